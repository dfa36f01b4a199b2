"""Meshes of four simulated devices, by name, and weights that each device reads its slices of."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import paradec_jax as pd
from paradec_jax.config import TokenSpec
from paradec_jax.families import PRESETS, init_params
from paradec_jax.store import Model, save

MESHES = {"one": None, "fsdp": (1, 4, 1), "fsdp x tensor": (1, 2, 2), "data x tensor": (2, 1, 2)}


def mesh_named(name: str):
    sizes = MESHES[name]
    return None if sizes is None else pd.make_mesh(*sizes)


def weights(names: list[str]) -> dict[str, Any]:
    """Whether models of each family lie right on meshes, cast too, and are saved as they were."""
    found = {}
    for name in names:
        config = PRESETS[name]
        model = Model(config, init_params(config, jax.random.key(0)), TokenSpec())
        with tempfile.TemporaryDirectory() as folder:
            place, again = Path(folder) / "model", Path(folder) / "again"
            save(place, model)
            for mesh in [mesh for mesh, sizes in MESHES.items() if sizes is not None]:
                where = mesh_named(mesh)
                loaded = pd.load(place, mesh=where).params
                save(again, dataclasses.replace(model, params=loaded), overwrite=True)
                cast = pd.load(place, mesh=where, dtype="bfloat16").params
                wanted = jax.device_put(model.params, pd.shardings(model.params, where))
                found[f"{name}, {mesh}"] = {
                    "same": equal(loaded, wanted),
                    "cast": equal(cast, jax.tree.map(lambda x: x.astype("bfloat16"), wanted)),
                    "again": pd.store.fingerprint(again) == pd.store.fingerprint(place),
                }
    return found


def equal(found, wanted) -> bool:
    """Whether all arrays of two trees have the same numbers in the same places."""
    pairs = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    return all(
        a.sharding == b.sharding
        and a.dtype == b.dtype
        and bool((np.asarray(a) == np.asarray(b)).all())
        for a, b in pairs
    )
