"""Meshes of four simulated devices, by name."""

from typing import Any

import paradec_jax as pd

MESHES = {"one": None, "fsdp": (1, 4, 1), "fsdp x tensor": (1, 2, 2), "data x tensor": (2, 1, 2)}


def mesh_named(name: str) -> Any:
    sizes = MESHES[name]
    return None if sizes is None else pd.make_mesh(*sizes)
