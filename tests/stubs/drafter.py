"""Masks with known guesses, beside the causal stub."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.decode.machine.network import Forward, Prefix
from stubs.base import CachedStub, Ids, Mask, Probe
from stubs.causal import StubCausal


@dataclasses.dataclass(frozen=True)
class StubDrafter(CachedStub):
    """Masks that know what a causal stub says, as far as they see the text.

    A mask counts as token 0 to the rows that see it. So its guess is right where no token between
    the text and the one before its own matters: all but the token before, which it is told. A mask
    whose key was stored makes wrong text.

    Attributes:
      of: the model.
      count: k, masks after a place.
      sharpness: logit of the guess; all others are 0.
      errs: whether guesses are wrong at about a third of the positions.
      probe: not called; the model's own counts the calls.
    """

    of: StubCausal
    count: int = 3
    sharpness: float = 8.0
    errs: bool = False
    probe: Probe | None = None
    counters: ClassVar[tuple[str, ...]] = ()

    @property
    def vocab_size(self) -> int:
        return self.of.vocab_size

    @property
    def max_length(self) -> int:
        return self.of.max_length

    def forward(
        self,
        params: Any,
        inputs: Ids,
        positions: Ids,
        prefix: Prefix | None = None,
        mask: Mask = None,
    ) -> Forward:
        """One call of the model on tokens and masks."""
        is_mask = inputs >= self.vocab_size
        model = dataclasses.replace(self.of, probe=self.probe)
        out = model.forward(
            params["network"], jnp.where(is_mask, 0, inputs), positions, prefix, mask
        )
        wrong = is_mask & self.errs & (positions % 3 == 0)
        return dataclasses.replace(out, hidden=out.hidden + wrong[..., None])

    def informed(
        self, params: Any, hidden: Float[Array, "*shape 1"], before: Int[Array, "*shape"]
    ) -> Float[Array, "*shape 1"]:
        """The guess that the token before it makes of a mask's state."""
        return (hidden + self.of.weights[0] * before[..., None]) % self.vocab_size

    def scores(
        self, params: Any, hidden: Float[Array, "*shape 1"], tokens: Int[Array, "*shape C"]
    ) -> Float[Array, "*shape C"]:
        """`sharpness` at the guess, 0 elsewhere."""
        guess = jax.nn.one_hot(jnp.round(hidden[..., 0]).astype(jnp.int32), self.vocab_size)
        return self.sharpness * jnp.take_along_axis(guess, tokens, axis=-1)
