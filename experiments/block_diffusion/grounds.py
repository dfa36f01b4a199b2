"""The two grounds that block diffusion is trained on: word problems, and a chain language whose law is known.

A ground knows its tokens, the shape that a model on it has, its batches, and how held-out text is judged: by the
bound of the loss itself, with exact counts of hidden tokens (`noise.blocks`), which varies least. On the chain no
bound lies below the entropy of a symbol given the one before it.
"""

import dataclasses
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.tasks import build_tokenizer, denoising_spec
from experiments.tasks.batches import Batch, Bucket, Mixture
from experiments.tasks.block_batches import ChainBatchMaker, block_batches
from experiments.tasks.chains import Followers
from experiments.tasks.words import problem
from paradec_jax import Model
from paradec_jax.config import TokenSpec
from paradec_jax.data.endless import Endless
from paradec_jax.data.text import character_spec, character_tokenizer
from paradec_jax.io import atomic_write_text
from paradec_jax.losses import BlockRules, block_diffusion_loss
from paradec_jax.noise import BlockNoise
from paradec_jax.tokenizer import Tokenizer

# Nine problems of ten fit into the first four; the last three are practice (`tasks.auxiliary`).
BUCKETS = (
    Bucket(2, 2, 102),
    Bucket(3, 4, 161),
    Bucket(5, 6, 226),
    Bucket(7, 8, 286),
    Bucket(0, 0, 128, task="sums"),
    Bucket(0, 0, 256, task="steps"),
    Bucket(0, 0, 128, task="recalls"),
)
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

    floor = None  # nats a labelled token that no model gets below; unknown here

    def tokenizer(self) -> Tokenizer:
        """Words and digits, and the mask."""
        return build_tokenizer(mask=True)

    def text(self) -> str:
        """A text, by whose ids tokenizers are compared."""
        return "".join(problem(0, i, "train", 8).prompt for i in range(20))

    def spec(self, alignment: str) -> TokenSpec:
        """Special tokens."""
        return denoising_spec(self.tokenizer(), alignment)

    def vocabulary(self, preset: int) -> int:
        """Rows of the embedding: the preset's, which a causal model to start from has too, if they are enough."""
        return max(preset, self.tokenizer().vocab_size)

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

    @property
    def floor(self) -> float:
        """Nats a labelled symbol that no model gets below."""
        return self.law.rate

    def tokenizer(self) -> Tokenizer:
        """A letter a symbol, and the mask."""
        return character_tokenizer(self.text())

    def text(self) -> str:
        """All symbols, by whose ids tokenizers are compared."""
        return SYMBOLS[: self.law.symbols]

    def spec(self, alignment: str) -> TokenSpec:
        """The mask is the last token; nothing ends a text."""
        return dataclasses.replace(character_spec(self.tokenizer(), "own"), alignment=alignment)

    def vocabulary(self, preset: int) -> int:
        """The symbols and the mask, whatever a preset has."""
        del preset
        return self.law.symbols + 1

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


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOut:
    """Judges a model by the bound of held-out text.

    Attributes:
      ground: where the text comes from.
      block: length of the blocks that it is cut into.
      batch_tokens: positions of a batch.
      batches: how many.
    """

    ground: Ground
    block: int
    batch_tokens: int = 4096
    batches: int = 8

    def of(self, model: Model) -> Callable[[Any], dict[str, float]]:
        """Nats a labelled token, and the share of hidden ones that are guessed, as a function of parameters."""
        rules = BlockRules(BlockNoise("count"), (self.block,))
        loss = jax.jit(block_diffusion_loss(model.network, model.token_spec, rules))
        made = self.ground.held_out(self.batch_tokens, self.block)
        kept = [made(i) for i in range(self.batches)]
        keys = jax.random.split(jax.random.key(0), self.batches)

        def judge(params: Any) -> dict[str, float]:
            found = [loss(params, None, batch, key) for batch, key in zip(kept, keys, strict=True)]
            labelled = np.asarray([batch["labelled"].sum() for batch in kept], np.float64)
            shown = labelled * [float(terms["hidden"]) for _, terms in found]
            nats = np.average([float(value) for value, _ in found], weights=labelled)
            accuracy = np.average([float(terms["accuracy"]) for _, terms in found], weights=shown)
            return {"nats": float(nats), "accuracy": float(accuracy)}

        return judge

    def write(self, path: Path, model: Model) -> dict[str, Any]:
        """Writes what is found, and how, to a JSON file, and returns it."""
        told: dict[str, Any] = {
            **self.of(model)(model.params),
            "floor": self.ground.floor,
            "block": self.block,
            "positions": self.batch_tokens * self.batches,
            "matmul_precision": getattr(jax.config, "jax_default_matmul_precision", None),
        }
        atomic_write_text(path, json.dumps(told, indent=2) + "\n")
        return told
