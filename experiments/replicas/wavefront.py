"""The wavefront sampler as the released program runs it, quirk for quirk (release of Huginn-0125).

`recurrent.wavefront.Wavefront` follows the paper's equations (arXiv 2510.14961); this one follows
the released code, so that its published numbers can be repeated. Where they differ, see
`ReleasedWavefront`. A frozen token is the *input* of a converged position; the last frozen token
stays in the window and is computed again::

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

from experiments.replicas.freezing import RULES, Evidence, Frozen
from experiments.replicas.wave import (
    Refined,
    ReleasedWavefrontKnobs,
    ReleasedWavefrontState,
    Wave,
    unless_done,
)
from paradec_jax.config.bounds import check_words
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.network import Counts, Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Reason, is_stop
from paradec_jax.decode.recurrent.latents import initial_latents
from paradec_jax.decode.recurrent.wave import (
    NOISE_MIXINGS,
    NOISE_SCHEDULES,
    mix_noise,
    on_narrowest,
    widths_of,
)
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.sampling import filtered_probabilities, inverse_cdf, is_hot, sample
from paradec_jax.decode.rules.windows import shift, window, write_after_read


@dataclasses.dataclass(frozen=True)
class ReleasedWavefront(DecoderBase):
    """The released sampler. It keeps what the program does, including what a user would not want:

    - after a step that committed m positions, distances compare position p with the old state of p
      + m;
    - all positions up to the *last* converged one are frozen, converged or not;
    - e of a new position is scaled by `1 - eta`; noise and candidates are drawn anew in every step;
    - a stop token is noticed only after `recurrence` steps and only in the step that freezes it;
    - more tokens than the budget, and tokens after a stop token, stay in the result;
    - a window of one slot never advances; without prefill, prompt tokens may be overwritten.

    Rows of a batch are independent, which the released program (batch 1) does not offer. The info
    of a step is what the rule froze, a `Frozen`.

    A row ends within `max_steps` + 3 network calls.

    Attributes:
      inner_recurrence: r', recurrences of a step.
      window: W, slots of the compiled window.
      headway: h, positions appended a step.
      recurrence: r of the prefill, also in the guard of the stop test and in the rules "fixed" and
        "token-stability"; the network's default when None.
      rule: what freezes positions, one of `RULES`.
      continuous: new positions start from the newest h states instead of random ones.
      prefill_prompt: read the prompt first; otherwise it is the first wave.
      noise_schedule, noise_mixing: see `recurrent.wave.mix_noise`.
      buckets: widths that are compiled beside the window, as those of `Wavefront`.
    """

    _: dataclasses.KW_ONLY
    inner_recurrence: int = 4
    window: int = 128
    headway: int = 1
    recurrence: int | None = None
    rule: str = "latent-diff"
    continuous: bool = False
    prefill_prompt: bool = True
    noise_schedule: str = "dampened"
    noise_mixing: str = "linear"
    buckets: tuple[int, ...] | None = None
    top_p_rule: str = "drop"
    Knobs: ClassVar[type] = ReleasedWavefrontKnobs

    def __post_init__(self) -> None:
        for name in ("inner_recurrence", "window", "headway"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.headway > self.window:
            raise ValueError(f"headway {self.headway} must not exceed the window {self.window}")
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, not {self.rule!r}")
        check_words(self, noise_schedule=NOISE_SCHEDULES, noise_mixing=NOISE_MIXINGS)

    @property
    def _r(self) -> int:
        return self.network.recurrence if self.recurrence is None else self.recurrence

    @property
    def patience(self) -> int:
        """Steps that a position waits under "fixed" and "token-stability"."""
        return self._r // self.inner_recurrence

    def init(
        self, params: Any, request: Request, knobs: ReleasedWavefrontKnobs
    ) -> ReleasedWavefrontState:
        """Reads the prompt and freezes the token it predicts, or makes the prompt the first wave.

        Raises:
          ValueError: a window that the rule "fixed" would fill for good, for it commits only when a
            wave grows; or, without prefill, a prompt wider than the window.
        """
        flying = self.headway * (self.patience + 2)
        if self.rule == "fixed" and self.window <= flying:
            raise ValueError(
                f'rule "fixed" holds {flying} positions in flight before it commits: the window must be at least '
                f"{flying + 1}, not {self.window}"
            )
        lengths, scratch = request.lengths, 2 * self.window
        zeros, latents = jnp.zeros_like(lengths), initial_latents(request, knobs)
        if self.prefill_prompt:
            reader = self.network.at(self.recurrence)
            rows, cache, _ = self.prefill(params, request, knobs, scratch, reader, **latents)
            start, count = lengths, zeros + 1
        else:
            if request.tokens.shape[1] > self.window:
                raise ValueError(
                    f"without prefill the prompt is the first wave, but {request.tokens.shape[1]} positions "
                    f"exceed the window {self.window}"
                )
            rows = self.begin(request, scratch)
            cache = self.empty_cache(request, self.size + scratch, **latents)
            start, count = zeros, lengths
        # A stop token that the prompt itself predicts goes unnoticed, a budget of one does not. A
        # row may hold a window beyond its budget.
        reason = jnp.where(rows.length >= rows.limit, Reason.BUDGET, Reason.RUNNING)
        rows = dataclasses.replace(rows, reason=reason, size=self.size + self.window)
        position = jnp.arange(rows.tokens.shape[1])
        done = self._r * self.prefill_prompt * (position <= lengths[:, None])
        positions = start[:, None] + jnp.arange(self.window)
        wave = Wave(self.network.latents(cache, positions), start, count)
        empty = jnp.zeros_like(wave.states)
        return ReleasedWavefrontState(
            rows=rows,
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
            stable=jnp.zeros_like(rows.tokens),
            time=zeros,
        )

    def step(
        self, params: Any, state: ReleasedWavefrontState, knobs: ReleasedWavefrontKnobs
    ) -> tuple[ReleasedWavefrontState, Frozen]:
        """One sampler step: refine the wave, predict again, append, freeze."""
        return self.advance(state, self.refine(params, state, knobs), knobs)

    def drafts(self, state: ReleasedWavefrontState) -> Int[Array, "B W"]:
        """The candidates after the frozen tokens, up to the newest prediction."""
        rows, wave = state.rows, state.wave
        open_ = jnp.arange(self.window) <= (wave.start + wave.count - rows.length)[:, None]
        return jnp.where(open_, window(rows.tokens, rows.length, self.window), -1)

    def refine(
        self, params: Any, state: ReleasedWavefrontState, knobs: ReleasedWavefrontKnobs
    ) -> Refined:
        """Prelude and momentum, noise, r' recurrences, a token for each slot."""
        network = self.network
        widths = widths_of(self.window, self.headway, self.buckets, self.bounded)

        def predict(narrow: ReleasedWavefrontState) -> tuple[Any, Any, Counts]:
            positions = narrow.wave.positions
            tokens = window(narrow.rows.tokens, narrow.wave.start, positions.shape[1])
            view = network.view(positions, Prefix(narrow.cache, narrow.cached))
            e, own = network.embed(params, tokens, view, network.empty_window(*tokens.shape))
            e = self._momentum(e, narrow, knobs)
            z = self._noise(narrow.wave.states, positions, narrow, knobs)
            z, own = network.recur(params, z, e, view, own, self.inner_recurrence)
            out = network.readout(params, z, view, own)
            logits = network.logits(params, out.hidden)
            return (e, z, self._draw(logits, positions + 1, narrow, knobs)), out.kv, out.counts

        (e, z, predicted), kv, counts = on_narrowest(self.network, widths, state, predict)
        return Refined(e, z, kv, counts, predicted)

    def advance(
        self, state: ReleasedWavefrontState, refined: Refined, knobs: ReleasedWavefrontKnobs
    ) -> tuple[ReleasedWavefrontState, Frozen]:
        """Candidates, new positions, freezing, stopping."""
        rows, wave = state.rows, state.wave
        position = jnp.arange(rows.tokens.shape[1])
        start, count, frozen = (x[:, None] for x in (wave.start, wave.count, rows.length))
        active = (position >= start) & (position < start + count)
        seen = state.seen + self.inner_recurrence * active

        # Frozen tokens stay, the others become what their predecessors predict now.
        source = jnp.clip(position - 1 - start, 0, self.window - 1)
        predicted = jnp.take_along_axis(refined.predicted, source, axis=1)
        again = (position < frozen) | (rows.tokens == predicted)
        stable = state.stable + (again & (position < start + count))
        filler = self._filler(position - (start + count + 1), state)
        tokens = jnp.where(position <= start + count, predicted, filler)
        tokens = jnp.where(position < frozen, rows.tokens, tokens)

        # New states after the others, cut at the limit.
        total = jnp.minimum(
            wave.count + self.headway, jnp.minimum(jnp.asarray(knobs.max_wavefront), self.window)
        )
        appended = total - wave.count
        states = self._append(refined.states, state)

        evidence = self._evidence(state, refined, stable, appended, knobs)
        decided = RULES[self.rule](evidence)
        moved = Wave(
            shift(states, decided.drop),
            wave.start
            + (self.headway * (decided.drop > 0) if self.rule == "fixed" else decided.drop),
            total - decided.drop,
        )
        rows = dataclasses.replace(
            rows.spend(refined.counts, wave.count),
            tokens=tokens,
            length=decided.length,
            reason=self._reason(state, decided, tokens, moved, knobs),
        )
        at = write_after_read(wave.start, refined.predicted)
        new = ReleasedWavefrontState(
            rows=rows,
            cache=self.network.write(state.cache, refined.kv, at),
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
        state: ReleasedWavefrontState,
        refined: Refined,
        stable: Int[Array, "B S"],
        appended: Int[Array, "B"],
        knobs: ReleasedWavefrontKnobs,
    ) -> Evidence:
        """What the freezing rules look at.

        With m the positions that the step before committed, slot i is compared with the old state
        of slot i + m. The old states were shifted when they were kept, so the further shift
        misaligns them.
        """
        wave, older = state.wave, state.older
        m, since = wave.start - state.start_before, wave.start - older.start
        before = shift(wave.states, m)
        return Evidence(
            states=refined.states,
            change=refined.states - before,
            change_count=jnp.maximum(wave.count - m, 0),
            change_before=state.change,
            change_count_before=state.change_count,
            older_change=before - shift(older.states, since),
            older_count=older.count - since,
            stable=window(stable, wave.start, self.window),
            start=wave.start,
            count=wave.count,
            appended=appended,
            length=state.rows.length,
            pointer=state.pointer,
            time=state.time,
            patience=self.patience,
            exit_threshold=knobs.exit_threshold,
        )

    def _momentum(
        self, e: Float[Array, "B W D"], state: ReleasedWavefrontState, knobs: ReleasedWavefrontKnobs
    ) -> Float[Array, "B W D"]:
        """The average over steps; a slot without history is scaled by 1 - eta, but in the first
        step by 1.
        """
        m, width = state.wave.start - state.start_before, e.shape[1]
        known = jnp.arange(width) + m[:, None] < state.embedded_count[:, None]
        before = jnp.where(known[..., None], shift(state.embedded, m, width), 0)
        eta = knobs.momentum
        return jnp.where(
            (state.time == 0)[:, None, None], e, ((1 - eta) * e + eta * before).astype(e.dtype)
        )

    def _noise(
        self,
        z: Float[Array, "B W D"],
        positions: Int[Array, "B W"],
        state: ReleasedWavefrontState,
        knobs: ReleasedWavefrontKnobs,
    ) -> Float[Array, "B W D"]:
        """Fresh noise in every step, weaker for positions that have done more recurrences."""
        recorded = state.rows.recorded
        seen = window(state.seen, state.wave.start, z.shape[1])

        def mix(z: Array) -> Array:
            if recorded is not None and recorded.noise is not None:
                steps, length = recorded.noise.shape[:2]
                at = jnp.minimum(state.time, steps - 1)[:, None], jnp.minimum(positions, length - 1)
                noise = recorded.noise[at] * knobs.init_scale
            else:
                keys = fold(state.rows.keys, Purpose.NOISE, positions, state.time)
                noise = self.network.initial_state(keys, knobs.init_scale)
            return mix_noise(z, noise, knobs.noise, seen, self.noise_schedule, self.noise_mixing)

        return lax.cond(jnp.asarray(knobs.noise) > 0, mix, lambda z: z, z)

    def _draw(
        self,
        logits: Float[Array, "B W V"],
        positions: Int[Array, "B W"],
        state: ReleasedWavefrontState,
        knobs: ReleasedWavefrontKnobs,
    ) -> Int[Array, "B W"]:
        """Each candidate with randomness of its own in every step."""
        rows, recorded = state.rows, state.rows.recorded
        if self.greedy:
            return self.sample(logits, positions, rows, knobs)
        if recorded is None or recorded.step_uniforms is None:
            return sample(
                logits,
                positions,
                rows.keys,
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

        return lax.cond(is_hot(knobs.temperature), stochastic, most_probable, logits)

    def _filler(self, index: Int[Array, "B S"], state: ReleasedWavefrontState) -> Int[Array, "B S"]:
        """The random tokens of positions that nothing predicts yet; `index` counts them from 0."""
        if self.headway == 1:
            return jnp.zeros_like(index)
        recorded = state.rows.recorded
        at = jnp.clip(index, 0, self.headway - 2)
        if recorded is not None and recorded.fillers is not None:
            row = recorded.fillers[jnp.minimum(state.time, len(recorded.fillers) - 1)]
            return jnp.take_along_axis(row, at, axis=1)
        slots = jnp.broadcast_to(jnp.arange(self.headway - 1), (index.shape[0], self.headway - 1))
        keys = fold(state.rows.keys, Purpose.FILLER, slots, state.time)
        draw = jax.vmap(
            jax.vmap(lambda key: jax.random.randint(key, (), 0, self.network.vocab_size))
        )
        return jnp.take_along_axis(draw(keys), at, axis=1)

    def _append(
        self, states: Float[Array, "B W D"], state: ReleasedWavefrontState
    ) -> Float[Array, "B W D"]:
        """States after the active ones; what lies beyond the headway is never read."""
        count = state.wave.count
        slot = jnp.arange(self.window)
        fresh = self.network.latents(state.cache, state.wave.positions)
        if self.continuous:
            copied = jnp.roll(states, self.headway, axis=1)
            fresh = jnp.where((count >= self.headway)[:, None, None], copied, fresh)
        return jnp.where((slot < count[:, None])[..., None], states, fresh)

    def _reason(
        self,
        state: ReleasedWavefrontState,
        decided: Frozen,
        tokens: Int[Array, "B S"],
        moved: Wave,
        knobs: ReleasedWavefrontKnobs,
    ) -> Int[Array, "B"]:
        """Stop tokens and the condition of the loop."""
        rows, time, length = state.rows, state.time, decided.length
        position = jnp.arange(tokens.shape[1])
        first, last = (state.pointer, decided.pointer)
        if self.rule == "fixed":
            first, last = length - self.headway, length
        newest = (position >= first[:, None]) & (position < last[:, None])
        hit = jnp.any(is_stop(tokens, rows.stop) & newest, axis=1) & (time > self._r)
        used_up = length >= rows.limit
        too_long = moved.start + moved.count > self.network.max_length
        over = used_up | too_long | (time > knobs.max_steps)
        return jnp.where(hit, Reason.STOP, jnp.where(over, Reason.BUDGET, Reason.RUNNING))
