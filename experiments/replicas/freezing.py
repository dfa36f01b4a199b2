"""Freezing rules of the released wavefront sampler: which slots leave the window after a step.

Distances compare z with earlier states as the released program lines them up, which is not by
position; see `wavefront.ReleasedWavefront`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.score import EPSILON
from paradec_jax.nn.precision import at_least_float32


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a step knows when it freezes.

    Attributes:
      states: z, [B, W, D].
      change: d, z less the states of the step before, and how many slots it has.
      change_count: [B].
      change_before: d of the step before, not shifted since, and its slots.
      change_count_before: [B].
      older_change: d' as the states of the two steps before give it, and its slots.
      older_count: [B].
      stable: c, in how many steps each slot's token was predicted again, [B, W].
      start: a, position of slot 0, [B].
      count: w, slots in use, [B].
      appended: slots that join the wave in this step, [B].
      length: frozen tokens, [B].
      pointer: k of the step before, [B].
      time: t, steps done before, [B].
      patience: steps that a position waits under "fixed" and "token-stability".
      exit_threshold: epsilon of the latent rules.
    """

    states: Float[Array, "B W D"]
    change: Float[Array, "B W D"]
    change_count: Int[Array, "B"]
    change_before: Float[Array, "B W D"]
    change_count_before: Int[Array, "B"]
    older_change: Float[Array, "B W D"]
    older_count: Int[Array, "B"]
    stable: Int[Array, "B W"]
    start: Int[Array, "B"]
    count: Int[Array, "B"]
    appended: Int[Array, "B"]
    length: Int[Array, "B"]
    pointer: Int[Array, "B"]
    time: Int[Array, "B"]
    patience: int
    exit_threshold: Float[Array, ""] | float

    def up_to_last(self, qualified: Bool[Array, "B W"], distance: Float[Array, "B W"]) -> "Frozen":
        """Freezes up to the last slot that qualifies, whatever those before it do."""
        found = jnp.any(qualified, axis=1)
        last = qualified.shape[1] - 1 - jnp.argmax(qualified[:, ::-1], axis=1)
        pointer = jnp.where(found, self.start + last + 1, self.pointer)
        return Frozen(
            jnp.where(found, last, 0), jnp.where(found, pointer, self.length), pointer, distance
        )

    def converged(self, distance: Float[Array, "B W"], count: Int[Array, "B"]) -> "Frozen":
        """Freezes up to the last of the first `count` slots whose distance is below epsilon."""
        measured = jnp.arange(distance.shape[1]) < count[:, None]
        distance = jnp.where(measured, distance, jnp.nan)
        return self.up_to_last(distance < self.exit_threshold, distance)

    def unmeasured(self) -> Float[Array, "B W"]:
        """The distances of a rule that measures none."""
        return jnp.full(self.stable.shape, jnp.nan, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """What a freezing rule decides; of a row that has stopped it means nothing.

    Attributes:
      drop: i*, slots that leave the window before the last frozen token, [B].
      length: frozen tokens, [B].
      pointer: k, [B].
      distance: what a latent rule measured in each slot, NaN where it measured nothing, [B, W].
    """

    drop: Int[Array, "B"]
    length: Int[Array, "B"]
    pointer: Int[Array, "B"]
    distance: Float[Array, "B W"]


def latent_diff(seen: Evidence) -> Frozen:
    """`|d| / |z| < epsilon`."""
    distance = _norm(seen.change) / jnp.maximum(_norm(seen.states), EPSILON)
    return seen.converged(distance, seen.change_count)


def latent_acceleration_1(seen: Evidence) -> Frozen:
    """`|d - d'| / |z| < epsilon`, d' as the step before measured it, slot by slot."""
    distance = _norm(seen.change - seen.change_before) / jnp.maximum(_norm(seen.states), EPSILON)
    return seen.converged(distance, jnp.minimum(seen.change_count, seen.change_count_before))


def latent_acceleration_2(seen: Evidence) -> Frozen:
    """`|z - 2 z' + z''| / (|z| + 1e-6) < epsilon` over the states of three steps."""
    distance = _norm(seen.change - seen.older_change) / (_norm(seen.states) + 1e-6)
    return seen.converged(distance, jnp.minimum(seen.change_count, seen.older_count))


def token_stability(seen: Evidence) -> Frozen:
    """Up to the last position whose token was predicted again in more than `patience` steps, ever."""
    slot = jnp.arange(seen.stable.shape[1])
    qualified = (seen.stable > seen.patience) & (slot < seen.count[:, None])
    decided = seen.up_to_last(qualified, seen.unmeasured())
    pointer = jnp.where(jnp.any(qualified, axis=1), decided.pointer, 0)
    return dataclasses.replace(decided, pointer=pointer)


def fixed(seen: Evidence) -> Frozen:
    """Algorithm 1 of arXiv 2510.14961: once the wave is `patience` + 2 steps old, one headway a
    step.
    """
    drop = jnp.where(seen.time > seen.patience, seen.appended, 0)
    return Frozen(drop, seen.length + drop, seen.pointer, seen.unmeasured())


RULES: dict[str, Callable[[Evidence], Frozen]] = {
    "latent-diff": latent_diff,
    "latent-acceleration-1": latent_acceleration_1,
    "latent-acceleration-2": latent_acceleration_2,
    "token-stability": token_stability,
    "fixed": fixed,
}


def _norm(x: Float[Array, "B W D"]) -> Float[Array, "B W"]:
    return score.norm(at_least_float32(x))
