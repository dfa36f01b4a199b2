"""The samplers of MDLM and SDTT as their programs run them (arXiv 2406.07524, 2410.21035)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.replicas import masked_rules as rules
from experiments.replicas.masked_rules import LAST, ReleasedMaskedKnobs
from paradec_jax.decode.canvas.canvas import Canvas
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules.race import race, reverse_weights

SAMPLERS = {"mdlm": ("ancestral", "cached", "analytic"), "sdtt": ("ancestral", "analytic")}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedMaskedState(Canvas):
    """A canvas, and where its program stands.

    Attributes:
      call: steps done, [B].
      probs: probabilities of the last network call, [B, S, V]; None of a sampler that keeps none.
      fresh: rows of which they are still those of the canvas, [B]; None likewise.
    """

    call: Int[Array, "B"]
    probs: Float[Array, "B S V"] | None
    fresh: Bool[Array, "B"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedStep:
    """What a step did: whether it called the network, and whether any row of the batch changed."""

    called: Bool[Array, ""]
    changed: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class ReleasedMasked(DecoderBase):
    """N steps over the grid `linspace(1, 1e-5, N + 1)`, and what each program does with masks that
    are left.

    ::

        program   sampler      network calls           at the end
        mdlm      ancestral    N + 1                   a call more, argmax at every position
        mdlm      cached       as far as it changes    a call more, argmax at every position
        mdlm      analytic     N + 1                   a call more, a draw without the mask
        sdtt      ancestral    N or N + 1              if a mask is left: a call more, argmax
        sdtt      analytic     N or N + 1              the same

    "cached" keeps the probabilities until any row of the batch has changed, and SDTT looks for
    masks in the whole batch, so counts of network calls depend on the batch; tokens do not. SDTT's
    projection, which writes a prompt over the first positions after every step, is what given
    tokens do here; so are its forced first and last tokens.

    A row ends within N + 1 network calls.

    Attributes:
      program: "mdlm" or "sdtt".
      sampler: "ancestral", "cached" or "analytic".
      steps: N.
    """

    _: dataclasses.KW_ONLY
    program: str = "mdlm"
    sampler: str = "cached"
    steps: int = 128
    Knobs: ClassVar[type] = ReleasedMaskedKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("full",)
    alignments: ClassVar[tuple[str, ...]] = ("own",)
    any_order: ClassVar[bool] = True
    needs_cache: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.program not in SAMPLERS:
            raise ValueError(f"program must be one of {', '.join(SAMPLERS)}, not {self.program!r}")
        if self.sampler not in SAMPLERS[self.program]:
            known = ", ".join(SAMPLERS[self.program])
            raise ValueError(
                f"sampler of {self.program} must be one of {known}, not {self.sampler!r}"
            )
        rules.check_program(self, steps=self.steps)

    @property
    def caches(self) -> bool:
        """Whether probabilities outlive a step."""
        return self.sampler == "cached"

    def init(
        self, params: Any, request: Request, knobs: ReleasedMaskedKnobs
    ) -> ReleasedMaskedState:
        """Fills the canvas with masks; calls nothing."""
        canvas = Canvas.of(self.begin(request, 0), self.mask)
        call = jnp.zeros_like(canvas.rows.length)
        probs = jnp.zeros((*canvas.shown.shape, self.network.vocab_size), jnp.float32)
        kept: dict[str, Any] = {"probs": None, "fresh": None}
        if self.caches:
            kept = {"probs": probs, "fresh": call > 0}
        return ReleasedMaskedState(**vars(canvas), call=call, **kept)

    def step(
        self, params: Any, state: ReleasedMaskedState, knobs: ReleasedMaskedKnobs
    ) -> tuple[ReleasedMaskedState, ReleasedStep]:
        """One step of the grid, or the end of the program."""
        at, running, last = jnp.zeros_like(state.call), ~state.rows.done, state.call >= self.steps
        needed = jnp.any(running)
        if state.probs is None or state.fresh is None:
            probs, counts = rules.predict(self, params, state, at, self.size, knobs)
        else:
            needed = jnp.any(running & (last | ~state.fresh))
            probs, counts = rules.predict_if(needed, state.probs, self, params, state, at, knobs)
        state = state.spend(counts, needed * state.rows.limit, needed)

        tokens, _, open_, _ = state.window(at, self.size)
        drawn = self._drawn(probs, tokens, state, at, last)
        left = jnp.any(open_ & (drawn == self.mask), axis=1)
        over = last
        if self.program == "sdtt":
            complete = ~jnp.any(left & running & (state.call == self.steps - 1))
            over |= (state.call == self.steps - 1) & complete
        new, changed = rules.write(state, drawn, at, self.mask, over)
        moved = jnp.any(changed & running)
        kept: dict[str, Any] = {}
        if self.caches:
            kept = {"probs": probs, "fresh": jnp.broadcast_to(~moved, running.shape)}
        return dataclasses.replace(new, call=state.call + running, **kept), ReleasedStep(
            needed, moved
        )

    def _drawn(
        self,
        probs: Float[Array, "B S V"],
        tokens: Int[Array, "B S"],
        state: ReleasedMaskedState,
        at: Int[Array, "B"],
        last: Bool[Array, "B"],
    ) -> Int[Array, "B S"]:
        """What the sampler makes of every position, and in the last call the end of the program."""
        mask, steps = self.mask, self.steps
        t = jnp.asarray(rules.linspace(1.0, LAST, steps + 1))[jnp.minimum(state.call, steps)]
        s = t - np.float32((1 - LAST) / steps)
        uniforms = rules.uniforms(state.rows, state.call, at, *probs.shape[1:])
        if self.sampler == "analytic":
            weights = rules.analytic_weights(probs, tokens, t, s, mask)
        elif self.sampler == "cached":
            weights = reverse_weights(probs, t, s, mask)
        else:
            now, then = rules.mask_probability(t), rules.mask_probability(s)
            weights = reverse_weights(probs, now, then, mask)
        drawn = race(weights, uniforms)
        if self.sampler == "analytic" and self.program == "mdlm":
            end = race(rules.analytic_weights(probs, tokens, t, None, mask), uniforms)
        else:
            end = rules.most_probable(probs, mask)
        return jnp.where(last[:, None], end, drawn)
