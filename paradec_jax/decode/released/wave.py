"""What the released wavefront sampler (`official.OfficialWavefront`) is told, refines and keeps between steps."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.base import where_rows
from paradec_jax.decode.protocol import Progress


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfficialKnobs(AutoRegressiveKnobs):
    """Sampling, and how the wave moves. Defaults are the code's; the paper has no noise.

    Attributes:
      exit_threshold: epsilon of the latent rules.
      momentum: eta.
      noise: beta.
      max_wavefront: active positions at most (the compiled width bounds it); 0 for the compiled width.
      max_steps: sampler steps before it gives up.
    """

    exit_threshold: Float[Array, "..."] | float = 0.03
    momentum: Float[Array, "..."] | float = 0.1
    noise: Float[Array, "..."] | float = 0.5
    max_wavefront: Int[Array, "..."] | int = 128
    max_steps: Int[Array, "..."] | int = 4096


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfficialState:
    """What the original program keeps between steps.

    Attributes:
      progress: the rows; `tokens` holds the candidates behind the frozen tokens, `length` counts the frozen.
      cache: keys and values.
      wave: states that this step begins with.
      start_before: a of the step before, [B]. Its states, once shifted, are `wave.states`.
      embedded: e of the step before after momentum; slot i is position `start_before + i`, [B, W, D].
      embedded_count: its slots in use, [B].
      older: states with which the step before began, and the a that it took them to start at.
      change: z - z_before as the step before measured it, [B, W, D], and how many slots it has.
      change_count: [B].
      pointer: k of the newest step, [B].
      seen: n, recurrences each position has done, [B, S].
      stable: c, how often each position's token was predicted again, [B, S].
      time: t, steps done, [B].
    """

    progress: Progress
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refined:
    """What the network makes of a wave: e, states, keys and values, the token each slot predicts."""

    embedded: Float[Array, "B W D"]
    states: Float[Array, "B W D"]
    kv: Any
    predicted: Int[Array, "B W"]


def unless_done(old: OfficialState, new: OfficialState) -> OfficialState:
    """The new state of rows that run, the old one of those that are done.

    The cache of a row that is done is never read again, and its counts stand still by themselves.
    """
    running = ~old.progress.done

    def chosen(names: tuple[str, ...], old: Any, new: Any) -> dict[str, Any]:
        return {name: where_rows(running, getattr(new, name), getattr(old, name)) for name in names}

    progress = dataclasses.replace(
        new.progress, **chosen(("tokens", "length", "reason"), old.progress, new.progress)
    )
    others = tuple(f.name for f in dataclasses.fields(new) if f.name not in ("progress", "cache"))
    return dataclasses.replace(new, progress=progress, **chosen(others, old, new))
