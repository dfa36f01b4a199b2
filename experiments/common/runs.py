"""What trainings of several papers share: their optimizer, their exports, and calls that end before their run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paradec_jax import Model
from paradec_jax.families import matrix_axes
from paradec_jax.train import muon


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


def in_half(model: Model) -> Model:
    """The model with parameters in bfloat16, whose files are half as large."""
    config = dataclasses.replace(model.config, param_dtype="bfloat16")
    return dataclasses.replace(
        model, config=config, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), dict(model.params))
    )


def over(minutes: float, step: int, steps: int) -> None:
    """Says that a call ended before its run."""
    if jax.process_index() == 0:
        print(f"{minutes:g} minutes are over after {step} of {steps} updates: run again to go on")
