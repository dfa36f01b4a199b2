"""Decoders of recurrent-depth networks."""
