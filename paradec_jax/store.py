"""Models on disk: a folder with a readable config.json, parameters in safetensors, and perhaps a tokenizer.

::

    config.json          format version, special tokens, and of each part: family, shape, file of its weights, digests
    network.safetensors  the part "network"; or shards network-00001-of-... and network.safetensors.index.json
    residual_head.safetensors   optional, the part "residual_head": what corrects the scores of a network of blocks
    tokenizer.json       optional
    chat_template.jinja  optional

A tensor is named by its parameter's path ("layer_0/attention/q"). Its digests are SHA-256 of blocks of 16 MiB, so
that a reader checks what it reads. Nothing in a folder is ever unpickled.
"""

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.config import ModelConfig, ResidualHeadConfig, TokenSpec
from paradec_jax.disk.blocks import refuse_nonfinite, whole
from paradec_jax.disk.bundled import locate
from paradec_jax.disk.description import (
    CHAT_TEMPLATE,
    DTYPES,
    build,
    check_dtypes,
    check_facts,
    check_ids,
    check_layers,
    check_leaf,
    check_names,
    identity,
    read_description,
    read_texts,
    sha256,
)
from paradec_jax.disk.folders import StoreError, names_of, refuse_existing, staged
from paradec_jax.disk.parts import PartFiles
from paradec_jax.disk.tensors import Lazy
from paradec_jax.disk.writing import write_tensors
from paradec_jax.families import FAMILIES, RESIDUAL_HEAD, Shape, family_named, network_of, parameter_shapes
from paradec_jax.io import one_sentence
from paradec_jax.sharding.layout import shardings
from paradec_jax.sharding.mesh import check_mesh
from paradec_jax.tokenizer import Tokenizer

__all__ = [
    "Model",
    "ResidualHead",
    "StoreError",
    "fingerprint",
    "load",
    "names_of",
    "opened",
    "refuse_existing",
    "save",
    "staged",
]

FORMAT_VERSION = 2
NETWORK = "network"
HEAD = RESIDUAL_HEAD.name
PARTS = (NETWORK, HEAD)
MAX_SHARD_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True, eq=False)
class ResidualHead:
    """A residual head and the network that it belongs to.

    Attributes:
      config: the head's shape.
      params: nested dict of arrays.
      backbone: fingerprint of the network that it was trained on; None for the one that it lies beside.
    """

    config: ResidualHeadConfig
    params: Mapping[str, Any]
    backbone: str | None = None

    @functools.cached_property
    def network(self) -> Any:
        """The head as decoders see it."""
        return network_of(self.config)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A network's shape, its parameters and the facts of its checkpoint.

    Attributes:
      config: the model's shape.
      params: nested dict of arrays.
      token_spec: special tokens of the checkpoint.
      tokenizer: text to ids and back, or None.
      chat_template: what makes a text of messages (`paradec_jax.chat.conversation`), or None.
      special_tokens: texts that the template knows by name, such as "bos_token", besides those of the ids.
      head: what corrects the network's scores between its calls, or None.
    """

    config: ModelConfig
    params: Mapping[str, Any]
    token_spec: TokenSpec
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    head: ResidualHead | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def family(self) -> str:
        """Name of the model family."""
        return self.config.family

    @functools.cached_property
    def network(self) -> Any:
        """The network as decoders see it."""
        return network_of(self.config)


def expected_shapes(config: Shape) -> dict[str, Any]:
    """The parameter tree that a config asks for, of `jax.ShapeDtypeStruct`.

    Raises:
      StoreError: shapes that no array has.
    """
    try:
        return parameter_shapes(config)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(f"no array can hold what the config asks for ({one_sentence(error, 99)})") from error


def save(
    folder: str | os.PathLike[str],
    model: Model,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    allow_nonfinite: bool = True,
) -> None:
    """Writes a model folder, whole or not at all, one parameter at a time.

    Args:
      folder: where to; parents are made.
      model: parameters may lie on a device or on the host, or be read when they are written (`disk.tensors.Lazy`).
      overwrite: whether a model folder already there is replaced.
      max_shard_bytes: weights beyond this size are split into shards with an index.
      allow_nonfinite: whether parameters may be NaN or infinite; `load` is told so again.

    Raises:
      StoreError: when the folder exists, the parameters contradict the config or are no numbers, or the head is
        another network's.
    """
    refuse_existing(folder, overwrite=overwrite)
    check_facts(model.config, model.token_spec)
    if model.tokenizer is not None:
        check_ids(model.tokenizer, model.config.vocab_size)
    network = _tensors(model.config, model.params)
    head = None if model.head is None else _tensors(model.head.config, model.head.params)
    how = max_shard_bytes, allow_nonfinite
    with staged(folder, overwrite=overwrite) as temporary:
        parts = {NETWORK: _written(temporary, NETWORK, model.config, network, *how)}
        if model.head is not None and head is not None:
            own = sha256({NETWORK: identity(model.config, parts[NETWORK]["sha256"])})
            _check_head(model.head.config, model.config, model.head.backbone or own, own)
            part = _written(temporary, HEAD, model.head.config, head, *how)
            parts[HEAD] = part | {"backbone": own}
        description = {
            "format_version": FORMAT_VERSION,
            "parts": parts,
            "token_spec": dataclasses.asdict(model.token_spec),
            "special_tokens": dict(model.special_tokens),
        }
        (temporary / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save(temporary / "tokenizer.json")
        if model.chat_template is not None:
            (temporary / CHAT_TEMPLATE).write_text(model.chat_template, encoding="utf-8", newline="")


def _tensors(config: Shape, params: Mapping[str, Any]) -> dict[str, Lazy]:
    """Parameters by path, compared with the config."""
    leaves = flatten_dict(params, sep="/")
    expected = flatten_dict(expected_shapes(config), sep="/")
    check_names(expected, leaves.keys())
    for path, leaf in leaves.items():
        check_leaf(expected, path, leaf)
    return {path: leaf if isinstance(leaf, Lazy) else Lazy.of(leaf) for path, leaf in leaves.items()}


def _written(
    folder: Path, name: str, config: Shape, tensors: Mapping[str, Lazy], most: int, allow_nonfinite: bool
) -> dict[str, Any]:
    """Writes the tensors of a part; its section of config.json."""
    check = (lambda path, block: None) if allow_nonfinite else refuse_nonfinite
    file, digests = write_tensors(folder, tensors, most, name, check)
    return {
        "family": config.family,
        "config": config.to_dict(),
        "weights": file,
        "sha256": dict(sorted(digests.items())),
    }


def _check_head(head: ResidualHeadConfig, network: ModelConfig, backbone: object, own: str) -> None:
    """Refuses the head of another network, by its shape or by the fingerprint that it names."""
    try:
        RESIDUAL_HEAD.check(head, network)
    except ValueError as error:
        raise StoreError(str(error)) from error
    if backbone != own:
        raise StoreError(
            f"the residual head was trained on another backbone (fingerprint {str(backbone)[:12]}) than the one "
            f"beside it ({own[:12]})"
        )


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    verify: bool = True,
    host: bool = False,
    allow_nonfinite: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Model:
    """Reads a model folder: names, shapes and types of all parameters are checked before any number is read.

    A process reads and verifies, in blocks of 16 MiB, what its own devices hold, and keeps nothing else.

    Args:
      folder: path of the folder, or the bare name of a bundled model ("tiny-causal").
      dtype: "float32" or "bfloat16" to cast the parameters and compute in that type; as stored by default.
      verify: whether what is read is compared with its digests.
      host: whether parameters stay NumPy arrays instead of moving to the default device.
      allow_nonfinite: whether parameters may be NaN or infinite.
      mesh: of `make_mesh`, on which parameters are put by the rules of `sharding`; the default device when None.

    Raises:
      StoreError: when the folder is missing, of another format, damaged or contradicts itself.
      ValueError: a mesh with Explicit axes, or one together with `host`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise StoreError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if mesh is not None:
        check_mesh(mesh)
        if host:
            raise ValueError("host keeps parameters off every device, so it does not go with a mesh")
    with _opened(folder, verify, allow_nonfinite) as found:
        return found.model(lambda part: _read(part, dtype, host, mesh), dtype)


@contextlib.contextmanager
def opened(folder: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> Iterator[Model]:
    """A model whose parameters are read, and verified, when they are indexed: `model.params["embedding"][...]`.

    Args:
      folder: as for `load`.
      allow_nonfinite: whether parameters may be NaN or infinite.

    Raises:
      StoreError: as `load`, but for what numbers alone tell, which reading a parameter raises.
    """
    with _opened(folder, True, allow_nonfinite) as found:
        yield found.model(lambda part: unflatten_dict(part.lazy(), sep="/"), None)


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a folder holds, before any number is read; the head's part with the fingerprint of its backbone."""

    network: PartFiles
    head: PartFiles | None
    own: str
    token_spec: TokenSpec
    texts: Mapping[str, Any]

    def model(self, read: Callable[[PartFiles], dict[str, Any]], dtype: str | None) -> Model:
        """The model with parameters as `read` gives them, in that type."""

        def cast(config: Any) -> Any:
            return config if dtype is None else dataclasses.replace(config, dtype=dtype, param_dtype=dtype)

        config = cast(self.network.config)
        params, head = read(self.network), None
        if self.head is not None:
            rounded = config != self.network.config  # other numbers, so of another fingerprint
            head = ResidualHead(cast(self.head.config), read(self.head), None if rounded else self.own)
        return Model(config, params, self.token_spec, head=head, **self.texts)


@contextlib.contextmanager
def _opened(folder: str | os.PathLike[str], verify: bool, allow_nonfinite: bool) -> Iterator[_Found]:
    """The folder's parts, which agree with their configs and each other as far as headers tell."""
    folder = locate(folder)
    description = read_description(folder, FORMAT_VERSION)
    config, part = _part(folder, description, NETWORK)
    token_spec = build(TokenSpec, description.get("token_spec"), f"token_spec of {folder / 'config.json'}")
    with contextlib.ExitStack() as files:
        try:
            check_facts(config, token_spec)
            own = sha256({NETWORK: identity(config, part["sha256"])})
            shapes = {NETWORK: (config, part)}
            if HEAD in description.get("parts", ()):
                of_head, its = shapes[HEAD] = _part(folder, description, HEAD)
                check_dtypes(of_head)
                _check_head(of_head, config, its.get("backbone"), own)
            expected = {}
            for name, (shape, section) in shapes.items():
                check_layers(shape, len(section["sha256"]))  # no more layers than there are digests
                expected[name] = flatten_dict(expected_shapes(shape), sep="/")
        except StoreError as error:
            raise StoreError(f"{folder}: {error}") from error
        parts = {
            name: files.enter_context(PartFiles(folder, shape, part, expected[name], verify, allow_nonfinite))
            for name, (shape, part) in shapes.items()
        }
        texts = read_texts(folder, description, config.vocab_size)
        yield _Found(parts[NETWORK], parts.get(HEAD), own, token_spec, texts)


def _read(part: PartFiles, dtype: str | None, host: bool, mesh: jax.sharding.Mesh | None) -> dict[str, Any]:
    """The parameters of a part, on the host, the default device or a mesh."""
    if mesh is not None:
        places = flatten_dict(shardings(unflatten_dict(part.expected, sep="/"), mesh), sep="/")
        return unflatten_dict(part.placed(places, dtype), sep="/")
    leaves = part.each(lambda path: [whole(part.expected[path].shape)], dtype)
    return unflatten_dict({path: leaf if host else jax.device_put(leaf) for path, (leaf,) in leaves}, sep="/")


def fingerprint(folder: str | os.PathLike[str]) -> str:
    """SHA-256 of a model's shape and parameters: two models of one name differ in it.

    A head counts; fields of a config that have their defaults, or change no output, do not.

    Raises:
      StoreError: see `load`; no parameter is read, since their digests are recorded.
    """
    folder = locate(folder)
    description = read_description(folder, FORMAT_VERSION)
    config, part = _part(folder, description, NETWORK)
    content = {NETWORK: identity(config, part["sha256"])}
    if HEAD in description.get("parts", ()):
        head, part = _part(folder, description, HEAD)
        content[HEAD] = identity(head, part["sha256"])
    return sha256(content)


def _part(folder: Path, description: Mapping[str, Any], name: str) -> tuple[Any, Mapping[str, Any]]:
    """The config of a part, and its section of config.json."""
    where = folder / "config.json"
    parts = description.get("parts")
    if not isinstance(parts, dict) or not isinstance(parts.get(name), dict):
        raise StoreError(f"{where} has no part called {name}")
    for other in parts.keys() - set(PARTS):
        raise StoreError(f"{where} has a part {other!r}, unknown to this version ({', '.join(PARTS)})")
    part = parts[name]
    given = str(part.get("family"))
    try:
        kind = family_named(given).config if name == NETWORK else {HEAD: RESIDUAL_HEAD.config}[given]
    except (ValueError, KeyError) as error:
        known = ", ".join(FAMILIES if name == NETWORK else (HEAD,))
        raise StoreError(f"family of {where} must be one of {known}, not {part.get('family')!r}") from error
    config = build(kind, part.get("config"), f"config of {where}")
    if not isinstance(part.get("sha256"), dict):
        raise StoreError(f"{where} has no table of digests (sha256)")
    file = part.get("weights")
    if not isinstance(file, str) or Path(file).name != file:
        raise StoreError(f"weights of {where} must be the name of a file, not {file!r}")
    return config, part
