"""Results as plain lists, and some rows of them, to be compared exactly."""

import dataclasses
from typing import Any

import jax
import numpy as np

from paradec_jax import decode


def listed(decoded: decode.Decoded) -> dict[str, Any]:
    """All fields of a result on the host, each count by its name."""
    fields = {f.name: getattr(decoded, f.name) for f in dataclasses.fields(decoded)}
    fields |= fields.pop("counts")
    return {
        name: None if value is None else np.asarray(value).tolist()
        for name, value in fields.items()
    }


def rows_of(decoded: decode.Decoded, *rows: int, columns: int | None = None) -> dict[str, Any]:
    """Some rows of a result, cut to some columns."""
    taken = jax.tree.map(lambda x: np.asarray(x)[list(rows)], decoded)
    if columns is not None:
        taken = jax.tree.map(lambda x: x[:, :columns] if x.ndim == 2 else x, taken)
    return listed(taken)
