"""The wavefront sampler of recurrent-depth models, clean rule (arXiv 2510.14961, Algorithm 2 and Eq. 3).

Instead of finishing a token before the next one starts, every step refines the latent states of a whole window
by a few recurrences, reads out a candidate for each, and appends new positions in front. Positions are committed
in order, once their states have stopped moving::

    slot          0            1 .. c-1          c .. w-1            w .. W-1
             [ newest     ][ converged     ][ still moving    ][ not yet      ]
    tokens   committed      = their inputs    candidates         unused
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode import score, select, stop
from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.base import DecoderBase, after
from paradec_jax.decode.noise import NOISE_MIXERS, mix_noise
from paradec_jax.decode.protocol import Progress, Request
from paradec_jax.decode.randomness import Purpose, fold
from paradec_jax.decode.sampling import log_probability
from paradec_jax.decode.schedule import Scheduled, at_age, check_schedule
from paradec_jax.nn.precision import at_least_float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WavefrontKnobs(AutoRegressiveKnobs):
    """Sampling, and how the wave moves. Defaults are the paper's.

    The first three may be schedules: an array [K] holds one value for each age of a slot, that is the steps it
    has done before the one at hand (`seen // inner_recurrence`, K - 1 at most). A number holds at every age.

    Attributes:
      exit_threshold: epsilon; a position has converged when its state's relative change in a step is below it.
      momentum: eta of the average over steps of the conditioning e, `e <- (1 - eta) e_new + eta e_old`. A slot
        of age 0 has no e_old, so entry 0 of a schedule does nothing.
      noise: beta, share of fresh noise mixed into the states before each step.
      max_wavefront: active positions at most (the compiled width bounds it); 0 for the compiled width.
      max_recurrence: recurrences after which a position counts as converged, counted from where it was opened or last
        started again; 0 for no bound. Some states never settle, and without a bound their row would never end.
    """

    exit_threshold: Scheduled = 0.03
    momentum: Scheduled = 0.1
    noise: Scheduled = 0.0
    max_wavefront: Int[Array, "..."] | int = 0
    max_recurrence: Int[Array, "..."] | int = 64

    def checked(self) -> "WavefrontKnobs":
        """Self, after a look at values and shapes. Raises ValueError."""
        for name in ("exit_threshold", "momentum", "noise"):
            check_schedule(getattr(self, name), name)
        super().checked()
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WavefrontState:
    """Rows, cache (one entry less than committed tokens), and the window in front of it.

    Slot i of a row is position `progress.length - 1 + i`; slot 0 is the newest committed token.

    Attributes:
      progress: the rows.
      cache: keys and values of the positions before slot 0.
      candidates: input tokens of the window; slot 0 is committed, the others are drafts, [B, W].
      latents: states z, [B, W, D].
      embedded: conditioning e after momentum, [B, W, D].
      seen: recurrences done in each slot; 0 in a fresh one, [B, W].
      active: width w of the wave, [B].
      distance: relative change of each slot in the newest step, before the shift, [B, W].
      committed: tokens committed in the newest step, [B].
      steps: steps done by each row, [B].
      filler: random token of each position, for those that nothing predicts yet, [B, S]; none with a headway of one.
    """

    progress: Progress
    cache: Any
    candidates: Int[Array, "B W"]
    latents: Float[Array, "B W D"]
    embedded: Float[Array, "B W D"]
    seen: Int[Array, "B W"]
    active: Int[Array, "B"]
    distance: Float[Array, "B W"]
    committed: Int[Array, "B"]
    steps: Int[Array, "B"]
    filler: Int[Array, "B F"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refined:
    """What the network makes of a window: states z, keys and values, e, and the token each slot predicts."""

    latents: Float[Array, "B W D"]
    kv: Any
    embedded: Float[Array, "B W D"]
    predicted: Int[Array, "B W"]
    log_probs: Float[Array, "B W"] | None


@dataclasses.dataclass(frozen=True)
class Wavefront(DecoderBase):
    """Refines a window of latent states and commits its converged prefix.

    Attributes:
      inner_recurrence: r', recurrences of a step.
      width: W, slots of the compiled window; `knobs.max_wavefront` narrows it without recompiling.
      headway: positions appended a step; those beyond the first start from random tokens.
      carry: whether a position keeps its state when its input token or one before it changes, as in the paper.
        Otherwise it starts again from its initial state, and nothing is left of what it was computed from. With
        exits at every step, and a prompt that was read at r', the wave is then Jacobi decoding: it writes what static
        decoding at r = r' writes.
      prefill_recurrence: r of the prompt; the network's default when None.
      noise_mixer: "dampened" (share `beta / (1 + n)`, n the recurrences a slot has done), "constant" (beta), or
        "sqrt" (dampened, mixed as variances).
      buckets: narrower widths that are compiled as well; a step runs at the smallest that holds every wave.
    """

    _: dataclasses.KW_ONLY
    inner_recurrence: int = 4
    width: int = 32
    headway: int = 1
    carry: bool = True
    prefill_recurrence: int | None = None
    noise_mixer: str = "dampened"
    buckets: tuple[int, ...] = ()
    Knobs: ClassVar[type] = WavefrontKnobs

    def __post_init__(self) -> None:
        for name in ("inner_recurrence", "width", "headway"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.noise_mixer not in NOISE_MIXERS:
            raise ValueError(
                f"noise_mixer must be one of {', '.join(NOISE_MIXERS)}, not {self.noise_mixer!r}"
            )
        if any(not 1 <= b < self.width for b in self.buckets) or list(self.buckets) != sorted(
            set(self.buckets)
        ):
            raise ValueError(
                f"buckets must ascend from 1 to below the width {self.width}, not {self.buckets}"
            )

    @property
    def _r(self) -> int:
        return self.network.recurrence if self.prefill_recurrence is None else self.prefill_recurrence

    def init(self, params: Any, request: Request, knobs: WavefrontKnobs) -> WavefrontState:
        """Reads the prompt with r recurrences, commits the first token, and starts a wave of one position."""
        progress, cache, _ = self.prefill(params, request, knobs, self._r, self.width)
        batch, width = request.batch, self.width
        slots = jnp.zeros((batch, width), jnp.int32)
        newest = stop.window(progress.tokens, progress.length - 1, 1)
        latents = self._fresh(progress)
        rows = jnp.zeros(batch, jnp.int32)
        return WavefrontState(
            progress=progress,
            cache=cache,
            candidates=slots.at[:, :1].set(newest),
            latents=latents,
            embedded=jnp.zeros_like(latents),
            seen=slots,
            active=rows + 1,
            distance=jnp.zeros_like(at_least_float32(latents[..., 0])),
            committed=rows,
            steps=rows,
            filler=self._fillers(progress),
        )

    def step(self, params: Any, state: WavefrontState, knobs: WavefrontKnobs) -> WavefrontState:
        """One sampler step: refine all active states, re-predict, commit the converged prefix, move on."""
        refined = self._refine(params, state, knobs)
        predicted = refined.predicted
        cache = self.network.write(state.cache, refined.kv, after(state.progress.length - 1, predicted))
        seen = state.seen + self.inner_recurrence

        # Eq. 3: a position is final when its state and those of all before it have stopped moving, and when the
        # token it was computed from is still the one its predecessor predicts.
        distance = score.latent_change(refined.latents, state.latents)
        converged = distance < at_age(knobs.exit_threshold, self._age(state.seen))
        converged |= (knobs.max_recurrence > 0) & (seen >= knobs.max_recurrence)
        unchanged = jnp.pad(
            predicted[:, :-1] == state.candidates[:, 1:], ((0, 0), (1, 0)), constant_values=True
        )
        slot = jnp.arange(self.width)
        final = select.prefix(converged & unchanged & (slot < state.active[:, None]))

        progress = state.progress
        count = stop.allowed(progress, predicted, final)
        progress = progress.count(1, state.active, self.inner_recurrence)
        progress = stop.commit(progress, predicted, final, refined.log_probs)
        state = dataclasses.replace(
            state,
            progress=progress,
            cache=cache,
            latents=refined.latents,
            embedded=refined.embedded,
            seen=seen,
            distance=jnp.where(slot < state.active[:, None], distance, jnp.nan),
            committed=count,
            steps=state.steps + ~progress.done,
        )
        return self._advance(state, refined, knobs)

    def _age(self, seen: Int[Array, "B W"]) -> Int[Array, "B W"]:
        """Steps that each slot has done, by which schedules are read."""
        return seen // self.inner_recurrence

    def _refine(self, params: Any, state: WavefrontState, knobs: WavefrontKnobs) -> Refined:
        """Runs the network on the window and predicts the token behind each slot.

        Where narrower widths are compiled, the smallest that holds every running wave does the work.
        """
        widths = (*self.buckets, self.width)
        needed = jnp.max(jnp.where(state.progress.done, 1, state.active))
        branches = [lambda s, w=w: self._refine_at(params, s, knobs, w) for w in widths]
        if len(branches) == 1:
            return branches[0](state)
        return lax.switch(jnp.searchsorted(jnp.asarray(widths), needed), branches, state)

    def _refine_at(self, params: Any, state: WavefrontState, knobs: WavefrontKnobs, width: int) -> Refined:
        z, e, hidden, window = self._recur(params, state, state.candidates[:, :width], knobs)
        predicted, log_probs = self._predict(self.network.logits(params, hidden), state.progress, knobs)

        def widen(x: Array) -> Array:
            return jnp.pad(x, [(0, 0), (0, self.width - width), *[(0, 0)] * (x.ndim - 2)])

        window = self.network.widen(window, self.width)
        log_probs = None if log_probs is None else widen(log_probs)
        return Refined(widen(z), window, widen(e), widen(predicted), log_probs)

    def _recur(
        self, params: Any, state: WavefrontState, inputs: Any, knobs: WavefrontKnobs
    ) -> tuple[Array, Array, Array, Any]:
        """r' recurrences of the slots that `inputs` fills: states z, conditioning e, head input, window."""
        network, width = self.network, inputs.shape[1]
        at = state.progress.length - 1
        positions = at[:, None] + jnp.arange(width)
        view = network.view(positions, state.cache, at)
        seen = state.seen[:, :width]

        e, window = network.embed(params, inputs, view, network.empty_window(inputs.shape[0], width))
        momentum = jnp.where(seen > 0, at_age(knobs.momentum, self._age(seen)), 0.0)[..., None]
        momentum = momentum.astype(e.dtype)
        e = (1 - momentum) * e + momentum * state.embedded[:, :width]
        z = self._mix_noise(state.latents[:, :width], seen, positions, state, knobs)
        z, window = network.recur(params, z, e, view, window, self.inner_recurrence)
        hidden, window = network.readout(params, z, view, window)
        return z, e, hidden, window

    def _predict(
        self, logits: Float[Array, "B W V"], progress: Progress, knobs: WavefrontKnobs
    ) -> tuple[Int[Array, "B W"], Float[Array, "B W"] | None]:
        """The token behind each slot, and its log-probability where that is kept."""
        positions = progress.length[:, None] + jnp.arange(logits.shape[1])
        predicted = self.sample(logits, positions, progress, knobs)
        return predicted, log_probability(logits, predicted) if self.log_probs else None

    def _mix_noise(
        self,
        z: Float[Array, "B W D"],
        seen: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        state: WavefrontState,
        knobs: WavefrontKnobs,
    ) -> Float[Array, "B W D"]:
        """The states with fresh noise in them, where there is any (Eq. 2)."""

        def mix(z: Array) -> Array:
            keys = fold(state.progress.keys, Purpose.NOISE, positions, state.steps)
            noise = self.network.initial_state(keys, knobs.init_scale)
            return mix_noise(z, noise, at_age(knobs.noise, self._age(seen)), seen, self.noise_mixer)

        if self.bounded:  # the gradient at a noise of 0 is that of the mixture, not of its absence
            return mix(z)
        return lax.cond(jnp.any(jnp.asarray(knobs.noise) > 0), mix, lambda z: z, z)

    def _advance(self, state: WavefrontState, refined: Refined, knobs: WavefrontKnobs) -> WavefrontState:
        """Shifts the window by the committed positions and appends `headway` new ones in front."""
        progress = state.progress
        limit = jnp.where(knobs.max_wavefront > 0, jnp.minimum(knobs.max_wavefront, self.width), self.width)
        kept = state.active - state.committed
        active = jnp.minimum(kept + self.headway, limit)

        # The input of slot i is what slot i - 1 predicts; the input of slot 0 is committed.
        inputs = jnp.concatenate([state.candidates[:, :1], refined.predicted], axis=1)
        candidates = stop.shift(inputs, state.committed, self.width)
        slot = jnp.arange(self.width)
        fresh = slot >= kept[:, None]
        if self.headway > 1:
            filler = stop.window(state.filler, progress.length - 1, self.width)
            candidates = jnp.where(slot > kept[:, None], filler, candidates)
        if not self.carry:
            changed = jnp.cumsum(inputs[:, : self.width] != state.candidates, axis=1) > 0
            fresh |= stop.shift(changed, state.committed)
        return dataclasses.replace(
            state,
            candidates=candidates,
            latents=jnp.where(
                fresh[..., None], self._fresh(progress), stop.shift(state.latents, state.committed)
            ),
            embedded=stop.shift(state.embedded, state.committed),
            seen=jnp.where(fresh, 0, stop.shift(state.seen, state.committed)),
            active=jnp.where(progress.done, state.active, active),
        )

    def _fresh(self, progress: Progress) -> Float[Array, "B W D"]:
        """Initial states of the positions the window covers."""
        return stop.window(progress.initial, progress.length - 1, self.width)

    def _fillers(self, progress: Progress) -> Int[Array, "B F"]:
        """A random token for every position, drawn once: inside the loop the draws would cost as much as a layer."""
        batch, size = progress.initial.shape[:2]
        positions = jnp.arange(size if self.headway > 1 else 0)
        keys = fold(progress.keys, Purpose.FILLER, jnp.broadcast_to(positions, (batch, len(positions))))
        draw = jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (), 0, self.network.vocab_size)))
        return draw(keys)
