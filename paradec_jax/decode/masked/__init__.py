"""Decoders that reveal the positions of a canvas in any order."""
