"""MDLM's semi-autoregressive sampler as its program runs it (arXiv 2406.07524, section 5.3)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from experiments.replicas import masked_rules as rules
from experiments.replicas.masked import ReleasedMaskedState, ReleasedStep
from experiments.replicas.masked_rules import ReleasedMaskedKnobs
from paradec_jax.decode.canvas.canvas import Canvas
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules.race import race, reverse_weights
from paradec_jax.decode.rules.windows import window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedStridedState(ReleasedMaskedState):
    """As of `ReleasedMasked`, `call` and `probs` those of the window, and the number of the window,
    [B].
    """

    number: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class ReleasedStrided(DecoderBase):
    """Windows of L positions that move by `stride`: in each N + 1 cached steps, then a call more
    and its argmax.

    The times are `1 - i dt` for i = 0 .. N with `dt = 1 / steps` and `N = int(1 / dt)`, which
    rounding makes `steps - 1` for some numbers; the last step reveals whatever is left. A text of K
    + 1 windows has `L + K stride` tokens. As in `ReleasedMasked`, the cache is dropped when any row
    of the batch has changed.

    A row of K + 1 windows ends within (K + 1) (N + 2) network calls.

    Attributes:
      steps: of the times.
      stride: positions by which a window moves.
      width: L; the network's longest sequence when None.
    """

    _: dataclasses.KW_ONLY
    steps: int = 1000
    stride: int = 512
    width: int | None = None
    Knobs: ClassVar[type] = ReleasedMaskedKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("full",)
    alignments: ClassVar[tuple[str, ...]] = ("own",)
    any_order: ClassVar[bool] = True
    needs_cache: ClassVar[bool] = False
    windowed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        rules.check_program(self, steps=self.steps, stride=self.stride, width=self.width)
        longest = self.width if self.network is None else self.network.max_length
        if (self.width or 0) > (longest or 0) or self.stride > (
            self.width or longest or self.stride
        ):
            raise ValueError(
                f"width must be at most the {longest} positions the model was built for and stride at most the "
                f"width, not {self.width} and {self.stride}"
            )

    @property
    def length(self) -> int:
        """L, no more than the buffer."""
        return min(self.width or self.network.max_length, self.size)

    def init(
        self, params: Any, request: Request, knobs: ReleasedMaskedKnobs
    ) -> ReleasedStridedState:
        """Fills the canvas with masks; calls nothing."""
        canvas = Canvas.of(self.begin(request, self.length), self.mask)
        zero = jnp.zeros_like(canvas.rows.length)
        probs = jnp.zeros((len(zero), self.length, self.network.vocab_size), jnp.float32)
        return ReleasedStridedState(
            **vars(canvas), call=zero, probs=probs, fresh=zero > 0, number=zero + 0
        )

    def step(
        self, params: Any, state: ReleasedStridedState, knobs: ReleasedMaskedKnobs
    ) -> tuple[ReleasedStridedState, ReleasedStep]:
        """One step of each row's window."""
        count, mask, at = rules.whole_steps(self.steps), self.mask, state.number * self.stride
        running, last = ~state.rows.done, state.call > count
        assert state.probs is not None and state.fresh is not None
        needed = jnp.any(running & (last | ~state.fresh))
        probs, counts = rules.predict_if(needed, state.probs, self, params, state, at, knobs)
        seen = jnp.sum(window(state.inside, at, self.length), axis=1)
        state = state.spend(counts, needed * seen, needed)

        times = np.asarray([1 - i / self.steps for i in range(count + 1)], np.float32)
        t = jnp.asarray(times)[jnp.minimum(state.call, count)]
        weights = reverse_weights(probs, t, t - np.float32(1 / self.steps), mask)
        turn = state.number * (count + 1) + jnp.minimum(state.call, count)
        uniforms = rules.uniforms(state.rows, turn, at, *probs.shape[1:])
        best = rules.most_probable(probs, mask)
        drawn = jnp.where(last[:, None], best, race(weights, uniforms))
        new, changed = rules.write(
            state, drawn, at, mask, last & (at + self.length >= state.rows.limit)
        )
        moved = jnp.any(changed & running)
        new = dataclasses.replace(
            new,
            probs=probs,
            fresh=~moved & ~last,
            call=jnp.where(last, 0, state.call + running),
            number=state.number + (last & running),
        )
        return new, ReleasedStep(needed, moved)
