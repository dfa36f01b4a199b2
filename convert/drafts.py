"""Folders of what drafts a model's tokens: an adapter in PEFT's layout, and masks and sampler head.

::

    adapter_config.json, adapter_model.safetensors   the adapters of rows of masks, as of `peft`
    drafts.json           format version, digest of the model's files, shape, SHA-256 of the file below
    drafts.safetensors    masks, embedding_norm, sampler_in, sampler_out

PEFT reads and writes the adapter's matrices, but applied to all rows they are another model.
"""

from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.config import CausalConfig, DraftConfig, ModelConfig
from paradec_jax.disk.folders import digest_of, staged
from paradec_jax.disk.tensors import finite, open_tensors, write_tensors
from paradec_jax.io import read_object, sha256_of
from paradec_jax.models.drafts import DraftNetwork
from paradec_jax.store.model import Drafter

from . import peft
from .engine import ConvertError
from .fields import write_json

FORMAT_VERSION = 1
CONFIG, STEM = "drafts.json", "drafts"
SHAPE = ("count", "rank", "inner")


def is_drafter(folder: Path) -> bool:
    """Whether a folder of an adapter has masks and a sampler head beside it."""
    return (folder / CONFIG).is_file()


def write(folder: Path, drafter: Drafter, base: str, run: str | None = None) -> None:
    """Writes a drafter in the place of one that was so written, whole or not at all.

    Args:
      folder: path of the folder.
      drafter: the drafter.
      base: the model that it drafts for, as for `store.load`.
      run: mark of the run whose drafter it is; one already there must have the same.
    """
    params = dict(drafter.params)
    layers = {name: params.pop(name) for name in [*params] if name.startswith("layer_")}
    with staged(folder, overwrite=True, run=run) as temporary:
        peft.write_into(temporary, drafter.config.base, layers, 1.0, base)
        files = write_tensors(temporary, STEM, params)
        fields = {"format_version": FORMAT_VERSION, "base": digest_of(base)}
        fields |= {name: getattr(drafter.config, name) for name in SHAPE}
        fields["weights"] = {file: sha256_of(temporary / file) for file in files}
        write_json(temporary / CONFIG, fields)


def read(folder: Path, config: ModelConfig, base: str, allow_nonfinite: bool = False) -> Drafter:
    """A drafter, its parameters on the host.

    Args:
      folder: path of the folder.
      config: shape of the model that it is to draft for.
      base: that model, as for `store.load`.
      allow_nonfinite: whether parameters may be NaN or infinite.

    Raises:
      ConvertError: a folder of another format, damaged, or of another model.
    """
    fields = read_object(folder / CONFIG, finite=True)
    if fields.get("format_version") != FORMAT_VERSION:
        raise ConvertError(
            f"{folder / CONFIG} has format_version {fields.get('format_version')!r}, not {FORMAT_VERSION}"
        )
    if fields.get("base") != digest_of(base):
        raise ConvertError(
            f"{folder} drafts for another model than {base}: its files have another digest than "
            f"{str(fields.get('base'))[:12]}, that of the model it was trained beside"
        )
    if not isinstance(config, CausalConfig):
        raise ConvertError(f"{folder} drafts for a causal model, and {base} is of {config.family}")
    shape = DraftConfig(base=config, **{name: fields.get(name, 0) for name in SHAPE})
    file = folder / f"{STEM}.safetensors"
    if fields.get("weights") != {file.name: sha256_of(file)}:
        raise ConvertError(f"{file} differs from its digest in {CONFIG}")
    tensors: dict[str, Any] = open_tensors(file)
    if not allow_nonfinite:
        tensors = {path: finite(path, tensor) for path, tensor in tensors.items()}
    leaves = {path: np.asarray(tensor) for path, tensor in tensors.items()}
    leaves |= flatten_dict(peft.read(folder, config, allow_nonfinite), sep="/")
    expected = flatten_dict(DraftNetwork.shapes(shape), sep="/")
    for path in sorted(expected.keys() | leaves.keys()):
        have, asked = (of[path].shape if path in of else None for of in (leaves, expected))
        if have != asked:
            raise ConvertError(
                f"{path} of {folder} has shape {have}, but {CONFIG} asks for {asked}"
            )
    return Drafter(shape, unflatten_dict(leaves, sep="/"))
