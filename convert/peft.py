"""Adapters in folders of PEFT: adapter_config.json and adapter_model.safetensors.

`base_model.model.MODULE.lora_A.weight` is [r, in] and `.lora_B.weight` [out, r], where
MODULE.weight [out, in] is a tensor of the model's Hugging Face folder. Where that feeds several
parameters, each has all of A and its own rows of B; written, the module has their A one below the
other, and in B the zeros that keep them apart.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.config import ModelConfig
from paradec_jax.config.bounds import LARGEST
from paradec_jax.disk.folders import ADAPTER_CONFIG, staged
from paradec_jax.disk.tensors import finite, open_tensors, write_tensors
from paradec_jax.nn.adapters import LORA_A, LORA_B
from paradec_jax.store.lora import merge
from paradec_jax.store.model import Model

from . import qwen2
from .checkpoint import BY_FAMILY, all_finite
from .engine import ConvertError, Json, Row, Source, check_tensors, note, read_json
from .fields import matches, write_json

STEM, HOLDER = "adapter_model", "base_model.model."
PLAIN: dict[str, tuple[Any, ...]] = {  # values that fields may have
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (True, False, None),
    # Others begin with a change of W.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# Fields that are read, and those that say nothing of a merged weight; any other must be empty or
# false.
KNOWN = "r lora_alpha rank_pattern alpha_pattern lora_dropout inference_mode task_type revision "
KNOWN += "base_model_name_or_path peft_version auto_mapping target_modules exclude_modules "
KNOWN += "layers_to_transform layers_pattern megatron_core qalora_group_size eva_config"


def merged(model: Model, folder: Path, allow_nonfinite: bool) -> Model:
    """A model whose parameters are not read yet, with the adapter of a folder; errors as of `read`."""
    changes = read(folder, model.config, allow_nonfinite)
    model = dataclasses.replace(model, params=merge(model.params, changes, 1.0))
    return model if allow_nonfinite else all_finite(model)


def read(folder: Path, config: ModelConfig, allow_nonfinite: bool = False) -> dict[str, Any]:
    """An adapter as of `adapters.init_lora`, in float32, its B multiplied by the scale.

    Raises:
      ConvertError: one that is more than plain LoRA, or of another model than that of the config.
      StoreError: numbers that are NaN or infinite.
    """
    fields = read_json(folder / ADAPTER_CONFIG)
    for name, value in fields.items():
        if value not in PLAIN[name] if name in PLAIN else value and name not in KNOWN.split():
            raise ConvertError(
                f"field {name} of {folder / ADAPTER_CONFIG} is {value!r}, but only plain LoRA is read"
            )
    rename = BY_FAMILY[config.family].plain_name
    file = folder / f"{STEM}.safetensors"
    if not file.exists() and (pickled := file.with_suffix(".bin")).exists():
        raise ConvertError(
            f"{pickled} is a pickle, which is never unpickled; convert it to safetensors"
        )
    stored = open_tensors(file)
    tensors = {rename(name.removeprefix(HOLDER)): tensor for name, tensor in stored.items()}
    if not allow_nonfinite:
        tensors = {name: finite(name, tensor) for name, tensor in tensors.items()}
    axes, modules = _modules(config)
    ranks, scales = (_patterns(fields, name) for name in ("rank_pattern", "alpha_pattern"))
    shapes, adapter = dict[str, tuple[int, ...]](), dict[str, Any]()
    for module, rows in modules.items():
        a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        if a in tensors or b in tensors:
            rank = _number(fields, "r", int, ranks, module)
            scale = _number(fields, "lora_alpha", float, scales, module)
            scale /= rank**0.5 if fields.get("use_rslora") else rank
            out, wide = rows[0][1].stored_shape(axes)
            shapes |= {a: (rank, wide), b: (out, rank)}
            for path, row in rows:
                adapter[f"{path}/{LORA_A}"] = a, (), 1.0
                adapter[f"{path}/{LORA_B}"] = b, row.share(axes), scale
    try:
        check_tensors(Source(folder, tensors), shapes, {})
    except ConvertError as error:
        raise ConvertError(f"{folder} is no adapter of this model: {error}") from error
    if not shapes:
        raise ConvertError(f"{folder} holds no tensor of an adapter")
    kinds = str(fields.get("target_modules"))
    named = [module for module in modules if repr(module.rpartition(".")[2]) in kinds]
    lacking = [module for module in named if f"{module}.lora_A.weight" not in shapes]
    if lacking and not fields.get("layers_to_transform"):
        note(
            f"{folder} names {len(lacking)} modules of which it holds no tensors, such as {lacking[0]}"
        )
    with np.errstate(over="ignore"):  # what becomes infinite is refused
        parts = {
            path: tensors[name].read(share).astype(np.float32) * np.float32(scale)
            for path, (name, share, scale) in adapter.items()
        }
    return unflatten_dict(parts, sep="/")


def write(
    folder: Path,
    config: ModelConfig,
    adapter: Mapping[str, Any],
    scale: float,
    base: str,
    run: str | None = None,
) -> None:
    """Writes an adapter of `adapters.init_lora`, in the place of one that was so written, whole or
    not at all.

    Args:
      folder, config: path of the folder; shape of the model.
      adapter, scale: as of `lora.merge`.
      base: name of the model.
      run: mark of the run whose adapter it is; one already there must have the same.
    """
    with staged(folder, overwrite=True, run=run) as temporary:
        write_into(temporary, config, adapter, scale, base)


def write_into(
    folder: Path, config: ModelConfig, adapter: Mapping[str, Any], scale: float, base: str
) -> None:
    """Writes the files of an adapter into a folder that is there; arguments as of `write`."""
    leaves, tensors = flatten_dict(adapter, sep="/"), dict[str, np.ndarray]()
    ranks: dict[str, int] = {}
    axes, modules = _modules(config)
    prefix = HOLDER + BY_FAMILY[config.family].PREFIX
    for module, rows in modules.items():
        here = [(path, row) for path, row in rows if f"{path}/{LORA_A}" in leaves]
        if here:
            a, at = np.concatenate([leaves[f"{path}/{LORA_A}"] for path, _ in here]), 0
            b = np.zeros((here[0][1].stored_shape(axes)[0], len(a)), a.dtype)
            for path, row in here:
                part = leaves[f"{path}/{LORA_B}"]
                b[row.share(axes), at : at + part.shape[1]] = part
                at += part.shape[1]
            tensors |= {f"{prefix}{module}.lora_A.weight": a, f"{prefix}{module}.lora_B.weight": b}
            ranks[module] = len(a)
    kinds = {module: module.rpartition(".")[2] for module in modules}
    some = {kinds[module] for module in ranks}
    whole = all(module in ranks for module in modules if kinds[module] in some)
    rank = min(ranks.values())
    more = {kinds[module]: n for module, n in ranks.items() if n != rank}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if config.family == qwen2.FAMILY else None,
        "base_model_name_or_path": base,
        "target_modules": sorted({kinds[module] if whole else module for module in ranks}),
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": more,
        "alpha_pattern": {kind: scale * n for kind, n in more.items()},
    }
    write_tensors(folder, STEM, tensors)
    write_json(folder / ADAPTER_CONFIG, fields)


def _modules(config: ModelConfig) -> tuple[Mapping[str, int], dict[str, list[tuple[str, Row]]]]:
    """Lengths of axes; path and row of each matrix that is a module's transposed weight, or a part."""
    axes, rows = BY_FAMILY[config.family].table(config)
    modules: dict[str, list[tuple[str, Row]]] = {}
    for row in rows:
        stored, ours = row.pattern.split(" -> ")
        sides = re.findall(r"[^ ()][^()]*(?=\))|[^ ()]+", stored)
        if len(sides) == 2 and ours == f"{sides[1]} {sides[0]}":
            for path, name in row.each():
                modules.setdefault(name.removesuffix(".weight"), []).append((path, row))
    return axes, modules


def _patterns(fields: Json, name: str) -> list[tuple[str, Any]]:
    """Ends of "^.MODULE" and their values, of a field of regular expressions, of which none is run."""
    given, other = fields.get(name) or {}, re.compile(r"[^\w.|^$-]")
    if not isinstance(given, dict) or any(other.search(key.replace("\\.", "")) for key in given):
        raise ConvertError(
            f"field {name} of {ADAPTER_CONFIG} must hold ends of names of modules, not {given!r:.99}"
        )
    return [
        (f".{part}".replace(".^", "^.").rstrip("$"), value)
        for key, value in given.items()
        for part in key.replace("\\", "").split("|")
    ]


def _number(fields: Json, name: str, kind: type, patterns: Any, module: str) -> Any:
    """A module's number of that field: of the first pattern that its name ends with, or all's."""
    value: Any = next((n for end, n in patterns if f"^.{module}".endswith(end)), fields.get(name))
    if not matches(value, kind) or not 0 < value < LARGEST:
        raise ConvertError(
            f"field {name} of {ADAPTER_CONFIG} must be a number above 0, not {value!r:.99}"
        )
    return value
