"""The wavefront sampler made differentiable: relaxed candidates and soft exits.

The step is that of `Wavefront`. Two of its decisions get something with a gradient beside them; the
decisions themselves, which token and how many positions are committed, stay discrete and carry
none.

**Candidates.** With E the embedding, l a slot's logits, y its token and p = softmax(l / tau), the
next slot reads the vector ("sg" stops gradients)::

    straight_through    sg(E[y] - p E) + p E      forward E[y], backward p E
    soft                p E

A committed token keeps the vector it had as a candidate, so gradients reach later tokens through it
too.

**Exits.** A slot at age a, whose state moved by the relative distance d, is past its threshold
eps_a to the degree g; the prefix rule (Eq. 3) makes of it the share m of the slot that is finished
in this step, where u_j says whether the token that slot j was computed from is still the one
predicted::

    g_i = sigmoid((log eps_a - log d_i) / gate_temperature)        1 where max_recurrence is reached
    m_i = product of g_j u_j over j <= i                           sum of m: expected number of finished positions

    staying_i = product of (1 - m_i) over the slot's earlier steps  sum over steps: expected steps of the position
    leaving_i = staying_i m_i, or all of staying_i in the step that commits the slot

Over the steps of a committed position `leaving` sums to 1, so that `sum leaving * loss(state)` is
the expected loss of the state that leaves and `sum staying` the expected number of steps: a loss
may trade one for the other. As gate_temperature goes to 0 both become what the discrete sampler
does. Nothing is known of states after the commit, so a lower threshold is only felt down to the one
that commits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paradec_jax.decode.machine import POSITIVE, Number, Request, at_age, knob
from paradec_jax.decode.recurrent.wave import WaveDecoder, WavefrontKnobs, WavefrontState
from paradec_jax.decode.recurrent.wavefront import WaveInfo
from paradec_jax.decode.rules import RELAXATIONS, relaxed, score, select, shift, write_after_read
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.records import choices, pytree


@pytree
class SoftWavefrontKnobs(WavefrontKnobs):
    """How the wave moves, and how soft its decisions are.

    Attributes:
      candidate_temperature: tau of the candidates' mixture, above 0.
      gate_temperature: width of the exit's sigmoid, in units of log distance, above 0.
    """

    candidate_temperature: Number = knob(1.0, POSITIVE)
    gate_temperature: Number = knob(0.5, POSITIVE)


@pytree
class SoftWavefrontState(WavefrontState):
    """A wave, and what is soft about its slots.

    Attributes:
      offsets: what the relaxation adds to the vector of each token, [B, W, D].
      survival: share of each slot that has not left, [B, W].
    """

    offsets: Float[Array, "B W D"]
    survival: Float[Array, "B W"]


@pytree
class SoftWaveInfo(WaveInfo):
    """The soft side of the newest step, zero in slots that were not in use and in rows that had
    stopped.

    Attributes:
      staying: share of each slot that did the step, [B, W].
      finished: m, share that the soft rule of Eq. 3 calls finished, [B, W].
      leaving: share that left with the state of this step, [B, W].
      refined: states after the step, [B, W, D].
      hidden: final hidden states of the step, [B, W, D].
    """

    staying: Float[Array, "B W"]
    finished: Float[Array, "B W"]
    leaving: Float[Array, "B W"]
    refined: Float[Array, "B W D"]
    hidden: Float[Array, "B W D"]


@choices
class SoftWavefront(WaveDecoder):
    """`Wavefront` on relaxed candidates; see the head of this file for the formulas.

    With "straight_through" its tokens, lengths and counts are those of `Wavefront` at any
    temperature. A row ends within as many network calls.

    Attributes:
      inner_recurrence, window, headway, prefill_recurrence, noise_schedule, noise_mixing: as those
        of `Wavefront`.
      relaxation: "straight_through" or "soft". "soft" mixes tokens that were not drawn, so it must
        be `greedy`.
    """

    relaxation: str = "straight_through"
    Knobs = SoftWavefrontKnobs

    WORDS = {**WaveDecoder.WORDS, "relaxation": RELAXATIONS}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relaxation == "soft" and not self.greedy:
            raise ValueError(
                "relaxation 'soft' needs greedy=True: mixtures take the place of drawn tokens"
            )

    def init(self, params: Any, request: Request, knobs: SoftWavefrontKnobs) -> SoftWavefrontState:
        """Reads the prompt, commits the first token, as hard as the prompt, and starts the wave."""
        state, table = self.first_wave(params, request, knobs), self.network.embedding(params)
        offsets = jnp.zeros((*state.wave.tokens.shape, table.shape[1]), table.dtype)
        survival = jnp.ones_like(at_least_float32(state.wave.states[..., 0]))
        return SoftWavefrontState(**vars(state), offsets=offsets, survival=survival)

    def step(
        self, params: Any, state: SoftWavefrontState, knobs: SoftWavefrontKnobs
    ) -> tuple[SoftWavefrontState, SoftWaveInfo]:
        """One step of `Wavefront`, and which share of each slot left."""
        wave, inner, slot = state.wave, self.inner_recurrence, jnp.arange(self.window)
        z, e, out, tokens, log_probs, relaxation = self._predict(params, state, knobs)
        cache = self.network.write(state.cache, out.kv, write_after_read(state.cached, tokens))

        # Eq. 3, as it is.
        age, total = wave.recurrences // inner, wave.recurrences + inner
        distance, overdue = score.latent_change(z, wave.states), knobs.overdue(total)
        agrees = wave.agrees(tokens) & wave.in_use
        final = select.leading_run((knobs.still(distance, age) | overdue) & agrees)
        rows = state.rows.spend(out.counts, wave.active).commit(tokens, final, log_probs)
        committed = rows.length - state.rows.length

        # Eq. 3, softly: g, m, and the shares that stayed and left.
        both = jnp.where(wave.in_use, distance, 1.0), at_age(knobs.exit_threshold, age)
        moved, most = (jnp.log(jnp.maximum(x, score.EPSILON)) for x in both)
        gate = jax.nn.sigmoid((most - moved) / knobs.gate_temperature)
        finished = jnp.cumprod(jnp.where(agrees, jnp.where(overdue, 1.0, gate), 0.0), axis=1)
        running = (~rows.done | (committed > 0))[:, None]
        finished = jnp.where(running, finished, 0.0)
        staying = jnp.where(running & wave.in_use, state.survival, 0.0)
        leaving = staying * jnp.where(slot < committed[:, None], 1.0, finished)
        distance = jnp.where(wave.in_use, distance, jnp.nan)
        info = SoftWaveInfo(distance, committed, staying, finished, leaving, z, out.hidden)

        # The wave moves on. Slots that nothing predicted, random ones and those after the wave,
        # read their tokens.
        refined = dataclasses.replace(wave, states=z, conditioning=e, recurrences=total)
        state = dataclasses.replace(state, rows=rows, cache=cache, wave=refined)
        moved = self.move(state, committed, tokens, knobs)
        left = (wave.active - committed)[:, None]
        offsets = jnp.concatenate([state.offsets[:, :1], relaxation], axis=1)
        offsets = jnp.where((slot <= left)[..., None], shift(offsets, committed, self.window), 0.0)
        survival = shift(state.survival * (1 - finished), committed)
        survival = jnp.where(slot < left, survival, 1.0)
        return dataclasses.replace(moved, offsets=offsets, survival=survival), info

    def _predict(
        self, params: Any, state: SoftWavefrontState, knobs: SoftWavefrontKnobs
    ) -> tuple[Any, ...]:
        """z, e, what is read out, a token after each slot, its log-probability, and what relaxes
        its vector.
        """
        table = self.network.embedding(params)
        vectors = table[state.wave.tokens] + state.offsets
        z, e, out, logits = self.refine(params, state, knobs, vectors)
        positions = state.cached[:, None] + 1 + jnp.arange(self.window)
        tokens = self.sample(logits, positions, state.rows, knobs)
        offsets = relaxed(table, logits, tokens, knobs.candidate_temperature, self.relaxation)
        return z, e, out, tokens, self.scores(logits, tokens), offsets
