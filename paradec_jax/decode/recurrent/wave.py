"""The window of a wave: what its slots hold, and how it begins, is refined and moves on (arXiv
2510.14961, Eq. 1, 2).

Slot i of a row is position `length - 1 + i`; slot 0 is the newest committed token::

    slot          0            1 .. c-1          c .. w-1            w .. W-1
             [ newest     ][ converged     ][ still moving    ][ not in use   ]
    tokens   committed      to be committed   drafts             unused

This is the wave within a step; slots whose tokens are committed leave at its end. Unlike Algorithm
2 the prompt is read beforehand, and fresh slots get no momentum from an older embedding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine import (
    COUNT,
    UNLIMITED,
    CachedState,
    Counts,
    DecoderBase,
    Forward,
    Prefix,
    Range,
    Request,
    Scheduled,
    Whole,
    at_age,
    knob,
    on_smallest,
)
from paradec_jax.decode.recurrent.latents import LatentKnobs, initial_latents
from paradec_jax.decode.rules import Purpose, fold, pad_slots, positions_of, select, shift, window
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.records import choices, pytree

NOISE_SCHEDULES = ("dampened", "constant")
NOISE_MIXINGS = ("linear", "sqrt")
BUCKETS = (2, 8, 32)


@pytree
class WavefrontKnobs(LatentKnobs):
    """Sampling, and how the wave moves. Defaults of epsilon, eta and beta are the paper's.

    The first three may be schedules: an array [K] holds one value for each age of a slot, the steps
    that it has done before the one at hand, K - 1 at most. A number holds at every age.

    Attributes:
      exit_threshold: epsilon, below which the relative change of a converged state lies; at
        infinity all converge.
      momentum: eta of the average of the conditioning e over steps; a slot of age 0 has nothing to
        average with.
      noise: beta, share of fresh noise in the states before each step; a program for None draws none.
      max_wavefront: positions in use at most; None for the compiled window, which bounds them.
      max_recurrence: recurrences after which a position counts as converged, since some states
        never settle. They are counted from where it was opened or last started again; None for no
        bound.
    """

    exit_threshold: Scheduled = 0.03
    momentum: Scheduled = 0.1
    noise: Scheduled | None = knob(None)
    max_wavefront: Whole | None = knob(
        None, Range(COUNT.holds, "at least 1 (None: the window)"), unset=UNLIMITED
    )
    max_recurrence: Whole | None = knob(
        64, Range(COUNT.holds, "at least 1 (None: no bound)"), unset=UNLIMITED
    )

    def still(self, distance: Float[Array, "B W"], age: Int[Array, "B W"]) -> Bool[Array, "B W"]:
        """Whether each slot's relative change is below its threshold; below infinity all are, NaN
        too.
        """
        threshold = at_age(self.exit_threshold, age)
        return (distance < threshold) | jnp.isposinf(threshold)

    def overdue(self, recurrences: Int[Array, "B W"]) -> Bool[Array, "B W"]:
        """Whether a slot counts as converged after so many recurrences, whatever its state does."""
        most: Any = self.max_recurrence
        return recurrences >= most


@pytree
class Wave:
    """The slots of a window, W of them or the first few.

    Attributes:
      tokens: input tokens; slot 0 is committed, the others are drafts, [B, W].
      states: z, [B, W, D].
      conditioning: e after momentum, [B, W, D].
      recurrences: n, recurrences done in each slot; 0 in a fresh one, [B, W].
      active: w, slots in use, [B].
    """

    tokens: Int[Array, "B W"]
    states: Float[Array, "B W D"]
    conditioning: Float[Array, "B W D"]
    recurrences: Int[Array, "B W"]
    active: Int[Array, "B"]

    @property
    def in_use(self) -> Bool[Array, "B W"]:
        """Slots of the wave."""
        return jnp.arange(self.tokens.shape[1]) < self.active[:, None]

    def first(self, width: int) -> "Wave":
        """The first `width` slots."""
        return jax.tree.map(lambda x: x[:, :width] if x.ndim > 1 else x, self)

    def agrees(self, predicted: Int[Array, "B W"]) -> Bool[Array, "B W"]:
        """Whether each slot was computed from the token that the slot before it predicts now."""
        same = predicted[:, :-1] == self.tokens[:, 1:]
        return jnp.pad(same, ((0, 0), (1, 0)), constant_values=True)


@pytree
class WavefrontState(CachedState):
    """What the next step needs; the cache holds the positions before slot 0.

    Attributes:
      wave: the window, which begins with the newest committed token.
      steps: steps done by each row, [B].
      fill: random token of each position, for those that nothing predicts yet, [B, S]; [B, 0] with
        a headway of one.
    """

    wave: Wave
    steps: Int[Array, "B"]
    fill: Int[Array, "B F"]

    @property
    def drafts(self) -> Int[Array, "B _"]:
        """Tokens of the slots after the first, -1 in those that are not in use."""
        return jnp.where(self.wave.in_use, self.wave.tokens, -1)[:, 1:]


@choices
class WaveDecoder(DecoderBase):
    """A decoder that refines a wave; an abstract base. `Wavefront` says what the fields mean."""

    inner_recurrence: int = 4
    window: int = 32
    headway: int = 1
    prefill_recurrence: int | None = None
    noise_schedule: str = "dampened"
    noise_mixing: str = "linear"

    WORDS = {  # noqa: RUF012
        **DecoderBase.WORDS,
        "noise_schedule": NOISE_SCHEDULES,
        "noise_mixing": NOISE_MIXINGS,
    }

    def first_wave(self, params: Any, request: Request, knobs: Any) -> WavefrontState:
        """The first wave, once the prompts are read: the newest token, and with a headway as many
        random ones.

        With a headway of one nothing is drawn: the second position is opened once the first
        predicts its token.
        """
        network, width = self.network, self.window
        latents = initial_latents(request, knobs)
        deep = network.at(self.prefill_recurrence)
        rows, cache, _ = self.prefill(params, request, knobs, width, deep, **latents)
        newest, position = rows.newest
        none, slots = jnp.zeros_like(rows.length), jnp.zeros((newest.shape[0], width), jnp.int32)
        states = network.latents(cache, position + jnp.arange(width))
        fill, tokens, active = slots[:, :0], slots, none + 1
        if self.headway > 1:
            # Drawn once: inside the loop the draws would cost as much as a layer of a small model.
            positions = positions_of(rows.tokens)
            keys = fold(rows.keys, Purpose.FILLER, positions)
            fill = jax.vmap(
                jax.vmap(lambda key: jax.random.randint(key, (), 0, network.vocab_size))
            )(keys)
            tokens = window(fill, rows.length - 1, width)
            opened = active + jnp.where(rows.done, 0, self.headway)
            active = jnp.minimum(opened, jnp.minimum(knobs.max_wavefront, width))
        wave = Wave(tokens.at[:, :1].set(newest), states, jnp.zeros_like(states), slots, active)
        return WavefrontState(rows, cache, wave, none, fill)

    def refine(
        self, params: Any, state: WavefrontState, knobs: WavefrontKnobs, inputs: Array
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W D"], Forward, Float[Array, "B W V"]]:
        """The network on a wave that reads `inputs`, tokens or their vectors: z, e, what is read
        out,
        and the logits.
        """
        network, wave, at = self.network, state.wave, state.cached
        positions = at[:, None] + jnp.arange(wave.tokens.shape[1])
        view = network.view(positions, Prefix(state.cache, at))
        age = wave.recurrences // self.inner_recurrence

        # Eq. 1, the prelude's output averaged over steps: e <- (1 - eta) e + eta e_old. A fresh
        # slot has no e_old.
        e, kv = network.embed(params, inputs, view, network.empty_window(*positions.shape))
        eta = jnp.where(wave.recurrences > 0, at_age(knobs.momentum, age), 0.0)[..., None].astype(
            e.dtype
        )
        e = (1 - eta) * e + eta * wave.conditioning

        # Eq. 2: fresh noise in the states, drawn like initial ones.
        def mix(z: Array) -> Array:
            keys = fold(state.rows.keys, Purpose.NOISE, positions, state.steps)
            noise, share = network.initial_state(keys, knobs.init_scale), at_age(knobs.noise, age)
            return mix_noise(
                z, noise, share, wave.recurrences, self.noise_schedule, self.noise_mixing
            )

        if knobs.noise is None:
            z = wave.states
        elif self.bounded:  # the gradient at noise 0 is that of the mixture, not of its absence
            z = mix(wave.states)
        else:
            z = lax.cond(jnp.any(jnp.asarray(knobs.noise) > 0), mix, lambda z: z, wave.states)

        # Algorithm 2: r' recurrences of all states, then the coda.
        z, kv = network.recur(params, z, e, view, kv, self.inner_recurrence)
        out = network.readout(params, z, view, kv)
        return z, e, out, network.logits(params, out.hidden)

    def move(
        self,
        state: Any,
        committed: Int[Array, "B"],
        predicted: Int[Array, "B W"],
        knobs: Any,
        warm_start: bool = True,
    ) -> Any:
        """The state in which committed slots have left the wave, others stay, and `headway` fresh
        ones
        follow them.
        """
        rows, wave, slot = state.rows, state.wave, jnp.arange(self.window)
        staying = (wave.active - committed)[:, None]
        # Each slot's token is what the slot before it predicts.
        tokens = jnp.concatenate([wave.tokens[:, :1], predicted], axis=1)
        tokens = shift(tokens, committed, self.window)
        fresh = slot >= staying
        if not warm_start:  # what was computed from a token that has changed starts again
            fresh |= shift(~select.leading(wave.agrees(predicted)), committed)
        initial = self.network.latents(state.cache, rows.length[:, None] - 1 + slot)
        if self.headway > 1:  # nothing predicts the tokens of new slots after the first
            tokens = jnp.where(
                slot > staying, window(state.fill, rows.length - 1, self.window), tokens
            )
        opened = staying[:, 0] + jnp.where(rows.done, 0, self.headway)
        wave = Wave(
            tokens=tokens,
            states=jnp.where(fresh[..., None], initial, shift(wave.states, committed)),
            conditioning=shift(wave.conditioning, committed),
            recurrences=jnp.where(fresh, 0, shift(wave.recurrences, committed)),
            active=jnp.minimum(opened, jnp.minimum(knobs.max_wavefront, self.window)),
        )
        return dataclasses.replace(state, wave=wave, steps=state.steps + ~rows.done)


def widths_of(
    window: int, headway: int, buckets: tuple[int, ...] | None, bounded: bool
) -> list[int]:
    """The widths that are compiled for a window, the widest last.

    A width that is less than three times narrower than the window saves too little. Those that no
    opened wave fits into are left out, and all where reverse mode crosses the step, for something
    of every width would be kept.
    """
    if buckets is None:
        buckets = tuple(b for b in BUCKETS if 3 * b <= window)
    return sorted({window, *(b for b in buckets if headway < b < window and not bounded)})


def on_narrowest(
    network: Any,
    widths: Sequence[int],
    state: Any,
    predict: Callable[[Any], tuple[Any, Any, Counts]],
) -> tuple[Any, Any, Counts]:
    """`predict` on the narrowest width that holds all waves: speed alone, for no slot hangs on
    later ones.

    `predict` takes the state with the first w slots of its wave, and returns a tree of [B, w, ...],
    keys and values, and counts. In the result slots after the width are zero.
    """

    def on(width: int) -> tuple[Any, Any, Counts]:
        narrow = dataclasses.replace(state, wave=state.wave.first(width))
        slots, kv, counts = predict(narrow)
        slots = jax.tree.map(lambda x: pad_slots(x, widths[-1]), slots)
        return slots, network.widen(kv, widths[-1]), counts

    active = jnp.where(state.rows.done, 0, state.wave.active)
    return on_smallest(on, widths, active[:, None] <= jnp.asarray(widths))


def mix_noise(
    z: Float[Array, "B W D"],
    noise: Array,
    share: Any,
    recurrences: Int[Array, "B W"],
    schedule: str,
    mixing: str,
) -> Float[Array, "B W D"]:
    """`(1 - b) z + b g`, or `sqrt(1 - b) z + sqrt(b) g` where `mixing` is "sqrt" (arXiv 2510.14961,
    Eq. 2).

    g is drawn like initial states. b is the share beta, one for all or one a position; where
    `schedule` is "dampened", it is `beta / (1 + n)` after n recurrences.
    """
    share = at_least_float32(jnp.asarray(share))
    if schedule == "dampened":
        share = share / (1 + recurrences)
    share = jnp.broadcast_to(share, recurrences.shape)[..., None]
    keep = 1 - share
    if mixing == "sqrt":
        keep, share = jnp.sqrt(jnp.maximum(keep, 0)), jnp.sqrt(share)
    return (keep * z + share * noise).astype(z.dtype)
