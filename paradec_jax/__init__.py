"""Language models that decode many tokens per network call."""
