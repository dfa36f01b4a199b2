"""What the released wavefront sampler (`wavefront.ReleasedWavefront`) is told, refines and keeps
between steps.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.decode.machine.knobs import COUNT, UNLIMITED, Range, knob
from paradec_jax.decode.machine.network import Counts
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.recurrent.latents import LatentKnobs, RecordedLatents
from paradec_jax.decode.rules.windows import where_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedWavefrontKnobs(LatentKnobs):
    """Sampling, and how the wave moves. Defaults are the released program's; the paper has no
    noise.

    Attributes:
      exit_threshold: epsilon of the latent rules.
      momentum: eta.
      noise: beta.
      max_wavefront: active positions at most (the compiled window bounds it); None for the compiled
        window.
      max_steps: sampler steps before it gives up.
    """

    exit_threshold: Float[Array, ""] | float = 0.03
    momentum: Float[Array, ""] | float = 0.1
    noise: Float[Array, ""] | float = 0.5
    max_wavefront: Int[Array, ""] | int | None = knob(
        128, Range(COUNT.holds, "at least 1 (None for the compiled window)"), unset=UNLIMITED
    )
    max_steps: Int[Array, ""] | int = 4096


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedWave(RecordedLatents):
    """Recorded draws of the sampler, for all rows; the last entry of an axis holds for later ones.

    `uniforms` sample the token that the prompt predicts.

    Attributes:
      step_uniforms: number in [0, 1) of each step and position, [T, P].
      noise: noise of each step and position at scale 1, [T, P, D].
      fillers: random tokens that start appended positions, of each step, [T, h].
    """

    step_uniforms: Float[Array, "T P"] | None = None
    noise: Float[Array, "T P D"] | None = None
    fillers: Int[Array, "T h"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wave:
    """Active states of one step and where they stand.

    Attributes:
      states: z, [B, W, D]; slot i is position `start + i`.
      start: a, positions before it are cached, [B].
      count: w, slots in use, [B].
    """

    states: Float[Array, "B W D"]
    start: Int[Array, "B"]
    count: Int[Array, "B"]

    @property
    def active(self) -> Int[Array, "B"]:
        """w."""
        return self.count

    @property
    def positions(self) -> Int[Array, "B W"]:
        """Those of the slots."""
        return self.start[:, None] + jnp.arange(self.states.shape[1])

    def first(self, width: int) -> "Wave":
        """The first `width` slots."""
        return dataclasses.replace(self, states=self.states[:, :width])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedWavefrontState:
    """What the released program keeps between steps.

    Attributes:
      rows: the rows; `tokens` holds the candidates after the frozen tokens, `length` counts the
        frozen.
      cache: keys and values, and the latent that each position starts from.
      wave: states that this step begins with.
      start_before: a of the step before, [B]. Its states, once shifted, are `wave.states`.
      embedded: e of the step before after momentum; slot i is position `start_before + i`, [B, W,
        D].
      embedded_count: its slots in use, [B].
      older: states with which the step before began, and the a that it took them to start at.
      change: z - z_before as the step before measured it, [B, W, D], and how many slots it has.
      change_count: [B].
      pointer: k of the newest step, [B].
      seen: n, recurrences each position has done, [B, S].
      stable: c, how often each position's token was predicted again, [B, S].
      time: t, steps done, [B].
    """

    rows: Rows
    cache: Any
    wave: Wave
    start_before: Int[Array, "B"]
    embedded: Float[Array, "B W D"]
    embedded_count: Int[Array, "B"]
    older: Wave
    change: Float[Array, "B W D"]
    change_count: Int[Array, "B"]
    pointer: Int[Array, "B"]
    seen: Int[Array, "B S"]
    stable: Int[Array, "B S"]
    time: Int[Array, "B"]

    @property
    def cached(self) -> Int[Array, "B"]:
        """Trusted cache entries."""
        return self.wave.start


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refined:
    """What the network makes of a wave: e, states, keys and values, what it cost, the token each
    slot predicts.
    """

    embedded: Float[Array, "B W D"]
    states: Float[Array, "B W D"]
    kv: Any
    counts: Counts
    predicted: Int[Array, "B W"]


def unless_done(old: ReleasedWavefrontState, new: ReleasedWavefrontState) -> ReleasedWavefrontState:
    """The new state of rows that run, the old one of those that are done.

    The cache of a row that is done is never read again, and its counts stand still by themselves.
    """
    running = ~old.rows.done

    def chosen(names: tuple[str, ...], old: Any, new: Any) -> dict[str, Any]:
        return {name: where_rows(running, getattr(new, name), getattr(old, name)) for name in names}

    rows = dataclasses.replace(
        new.rows, **chosen(("tokens", "length", "reason"), old.rows, new.rows)
    )
    others = tuple(f.name for f in dataclasses.fields(new) if f.name not in ("rows", "cache"))
    return dataclasses.replace(new, rows=rows, **chosen(others, old, new))
