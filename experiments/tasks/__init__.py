"""Tasks that are drawn from a seed: word problems, pointers, chains and practice, and their tokens.

The package reads tasks from files alone (`paradec_jax.data.problems`); `python -m
experiments.tasks` writes them.
"""

from experiments.tasks.chains import Followers, MarkovLaw
from experiments.tasks.pointers import exact_lists, pointer_problems
from experiments.tasks.vocabulary import build_tokenizer, denoising_spec, token_spec
from experiments.tasks.words import problem, word_problems

__all__ = [
    "Followers",
    "MarkovLaw",
    "build_tokenizer",
    "denoising_spec",
    "exact_lists",
    "pointer_problems",
    "problem",
    "token_spec",
    "word_problems",
]
