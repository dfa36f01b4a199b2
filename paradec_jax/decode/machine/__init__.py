"""Floor 2: what every decoder is made of and driven by. It knows no family."""
