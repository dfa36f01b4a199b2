"""Trajectories of Jacobi decoding: the iterates of each block, from its random draft to its fixed
point.

They are the training data of consistency distillation: a network learns to jump from an early
iterate to the fixed point. `ReleasedJacobi(complete_blocks=True)` decodes them, `trace` records
every step::

    _, infos = trace(decoder, params, request, knobs, n=steps)
    per_row = trajectories(infos)                        # of each row, a list of blocks
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.replicas.jacobi import ReleasedJacobiInfo


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The iterates of one block.

    Attributes:
      points: draft, iterates, fixed point, [X, n]; those between have their accepted tokens first.
      start: tokens of prompt and earlier blocks.
      network_calls: calls that led to the fixed point.
      known: the token after the block.
    """

    points: Int[np.ndarray, "X n"]
    start: int
    network_calls: int
    known: int


def trajectories(infos: ReleasedJacobiInfo, *, aliased: bool = False) -> list[list[Trajectory]]:
    """Points of every block that was completed, row by row.

    A block keeps its draft, its iterate after each network call but the last (unless a single token
    is left, which is known by then), and its fixed point.

    Args:
      infos: records of a trace, leaves [T, B, ...].
      aliased: the released program overwrites the draft in place, so the first point that it stores
        is the fixed point, and the random draft is lost. True repeats that.

    Returns:
      For each row its blocks in order.
    """
    host = {
        field.name: np.asarray(getattr(infos, field.name)) for field in dataclasses.fields(infos)
    }
    rows = host["running"].shape[1]
    return [_of_row({name: x[:, row] for name, x in host.items()}, aliased) for row in range(rows)]


def _of_row(steps: dict[str, Any], aliased: bool) -> list[Trajectory]:
    found, points, calls = [], [], 0
    n = steps["before"].shape[-1]
    for t in np.flatnonzero(steps["running"]):
        if steps["start"][t] == 0:
            points, calls, start = [steps["before"][t]], 0, int(steps["cached"][t])
        calls += 1
        left = n - steps["accepted"][t]
        if left != 1:
            points.append(steps["after"][t])
        if left == 0:
            kept = np.stack([points[-1] if aliased else points[0], *points[1:]])
            found.append(Trajectory(kept, start, calls, int(steps["known"][t])))
    return found
