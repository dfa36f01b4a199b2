"""Jacobi decoding in plain Python, one row, one call and one guess at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from plain_baselines import Count, right, text_of
from stubs import PROMPTS, StubCausal

from paradec_jax.decode.rules.randomness import Purpose, fold

Predict = Callable[[Sequence[int], Sequence[int]], list[int]]
POSITIONS = 128  # more than any text here has


def trajectory(
    predict: Predict, context: Sequence[int], draft: Sequence[int]
) -> tuple[list[list[int]], int]:
    """All iterates of one block, and the first token after it (without stop tokens).

    Args:
      predict: (context, draft) -> the token after the context and after each token of the draft.
      context: all tokens before the block.
      draft: n tokens, the first of which is right.
    """
    points, done, left = [list(draft)], [], list(draft)
    while True:
        predicted = predict([*context, *done], left)[1:]
        agreed = 1 + right(left[1:], predicted)
        done, left, after = done + left[:agreed], predicted[agreed - 1 : -1], predicted[agreed - 1]
        if not left:
            return points, after  # the last point is right, or some of it would be left
        points.append(done + left)


@functools.cache
def uniforms_of(row: int, seed: int = 0) -> np.ndarray:
    """The number that draws the guess at each position, for the key that `make_request` gives a
    row.
    """
    key = jax.random.fold_in(jax.random.key(seed), row)
    keys = fold(key[None], Purpose.FILLER, jnp.arange(POSITIONS)[None])[0]
    return np.asarray(jax.vmap(jax.random.uniform)(keys))


@dataclasses.dataclass
class PlainJacobi:
    """One row; `step` does one network call. Options are those of `Jacobi`, and the knob `spawn`."""

    predict: Predict
    vocab: int
    prompt: list[int]
    uniforms: np.ndarray
    block: int = 16
    running: bool = False
    pool: int = 0
    candidates: int | None = None
    blocks: int = 1
    spawn: float = 0.5

    def __post_init__(self):
        self.candidates = self.candidates or 1 + self.pool
        self.width = self.block * self.blocks
        first, *draft = self.predict(self.prompt, self.guesses(self.prompt))
        self.text = [*self.prompt, first]
        self.drafts, self.iterates = [draft], []
        self.calls, self.positions = 1, len(self.prompt) + self.width - 1
        self.end = 0  # where the window ends; nothing is accepted from there on
        self.move_end(0)

    def guesses(self, text: list[int]) -> list[int]:
        """A token of the text for each of the next positions."""
        numbers = self.uniforms[len(text) : len(text) + self.width - 1]
        return [text[int(number * np.float32(len(text)))] for number in numbers]

    def move_end(self, agreed: int):
        """The window follows the text; `agreed` tokens of the newest block are settled."""
        start, newest = len(self.prompt), len(self.text) - 1
        if self.running:
            self.end = newest + self.width
            return
        first = start + (newest - start) // self.block * self.block  # of the newest token's block
        blocks = max((self.end - first) // self.block, 1)
        if (
            blocks < self.blocks
            and self.end > first
            and agreed >= math.ceil(self.spawn * self.block)
        ):
            blocks += 1
        self.end = first + self.block * (self.blocks if self.spawn == 0 else blocks)

    def fed(self) -> int:
        """Positions of a call: all candidates where any is not the draft, all blocks once one is
        spawned.
        """
        spawned = self.end - (len(self.text) - 1) > self.block or self.blocks == 1 or self.pool > 0
        return (self.candidates if len(self.drafts) > 1 else 1) * (
            self.width if spawned else self.block
        )

    def step(self):
        """Verifies every candidate, commits the longest agreement, and makes the next ones."""
        outcomes = [self.predict(self.text, draft) for draft in self.drafts]
        self.calls, self.positions = self.calls + 1, self.positions + self.fed()
        room, newest = self.end - len(self.text), self.text[-1]
        runs = [
            right(draft[:room], predicted)
            for draft, predicted in zip(self.drafts, outcomes, strict=True)
        ]
        best = runs.index(max(runs))
        accepted, draft, predicted = runs[best], self.drafts[best], outcomes[best]

        # of the newest block, counted from the first draft
        begin = self.end - self.block - len(self.text)
        ahead = max(begin, 0)
        agreed = min(max(-begin, 0), self.block) + right(draft[ahead:room], predicted[ahead:])

        self.text += predicted[: accepted + 1]
        left = predicted[accepted + 1 : min(room + 1, self.width)]
        self.move_end(agreed)
        draft = left + self.guesses(self.text)[len(left) :]
        found = self.recycled(draft) + (
            self.repairs(draft, predicted[accepted + 1]) if left else []
        )
        distinct = [draft]
        for candidate in found:
            if candidate not in distinct:
                distinct.append(candidate)
        self.drafts = distinct[: self.candidates]
        self.iterates = [[newest, *predicted], *self.iterates][: self.pool]

    def recycled(self, draft: list[int]) -> list[list[int]]:
        """What stood after the newest token in earlier iterates."""
        found = []
        for iterate in self.iterates:
            after = iterate[iterate.index(self.text[-1]) + 1 :] if self.text[-1] in iterate else []
            if after:
                found.append((after + draft[len(after) :])[: len(draft)])
        return found

    def repairs(self, draft: list[int], best: int) -> list[list[int]]:
        """The draft with another first guess: all but the best token are equally good, so in
        ascending order.
        """
        others = [token for token in range(self.vocab) if token != best]
        return [[token, *draft[1:]] for token in others[: self.candidates - 1]]


def predictor(stub: StubCausal) -> Predict:

    def predict(context: Sequence[int], draft: Sequence[int]) -> list[int]:
        text = [*context, *draft]
        return [stub.expected(text[:end], 1)[0] for end in range(len(context), len(text) + 1)]

    return predict


def plain_row(options: dict[str, Any], stub: StubCausal, row: int, seed: int = 0) -> PlainJacobi:
    """Row `row` of `tiny_request(seed=seed)`, after the prompt's call."""
    names = {field.name for field in dataclasses.fields(PlainJacobi)}
    options = {name: value for name, value in options.items() if name in names}
    return PlainJacobi(
        predictor(stub), stub.vocab_size, list(PROMPTS[row]), uniforms_of(row, seed), **options
    )


def jacobi_count(options: dict[str, Any], stub: StubCausal, prompt: int, new: int) -> Count:
    """Calls and positions until `new` tokens are committed."""
    tokens = text_of(stub, prompt, new)[:prompt]
    row = plain_row(options, stub, [list(p) for p in PROMPTS].index(tokens))
    while len(row.text) < prompt + new:
        row.step()
    return row.calls, row.positions
