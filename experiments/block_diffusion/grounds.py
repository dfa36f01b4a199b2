"""The two grounds that block diffusion is trained on: word problems, and a chain language whose law is known.

A ground knows its tokens and its batches.
"""

import dataclasses
import string
from collections.abc import Callable
from typing import Any

from experiments.tasks import build_tokenizer, denoising_spec
from experiments.tasks.batches import Batch, Mixture
from experiments.tasks.block_batches import ChainBatchMaker, block_batches
from experiments.tasks.chains import Followers
from experiments.tasks.curriculum import BUCKETS
from experiments.tasks.words import problem
from paradec_jax.config import TokenSpec
from paradec_jax.data.endless import Endless
from paradec_jax.data.text import character_spec, character_tokenizer
from paradec_jax.tokenizer import Tokenizer

HELD_OUT_SEED = 10**6  # of texts of a chain that are judged; problems have a split of their own
SYMBOLS = string.ascii_letters + string.digits


@dataclasses.dataclass(frozen=True)
class Words:
    """Word problems.

    Attributes:
      mixture: from which update on, and how often, each of `BUCKETS` is drawn.
      length: of packed rows, which mix the buckets; rows of one sample when None.
    """

    mixture: Mixture = ((0, (0.25, 0.4, 0.15, 0.1, 0.05, 0.05, 0.0)),)
    length: int | None = None

    def tokenizer(self) -> Tokenizer:
        """Words and digits, and the mask."""
        return build_tokenizer(mask=True)

    def text(self) -> str:
        """A text, by whose ids tokenizers are compared."""
        return "".join(problem(0, i, "train", 8).prompt for i in range(20))

    def spec(self, alignment: str) -> TokenSpec:
        """Special tokens."""
        return denoising_spec(self.tokenizer(), alignment)

    def maker(self, seed: int, batch_tokens: int, block: int, split: str = "train") -> Callable[[int], Batch]:
        """Batch i."""
        return block_batches(
            self.tokenizer(),
            seed=seed,
            block=block,
            spec=self.spec("own"),
            split=split,
            batch_tokens=batch_tokens,
            buckets=BUCKETS,
            mixture=self.mixture,
            length=self.length,
        ).make

    def held_out(self, batch_tokens: int, block: int) -> Callable[[int], Batch]:
        """Batch i of problems of 3 and 4 steps from the tuning split, one a row."""
        only = dataclasses.replace(self, mixture=((0, (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)),), length=None)
        return only.maker(0, batch_tokens, block, "tune")


@dataclasses.dataclass(frozen=True)
class Chains:
    """Texts of a chain; the symbols before the first labelled block are given.

    Attributes:
      law: of the texts.
      prompt: symbols that are given.
    """

    law: Followers = Followers()  # noqa: RUF009
    prompt: int = 8

    def __post_init__(self) -> None:
        if self.law.symbols > len(SYMBOLS):
            raise ValueError(f"symbols must be at most {len(SYMBOLS)}, not {self.law.symbols}")
        if not 1 <= self.prompt < self.law.length:
            raise ValueError(f"prompt must be from 1 to below {self.law.length} symbols, not {self.prompt}")

    def tokenizer(self) -> Tokenizer:
        """A letter a symbol, and the mask."""
        return character_tokenizer(self.text())

    def text(self) -> str:
        """All symbols, by whose ids tokenizers are compared."""
        return SYMBOLS[: self.law.symbols]

    def spec(self, alignment: str) -> TokenSpec:
        """The mask is the last token; nothing ends a text."""
        return dataclasses.replace(character_spec(self.tokenizer(), "own"), alignment=alignment)

    def maker(self, seed: int, batch_tokens: int, block: int) -> Callable[[int], Batch]:
        """Batch i. The first block of a long length may be half given, as it is when a study asks."""
        if self.law.length % block:
            raise ValueError(f"length {self.law.length} must be whole blocks of {block} symbols")
        return ChainBatchMaker(self.law, seed, batch_tokens // self.law.length, self.prompt)

    def held_out(self, batch_tokens: int, block: int) -> Callable[[int], Batch]:
        """Batch i of texts that no training draws."""
        return self.maker(HELD_OUT_SEED, batch_tokens, block)


Ground = Words | Chains


def batches_of(ground: Ground, seed: int, batch_tokens: int, block: int) -> Any:
    """A resumable iterator over training batches."""
    return Endless(ground.maker(seed, batch_tokens, block))
