"""The wavefront sampler of recurrent-depth models, clean rule (arXiv 2510.14961, Algorithm 2 and Eq. 3).

Instead of finishing a token before the next one starts, every step refines the latent states of a whole window by a
few recurrences, reads out a token for each, and opens new positions after them. Positions are committed in order,
once their states have stopped moving. `wave` draws the window.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.recurrent import wave as waves
from paradec_jax.decode.recurrent.buckets import check_buckets, on_narrowest
from paradec_jax.decode.recurrent.latents import initial_latents
from paradec_jax.decode.recurrent.wave import Prediction, WavefrontKnobs, WavefrontState
from paradec_jax.decode.rules import score, select
from paradec_jax.decode.rules.by_age import at_age
from paradec_jax.decode.rules.windows import shift, write_after_read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WaveInfo:
    """The newest step, before the window moved: slot i was position `length - committed - 1 + i`.

    Attributes:
      distance: relative change of each slot's state, NaN where the slot was not in use, [B, W].
      committed: tokens committed, [B].
    """

    distance: Float[Array, "B W"]
    committed: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Wavefront(DecoderBase):
    """Refines a window of latent states and commits its converged prefix.

    A row of n new tokens ends within 1 + (n - 1) ceil(max_recurrence / r') network calls; without a bound on
    recurrences maybe never.

    Attributes:
      inner_recurrence: r', recurrences of a step.
      window: W, slots of the compiled window; `knobs.max_wavefront` narrows it without recompiling.
      headway: positions opened a step; those after the first start from random tokens.
      warm_start: whether a position keeps its state when its input token or one before it changes, as in the paper.
        Otherwise it starts again from its initial state, and nothing is left of what it was computed from. With
        exits at every step, and a prompt that was read at r', the wave is then Jacobi decoding: it writes what static
        decoding at r = r' writes.
      prefill_recurrence: r of the prompt; the network's default when None.
      noise_schedule: "dampened" (share `beta / (1 + n)`, n the recurrences a slot has done) or "constant" (beta).
      noise_mixing: "linear", or "sqrt" (mixed as variances).
      buckets: narrower windows that are compiled as well; a step runs on the narrowest that holds every wave. None
        for those of the rule in `buckets.compiled_widths`.
    """

    _: dataclasses.KW_ONLY
    inner_recurrence: int = 4
    window: int = 32
    headway: int = 1
    warm_start: bool = True
    prefill_recurrence: int | None = None
    noise_schedule: str = "dampened"
    noise_mixing: str = "linear"
    buckets: tuple[int, ...] | None = None
    Knobs: ClassVar[type] = WavefrontKnobs

    def __post_init__(self) -> None:
        waves.check_wave(self)
        check_buckets(self.buckets, self.window)

    def init(self, params: Any, request: Request, knobs: WavefrontKnobs) -> WavefrontState:
        """Reads the prompt with r recurrences, commits the first token, and starts the wave."""
        deep, latents = self.network.at(self.prefill_recurrence), initial_latents(request, knobs)
        rows, cache, _ = self.prefill(params, request, knobs, self.window, deep, **latents)
        return waves.begin(self.network, rows, cache, self.window, self.headway, knobs.limit(self.window))

    def step(
        self, params: Any, state: WavefrontState, knobs: WavefrontKnobs
    ) -> tuple[WavefrontState, WaveInfo]:
        """One step of Algorithm 2 (arXiv 2510.14961): predict, commit what has converged, move on."""
        network, rows, wave = self.network, state.rows, state.wave

        # Prelude, r' recurrences, coda and sampling: a token after each slot.
        new = self._predict(params, state, knobs)
        cache = network.write(state.cache, new.kv, write_after_read(state.cached, new.tokens))

        # Eq. 3: a position is final when its state and those of all before it have stopped moving, and when the
        # token it was computed from is still the one its predecessor predicts.
        age = wave.recurrences // self.inner_recurrence
        distance = score.latent_change(new.states, wave.states)
        overdue = knobs.overdue(wave.recurrences + self.inner_recurrence)
        agrees = wave.agrees(new.tokens)
        converged = (waves.stands_still(distance, at_age(knobs.exit_threshold, age)) | overdue) & agrees
        final = select.leading_run(converged & wave.in_use)

        # The tokens that final positions predict are committed.
        rows = rows.spend(new.counts, wave.active).commit(new.tokens, final, new.log_probs)
        committed = rows.length - state.rows.length

        # Their states leave, the others are kept for the next step, `headway` fresh ones follow them.
        moved = wave.refined(new, self.inner_recurrence).advance(committed, new.tokens)
        fresh = network.latents(cache, moved.positions(rows.length - 1))
        if not self.warm_start:
            moved = moved.restart(shift(~select.leading(agrees), committed), fresh)
        moved = moved.open(
            count=jnp.where(rows.done, 0, self.headway),
            limit=knobs.limit(self.window),
            fresh=fresh,
            fill=waves.fill_tokens(state, rows, self.headway),
        )
        info = WaveInfo(jnp.where(wave.in_use, distance, jnp.nan), committed)
        steps = state.steps + ~rows.done
        return dataclasses.replace(state, rows=rows, cache=cache, wave=moved, steps=steps), info

    @on_narrowest
    def _predict(self, params: Any, state: WavefrontState, knobs: WavefrontKnobs) -> Prediction:
        """The network on the wave: prelude, r' recurrences, coda, and a token after each slot."""
        network, wave, at = self.network, state.wave, state.cached
        positions = wave.positions(at)
        view = network.view(positions, Prefix(state.cache, at))
        age = wave.recurrences // self.inner_recurrence

        # The prelude's output, averaged over steps (Eq. 1).
        e, kv = network.embed(params, wave.tokens, view, network.empty_window(*positions.shape))
        e = wave.with_momentum(e, at_age(knobs.momentum, age))

        # Fresh noise in the states (Eq. 2).
        share = at_age(knobs.noise, age)
        z = waves.with_noise(
            network, state, wave, knobs, share, self.noise_schedule, self.noise_mixing, self.bounded
        )

        # r' recurrences of all states, then the coda and a token of each.
        z, kv = network.recur(params, z, e, view, kv, self.inner_recurrence)
        out = network.readout(params, z, view, kv)
        logits = network.logits(params, out.hidden)
        tokens = self.sample(logits, positions + 1, state.rows, knobs)
        return Prediction(z, e, out.kv, out.counts, tokens, self.scores(logits, tokens))
