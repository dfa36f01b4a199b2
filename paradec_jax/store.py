"""Models on disk: a folder with a readable config.json, parameters in safetensors, and perhaps a tokenizer.

::

    config.json          format version, special tokens, and of each part: family, shape, file of its weights, digests
    network.safetensors  the part "network"; or shards network-00001-of-... and network.safetensors.index.json
    tokenizer.json       optional
    chat_template.jinja  optional

A tensor is named by its parameter's path ("layer_0/attention/q"). Its digests are SHA-256 of blocks of 16 MiB, so
that a reader checks what it reads. Folders of format 1 (`paradec_jax.disk.format1`) are read and never written.
Nothing in a folder is ever unpickled.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.config import ModelConfig, TokenSpec
from paradec_jax.disk import format1
from paradec_jax.disk.folders import StoreError, refuse_existing, staged
from paradec_jax.disk.tensors import INDEX, Lazy, TensorFiles, digests, listed_in, write_tensors
from paradec_jax.families import FAMILIES, family_named, network_of, parameter_shapes
from paradec_jax.tokenizer import Tokenizer

__all__ = ["Model", "StoreError", "fingerprint", "load", "locate", "refuse_existing", "save", "staged"]

FORMAT_VERSION = 2
NETWORK = "network"
PARTS = (NETWORK,)  # a folder may come to hold more, such as a residual head or a teacher
MAX_SHARD_BYTES = 5 * 10**9
IDLE_FIELDS = ("remat", "mean_backprop_depth", "dropout")  # of a config: they change no output
DTYPES = ("float32", "bfloat16")
CHAT_TEMPLATE = "chat_template.jinja"
ASSETS = Path(__file__).parent / "assets"
CHECKOUT = Path(__file__).parents[1] / "experiments"  # a folder a paper, some with `assets`
ONLY_IN_CHECKOUT = ("tiny-recurrent", "tiny-recurrent-exponential", "tiny-pointers", "wide-pointers")


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A network's shape, its parameters and the facts of its checkpoint.

    Attributes:
      config: the model's shape.
      params: nested dict of arrays.
      token_spec: special tokens of the checkpoint.
      tokenizer: text to ids and back, or None.
      chat_template: what makes a text of messages (`paradec_jax.chat.render`), or None.
    """

    config: ModelConfig
    params: Mapping[str, Any]
    token_spec: TokenSpec
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None

    @property
    def family(self) -> str:
        """Name of the model family."""
        return self.config.family

    @functools.cached_property
    def network(self) -> Any:
        """The network as decoders see it."""
        return network_of(self.config)


def expected_shapes(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree that a config asks for, of `jax.ShapeDtypeStruct`."""
    return parameter_shapes(config)


def save(
    folder: str | os.PathLike[str],
    model: Model,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a model folder, whole or not at all.

    Args:
      folder: where to; parents are made.
      model: parameters may lie on a device or on the host.
      overwrite: whether a model folder already there is replaced.
      max_shard_bytes: weights beyond this size are split into shards with an index.

    Raises:
      StoreError: when the folder exists, or the parameters contradict the config.
    """
    refuse_existing(folder, overwrite=overwrite)
    _check_facts(model.config, model.token_spec)
    leaves = flatten_dict(model.params, sep="/")
    expected = flatten_dict(expected_shapes(model.config), sep="/")
    _check_names(expected, leaves.keys())
    for path, leaf in leaves.items():
        _check_leaf(expected, path, leaf)
    tensors = {path: Lazy(leaf.nbytes, functools.partial(np.asarray, leaf)) for path, leaf in leaves.items()}
    with staged(folder, overwrite=overwrite) as temporary:
        part = {
            "family": model.family,
            "config": model.config.to_dict(),
            "weights": write_tensors(temporary, tensors, max_shard_bytes, NETWORK),
            "sha256": {path: digests(tensor.make()) for path, tensor in sorted(tensors.items())},
        }
        description = {
            "format_version": FORMAT_VERSION,
            "parts": {NETWORK: part},
            "token_spec": dataclasses.asdict(model.token_spec),
        }
        (temporary / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save(temporary / "tokenizer.json")
        if model.chat_template is not None:
            (temporary / CHAT_TEMPLATE).write_text(model.chat_template, encoding="utf-8", newline="")


def load(
    folder: str | os.PathLike[str], *, dtype: str | None = None, verify: bool = True, host: bool = False
) -> Model:
    """Reads a model folder.

    Args:
      folder: path of the folder, or the bare name of a bundled model ("tiny-causal").
      dtype: "float32" or "bfloat16" to cast the parameters and compute in that type; as stored by default.
      verify: whether every parameter is compared with its digests.
      host: whether parameters stay NumPy arrays instead of moving to the default device.

    Raises:
      StoreError: when the folder is missing, of another format, damaged or contradicts itself.
    """
    if dtype is not None and dtype not in DTYPES:
        raise StoreError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = locate(folder)
    description = _read_description(folder)
    config, part = _network_part(folder, description)
    token_spec = _build(TokenSpec, description.get("token_spec"), f"token_spec of {folder / 'config.json'}")
    leaves: dict[str, Any] = {}
    try:
        _check_facts(config, token_spec)
        for path, leaf in _read_leaves(folder, description["format_version"], config, part, verify):
            leaf = leaf if dtype is None else leaf.astype(dtype)
            leaves[path] = leaf if host else jax.device_put(leaf)
    except StoreError as error:
        raise StoreError(f"{folder}: {error}") from error
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        try:
            tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
        except (ValueError, OSError) as error:
            raise StoreError(str(error)) from error
    template = read_chat_template(folder / CHAT_TEMPLATE)
    return Model(config, unflatten_dict(leaves, sep="/"), token_spec, tokenizer, template)


def _read_leaves(
    folder: Path, version: int, config: ModelConfig, part: Mapping[str, Any], verify: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters one after the other, checked against the config and on request against their digests."""
    recorded = part["sha256"]
    expected = flatten_dict(expected_shapes(config), sep="/")
    if version == 1:
        _check_names(expected, {name for path in recorded for name in format1.names(path)})
        for path, leaf in format1.read(folder, config, recorded, verify=verify):
            _check_leaf(expected, path, leaf)
            yield path, leaf
        return
    _check_names(expected, recorded.keys())
    file = folder / part["weights"]
    with TensorFiles(listed_in(file) if file.name.endswith(INDEX) else {file: []}) as tensors:
        _check_names(expected, tensors.names)
        for path in expected:
            leaf = tensors.read(path)
            _check_leaf(expected, path, leaf)
            if verify and recorded[path] != digests(leaf):
                raise StoreError(f"parameter {path} differs from its digests in config.json")
            yield path, leaf


def read_chat_template(path: Path) -> str | None:
    """The text of a chat_template.jinja, or None where there is no such file.

    Raises:
      StoreError: when it is not a text in UTF-8.
    """
    if not path.is_file():
        return None
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise StoreError(f"{path} is not a text in UTF-8 ({error})") from error


def locate(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, or the bundled model of that bare name where no such folder exists.

    Raises:
      StoreError: when there is neither.
    """
    path = Path(folder)
    if path.is_dir():
        return path
    if path.exists():
        raise StoreError(f"{path} is a file; a model is a folder")
    if path.name == str(folder):
        for bundled in _bundled():
            if bundled.name == path.name:
                return bundled
        if path.name in ONLY_IN_CHECKOUT:
            raise StoreError(
                f"model {path} is not installed with the package; it lies in experiments/*/assets of the repository"
            )
    found = ", ".join(sorted(bundled.name for bundled in _bundled())) or "none"
    raise StoreError(f"there is no model folder {path}, and no bundled model of that name (bundled: {found})")


def _bundled() -> list[Path]:
    """The folders of bundled models, those of the package first."""
    files = [*ASSETS.glob("*/config.json"), *CHECKOUT.glob("*/assets/*/config.json")]
    return [file.parent for file in files]


def fingerprint(folder: str | os.PathLike[str]) -> str:
    """SHA-256 of a model's shape and parameters: two models of one name differ in it, the formats of one do not.

    Fields of the config that have their defaults, or change no output, do not count.

    Raises:
      StoreError: see `load`; parameters of format 1 are read, those of format 2 are known by their digests.
    """
    folder = locate(folder)
    description = _read_description(folder)
    config, part = _network_part(folder, description)
    recorded = part["sha256"]
    if description["format_version"] == 1:
        try:
            leaves = _read_leaves(folder, 1, config, part, verify=True)
            recorded = {path: digests(leaf) for path, leaf in leaves}
        except StoreError as error:
            raise StoreError(f"{folder}: {error}") from error
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    shape = {
        name: value
        for name, value in config.to_dict().items()
        if name not in IDLE_FIELDS and value != defaults[name]
    }
    content = {NETWORK: {"family": config.family, "config": shape, "sha256": recorded}}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def names_of(models: Sequence[str]) -> list[str]:
    """Short names that differ: of a folder .../RUN/round-N/model the run and the round, else the last part."""
    found = []
    for model in models:
        parts = Path(model).parts
        generic = len(parts) >= 3 and parts[-1] == "model"
        found.append("/".join(parts[-3:-1]) if generic else parts[-1])
    return found if len(set(found)) == len(found) else list(models)


def _check_facts(config: ModelConfig, token_spec: TokenSpec) -> None:
    """Numeric types are known ones, and special tokens lie in the vocabulary."""
    for name in ("dtype", "param_dtype"):
        if getattr(config, name) not in DTYPES:
            raise StoreError(f"{name} must be one of {', '.join(DTYPES)}, not {getattr(config, name)!r}")
    optional = [i for i in (token_spec.bos, token_spec.mask) if i is not None]
    for token in (*optional, *token_spec.stop, token_spec.pad):
        if not matches(token, int) or not 0 <= token < config.vocab_size:
            raise StoreError(
                f"token_spec holds {token!r}, which is no id of a vocabulary of {config.vocab_size}"
            )


def _check_names(expected: Mapping[str, Any], names: Collection[str]) -> None:
    for path in sorted(expected.keys() - names):
        raise StoreError(f"parameter {path} is missing, although the config asks for it")
    for path in sorted(names - expected.keys()):
        raise StoreError(f"parameter {path} is there, although the config does not ask for it")


def _check_leaf(expected: Mapping[str, Any], path: str, leaf: Any) -> None:
    want = expected[path]
    if leaf.shape != want.shape:
        raise StoreError(f"parameter {path} has shape {leaf.shape}, but the config asks for {want.shape}")
    if leaf.dtype != want.dtype:
        raise StoreError(f"parameter {path} is {leaf.dtype}, but the config asks for {want.dtype}")


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    foreign = f"{folder} is a Hugging Face folder; convert it first: python -m convert import {folder} DST"
    if not path.is_file():
        if any(folder.glob("model*.safetensors")):
            raise StoreError(foreign)
        raise StoreError(f"{folder} is not a model folder: it has no config.json")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(description, dict):
        raise StoreError(f"{path} must hold one JSON object")
    if "format_version" not in description:
        if "model_type" in description or any(folder.glob("model*.safetensors")):
            raise StoreError(foreign)
        raise StoreError(f"{path} has no format_version: not a model of paradec_jax")
    version = description["format_version"]
    if not matches(version, int) or version < 1:
        raise StoreError(f"format_version of {path} must be a positive integer, not {version!r}")
    if version > FORMAT_VERSION:
        raise StoreError(
            f"{folder} has format {version}, newer than format {FORMAT_VERSION} that this version reads"
        )
    return description


def _network_part(folder: Path, description: Mapping[str, Any]) -> tuple[ModelConfig, Mapping[str, Any]]:
    """The config of the network, and its section of config.json."""
    where = folder / "config.json"
    former = description["format_version"] == 1
    parts = {NETWORK: description} if former else description.get("parts")
    if not isinstance(parts, dict) or not isinstance(parts.get(NETWORK), dict):
        raise StoreError(f"{where} has no part called {NETWORK}")
    for name in parts.keys() - set(PARTS):
        raise StoreError(f"{where} has a part {name!r}, unknown to this version ({', '.join(PARTS)})")
    part = parts[NETWORK]
    try:
        family = family_named(str(part.get("family")))
    except ValueError as error:
        known = ", ".join(FAMILIES)
        raise StoreError(f"family of {where} must be one of {known}, not {part.get('family')!r}") from error
    config = _build(family.config, part.get("config"), f"config of {where}", unknown=former)
    if not isinstance(part.get("sha256"), dict):
        raise StoreError(f"{where} has no table of digests (sha256)")
    file = part.get("weights")
    if not former and (not isinstance(file, str) or Path(file).name != file):
        raise StoreError(f"weights of {where} must be the name of a file, not {file!r}")
    return config, part


def _build(cls: type, values: Any, where: str, *, unknown: bool = False) -> Any:
    """A dataclass from its JSON object; unknown fields are refused, or dropped where `unknown` says so."""
    if not isinstance(values, dict):
        raise StoreError(f"{where} must be a JSON object, not {values!r}")
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    if unknown:
        values = {name: value for name, value in values.items() if name in fields}
        if values.get("head_channels") == 0:  # how format 1 said None
            values["head_channels"] = None
    for name in values.keys() - fields.keys():
        raise StoreError(f"{where} has an unknown field {name!r}")
    for name, value in values.items():
        kind = fields[name]
        if kind in (int, float, str, bool) and not matches(value, kind):
            raise StoreError(f"{name} in {where} must be of type {kind.__name__}, not {value!r}")
        if kind == tuple[int, ...] and not isinstance(value, list):
            raise StoreError(f"{name} in {where} must be a list, not {value!r}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{where} is wrong: {error}") from error


def matches(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a plain type: integers pass for floats, booleans for nothing but bool."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
