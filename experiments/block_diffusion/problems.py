"""What the studies of block diffusion decode: word problems or texts of a chain."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from experiments.block_diffusion.grounds import Chains
from experiments.tasks import word_problems
from paradec_jax import Model
from paradec_jax.data.problems import exact_answers
from paradec_jax.evaluate.compare import Score

Ground = Literal["words", "chains"]
CHAIN_SEED = 2  # of texts of a chain that are decoded; training and judging draw others


@dataclasses.dataclass(frozen=True, eq=False)
class Problems:
    """Prompts, and what is right.

    Attributes:
      prompts: word problems or texts.
      budget: tokens of an answer; None for room for the longest reference.
      score: which answers are right.
      temperature: of the decoders.
      rows: prompts decoded together.
      blocks: which blocks of each answer are right, where that can be told: texts -> bool [N,
        blocks].
    """

    prompts: Sequence[Any]
    budget: int | None
    score: Score
    temperature: float
    rows: int
    blocks: Callable[[Sequence[str]], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Asked:
    """Which problems.

    Attributes:
      ground: "words" or "chains".
      count: problems.
      steps: fewest and most steps of word problems.
      split: of word problems, "test", or "tune" for those that settings are chosen on.
      blocks: whole blocks of a chain's text, of `block` symbols.
      block: symbols of a judged block of a chain.
      budget: tokens of an answer; those that a ground needs when None.
      temperature: of the decoders; 1 on the chain, whose law is drawn from, else 0, when None.
      rows: prompts decoded together.
      seed: of problems and draws.
    """

    ground: Ground = "words"
    count: int = 500
    steps: tuple[int, int] = (2, 4)
    split: Literal["test", "tune"] = "test"
    blocks: int = 3
    block: int = 8
    budget: int | None = None
    temperature: float | None = None
    rows: int = 50
    seed: int = 2

    def __post_init__(self) -> None:
        if min(self.count, self.blocks, self.block, self.rows) < 1:
            raise ValueError("count, blocks, block and rows must be at least 1")
        if self.ground != "words" and self.split != "test":
            raise ValueError(f"split {self.split!r} is a matter of word problems")

    def read(self, model: Model) -> Problems:
        """The problems, as a model is asked them."""
        if self.ground == "words":
            drawn = word_problems(self.count, seed=self.seed, steps=self.steps, split=self.split)
            return Problems(drawn, self.budget, exact_answers, self.temperature or 0.0, self.rows)
        symbols, own = Chains().text(), Chains().tokenizer()
        if model.tokenizer is None or model.tokenizer.encode(symbols) != own.encode(symbols):
            raise ValueError(
                "the model has other tokens than the chain: it was trained on another ground"
            )
        temperature = 1.0 if self.temperature is None else self.temperature
        judge = Lawful(Chains(), self.count, self.blocks, self.block, [self.seed, CHAIN_SEED])
        return Problems(
            judge.prompts, judge.budget, judge.score, temperature, self.rows, judge.lawful
        )


class Lawful:
    """Texts of a chain, of which the first symbols are given, and which blocks of what is written
    are lawful.
    """

    def __init__(self, ground: Chains, count: int, blocks: int, block: int, seed: Any) -> None:
        self.law, self.block, self.budget = ground.law, block, blocks * block
        self.tokenizer = ground.tokenizer()
        self.given = ground.law.draw(count, seed)[:, : ground.prompt]
        self.prompts = [self.tokenizer.decode(row) for row in self.given.tolist()]

    def lawful(self, texts: Sequence[str]) -> np.ndarray:
        """Which blocks are lawful to their last symbol, given the symbol before them; what is
        missing is not.
        """
        ids = np.full((len(texts), self.budget), -1)
        for row, text in zip(ids, texts, strict=True):
            written = self.tokenizer.encode(text)[: self.budget] if text else []
            row[: len(written)] = written
        each = self.law.lawful(ids, self.given[:, -1])
        return np.all(each.reshape(len(texts), -1, self.block), axis=2)

    def score(self, prompts: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        """Which texts are lawful as a whole."""
        del prompts
        return np.all(self.lawful(texts), axis=1)
