"""Weights that each device reads its slices of."""

import dataclasses
import tempfile
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import numpy as np
from meshes import MESHES, mesh_named

import paradec_jax as pd
from paradec_jax.config import TokenSpec
from paradec_jax.disk import blocks
from paradec_jax.disk.tensors import TensorFiles
from paradec_jax.families import PRESETS, init_params
from paradec_jax.store import Model, save

FILL = TensorFiles._fill


def weights(names: list[str]) -> dict[str, Any]:
    """Models of each family loaded on meshes: whether values and places are right, how often a byte was read,

    and whether saving them leaves copies on the host.
    """
    found = {}
    for name in names:
        config = PRESETS[name]
        model = Model(config, init_params(config, jax.random.key(0)), TokenSpec())
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(blocks, "BLOCK", 256):
            save(Path(folder) / "model", model)
            total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
            for mesh, sizes in MESHES.items():
                if sizes is None:
                    continue
                with unittest.mock.patch.object(TensorFiles, "_fill", autospec=True) as fill:
                    read = []
                    fill.side_effect = lambda *call, r=read: (r.append(call[-1].nbytes), FILL(*call))[1]
                    loaded = pd.load(Path(folder) / "model", mesh=mesh_named(mesh)).params
                save(Path(folder) / "again", dataclasses.replace(model, params=loaded), overwrite=True)
                kept = copies(loaded)
                cast = pd.load(Path(folder) / "model", mesh=mesh_named(mesh), dtype="bfloat16").params
                wanted = jax.device_put(model.params, pd.shardings(model.params, mesh_named(mesh)))
                found[f"{name}, {mesh}"] = {
                    "same": all(map(same, *map(jax.tree.leaves, (loaded, wanted)))),
                    "cast": all(
                        same(a, b.astype("bfloat16"))
                        for a, b in zip(*map(jax.tree.leaves, (cast, wanted)), strict=True)
                    ),
                    "reads": sum(read) / total,
                    "again": pd.store.fingerprint(Path(folder) / "again")
                    == pd.store.fingerprint(Path(folder) / "model"),
                    "kept": kept,
                    "could be kept": copies(loaded) > 0,  # `same` has read them in JAX's way
                }
    return found


def copies(params: Any) -> int:
    """Arrays that keep a copy of their numbers on the host."""
    return sum(leaf._npy_value is not None for leaf in jax.tree.leaves(params))


def same(a: Any, b: Any) -> bool:
    """Whether two arrays have the same numbers in the same places."""
    return a.sharding == b.sharding and a.dtype == b.dtype and bool((np.asarray(a) == np.asarray(b)).all())
