"""Training in rounds: every so many updates the student becomes the teacher of the next round."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paradec_jax.train.state import TrainState, float32_copy

PyTree = Any
WEIGHTS = ("raw", "ema")


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How a run is cut into rounds.

    Attributes:
      updates: of each round.
      weights: which weights become the teacher: "raw" or "ema", from which then the student too goes on.
      reset_optimizer: whether a round begins with a new optimizer: moments, and the count of its schedule.
      reset_ema: whether a round begins a new average, from the student's weights and with a count of 0.
    """

    updates: int
    weights: str = "raw"
    reset_optimizer: bool = False
    reset_ema: bool = False

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ValueError(f"updates of a round must be at least 1, not {self.updates}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, not {self.weights!r}")


def next_round(
    state: TrainState, rounds: Rounds, which: int, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state with which round `which` begins; its arrays are its own, `state` may be donated or dropped.

    Nothing of it is compiled into a program, so that a new round compiles nothing.

    Raises:
      ValueError: a state without a teacher, or without the average that the rounds ask for.
    """
    if state.teacher is None:
        raise ValueError("rounds need a teacher, and the state has none")
    if state.ema is None and (rounds.weights == "ema" or rounds.reset_ema):
        raise ValueError("these rounds need a moving average, and the state has none: give ema_decay")
    params = state.params
    if rounds.weights == "ema":
        params = jax.tree.map(lambda e, p: jnp.array(e, p.dtype, copy=True), state.ema, params)
    new = {
        "params": params,
        "teacher": jax.tree.map(lambda x: jnp.array(x, copy=True), params),
        "round": jnp.full((), which, jnp.int32),
    }
    if rounds.reset_optimizer:
        new["opt_state"] = optimizer.init(params)
    if rounds.reset_ema:
        new |= {"ema": jax.tree.map(float32_copy, params), "ema_count": jnp.zeros((), jnp.int32)}
    return dataclasses.replace(state, **new)
