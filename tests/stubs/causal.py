"""A causal network with known answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.nn import masks
from stubs.base import CachedStub, Ids, Inputs, Mask, Probe, TokenKV, keys_seen


@dataclasses.dataclass(frozen=True)
class StubCausal(CachedStub):
    """A causal network whose next token is a known function of the tokens that a position sees.

    ::

        next(p) = (sum over d of w(d) token(p - d) + a p + b + astray(p)) mod V,    d = 0 .. p

    `astray` is 0 where each of the positions 0 .. p is seen once, through the cache or the window,
    and 1
    elsewhere: a wrong mask, position or cache gives wrong tokens even where w is mostly 0. With
      weights
    (0, 0, 1, 0) and neither a nor b the text repeats with period 3, so that drafts can be right.

    Attributes:
      vocab_size: V.
      max_length: longest sequence.
      weights: w(0), w(1), ..; the last one holds for all greater distances.
      slope, constant: a and b.
      sharpness: logit of the predicted token; all others are 0.
      counter: a counter of its own, 1 a call; None for none.
      probe: called on the host with that counter, or "network_calls", whenever a call really runs.
    """

    vocab_size: int = 11
    max_length: int = 64
    weights: tuple[int, ...] = (5, 1)
    slope: int = 3
    constant: int = 1
    sharpness: float = 8.0
    counter: str | None = None
    probe: Probe | None = None

    @property
    def counters(self) -> tuple[str, ...]:
        return () if self.counter is None else (self.counter,)

    def expected(self, prompt: Sequence[int], count: int, recurrence: int = 1) -> list[int]:
        """The `count` tokens that follow a prompt."""
        del recurrence
        tokens, last = list(prompt), len(self.weights) - 1
        for _ in range(count):
            total = sum(
                self.weights[min(d, last)] * token for d, token in enumerate(reversed(tokens))
            )
            tokens.append(
                (total + self.slope * (len(tokens) - 1) + self.constant) % self.vocab_size
            )
        return tokens[len(prompt) :]

    def forward(
        self,
        params: Any,
        inputs: Inputs,
        positions: Ids,
        prefix: Prefix | None = None,
        mask: Mask = None,
    ) -> Forward:
        """One call; head input is the predicted token, as a number. The caller stores the window."""
        self.report(self.counter or "network_calls")
        own = TokenKV(self.tokens_of(inputs), positions)
        keys, seen = keys_seen(
            own, prefix, masks.causal(positions.shape[1]) if mask is None else mask
        )
        distance = positions[:, :, None] - keys.positions[:, None]
        weight = jnp.asarray(self.weights)[jnp.clip(distance, 0, len(self.weights) - 1)]
        total = jnp.sum(seen * weight * keys.tokens[:, None], axis=-1)
        count = jnp.sum(seen, axis=-1)
        astray = (count != positions + 1) | (
            jnp.sum(seen * distance, axis=-1) != count * positions // 2
        )
        predicted = (total + self.slope * positions + self.constant + astray) % self.vocab_size
        return Forward(
            predicted[..., None].astype(jnp.float32), own, dict.fromkeys(self.counters, 1)
        )
