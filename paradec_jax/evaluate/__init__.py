"""Decoders judged by their answers and texts, with uncertainty, and side by side."""
