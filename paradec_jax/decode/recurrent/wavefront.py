"""The wavefront sampler of recurrent-depth models as the paper states it (arXiv 2510.14961,
Algorithm 2 and Eq. 3).

Instead of finishing a token before the next one starts, every step refines the latent states of a
whole window by a few recurrences, reads out a token for each, and opens new positions after them.
Positions are committed in order, once their states have stopped moving. `wave` draws the window.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.decode.machine import Counts, Request
from paradec_jax.decode.recurrent.wave import (
    WaveDecoder,
    WavefrontKnobs,
    WavefrontState,
    on_narrowest,
    widths_of,
)
from paradec_jax.decode.rules import score, select, write_after_read
from paradec_jax.records import choices, pytree


@pytree
class WaveInfo:
    """The newest step, before the window moved: slot i was position `length - committed - 1 + i`.

    Attributes:
      distance: relative change of each slot's state, NaN where the slot was not in use, [B, W].
      committed: tokens committed, [B].
    """

    distance: Float[Array, "B W"]
    committed: Int[Array, "B"]


@choices
class Wavefront(WaveDecoder):
    """Refines a window of latent states and commits its converged prefix.

    A row of n new tokens ends within 1 + (n - 1) ceil(max_recurrence / r') network calls; without a
    bound on recurrences maybe never.

    Attributes:
      inner_recurrence: r', recurrences of a step.
      window: W, slots of the compiled window; `knobs.max_wavefront` narrows it without recompiling.
      headway: positions opened a step; those after the first start from random tokens.
      warm_start: whether a position keeps its state when its input token or one before it changes,
        as in the paper. Otherwise it starts again. With exits at every step, and a prompt that was
        read at r', the wave is then Jacobi
        decoding: it writes what static decoding at r = r' writes.
      prefill_recurrence: r of the prompt; the network's default when None.
      noise_schedule: share of noise: "dampened" (`beta / (1 + n)` after n recurrences of a slot, as
        the release has it; the paper's falls linearly) or "constant" (beta).
      noise_mixing: "linear", or "sqrt" (mixed as variances).
      buckets: narrower widths that are compiled too; the narrowest that holds every row's wave
        runs. None is 2, 8 and 32, as far as they are at most a third of the window.
    """

    warm_start: bool = True
    buckets: tuple[int, ...] | None = None
    Knobs = WavefrontKnobs

    def init(self, params: Any, request: Request, knobs: WavefrontKnobs) -> WavefrontState:
        """Reads the prompt with r recurrences, commits the first token, and starts the wave."""
        return self.first_wave(params, request, knobs)

    def step(
        self, params: Any, state: WavefrontState, knobs: WavefrontKnobs
    ) -> tuple[WavefrontState, WaveInfo]:
        """One iteration of Algorithm 2: predict, commit what has converged, move on."""
        wave, inner = state.wave, self.inner_recurrence
        widths = widths_of(self.window, self.headway, self.buckets, self.bounded)

        # e <- P(y), z <- R(z, e) r' times, p <- C(z), y <- Sample(p): a token after each slot.
        def predict(narrow: WavefrontState) -> tuple[Any, Any, Counts]:
            z, e, out, logits = self.refine(params, narrow, knobs, narrow.wave.tokens)
            own = narrow.cached[:, None] + 1 + jnp.arange(z.shape[1])
            tokens = self.sample(logits, own, narrow.rows, knobs)
            return (z, e, tokens, self.scores(logits, tokens)), out.kv, out.counts

        (z, e, tokens, log_probs), kv, counts = on_narrowest(self.network, widths, state, predict)
        cache = self.network.write(state.cache, kv, write_after_read(state.cached, tokens))

        # k* by Eq. 3: a position is final when its state and those of all before it have stopped
        # moving. Not in the paper: the token it was computed from must still be the one its
        # predecessor predicts, so that the keys that are stored are its own; and `max_recurrence`
        # ends the wait.
        distance = score.latent_change(z, wave.states)
        converged = knobs.still(distance, wave.recurrences // inner) | knobs.overdue(
            wave.recurrences + inner
        )
        final = select.leading_run(converged & wave.agrees(tokens) & wave.in_use)

        # y_frozen <- y[1 : k*]: the tokens that final positions predict are committed (the release:
        # those fed there).
        rows = state.rows.spend(counts, wave.active).commit(tokens, final, log_probs)
        info = WaveInfo(jnp.where(wave.in_use, distance, jnp.nan), rows.length - state.rows.length)

        # z <- z[k* :], InitState: their states leave, `headway` fresh ones follow the others.
        refined = dataclasses.replace(
            wave, states=z, conditioning=e, recurrences=wave.recurrences + inner
        )
        state = dataclasses.replace(state, rows=rows, cache=cache, wave=refined)
        return self.move(state, info.committed, tokens, knobs, self.warm_start), info
