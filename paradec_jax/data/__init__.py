"""Data: problems and prompts, texts, stored trajectories, and resumable batches."""

from paradec_jax.data.pairs import Selection, kept, pair_batches
from paradec_jax.data.problems import Problem, encode_prompts, exact_answers, read_problems
from paradec_jax.data.trajectories import Generation, Trajectories

__all__ = [
    "Generation",
    "Problem",
    "Selection",
    "Trajectories",
    "encode_prompts",
    "exact_answers",
    "kept",
    "pair_batches",
    "read_problems",
]
