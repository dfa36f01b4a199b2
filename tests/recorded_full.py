"""Folders of recorded networks of full attention, and the models in them."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.convert.checkpoint import opened
from paradec_jax.convert.full import MODEL_TYPES
from paradec_jax.families import network_of

LOGITS = {"atol": 5e-4, "rtol": 1e-4}


def json_in(path: Path) -> dict[str, Any]:
    """The object of a JSON file, empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def folders_in(place: Path) -> list[str]:
    """Names of the folders of models of full attention."""
    kinds = {path.parent.name: json_in(path) for path in sorted(place.glob("*/config.json"))}
    causal = ("llama",)  # whose drafts are recorded beside them
    return [name for name, fields in kinds.items() if fields["model_type"] not in causal]


@functools.cache
def model(folder: Path, kind: str = "mdlm", block: int | None = None) -> tuple[Any, Any, Any]:
    """Network, parameters and special tokens, as the converter imports a folder.

    What its config.json does not say is given: the kind, and the mask of traces.json.
    """
    fields, trace = json_in(folder / "config.json"), json_in(folder / "traces.json")
    of = {} if fields["model_type"] in MODEL_TYPES else {"kind": kind, "block": block}
    if "mask_token_id" not in fields:
        of["mask"] = trace["model"]["mask"]
    with opened(folder, "float32", of_masks=of) as read:
        params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), read.params)
        return network_of(read.config), params, read.token_spec
