"""Decoders of block diffusion: one block after another, its positions revealed in any order."""
