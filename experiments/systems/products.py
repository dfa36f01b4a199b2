"""Operations of the matrix products in a traced program, loops counted as often as they run."""

import math
from typing import Any


def products(jaxpr: Any, unknown: int = 1) -> int:
    """Floating-point operations of all matrix products, two for a multiplication and an addition,
    on all devices.

    XLA's own count takes the body of a loop once. This one multiplies by the length of each scan,
    by the devices that each run the body of a `shard_map` and by the grid of a Pallas kernel, and
    counts what a backward pass computes anew; elementwise operations are left out. Of the branches
    of a conditional the dearest counts, so a kernel that skips steps of its grid is counted as if
    it skipped none.

    Args:
      jaxpr: of `jax.make_jaxpr` or `jax.jit(..).trace(..)`.
      unknown: iterations of loops, and lengths of grids, that only the data knows.
    """
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += (
                2
                * math.prod(equation.outvars[0].aval.shape)
                * math.prod(shape[i] for i in contracted)
            )
        elif name == "cond":
            total += max(products(branch, unknown) for branch in parameters["branches"])
        elif name == "while":
            total += unknown * products(parameters["body_jaxpr"], unknown)
        else:
            total += _times(name, parameters, unknown) * sum(
                products(inner, unknown) for inner in _inner(parameters)
            )
    return total


def _times(name: str, parameters: dict[str, Any], unknown: int) -> int:
    """How often the program inside an equation runs, on all devices."""
    if name == "scan":
        return parameters["length"]
    if name == "shard_map":
        mesh = parameters["mesh"]
        return math.prod(mesh.shape[axis] for axis in parameters["newly_manual_axes"])
    if name == "pallas_call":
        return math.prod(
            n if isinstance(n, int) else unknown for n in parameters["grid_mapping"].grid
        )
    return 1


def _inner(parameters: dict[str, Any]) -> list[Any]:
    """Programs among the parameters of an equation."""
    return [
        value for value in parameters.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")
    ]
