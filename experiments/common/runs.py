"""What trainings of several papers share: their hooks, and weights of few bits."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from paradec_jax.objectives.hooks import Limit
from paradec_jax.train import Checkpoint, Evaluate, Hook, Log, Preempt, TrainState


def hooks_of(
    folder: Path,
    checkpoint_every: int,
    *,
    flops: Callable[..., float] | None = None,
    evaluate: Callable[[TrainState], Any] | None = None,
    evaluate_every: int = 1000,
    minutes: float | None = None,
    allow: Sequence[str] = (),
    more: Sequence[Hook] = (),
) -> list[Hook]:
    """Hooks of a recipe's run.

    Args:
      folder: folder of the run.
      checkpoint_every: updates between checkpoints.
      flops: operations of an update, for the log.
      evaluate: numbers of the state, by name.
      evaluate_every: updates between evaluations.
      minutes: after so many the call ends; never when None.
      allow: parts in which the call may differ from the run that it goes on with.
      more: further hooks.
    """
    found: list[Hook] = [Log(folder, every=20, flops=flops), *more]
    if evaluate is not None:
        found.append(Evaluate(evaluate, every=evaluate_every))
    found.append(Checkpoint(folder, every=checkpoint_every, allow=allow))
    if minutes is not None:
        found.append(Limit(time.monotonic() + 60 * minutes))
    return [*found, Preempt()]


def rounded(params: Any, bits: int) -> Any:
    """Parameters with `bits` significant bits each, in their own dtype."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        mantissa, exponent = jnp.frexp(leaf)
        return jnp.ldexp(jnp.round(mantissa * 2.0**bits) / 2.0**bits, exponent).astype(leaf.dtype)

    return params if bits >= 24 else jax.tree.map(of_leaf, params)
