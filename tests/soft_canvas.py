"""Gradients through soft decoders of canvases against central differences, along one direction for
each choice.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def arguments(params, knobs: dict[str, Any], text: list[int], shift: float = 0.1) -> dict[str, Any]:
    """What gradients are taken of: knobs, parameters, vectors of the given tokens."""
    return {
        "knobs": {name: jnp.asarray(value, jnp.float64) for name, value in knobs.items()},
        "params": params,
        "vectors": params["embedding"][jnp.asarray([text])] + shift,
    }


def directions(at: dict[str, Any], given: list[bool]) -> Iterator[tuple[str, Any]]:
    """One for each number among the knobs, each group of parameters, the vectors of each given
    token.
    """
    zero = jax.tree.map(jnp.zeros_like, at)
    for name, value in at["knobs"].items():
        for i in range(value.size):
            one = jnp.zeros(value.size).at[i].set(1.0).reshape(value.shape)
            yield f"{name} {i}", zero | {"knobs": zero["knobs"] | {name: one}}
    some = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), at["params"]
    )
    for name in ("embedding", "head", "layer_0"):
        yield name, zero | {"params": zero["params"] | {name: some[name]}}
    for i in np.flatnonzero(given):
        wave = jnp.cos(jnp.arange(8.0))
        yield f"given {i}", zero | {"vectors": zero["vectors"].at[0, i].set(wave)}


def check_differences(function, at, given: list[bool], gradient, discrete):
    """Compares a gradient with differences of a compiled function, whose first events may not
    change.
    """
    h = 1e-6
    for name, direction in directions(at, given):
        sides = [
            function(jax.tree.map(lambda x, d, s=s: x + s * h * d, at, direction)) for s in (1, -1)
        ]
        for _, events in sides:
            for found, wanted in zip(events, discrete, strict=False):
                np.testing.assert_array_equal(found, wanted, err_msg=name)
        difference = float(sides[0][0] - sides[1][0]) / (2 * h)
        products = jax.tree.map(lambda g, d: float(np.sum(g * np.asarray(d))), gradient, direction)
        assert abs(difference) > 1e-3, f"{name} does nothing"
        assert sum(jax.tree.leaves(products)) == pytest.approx(difference, rel=1e-4, abs=1e-6), name
