"""Floor 1: pure functions on arrays. They know neither decoders nor networks."""
