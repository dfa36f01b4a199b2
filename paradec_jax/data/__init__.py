"""Data: problems and prompts, texts, stored trajectories, and resumable batches."""

from paradec_jax.data.noisy_iterates import Selection, kept
from paradec_jax.data.pair_batches import PairBucket, pair_batches
from paradec_jax.data.problems import Problem, encode_prompts, exact_answers, read_problems
from paradec_jax.data.trajectories import Generation, Trajectories, TrajectoryWriter

__all__ = [
    "Generation",
    "PairBucket",
    "Problem",
    "Selection",
    "Trajectories",
    "TrajectoryWriter",
    "encode_prompts",
    "exact_answers",
    "kept",
    "pair_batches",
    "read_problems",
]
