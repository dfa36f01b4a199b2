"""Pieces of networks: norms, rotary embedding, visibility rules, attention, caches, blocks."""
