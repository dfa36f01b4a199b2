"""Decoders of causal networks that guess several tokens at once; the output stays autoregressive."""
