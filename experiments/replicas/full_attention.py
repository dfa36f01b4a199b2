"""Released programs of full attention: LLaDA, Dream, Fast-dLLM, CoDA, Open-dCoder, dllm.

Their rules are those of the package; here is what only a release does, and recorded draws.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import MultiBlock, Planned, SemiAutoregressive
from paradec_jax.decode.canvas import CanvasDecoder, CanvasState
from paradec_jax.decode.machine import NETWORK_CALLS, DecoderBase, RecordedDraws, Request, Rows
from paradec_jax.decode.rules.sampling import filtered_probabilities, inverse_cdf
from paradec_jax.decode.rules.windows import window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedCanvas(RecordedDraws):
    """Recorded numbers of every call, each row's own.

    Attributes:
      orders: what orders positions: where orders are random, the scores; else uniform numbers,
        [B, T, S].
      races: u of `argmax exp(z) / (-log u)^T`, [B, T, S, V].
      samples: u of the first token whose cumulative probability exceeds it, after the filters,
        [B, T, S].
    """

    orders: Float[Array, "B T S"] | None = None
    races: Float[Array, "B T S V"] | None = None
    samples: Float[Array, "B T S"] | None = None
    per_row: ClassVar[tuple[str, ...]] = ("orders", "races", "samples")


class Replayed(DecoderBase):
    """A decoder that draws its tokens from recorded numbers, where there are any."""

    def sample(
        self,
        logits: Float[Array, "B W V"],
        positions: Int[Array, "B W"],
        rows: Rows,
        knobs: Any,
        step: Any = None,
        before: Any = None,
    ) -> Int[Array, "B W"]:
        """The token at each position of the current call."""
        if (race := recorded("races", rows, positions)) is not None:
            noisy = logits - knobs.temperature * jnp.log(-jnp.log(race))
            return jnp.argmax(noisy, axis=-1).astype(jnp.int32)
        if (uniform := recorded("samples", rows, positions)) is not None:
            probs = filtered_probabilities(logits, knobs, top_p_rule=self.top_p_rule)
            return inverse_cdf(probs, uniform)
        return super().sample(logits, positions, rows, knobs, step, before)


class ReplayedCanvas(Replayed, CanvasDecoder):
    """And what orders positions, too."""

    def numbers(self, state: CanvasState, positions: Int[Array, "B W"]) -> Float[Array, "B W"]:
        """What orders positions of the current call."""
        orders = recorded("orders", state.rows, positions)
        return super().numbers(state, positions) if orders is None else orders


def recorded(name: str, rows: Rows, positions: Int[Array, "B W"]) -> Array | None:
    """Recorded numbers of the current call at these positions; calls after the last see its own."""
    given = getattr(rows.recorded, name, None)
    if given is None:
        return None
    call = rows.counts[NETWORK_CALLS] - 1
    of_call = jax.vmap(lambda x, t: lax.dynamic_index_in_dim(x, t, 0, False))(given, call)
    return jax.vmap(lambda x, at: jnp.take(x, at, axis=0, mode="clip"))(of_call, positions)


class ReplayedPlanned(ReplayedCanvas, Planned):
    """`Planned` on recorded draws."""


class ReplayedFlight(Replayed, MultiBlock):
    """`MultiBlock` on recorded draws, of each call after the prompt's."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwoCallState(CanvasState):
    """A canvas whose blocks are left after two calls."""

    def opened(self) -> tuple["TwoCallState", Bool[Array, "B"]]:
        """The canvas at the block that the count of calls says."""
        call = self.rows.counts[NETWORK_CALLS]
        at = self.rows.prompt_lengths + self.block * (call // 2)
        opens = call % 2 == 0
        moved = dataclasses.replace(self, cached=at, step=jnp.where(opens, 0, self.step))
        return dataclasses.replace(moved, todo=jnp.sum(window(self.open, at, self.block), 1)), opens


@dataclasses.dataclass(frozen=True)
class ReleasedCanvas(ReplayedCanvas, SemiAutoregressive):
    """`SemiAutoregressive` on recorded draws, with what only releases do.

    Attributes:
      last_along: by rule "factor" a run that stops at the last mask takes it along (Fast-dLLM).
      coin: by rule "grid" each mask is revealed with probability 1 - t_(i+1) / t_i, by the recorded
        number of its order (Dream's "origin").
      unfinished: a block is left after two calls, of which the second reveals nothing (Fast-dLLM
        for Dream with one step a block).
    """

    _: dataclasses.KW_ONLY
    last_along: bool = False
    coin: bool = False
    unfinished: bool = False

    def init(self, params: Any, request: Request, knobs: Any) -> Any:
        """As of `SemiAutoregressive`."""
        state = super().init(params, request, knobs)
        return TwoCallState(**vars(state)) if self.unfinished else state

    def due(self, state: Any, masks: Int[Array, "B"], knobs: Any) -> Any:
        """No step is skipped where coins are thrown."""
        return (state, masks) if self.coin or self.unfinished else super().due(state, masks, knobs)

    def reveals(
        self,
        scores: Float[Array, "B W"],
        masked: Bool[Array, "B W"],
        count: Int[Array, "B"],
        step: Int[Array, "B"],
        knobs: Any,
    ) -> Bool[Array, "B W"]:
        """As of `SemiAutoregressive`, but for what releases do."""
        if self.unfinished:
            return jnp.zeros_like(masked)
        if self.coin:
            time = 1 + (knobs.epsilon - 1) * jnp.stack([step, step + 1]) / knobs.steps
            leaves = (scores < (1 - time[1] / time[0])[:, None]) | (step + 1 >= knobs.steps)[
                :, None
            ]
            return masked & leaves
        where = super().reveals(scores, masked, count, step, knobs)
        if not self.last_along:
            return where
        one_left = jnp.sum(masked & ~where, axis=1, keepdims=True) == 1
        return where | (masked & one_left)
