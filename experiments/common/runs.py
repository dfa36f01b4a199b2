"""What trainings of several papers share: their optimizer, hooks and exports, and calls that end before their run."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paradec_jax import Model
from paradec_jax.families import matrix_axes
from paradec_jax.recipes.hooks import Limit
from paradec_jax.train import Checkpoint, Evaluate, Hook, Log, Preempt, TrainState, muon


def optimizer_of(recipe: Any, config: Any) -> optax.GradientTransformation:
    """Muon on the recipe's schedule, whose `cooldown` is a share of the updates."""
    return muon(
        recipe.learning_rate,
        recipe.steps,
        axes=matrix_axes(config),
        warmup=recipe.warmup,
        cooldown=min(round(recipe.cooldown * recipe.steps), recipe.steps - recipe.warmup),
        weight_decay=recipe.weight_decay,
        adam_learning_rate=recipe.adam_learning_rate,
    )


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


def in_half(model: Model) -> Model:
    """The model with parameters in bfloat16, whose files are half as large."""
    config = dataclasses.replace(model.config, param_dtype="bfloat16")
    return dataclasses.replace(
        model, config=config, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), dict(model.params))
    )


def rounded(params: Any, bits: int) -> Any:
    """Parameters with `bits` significant bits each, in their own dtype."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        mantissa, exponent = jnp.frexp(leaf)
        return jnp.ldexp(jnp.round(mantissa * 2.0**bits) / 2.0**bits, exponent).astype(leaf.dtype)

    return params if bits >= 24 else jax.tree.map(of_leaf, params)


def over(minutes: float, step: int, steps: int) -> None:
    """Says that a call ended before its run."""
    if jax.process_index() == 0:
        print(f"{minutes:g} minutes are over after {step} of {steps} updates: run again to go on")
