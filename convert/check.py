"""Compares a model's logits with recorded ones."""

import re
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.config import MOST_RECURRENCES, RecurrentDepthConfig
from paradec_jax.store.model import Model

from .engine import ConvertError


def errors(model: Model, recorded: Mapping[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    """Largest absolute difference of each recorded array of logits from the model's, in float32.

    Args:
      model: in float32.
      recorded: `input_ids` [B, T] and, of a model without recurrences, `logits` [B, T, V]; of a
        recurrent model `logits_r<n>` [B, T, V] for any numbers n of recurrences, or `logits` with
        `num_steps`, and perhaps `init_state` [B, T, D] (zeros if absent). Other arrays are passed
        over.

    Raises:
      ConvertError: when an array is missing or has a shape that the model cannot give.
    """
    config = model.config
    recurrent = isinstance(config, RecurrentDepthConfig)
    wanted = _wanted(recorded, recurrent)
    tokens = recorded.get("input_ids", np.zeros(0))
    if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
        raise ConvertError("array input_ids must hold integers [B, T]")
    if tokens.shape[1] > config.max_length:
        raise ConvertError(
            f"array input_ids has rows beyond the {config.max_length} positions of the model"
        )
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ConvertError(
            f"array input_ids holds ids beyond the vocabulary of {config.vocab_size}"
        )
    width = config.width if recurrent else 0
    state = recorded.get("init_state", np.zeros((*tokens.shape, width), np.float32))
    arrays = {"init_state": state, **{name: recorded[name] for name in wanted}}
    for name, array in arrays.items():
        last = width if name == "init_state" else config.vocab_size
        want = (*tokens.shape, last)
        if array.shape != want or not np.issubdtype(array.dtype, np.floating):
            raise ConvertError(
                f"array {name} must hold floats of shape {want}, not {array.dtype} {array.shape}"
            )
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    @jax.jit(static_argnums=3)
    def logits(params, tokens, state, recurrences):
        network = model.network
        if recurrent:
            output, _ = network.at(recurrences).forward_from(params, tokens, positions, state)
        else:
            output = network.forward(params, tokens, positions)
        return network.logits(params, output.hidden)

    with jax.default_matmul_precision("highest"):
        for name, recurrences in wanted.items():
            inputs = jnp.asarray(tokens, jnp.int32), jnp.asarray(state, jnp.float32)
            ours = np.asarray(logits(model.params, *inputs, recurrences), np.float64)
            yield name, float(np.max(np.abs(ours - recorded[name].astype(np.float64))))


def _wanted(recorded: Mapping[str, np.ndarray], recurrent: bool) -> dict[str, int]:
    """Recurrences (1 where a model has none) of recorded logits by their names, fewest first."""
    numbered = {name: re.fullmatch(r"logits_r(\d+)", name) for name in recorded if recurrent}
    wanted = {name: int(match[1]) for name, match in numbered.items() if match}
    if not wanted and "logits" in recorded:
        steps = recorded.get("num_steps") if recurrent else np.array(1)
        if steps is None or steps.size != 1 or not np.issubdtype(steps.dtype, np.integer):
            raise ConvertError(
                "array logits of a recurrent model needs one integer num_steps beside it"
            )
        wanted = {"logits": int(steps.item())}
    if not wanted:
        raise ConvertError("there is no array logits" + ", nor logits_r<n>" * recurrent)
    for name, recurrences in wanted.items():
        if not 1 <= recurrences <= MOST_RECURRENCES:
            raise ConvertError(
                f"array {name} is of {recurrences} recurrences, but must be of 1 to {MOST_RECURRENCES}"
            )
    return dict(sorted(wanted.items(), key=lambda item: item[1]))
