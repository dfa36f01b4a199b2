"""The window of a wave: what its slots hold, and how they are refined, moved on and opened (arXiv 2510.14961).

Slot i of a row is position `length - 1 + i`; slot 0 is the newest committed token::

    slot          0            1 .. c-1          c .. w-1            w .. W-1
             [ newest     ][ converged     ][ still moving    ][ not in use   ]
    tokens   committed      drafts that stay  drafts             unused
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import check_sizes, check_words
from paradec_jax.decode.machine.decoder import CachedState
from paradec_jax.decode.machine.knobs import UNLIMITED, check_range, knob
from paradec_jax.decode.machine.network import Counts
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.recurrent.latents import LatentKnobs
from paradec_jax.decode.recurrent.noise import NOISE_MIXINGS, NOISE_SCHEDULES, mix_noise
from paradec_jax.decode.rules.by_age import Scheduled
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.windows import shift, window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WavefrontKnobs(LatentKnobs):
    """Sampling, and how the wave moves. Defaults are the paper's.

    The first three may be schedules: an array [K] holds one value for each age of a slot, that is the steps it
    has done before the one at hand (`recurrences // inner_recurrence`, K - 1 at most). A number holds at every age.

    Attributes:
      exit_threshold: epsilon; a position has converged when its state's relative change in a step is below it.
        Infinity: it always has.
      momentum: eta of the average over steps of the conditioning e, `e <- (1 - eta) e_new + eta e_old`. A slot
        of age 0 has no e_old, so entry 0 of a schedule does nothing.
      noise: beta, share of fresh noise mixed into the states before each step.
      max_wavefront: positions in use at most (the compiled window bounds them); None for the compiled window.
      max_recurrence: recurrences after which a position counts as converged, counted from where it was opened or last
        started again; None for no bound. Some states never settle, and without a bound their row would never end.
    """

    exit_threshold: Scheduled = 0.03
    momentum: Scheduled = 0.1
    noise: Scheduled = 0.0
    max_wavefront: Int[Array, ""] | int | None = knob(None, unset=UNLIMITED)
    max_recurrence: Int[Array, ""] | int | None = knob(64, unset=UNLIMITED)

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        check_range(self.max_wavefront, "max_wavefront", lambda x: x >= 1, "at least 1 (None: the window)")
        check_range(self.max_recurrence, "max_recurrence", lambda x: x >= 1, "at least 1 (None: no bound)")
        super().check()

    def limit(self, window: int) -> Int[Array, ""]:
        """Slots in use at most."""
        return jnp.minimum(UNLIMITED if self.max_wavefront is None else self.max_wavefront, window)

    def overdue(self, recurrences: Int[Array, "B W"]) -> Bool[Array, "B W"]:
        """Whether a slot counts as converged after so many recurrences, whatever its state does."""
        return recurrences >= (UNLIMITED if self.max_recurrence is None else self.max_recurrence)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
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
    def slot(self) -> Int[Array, "W"]:
        """0 .. W-1."""
        return jnp.arange(self.tokens.shape[1])

    @property
    def in_use(self) -> Bool[Array, "B W"]:
        """Slots of the wave."""
        return self.slot < self.active[:, None]

    def positions(self, at: Int[Array, "B"]) -> Int[Array, "B W"]:
        """Position of each slot, slot 0 being at `at`."""
        return at[:, None] + self.slot

    def first(self, width: int) -> "Wave":
        """The first `width` slots."""
        z, e = self.states[:, :width], self.conditioning[:, :width]
        return Wave(self.tokens[:, :width], z, e, self.recurrences[:, :width], self.active)

    def agrees(self, predicted: Int[Array, "B W"]) -> Bool[Array, "B W"]:
        """Whether each slot was computed from the token that the slot before it predicts now."""
        same = predicted[:, :-1] == self.tokens[:, 1:]
        return jnp.pad(same, ((0, 0), (1, 0)), constant_values=True)

    def with_momentum(self, e: Float[Array, "B W D"], momentum: Array) -> Float[Array, "B W D"]:
        """`(1 - eta) e + eta e_old`; a fresh slot has no e_old."""
        share = jnp.where(self.recurrences > 0, momentum, 0.0)[..., None].astype(e.dtype)
        return (1 - share) * e + share * self.conditioning

    def refined(self, new: "Prediction", recurrences: int) -> "Wave":
        """The wave after `recurrences` more of them."""
        return dataclasses.replace(
            self,
            states=new.states,
            conditioning=new.conditioning,
            recurrences=self.recurrences + recurrences,
        )

    def advance(self, by: Int[Array, "B"], predicted: Int[Array, "B W"]) -> "Wave":
        """The window moved `by` positions on; each slot's token is what the slot before it predicts."""
        inputs = jnp.concatenate([self.tokens[:, :1], predicted], axis=1)
        return Wave(
            tokens=shift(inputs, by, self.tokens.shape[1]),
            states=shift(self.states, by),
            conditioning=shift(self.conditioning, by),
            recurrences=shift(self.recurrences, by),
            active=self.active - by,
        )

    def restart(self, where: Bool[Array, "B W"], fresh: Float[Array, "B W D"]) -> "Wave":
        """Some slots again from initial states."""
        return dataclasses.replace(
            self,
            states=jnp.where(where[..., None], fresh, self.states),
            recurrences=jnp.where(where, 0, self.recurrences),
        )

    def open(
        self,
        count: Int[Array, "B"],
        limit: Int[Array, ""],
        fresh: Float[Array, "B W D"],
        fill: Int[Array, "B W"] | None = None,
    ) -> "Wave":
        """`count` further slots in use, `limit` in all; `fill` are the tokens of those that nothing predicts yet."""
        wave = self.restart(~self.in_use, fresh)
        tokens = self.tokens
        if fill is not None:
            tokens = jnp.where(self.slot > self.active[:, None], fill, tokens)
        return dataclasses.replace(wave, tokens=tokens, active=jnp.minimum(self.active + count, limit))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the network makes of a wave in one step.

    Attributes:
      states: z, [B, W, D].
      conditioning: e after momentum, [B, W, D].
      kv: keys and values of the window.
      counts: what the call cost.
      tokens: the token after each slot, [B, W].
      log_probs: of these tokens, where they are kept, [B, W].
    """

    states: Float[Array, "B W D"]
    conditioning: Float[Array, "B W D"]
    kv: Any
    counts: Counts
    tokens: Int[Array, "B W"]
    log_probs: Float[Array, "B W"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WavefrontState(CachedState):
    """What the next step needs.

    Attributes:
      rows: the rows.
      cache: keys and values of the positions before slot 0.
      wave: the window, which begins with the newest committed token.
      steps: steps done by each row, [B].
      fill: random token of each position, for those that nothing predicts yet, [B, S]; [B, 0] with a headway of one.
    """

    wave: Wave
    steps: Int[Array, "B"]
    fill: Int[Array, "B F"]

    @property
    def drafts(self) -> Int[Array, "B _"]:
        """Tokens of the slots after the first, -1 in those that are not in use."""
        return jnp.where(self.wave.in_use, self.wave.tokens, -1)[:, 1:]


def begin(
    network: Any, rows: Rows, cache: Any, width: int, headway: int, limit: Int[Array, ""]
) -> WavefrontState:
    """The first wave of rows whose prompts are read: the newest token, and with a headway as many random ones.

    With a headway of one nothing is drawn: the second position is opened once the first predicts its token.
    """
    newest, position = rows.newest
    batch = newest.shape[0]
    slots = jnp.zeros((batch, width), jnp.int32)
    states = network.latents(cache, position + jnp.arange(width))
    none = jnp.zeros(batch, jnp.int32)
    wave = Wave(slots.at[:, :1].set(newest), states, jnp.zeros_like(states), slots, none + 1)
    fill = jnp.zeros((batch, 0), jnp.int32)
    if headway > 1:  # drawn once: inside the loop the draws would cost as much as a layer of a small model
        positions = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1]), rows.tokens.shape)
        keys = fold(rows.keys, Purpose.FILLER, positions)
        fill = jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (), 0, network.vocab_size)))(keys)
        tokens = window(fill, rows.length - 1, width).at[:, :1].set(newest)
        wave = dataclasses.replace(wave, tokens=tokens).open(jnp.where(rows.done, 0, headway), limit, states)
    return WavefrontState(rows, cache, wave, none, fill)


def fill_tokens(state: WavefrontState, rows: Rows, headway: int) -> Int[Array, "B W"] | None:
    """The random tokens of the window's positions once the rows have moved; None with a headway of one."""
    return window(state.fill, rows.length - 1, state.wave.tokens.shape[1]) if headway > 1 else None


def with_noise(
    network: Any,
    state: WavefrontState,
    wave: Wave,
    knobs: WavefrontKnobs,
    share: Array,
    schedule: str,
    mixing: str,
    always: bool,
) -> Float[Array, "B W D"]:
    """The wave's states with fresh noise in them, where there is any.

    Args:
      network: draws noise like initial states.
      state: keys, positions and steps, which tell the draws apart.
      wave: the slots at hand.
      knobs: whether there is noise at all, and its scale.
      share: beta of each slot.
      schedule, mixing: see `mix_noise`.
      always: mix even where the noise is 0: the gradient there is that of the mixture, not of its absence.
    """

    def mix(z: Array) -> Array:
        keys = fold(state.rows.keys, Purpose.NOISE, wave.positions(state.cached), state.steps)
        noise = network.initial_state(keys, knobs.init_scale)
        return mix_noise(z, noise, share, wave.recurrences, schedule, mixing)

    if always:
        return mix(wave.states)
    return lax.cond(jnp.any(jnp.asarray(knobs.noise) > 0), mix, lambda z: z, wave.states)


def stands_still(distance: Float[Array, "B W"], threshold: Array) -> Bool[Array, "B W"]:
    """Whether each slot's relative change is below its threshold; below infinity all are, NaN too."""
    return (distance < threshold) | jnp.isposinf(threshold)


def check_wave(decoder: Any) -> None:
    """Refuses numbers below 1 and unknown kinds of noise. Raises ValueError."""
    check_sizes(decoder, "inner_recurrence", "window", "headway")
    check_words(decoder, noise_schedule=NOISE_SCHEDULES, noise_mixing=NOISE_MIXINGS)
