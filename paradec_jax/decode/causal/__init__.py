"""Decoders of networks that are right about several tokens at once, or guess them: the output stays autoregressive."""
