"""Models on disk: a folder with a readable config.json, parameters written by Orbax, and perhaps a tokenizer.

::

    config.json          format version, family, shape, special tokens, SHA-256 of every parameter
    tokenizer.json       optional
    chat_template.jinja  optional
    params/              Orbax checkpoint of the parameter tree

Nothing in a folder is ever unpickled.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.config import CausalConfig, ModelConfig, RecurrentDepthConfig, TokenSpec
from paradec_jax.tokenizer import Tokenizer

FORMAT_VERSION = 1
FAMILIES: dict[str, type[ModelConfig]] = {"recurrent_depth": RecurrentDepthConfig, "jacobi": CausalConfig}
DTYPES = ("float32", "bfloat16")
CHAT_TEMPLATE = "chat_template.jinja"
ASSETS = Path(__file__).parent / "assets"


class StoreError(ValueError):
    """A model folder that cannot be read or written."""


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
        from paradec_jax.models import network_of

        return network_of(self.config)


def expected_shapes(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree that a config asks for, of `jax.ShapeDtypeStruct`."""
    from paradec_jax.models import parameter_shapes

    return parameter_shapes(config)


def save(folder: str | os.PathLike[str], model: Model, *, overwrite: bool = False) -> None:
    """Writes a model folder, whole or not at all.

    Args:
      folder: where to; parents are made.
      model: parameters may lie on a device or on the host.
      overwrite: whether a model folder already there is replaced.

    Raises:
      StoreError: when the folder exists, or the parameters contradict the config.
    """
    refuse_existing(folder, overwrite=overwrite)
    _check_facts(model.config, model.token_spec)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_dict(model.params, sep="/").items()}
    expected = flatten_dict(expected_shapes(model.config), sep="/")
    _check_names(expected, leaves.keys())
    for path, leaf in leaves.items():
        _check_leaf(expected, path, leaf)
    description = {
        "format_version": FORMAT_VERSION,
        "family": model.family,
        "config": model.config.to_dict(),
        "token_spec": dataclasses.asdict(model.token_spec),
        "sha256": {path: _digest(leaf) for path, leaf in sorted(leaves.items())},
    }
    with staged(folder, overwrite=overwrite) as temporary:
        (temporary / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save(temporary / "tokenizer.json")
        if model.chat_template is not None:
            (temporary / CHAT_TEMPLATE).write_text(model.chat_template, encoding="utf-8", newline="")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(epath.Path(temporary / "params"), unflatten_dict(leaves, sep="/"))


def load(
    folder: str | os.PathLike[str], *, dtype: str | None = None, verify: bool = True, host: bool = False
) -> Model:
    """Reads a model folder.

    Args:
      folder: path of the folder, or the bare name of a bundled model ("tiny-recurrent").
      dtype: "float32" or "bfloat16" to cast the parameters and compute in that type; as stored by default.
      verify: whether every parameter is compared with its digest.
      host: whether parameters stay NumPy arrays instead of moving to the default device.

    Raises:
      StoreError: when the folder is missing, of another format, damaged or contradicts itself.
    """
    if dtype is not None and dtype not in DTYPES:
        raise StoreError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = locate(folder)
    description = _read_description(folder)
    config = _build(FAMILIES[description["family"]], description.get("config"), folder, "config")
    token_spec = _build(TokenSpec, description.get("token_spec"), folder, "token_spec")
    digests = description.get("sha256")
    if not isinstance(digests, dict):
        raise StoreError(f"{folder / 'config.json'} has no table of digests (sha256)")
    leaves = {}
    try:
        _check_facts(config, token_spec)
        expected = flatten_dict(expected_shapes(config), sep="/")
        _check_names(expected, digests.keys())
        for path, leaf in _read_leaves(folder / "params", expected):
            _check_leaf(expected, path, leaf)
            if verify and digests[path] != _digest(leaf):
                raise StoreError(f"parameter {path} differs from its digest in config.json")
            leaf = leaf if dtype is None else leaf.astype(dtype)
            leaves[path] = leaf if host else jnp.asarray(leaf)
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
    if path.name == str(folder) and (ASSETS / path / "config.json").is_file():
        return ASSETS / path
    bundled = ", ".join(sorted(p.parent.name for p in ASSETS.glob("*/config.json"))) or "none"
    raise StoreError(
        f"there is no model folder {path}, and no bundled model of that name (bundled: {bundled})"
    )


def fingerprint(folder: str | os.PathLike[str]) -> str:
    """SHA-256 of a model's `config.json`, which holds those of its parameters: two models of one name differ in it.

    Raises:
      StoreError: see `locate`.
    """
    return hashlib.sha256((locate(folder) / "config.json").read_bytes()).hexdigest()


def names_of(models: Sequence[str]) -> list[str]:
    """Short names that differ: of a folder .../RUN/round-N/model the run and the round, else the last part."""
    found = []
    for model in models:
        parts = Path(model).parts
        generic = len(parts) >= 3 and parts[-1] == "model"
        found.append("/".join(parts[-3:-1]) if generic else parts[-1])
    return found if len(set(found)) == len(found) else list(models)


def refuse_existing(folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raises StoreError where writing `folder` would destroy something.

    An empty folder is free. With `overwrite`, so is one that holds a config.json.
    """
    folder = Path(folder)
    if not (folder.exists() or folder.is_symlink()):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise StoreError(f"{folder} exists and is not a folder")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise StoreError(f"{folder} exists; remove it or ask to overwrite it")
    if not (folder / "config.json").is_file():
        raise StoreError(f"{folder} exists and is not a model folder, so it is not overwritten")


@contextlib.contextmanager
def staged(folder: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling that becomes `folder` when the block ends well and vanishes when it does not.

    Raises:
      StoreError: as `refuse_existing`.
    """
    folder = Path(os.path.abspath(folder))
    refuse_existing(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        _replace(folder, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replace(folder: Path, temporary: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    retired = temporary.with_suffix(".old")
    folder.rename(retired)
    try:
        temporary.rename(folder)
    except BaseException:
        retired.rename(folder)
        raise
    shutil.rmtree(retired)


def _digest(leaf: np.ndarray) -> str:
    """SHA-256 over type, shape and little-endian bytes."""
    digest = hashlib.sha256(f"{leaf.dtype.name}{list(leaf.shape)}".encode())
    digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


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


def _check_leaf(expected: Mapping[str, Any], path: str, leaf: np.ndarray) -> None:
    want = expected[path]
    if leaf.shape != want.shape:
        raise StoreError(f"parameter {path} has shape {leaf.shape}, but the config asks for {want.shape}")
    if leaf.dtype != want.dtype:
        raise StoreError(f"parameter {path} is {leaf.dtype}, but the config asks for {want.dtype}")


def _read_leaves(directory: Path, paths: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Reads one parameter after the other, as NumPy arrays."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for path in paths:
            arguments = ocp.args.PyTreeRestore(
                item=unflatten_dict({path: 0}, sep="/"),
                restore_args=unflatten_dict({path: ocp.RestoreArgs(restore_type=np.ndarray)}, sep="/"),
                partial_restore=True,
            )
            try:
                tree = checkpointer.restore(epath.Path(os.path.abspath(directory)), args=arguments)
            except Exception as error:  # Orbax raises whatever its backends do
                raise StoreError(f"parameter {path} is missing or damaged in {directory.name}/") from error
            yield path, flatten_dict(tree, sep="/")[path]


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    foreign = f"{folder} is a Hugging Face folder; convert it first: python -m convert import {folder} DST"
    if not path.is_file():
        if any(folder.glob("*.safetensors")):
            raise StoreError(foreign)
        raise StoreError(f"{folder} is not a model folder: it has no config.json")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(description, dict):
        raise StoreError(f"{path} must hold one JSON object")
    if "format_version" not in description:
        if "model_type" in description or any(folder.glob("*.safetensors")):
            raise StoreError(foreign)
        raise StoreError(f"{path} has no format_version: not a model of paradec_jax")
    version = description["format_version"]
    if not matches(version, int) or version < 1:
        raise StoreError(f"format_version of {path} must be a positive integer, not {version!r}")
    if version > FORMAT_VERSION:
        raise StoreError(
            f"{folder} has format {version}, newer than format {FORMAT_VERSION} that this version reads"
        )
    if str(description.get("family")) not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise StoreError(f"family of {path} must be one of {known}, not {description.get('family')!r}")
    return description


def _build(cls: type, values: Any, folder: Path, section: str) -> Any:
    """A dataclass from its JSON object."""
    where = f"{section} of {folder / 'config.json'}"
    if not isinstance(values, dict):
        raise StoreError(f"{where} must be a JSON object, not {values!r}")
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
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
