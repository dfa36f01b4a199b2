"""A causal network with known answers, and a tiny model."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.decode.machine.network import Forward, Prefix, Prepared
from paradec_jax.models import transformer
from paradec_jax.models.transformer_network import TransformerNetwork
from paradec_jax.nn import masks
from paradec_jax.testing import stubs
from paradec_jax.testing.stubs import TokenKV


@dataclasses.dataclass(frozen=True)
class StubCausal:
    """A causal network whose next token is a known function of the tokens that a position sees.

    ::

        next(p) = (sum over d of w(d) token(p - d) + a p + b + astray(p)) mod V,    d = 0 .. p

    `astray` is 0 where each of the positions 0 .. p is seen once, through the cache or the window, and 1
    elsewhere: a wrong mask, position or cache gives wrong tokens even where w is mostly 0. With weights
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
    probe: stubs.Probe | None = None

    @property
    def counters(self) -> tuple[str, ...]:
        """The one of its own."""
        return () if self.counter is None else (self.counter,)

    @property
    def visibility(self) -> str:
        """A position sees itself and the ones before it."""
        return "causal"

    @property
    def block(self) -> None:
        """There are no blocks."""
        return None

    def expected(self, prompt: Sequence[int], count: int, recurrence: int = 1) -> list[int]:
        """The `count` tokens that follow a prompt."""
        del recurrence
        tokens, last = list(prompt), len(self.weights) - 1
        for _ in range(count):
            total = sum(self.weights[min(d, last)] * token for d, token in enumerate(reversed(tokens)))
            tokens.append((total + self.slope * (len(tokens) - 1) + self.constant) % self.vocab_size)
        return tokens[len(prompt) :]

    def prepare(self, params: Any) -> Prepared:
        """The parameters as they are."""
        return stubs.prepared(params)

    def init_cache(self, keys: Array, size: int) -> TokenKV:
        """An empty cache."""
        return stubs.empty(len(keys), size)

    def write(self, cache: TokenKV, window: TokenKV, at: Int[Array, "B"]) -> TokenKV:
        """The cache with a window stored at slots `at .. at + W - 1`."""
        return stubs.write(cache, window, at)

    def pick(self, window: TokenKV, start: Int[Array, "B"], width: int) -> TokenKV:
        """Slots `start .. start + width - 1` of each row's window."""
        return stubs.pick(window, start, width)

    def widen(self, window: TokenKV, width: int) -> TokenKV:
        """The window with zeros after its slots, up to `width`."""
        return stubs.widen(window, width)

    def embedding(self, params: Any) -> Float[Array, "V 1"]:
        """The vector of a token is its number."""
        return jnp.arange(self.vocab_size, dtype=jnp.float32)[:, None]

    def logits(self, params: Any, hidden: Float[Array, "*shape 1"]) -> Float[Array, "*shape V"]:
        """`sharpness` at the predicted token."""
        return stubs.said(params, stubs.one_hot_logits(hidden[..., 0], self.vocab_size, self.sharpness))

    def forward(
        self,
        params: Any,
        inputs: Int[Array, "B W"] | Float[Array, "B W 1"],
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Bool[Array, "*B W W"] | None = None,
    ) -> Forward:
        """One call; head input is the predicted token, as a number. The caller stores the window."""
        stubs.report(self.probe, self.counter or "network_calls")
        if inputs.ndim == 3:
            inputs = jnp.round(inputs[..., 0]).astype(jnp.int32)
        own = TokenKV(inputs, positions)
        keys, seen = stubs.keys_seen(own, prefix, masks.causal(positions.shape[1]) if mask is None else mask)
        distance = positions[:, :, None] - keys.positions[:, None]
        weight = jnp.asarray(self.weights)[jnp.clip(distance, 0, len(self.weights) - 1)]
        total = jnp.sum(seen * weight * keys.tokens[:, None], axis=-1)
        count = jnp.sum(seen, axis=-1)
        astray = (count != positions + 1) | (jnp.sum(seen * distance, axis=-1) != count * positions // 2)
        predicted = (total + self.slope * positions + self.constant + astray) % self.vocab_size
        return Forward(predicted[..., None].astype(jnp.float32), own, dict.fromkeys(self.counters, 1))


def tiny_causal(**changes: Any) -> TransformerNetwork:
    """A causal network of a few thousand parameters; `changes` are fields of its config."""
    return TransformerNetwork(dataclasses.replace(CAUSAL_PRESETS["test-causal"], **changes))


@functools.cache
def tiny_causal_params(seed: int = 0, gain: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Random parameters of `tiny_causal`, all multiplied by `gain`."""
    with jax.ensure_compile_time_eval():  # the first caller may be under a trace, the next one is not
        config = tiny_causal(**changes).config
        return jax.tree.map(lambda x: gain * x, transformer.init_params(config, jax.random.key(seed)))
