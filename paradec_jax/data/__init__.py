"""Data: problems and prompts, texts, stored trajectories, and resumable batches."""
