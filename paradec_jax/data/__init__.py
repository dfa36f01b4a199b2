"""Data: the word-problem generator, its tokenizer and resumable batches."""

from paradec_jax.data.batches import BUCKETS, Bucket, encode_prompts, word_problem_batches
from paradec_jax.data.vocabulary import build_tokenizer, token_spec
from paradec_jax.data.word_problems import WordProblem, extract_answer, problem, read_jsonl, write_jsonl

__all__ = [
    "BUCKETS",
    "Bucket",
    "WordProblem",
    "build_tokenizer",
    "encode_prompts",
    "extract_answer",
    "problem",
    "read_jsonl",
    "token_spec",
    "word_problem_batches",
    "write_jsonl",
]
