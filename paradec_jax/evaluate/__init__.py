"""Decoders judged by their answers, with uncertainty, and side by side."""
