"""Data: word problems and their tokenizer, chains, stored trajectories, and resumable batches."""

from paradec_jax.data.batches import BUCKETS, Bucket, encode_prompts, word_problem_batches
from paradec_jax.data.block_batches import block_batches, chain_batches
from paradec_jax.data.chains import Followers, MarkovLaw
from paradec_jax.data.noisy_iterates import Selection, corrupted, kept
from paradec_jax.data.pair_batches import PairBucket, pair_batches
from paradec_jax.data.trajectories import Generation, Trajectories, TrajectoryWriter
from paradec_jax.data.vocabulary import build_tokenizer, denoising_spec, token_spec
from paradec_jax.data.word_problems import WordProblem, extract_answer, problem, read_jsonl, write_jsonl

__all__ = [
    "BUCKETS",
    "Bucket",
    "Followers",
    "Generation",
    "MarkovLaw",
    "PairBucket",
    "Selection",
    "Trajectories",
    "TrajectoryWriter",
    "WordProblem",
    "block_batches",
    "build_tokenizer",
    "chain_batches",
    "corrupted",
    "denoising_spec",
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
