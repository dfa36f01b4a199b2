"""The wavefront sampler as the original program runs it, quirk for quirk (release of Huginn-0125).

`wavefront.Wavefront` follows the paper's equations; this one follows the code, so that its published numbers can be
repeated. Where they differ, see `OfficialWavefront`. A frozen token is the *input* of a converged position; the
last frozen token stays in the window and is computed again::

    position   0 .. a-1    a          a+1 .. F-1     F .. a+w-1      a+w
             [ cached  ][ last     ][ (none: F =   ][ candidates  ][ newest        ]
    tokens     frozen     frozen       a + 1)         re-predicted    prediction
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode import stop
from paradec_jax.decode.base import DecoderBase, after
from paradec_jax.decode.freezing import RULES, Evidence, Frozen
from paradec_jax.decode.noise import NOISE_MIXERS, mix_noise
from paradec_jax.decode.official_wave import OfficialKnobs, OfficialState, Refined, Wave, unless_done
from paradec_jax.decode.protocol import Decoded, Reason, Request
from paradec_jax.decode.randomness import Purpose, fold
from paradec_jax.decode.sampling import filtered_probabilities, inverse_cdf, sample


@dataclasses.dataclass(frozen=True)
class OfficialWavefront(DecoderBase):
    """The released sampler. It keeps what the release does, including what a user would not want:

    - after a step that committed m positions, distances compare position p with the old state of p + m;
    - all positions up to the *last* converged one are frozen, converged or not;
    - e of a new position is scaled by `1 - eta`; noise and candidates are drawn anew in every step;
    - a stop token is noticed only after `recurrence` steps and only in the step that freezes it;
    - more tokens than the budget, and tokens behind a stop token, stay in the result;
    - a wave of width 1 never advances; without prefill, prompt tokens may be overwritten.

    Rows of a batch are independent, which the release (batch 1) does not offer.

    Attributes:
      inner_recurrence: r', recurrences of a step.
      width: W, slots of the compiled window.
      headway: h, positions appended a step.
      recurrence: r of the prefill, also in the guard of the stop test and in the rules "fixed" and
        "token-stability"; the network's default when None.
      rule: what freezes positions, one of `RULES`.
      continuous: new positions start from the newest h states instead of random ones.
      prefill_prompt: read the prompt first; otherwise it is the first wave.
      noise_mixer: one of `NOISE_MIXERS`.
    """

    _: dataclasses.KW_ONLY
    inner_recurrence: int = 4
    width: int = 128
    headway: int = 1
    recurrence: int | None = None
    rule: str = "latent-diff"
    continuous: bool = False
    prefill_prompt: bool = True
    noise_mixer: str = "dampened"
    Knobs: ClassVar[type] = OfficialKnobs

    def __post_init__(self) -> None:
        for name in ("inner_recurrence", "width", "headway"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.headway > self.width:
            raise ValueError(f"headway {self.headway} must not exceed the width {self.width}")
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, not {self.rule!r}")
        if self.noise_mixer not in NOISE_MIXERS:
            raise ValueError(
                f"noise_mixer must be one of {', '.join(NOISE_MIXERS)}, not {self.noise_mixer!r}"
            )

    @property
    def _r(self) -> int:
        return self.network.recurrence if self.recurrence is None else self.recurrence

    @property
    def patience(self) -> int:
        """Steps that a position waits under "fixed" and "token-stability"."""
        return self._r // self.inner_recurrence

    def init(self, params: Any, request: Request, knobs: OfficialKnobs) -> OfficialState:
        """Reads the prompt and freezes the token it predicts (S1), or makes the prompt the first wave.

        Raises:
          ValueError: a width that the rule "fixed" would fill for good, for it commits only when a wave grows; or,
            without prefill, a prompt wider than the wave.
        """
        flying = self.headway * (self.patience + 2)
        if self.rule == "fixed" and self.width <= flying:
            raise ValueError(
                f'rule "fixed" holds {flying} positions in flight before it commits: the width must be at least '
                f"{flying + 1}, not {self.width}"
            )
        batch, lengths = request.batch, request.lengths
        zeros = jnp.zeros(batch, jnp.int32)
        if self.prefill_prompt:
            progress, cache, _ = self.prefill(params, request, knobs, self._r, 2 * self.width)
            start, count = lengths, zeros + 1
        else:
            if request.tokens.shape[1] > self.width:
                raise ValueError(
                    f"without prefill the prompt is the first wave, but {request.tokens.shape[1]} positions "
                    f"exceed the width {self.width}"
                )
            progress, cache = self.start(request, knobs, 2 * self.width)
            start, count = zeros, lengths
        # A stop token that the prompt itself predicts goes unnoticed, a budget of one does not.
        reason = jnp.where(progress.length >= progress.limit, Reason.BUDGET, Reason.RUNNING)
        progress = dataclasses.replace(progress, reason=reason)
        position = jnp.arange(progress.tokens.shape[1])
        done = self._r * self.prefill_prompt * (position <= lengths[:, None])
        wave = Wave(stop.window(progress.initial, start, self.width), start, count)
        empty = jnp.zeros_like(wave.states)
        return OfficialState(
            progress=progress,
            cache=cache,
            wave=wave,
            start_before=zeros,
            embedded=empty,
            embedded_count=zeros,
            older=Wave(empty, zeros, zeros),
            change=empty,
            change_count=zeros + 1,
            pointer=zeros,
            seen=done.astype(jnp.int32),
            stable=jnp.zeros_like(progress.tokens),
            time=zeros,
        )

    def finish(self, state: OfficialState) -> Decoded:
        """All frozen tokens, those beyond the budget included."""
        return stop.finish(state.progress, self.size + self.width, self.pad)

    def step(self, params: Any, state: OfficialState, knobs: OfficialKnobs) -> OfficialState:
        """One sampler step: refine the wave, predict again, append, freeze."""
        refined = self.refine(params, state, knobs)
        return self.advance(state, refined, knobs)[0]

    def refine(self, params: Any, state: OfficialState, knobs: OfficialKnobs) -> Refined:
        """W1 to W6: prelude and momentum, noise, r' recurrences, a token for each slot."""
        network, progress, wave = self.network, state.progress, state.wave
        batch = wave.start.shape[0]
        positions = wave.start[:, None] + jnp.arange(self.width)
        tokens = stop.window(progress.tokens, wave.start, self.width)
        view = network.view(positions, state.cache, wave.start)
        e, window = network.embed(params, tokens, view, network.empty_window(batch, self.width))
        e = self._momentum(e, state, knobs)
        z = self._noise(wave.states, positions, state, knobs)
        z, window = network.recur(params, z, e, view, window, self.inner_recurrence)
        hidden, window = network.readout(params, z, view, window)
        logits = network.logits(params, hidden)
        return Refined(e, z, window, self._draw(logits, positions + 1, state, knobs))

    def advance(
        self, state: OfficialState, refined: Refined, knobs: OfficialKnobs
    ) -> tuple[OfficialState, Frozen]:
        """W7 to W13: candidates, new positions, freezing, stopping."""
        progress, wave = state.progress, state.wave
        position = jnp.arange(progress.tokens.shape[1])
        start, count, frozen = (x[:, None] for x in (wave.start, wave.count, progress.length))
        active = (position >= start) & (position < start + count)
        seen = state.seen + self.inner_recurrence * active

        # W7, W8: frozen tokens stay, the others become what their predecessors predict now.
        source = jnp.clip(position - 1 - start, 0, self.width - 1)
        predicted = jnp.take_along_axis(refined.predicted, source, axis=1)
        again = (position < frozen) | (progress.tokens == predicted)
        stable = state.stable + (again & (position < start + count))
        filler = self._filler(position - (start + count + 1), state)
        tokens = jnp.where(position <= start + count, predicted, filler)
        tokens = jnp.where(position < frozen, progress.tokens, tokens)

        # W9, W10: new states in front, cut at the limit.
        limit = jnp.where(knobs.max_wavefront > 0, jnp.minimum(knobs.max_wavefront, self.width), self.width)
        total = jnp.minimum(wave.count + self.headway, limit)
        appended = total - wave.count
        states = self._append(refined.states, state)

        # W11: freeze.
        evidence = self._evidence(state, refined, stable, appended, knobs)
        decided = RULES[self.rule](evidence)
        moved = Wave(
            stop.shift(states, decided.drop),
            wave.start + (self.headway * (decided.drop > 0) if self.rule == "fixed" else decided.drop),
            total - decided.drop,
        )
        length = decided.length
        progress = progress.count(1, wave.count, self.inner_recurrence)
        progress = dataclasses.replace(
            progress,
            tokens=tokens,
            length=length,
            reason=self._reason(state, decided, tokens, length, moved, knobs),
        )
        cache = self.network.write(state.cache, refined.kv, after(wave.start, refined.predicted))
        new = OfficialState(
            progress=progress,
            cache=cache,
            wave=moved,
            start_before=wave.start,
            embedded=refined.embedded,
            embedded_count=wave.count,
            older=Wave(wave.states, state.start_before, wave.count),
            change=evidence.change,
            change_count=evidence.change_count,
            pointer=decided.pointer,
            seen=seen,
            stable=stable,
            time=state.time + 1,
        )
        return unless_done(state, new), decided

    def _evidence(
        self,
        state: OfficialState,
        refined: Refined,
        stable: Int[Array, "B S"],
        appended: Int[Array, "B"],
        knobs: OfficialKnobs,
    ) -> Evidence:
        """What the freezing rules look at.

        With m the positions that the step before committed, slot i is compared with the old state of slot i + m.
        The old states were shifted when they were kept, so the further shift misaligns them.
        """
        wave, older = state.wave, state.older
        m, since = wave.start - state.start_before, wave.start - older.start
        before = stop.shift(wave.states, m)
        return Evidence(
            states=refined.states,
            change=refined.states - before,
            change_count=jnp.maximum(wave.count - m, 0),
            change_before=state.change,
            change_count_before=state.change_count,
            older_change=before - stop.shift(older.states, since),
            older_count=older.count - since,
            stable=stop.window(stable, wave.start, self.width),
            start=wave.start,
            count=wave.count,
            appended=appended,
            length=state.progress.length,
            pointer=state.pointer,
            time=state.time,
            patience=self.patience,
            exit_threshold=knobs.exit_threshold,
        )

    def _momentum(
        self, e: Float[Array, "B W D"], state: OfficialState, knobs: OfficialKnobs
    ) -> Float[Array, "B W D"]:
        """W2: rows without history are scaled by 1 - eta, except in the first step, which has all of it."""
        m = state.wave.start - state.start_before
        known = jnp.arange(self.width) + m[:, None] < state.embedded_count[:, None]
        before = jnp.where(known[..., None], stop.shift(state.embedded, m), 0)
        eta = knobs.momentum
        return jnp.where((state.time == 0)[:, None, None], e, ((1 - eta) * e + eta * before).astype(e.dtype))

    def _noise(
        self,
        z: Float[Array, "B W D"],
        positions: Int[Array, "B W"],
        state: OfficialState,
        knobs: OfficialKnobs,
    ) -> Float[Array, "B W D"]:
        """W3: fresh noise in every step, weaker for positions that have done more recurrences."""
        recorded = state.progress.recorded
        seen = stop.window(state.seen, state.wave.start, self.width)

        def mix(z: Array) -> Array:
            if recorded is not None and recorded.noise is not None:
                steps, rows = recorded.noise.shape[:2]
                at = jnp.minimum(state.time, steps - 1)[:, None], jnp.minimum(positions, rows - 1)
                noise = recorded.noise[at] * knobs.init_scale
            else:
                keys = fold(state.progress.keys, Purpose.NOISE, positions, state.time)
                noise = self.network.initial_state(keys, knobs.init_scale)
            return mix_noise(z, noise, knobs.noise, seen, self.noise_mixer)

        return lax.cond(jnp.asarray(knobs.noise) > 0, mix, lambda z: z, z)

    def _draw(
        self,
        logits: Float[Array, "B W V"],
        positions: Int[Array, "B W"],
        state: OfficialState,
        knobs: OfficialKnobs,
    ) -> Int[Array, "B W"]:
        """W6: each candidate with randomness of its own in every step."""
        progress, recorded = state.progress, state.progress.recorded
        if self.greedy:
            return self.sample(logits, positions, progress, knobs)
        if recorded is None or recorded.step_uniforms is None:
            return sample(
                logits,
                positions,
                progress.keys,
                knobs,
                top_p_rule=self.top_p_rule,
                purpose=Purpose.DRAFT,
                step=state.time,
            )
        uniforms = recorded.step_uniforms
        at = (
            jnp.minimum(state.time, uniforms.shape[0] - 1)[:, None],
            jnp.minimum(positions, uniforms.shape[1] - 1),
        )

        def stochastic(logits: Array) -> Array:
            probs = filtered_probabilities(logits, knobs, top_p_rule=self.top_p_rule)
            return inverse_cdf(probs, uniforms[at])

        def most_probable(logits: Array) -> Array:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)

        return lax.cond(jnp.asarray(knobs.temperature) > 0, stochastic, most_probable, logits)

    def _filler(self, index: Int[Array, "B S"], state: OfficialState) -> Int[Array, "B S"]:
        """The random tokens of positions that nothing predicts yet; `index` counts them from 0."""
        if self.headway == 1:
            return jnp.zeros_like(index)
        recorded = state.progress.recorded
        at = jnp.clip(index, 0, self.headway - 2)
        if recorded is not None and recorded.fillers is not None:
            row = recorded.fillers[jnp.minimum(state.time, len(recorded.fillers) - 1)]
            return jnp.take_along_axis(row, at, axis=1)
        slots = jnp.broadcast_to(jnp.arange(self.headway - 1), (index.shape[0], self.headway - 1))
        keys = fold(state.progress.keys, Purpose.FILLER, slots, state.time)
        draw = jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (), 0, self.network.vocab_size)))
        return jnp.take_along_axis(draw(keys), at, axis=1)

    def _append(self, states: Float[Array, "B W D"], state: OfficialState) -> Float[Array, "B W D"]:
        """W9: states behind the active ones; what lies beyond the headway is never read."""
        count = state.wave.count
        slot = jnp.arange(self.width)
        fresh = stop.window(state.progress.initial, state.wave.start, self.width)
        if self.continuous:
            copied = jnp.roll(states, self.headway, axis=1)
            fresh = jnp.where((count >= self.headway)[:, None, None], copied, fresh)
        return jnp.where((slot < count[:, None])[..., None], states, fresh)

    def _reason(
        self,
        state: OfficialState,
        decided: Frozen,
        tokens: Int[Array, "B S"],
        length: Int[Array, "B"],
        moved: Wave,
        knobs: OfficialKnobs,
    ) -> Int[Array, "B"]:
        """W12 and the loop's condition."""
        progress, time = state.progress, state.time
        position = jnp.arange(tokens.shape[1])
        first, last = (state.pointer, decided.pointer)
        if self.rule == "fixed":
            first, last = length - self.headway, length
        newest = (position >= first[:, None]) & (position < last[:, None])
        hit = jnp.any(stop.is_stop(tokens, progress.stop) & newest, axis=1) & (time > self._r)
        used_up = length >= progress.limit
        too_long = moved.start + moved.count > self.network.max_length
        over = used_up | too_long | (time > knobs.max_steps)
        return jnp.where(hit, Reason.STOP, jnp.where(over, Reason.BUDGET, Reason.RUNNING))
