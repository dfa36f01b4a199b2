"""Data: the word-problem generator, its tokenizer, stored trajectories, and resumable batches."""

from paradec_jax.data.batches import BUCKETS, Bucket, encode_prompts, word_problem_batches
from paradec_jax.data.noisy_iterates import Selection, corrupted, kept
from paradec_jax.data.pair_batches import PairBucket, pair_batches
from paradec_jax.data.trajectories import Generation, Trajectories, TrajectoryWriter
from paradec_jax.data.vocabulary import build_tokenizer, token_spec
from paradec_jax.data.word_problems import WordProblem, extract_answer, problem, read_jsonl, write_jsonl

__all__ = [
    "BUCKETS",
    "Bucket",
    "Generation",
    "PairBucket",
    "Selection",
    "Trajectories",
    "TrajectoryWriter",
    "WordProblem",
    "build_tokenizer",
    "corrupted",
    "encode_prompts",
    "extract_answer",
    "kept",
    "pair_batches",
    "problem",
    "read_jsonl",
    "token_spec",
    "word_problem_batches",
    "write_jsonl",
]
