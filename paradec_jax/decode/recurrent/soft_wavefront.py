"""The wavefront sampler made differentiable: relaxed candidates and soft exits.

The step is that of `Wavefront`. Two of its decisions get something with a gradient beside them; the decisions
themselves, which token and how many positions are committed, stay discrete and carry none.

**Candidates.** With E the embedding, l a slot's logits, y its token and p = softmax(l / tau), the next slot reads
the vector ("sg" stops gradients)::

    straight_through    sg(E[y] - p E) + p E      forward E[y], backward p E
    soft                p E

A committed token keeps the vector it had as a candidate, so gradients reach later tokens through it too.

**Exits.** A slot at age a, whose state moved by the relative distance d, is past its threshold eps_a to the degree
g; the prefix rule (Eq. 3) makes of it the share m of the slot that is finished in this step, where u_j says
whether the token that slot j was computed from is still the one predicted::

    g_i = sigmoid((log eps_a - log d_i) / gate_temperature)        1 where max_recurrence is reached
    m_i = product of g_j u_j over j <= i                           sum of m: expected number of finished positions

    staying_i = product of (1 - m_i) over the slot's earlier steps  sum over steps: expected steps of the position
    leaving_i = staying_i m_i, or all of staying_i in the step that commits the slot

Over the steps of a committed position `leaving` sums to 1, so that `sum leaving * loss(state)` is the expected loss
of the state that leaves and `sum staying` the expected number of steps: a loss may trade one for the other. As
gate_temperature goes to 0 both become what the discrete sampler does. Nothing is known of states after the commit,
so a lower threshold is only felt down to the one that commits.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode import score, stop
from paradec_jax.decode.protocol import Request
from paradec_jax.decode.sampling import check
from paradec_jax.decode.schedule import at_age
from paradec_jax.decode.wavefront import Refined, Wavefront, WavefrontKnobs, WavefrontState
from paradec_jax.nn.precision import at_least_float32

RELAXATIONS = ("straight_through", "soft")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftWavefrontKnobs(WavefrontKnobs):
    """How the wave moves, and how soft its decisions are.

    Attributes:
      candidate_temperature: tau of the candidates' mixture, above 0.
      gate_temperature: width of the exit's sigmoid, in units of log distance, above 0.
    """

    candidate_temperature: Float[Array, "..."] | float = 1.0
    gate_temperature: Float[Array, "..."] | float = 0.5

    def checked(self) -> "SoftWavefrontKnobs":
        """Self, after a look at values and shapes. Raises ValueError."""
        for name in ("candidate_temperature", "gate_temperature"):
            check(getattr(self, name), name, lambda x: x > 0, "above 0")
        super().checked()
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftWavefrontState(WavefrontState):
    """The wave, and the soft side of its newest step.

    The last five describe the newest step before the shift: slot i was position
    `progress.length - committed - 1 + i`. They are zero in slots that were not active and in rows that had stopped.

    Attributes:
      offsets: what the relaxation adds to the vector of each candidate, [B, W, D].
      survival: share of each slot that has not left, [B, W].
      staying: share of each slot that did the newest step, [B, W].
      finished: m, share that the soft rule of Eq. 3 calls finished, [B, W].
      leaving: share that left with the state of the newest step, [B, W].
      refined: states of the newest step, [B, W, D].
      hidden: head input of these states, [B, W, D].
    """

    offsets: Float[Array, "B W D"]
    survival: Float[Array, "B W"]
    staying: Float[Array, "B W"]
    finished: Float[Array, "B W"]
    leaving: Float[Array, "B W"]
    refined: Float[Array, "B W D"]
    hidden: Float[Array, "B W D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftRefined(Refined):
    """As `Refined`, with the head input and what the relaxation adds to the vector of each predicted token."""

    hidden: Float[Array, "B W D"]
    offsets: Float[Array, "B W D"]


@dataclasses.dataclass(frozen=True)
class SoftWavefront(Wavefront):
    """`Wavefront` on relaxed candidates; see the head of this file for the formulas.

    With "straight_through" its tokens, lengths and counts are those of `Wavefront` at any temperature.

    Attributes:
      relaxation: "straight_through" or "soft". "soft" mixes tokens that were not drawn, so it must be `greedy`.
    """

    _: dataclasses.KW_ONLY
    relaxation: str = "straight_through"
    Knobs: ClassVar[type] = SoftWavefrontKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relaxation not in RELAXATIONS:
            raise ValueError(f"relaxation must be one of {', '.join(RELAXATIONS)}, not {self.relaxation!r}")
        if self.relaxation == "soft" and not self.greedy:
            raise ValueError("relaxation 'soft' needs greedy=True: mixtures take the place of drawn tokens")
        if not self.carry:
            raise ValueError(
                "a soft wavefront follows states through changes of tokens, so carry must be True"
            )
        if self.buckets:
            raise ValueError(f"a soft wavefront runs at one width, so buckets must be (), not {self.buckets}")

    def init(self, params: Any, request: Request, knobs: Any) -> SoftWavefrontState:
        """As `Wavefront.init`; the first token is as hard as the prompt."""
        state = super().init(params, request, knobs)
        table = self.network.embedding(params)
        vectors = jnp.zeros((*state.candidates.shape, table.shape[1]), table.dtype)
        none = jnp.zeros_like(state.distance)
        return SoftWavefrontState(
            **{field.name: getattr(state, field.name) for field in dataclasses.fields(state)},
            offsets=vectors,
            survival=none + 1,
            staying=none,
            finished=none,
            leaving=none,
            refined=jnp.zeros_like(state.latents),
            hidden=jnp.zeros_like(state.latents),
        )

    def _refine(self, params: Any, state: Any, knobs: Any) -> SoftRefined:
        table = self.network.embedding(params)
        inputs = table[state.candidates] + state.offsets
        z, e, hidden, window = self._recur(params, state, inputs, knobs)
        logits = self.network.logits(params, hidden)
        predicted, log_probs = self._predict(logits, state.progress, knobs)
        offsets = relaxed(table, logits, predicted, knobs.candidate_temperature, self.relaxation)
        return SoftRefined(z, window, e, predicted, log_probs, hidden, offsets)

    def _advance(self, state: Any, refined: Any, knobs: Any) -> SoftWavefrontState:
        """Moves on as `Wavefront` does, and says which share of each slot left."""
        finished = self._finished(state, refined, knobs)
        slot = jnp.arange(self.width)
        running = (~state.progress.done | (state.committed > 0))[:, None]
        staying = jnp.where(running & (slot < state.active[:, None]), state.survival, 0.0)
        finished = jnp.where(running, finished, 0.0)
        leaving = staying * jnp.where(slot < state.committed[:, None], 1.0, finished)

        moved: Any = super()._advance(state, refined, knobs)
        survival = stop.shift(state.survival * (1 - finished), state.committed)
        # Slots that nothing predicted, random ones and those beyond the wave, read the vectors of their tokens.
        kept = (state.active - state.committed)[:, None]
        offsets = jnp.concatenate([state.offsets[:, :1], refined.offsets], axis=1)
        offsets = stop.shift(offsets, state.committed, self.width)
        return dataclasses.replace(
            moved,
            offsets=jnp.where((slot <= kept)[..., None], offsets, 0.0),
            survival=jnp.where(slot < kept, survival, 1.0),
            staying=staying,
            finished=finished,
            leaving=leaving,
            refined=refined.latents,
            hidden=refined.hidden,
        )

    def _finished(
        self, state: SoftWavefrontState, refined: SoftRefined, knobs: SoftWavefrontKnobs
    ) -> Float[Array, "B W"]:
        """m, the soft form of Eq. 3, of a state after its commit and before its shift."""
        active = jnp.arange(self.width) < state.active[:, None]
        distance = jnp.maximum(jnp.where(active, state.distance, 1.0), score.EPSILON)
        threshold = at_age(knobs.exit_threshold, self._age(state.seen) - 1)
        threshold = jnp.maximum(threshold, score.EPSILON)
        gate = jax.nn.sigmoid((jnp.log(threshold) - jnp.log(distance)) / knobs.gate_temperature)
        gate = jnp.where((knobs.max_recurrence > 0) & (state.seen >= knobs.max_recurrence), 1.0, gate)
        unchanged = refined.predicted[:, :-1] == state.candidates[:, 1:]
        unchanged = jnp.pad(unchanged, ((0, 0), (1, 0)), constant_values=True)
        return jnp.cumprod(jnp.where(unchanged & active, gate, 0.0), axis=1)


def relaxed(
    table: Float[Array, "V D"],
    logits: Float[Array, "B W V"],
    tokens: Int[Array, "B W"],
    temperature: Float[Array, ""] | float,
    relaxation: str,
) -> Float[Array, "B W D"]:
    """What is added to the vector `E[y]` of each token: `x = p E - E[y]`, or `x - sg(x)` for "straight_through".

    Args:
      table: E, the vector of each token.
      logits: l, of which p = softmax(l / temperature).
      tokens: y.
      temperature: tau.
      relaxation: one of `RELAXATIONS`.
    """
    mixed = (jax.nn.softmax(at_least_float32(logits) / temperature, axis=-1) @ table).astype(table.dtype)
    difference = mixed - table[tokens]
    return difference if relaxation == "soft" else difference - lax.stop_gradient(difference)
