"""Models on disk: a folder with a readable config.json, parameters in safetensors, and perhaps a
tokenizer.

::

    config.json          format version, special tokens, and of each part: family, shape, SHA-256 of each file;
                         perhaps `sampling` and `decoder`, see `Model`
    network.safetensors  the part "network"; or shards network-00001-of-...
    residual_head.safetensors   optional, the part "residual_head": what corrects the scores of a network of blocks
    tokenizer.json, chat_template.jinja   optional

A tensor is named by its parameter's path ("layer_0/attention/q"). Nothing in a folder is ever
unpickled.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.config import ModelConfig, ResidualHeadConfig, TokenSpec, check_fits, check_words
from paradec_jax.disk.folders import (
    ADAPTER_CONFIG,
    CHAT_TEMPLATE,
    IS_ADAPTER,
    StoreError,
    locate,
    staged,
)
from paradec_jax.disk.tensors import Lazy, finite, open_tensors, write_tensors
from paradec_jax.families import choose, family_named, network_of, parameter_shapes
from paradec_jax.io import AnyPath, read_object, sha256_of, text_of
from paradec_jax.sharding.layout import shardings
from paradec_jax.sharding.processes import put
from paradec_jax.store.model import PARAM_DTYPES, Model, ResidualHead, sampling_of
from paradec_jax.text.tokenizer import Tokenizer

FORMAT_VERSION = 2
NETWORK, HEAD = "network", ResidualHeadConfig.family
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
# Fields of a config that change no output.
IDLE_FIELDS = ["attention", "remat", "scan_layers", "mean_backprop_depth", "dropout"]
FEW = 256  # tokens that a tokenizer may have beyond the rows of the embedding
Parts = dict[str, tuple[Any, dict[str, str]]]  # by name: config, digests of files by their names


def save(folder: AnyPath, model: Model, *, overwrite: bool = False, run: str | None = None) -> None:
    """Writes a model folder, whole or not at all, one file of weights at a time.

    Args:
      folder: path of the new folder; parents are made.
      model: parameters may lie on a device or on the host, or be made when they are written
        (`disk.tensors.Lazy`).
      overwrite: whether a model folder already there, as it was written, is replaced.
      run: mark of the run whose model it is; one already there must have the same.

    Raises:
      StoreError: when the folder exists or has other files, the parameters contradict the config,
        or the head is another network's.
    """
    _check_ids(model)
    sources: dict[str, Any] = {NETWORK: model} | ({HEAD: model.head} if model.head else {})
    leaves = {name: flatten_dict(source.params, sep="/") for name, source in sources.items()}
    for name, source in sources.items():
        _check_leaves(source.config, leaves[name])
    with staged(folder, overwrite=overwrite, run=run) as temporary:
        parts, sections = {}, {}
        for name, source in sources.items():
            files = write_tensors(temporary, name, leaves[name])
            parts[name] = source.config, {file: sha256_of(temporary / file) for file in files}
            shape = {"family": source.config.family, "config": source.config.to_dict()}
            sections[name] = shape | {"weights": parts[name][1]}
        if model.head is not None:
            backbone = _fingerprint({NETWORK: parts[NETWORK]})
            trained_on = model.head.backbone or backbone
            with _naming(folder):
                _check_head(model.head.config, model.config, trained_on, backbone)
            sections[HEAD]["backbone"] = backbone
        description = {
            "format_version": FORMAT_VERSION,
            "parts": sections,
            "token_spec": dataclasses.asdict(model.token_spec),
            "special_tokens": dict(model.special_tokens),
            "sampling": dict(model.sampling),
            "decoder": model.decoder,
        }
        (temporary / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save(temporary / TOKENIZER)
        if model.chat_template is not None:
            template = temporary / CHAT_TEMPLATE
            template.write_text(model.chat_template, encoding="utf-8", newline="")


def load(
    source: AnyPath,
    *,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
    mesh: jax.sharding.Mesh | None = None,
    adapter: AnyPath | None = None,
    kind: str | None = None,
) -> Model:
    """Reads a model, one parameter after the other; a checkpoint that is not ours is converted in
    memory.

    Of a model folder, names, shapes, types and digests are checked before any parameter is read.

    Args:
      source: bare name of a bundled model ("tiny-causal"), path of a model folder, of a Hugging
        Face folder or of a .gguf file, or a name on the Hugging Face Hub ("org/name",
        "org/name@revision"; extra `hub`).
      dtype: "float32" or "bfloat16" to cast the parameters and compute in that type; as stored by
        default.
      allow_nonfinite: whether parameters may be NaN or infinite.
      mesh: mesh of `make_mesh`, over which parameters are split by the rules of `sharding`; a
        process keeps what its own devices hold. The default device when None.
      adapter: folder of a LoRA adapter in PEFT's layout, which is merged into the parameters; or of
        what drafts the model's tokens (`paradec train draft`), which changes none of them.
      kind: how a checkpoint was trained where its config.json does not say it, "bd3lm" block by
        block or "mdlm" with full attention: of types a2d-qwen3 and a2d-qwen2, and of qwen2 where it
        is no causal model but Open-dCoder.

    Raises:
      StoreError: when the source is missing, of another format, damaged, contradicts itself or
        cannot be converted; when the adapter is of another model, or not plain LoRA.
      ValueError: a mesh with Explicit axes.
    """
    if dtype is not None and dtype not in PARAM_DTYPES:
        raise StoreError(f"dtype must be one of {', '.join(PARAM_DTYPES)}, not {dtype!r}")

    def place(leaf: Lazy, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            return np.asarray(leaf.read(index), dtype or leaf.dtype)

        if sharding is None:
            return jax.device_put(read(()))
        return jax.make_array_from_callback(leaf.shape, sharding, read, dtype=dtype or leaf.dtype)

    def placed(part: Any) -> Any:
        places = () if mesh is None else (shardings(part.params, mesh),)
        kinds = {} if dtype is None else {"dtype": dtype, "param_dtype": dtype}
        params = jax.tree.map(place, part.params, *places)
        config = dataclasses.replace(part.config, **kinds)
        return dataclasses.replace(part, config=config, params=params)

    with _reading(source, dtype, allow_nonfinite, kind) as stored:
        if adapter is not None:
            import paradec_jax.convert.drafts as drafts
            import paradec_jax.convert.peft as peft

            lies = locate(adapter)
            if drafts.is_drafter(lies):
                drafter = drafts.read(lies, stored.config, str(source), allow_nonfinite)
                stored = dataclasses.replace(stored, drafter=drafter, decoder="drafted")
            else:
                stored = peft.merged(stored, lies, allow_nonfinite)
        model = placed(stored)
        head = None if stored.head is None else placed(stored.head)
        drafter = stored.drafter
        if drafter is not None:
            config = dataclasses.replace(drafter.config, base=model.config)
            params = drafter.params
            params = (
                jax.device_put(params) if mesh is None else put(params, shardings(params, mesh))
            )
            drafter = dataclasses.replace(drafter, config=config, params=params)
    if head is not None and (adapter is not None or model.config != stored.config):
        # The network has other numbers than in its folder, so another fingerprint.
        head = dataclasses.replace(head, backbone=None)
    return dataclasses.replace(model, head=head, drafter=drafter)


@contextlib.contextmanager
def _reading(
    source: AnyPath, dtype: str | None, allow_nonfinite: bool, kind: str | None
) -> Iterator[Model]:
    """The model of a source, whose parameters are read when they are asked for."""
    path = locate(source)
    config = path / CONFIG
    with _naming(source):
        if path.is_dir() and (not config.is_file() or "format_version" in read_object(config)):
            if kind is not None:
                raise StoreError(f"kind is for checkpoints of others, but {path} is a model folder")
            yield _opened(path, allow_nonfinite)
            return
    # A model folder needs no converter.
    from paradec_jax.convert.checkpoint import opened as converted

    with converted(path, dtype, of_masks={"kind": kind}, allow_nonfinite=allow_nonfinite) as model:
        _check_ids(model)
        yield model


def opened(folder: AnyPath, *, allow_nonfinite: bool = False) -> Model:
    """A model whose parameters are read when `np.asarray` asks for them:
    `np.asarray(model.params["embedding"])`.

    Args:
      folder: model folder, or name of one, as for `load`.
      allow_nonfinite: whether parameters may be NaN or infinite.

    Raises:
      StoreError: as `load`; numbers that are NaN or infinite only when they are read.
    """
    path = locate(folder)
    with _naming(folder):
        return _opened(path, allow_nonfinite)


def _opened(folder: Path, allow_nonfinite: bool) -> Model:
    description, parts = _read_description(folder)
    config, weights = parts[NETWORK]
    words, template = folder / TOKENIZER, folder / CHAT_TEMPLATE
    model = Model(
        config,
        {},
        _built(TokenSpec, description["token_spec"]),
        tokenizer=Tokenizer.from_file(words) if words.exists() else None,
        chat_template=text_of(template) if template.exists() else None,
        special_tokens=description.get("special_tokens", {}),
        sampling=description.get("sampling", {}),
        decoder=description.get("decoder"),
    )
    with _naming(f"sampling or decoder of {CONFIG}"):
        sampling_of({"do_sample": True, **model.sampling})
        if model.decoder is not None:
            usual, network = choose(config.family, model.decoder), network_of(config)
            usual.decoder.bind(network, config.max_length, model.token_spec).knobs(usual.knobs)
    special = model.special_tokens
    if not isinstance(special, dict) or not all(
        name.endswith("_token") and isinstance(text, str) for name, text in special.items()
    ):
        raise StoreError(
            f"special_tokens must be texts by names that end in _token, not {special!r:.99}"
        )
    _check_ids(model)
    params, head = _open_part(folder, config, weights, allow_nonfinite), None
    if HEAD in parts:
        shape, weights = parts[HEAD]
        backbone = _fingerprint({NETWORK: parts[NETWORK]})
        _check_head(shape, config, description["parts"][HEAD]["backbone"], backbone)
        head = ResidualHead(shape, _open_part(folder, shape, weights, allow_nonfinite), backbone)
    return dataclasses.replace(model, params=params, head=head)


def fingerprint(folder: AnyPath) -> str:
    """SHA-256 of a model's shape and parameters: two models of one name differ in it.

    A head counts; fields of a config that have their defaults, or change no output, do not. Nothing
    but config.json is read, since that has the digests of all files.

    Raises:
      StoreError: see `load`.
    """
    folder = locate(folder)
    with _naming(folder):
        return _fingerprint(_read_description(folder)[1])


def names_of(models: Sequence[str]) -> list[str]:
    """Short names that differ: of a folder .../RUN/round-N/model the run and the round, else the
    last part.
    """
    paths = [Path(model).parts for model in models]
    short = ["/".join(p[-3:-1] if len(p) >= 3 and p[-1] == "model" else p[-1:]) for p in paths]
    return short if len(set(short)) == len(short) else list(models)


@contextlib.contextmanager
def _naming(folder: AnyPath) -> Iterator[None]:
    """Errors about a folder name it."""
    try:
        yield
    except KeyError as error:
        raise StoreError(f"{folder}: {CONFIG} lacks {error}") from error
    except (AttributeError, TypeError, ValueError, OSError) as error:
        raise StoreError(f"{folder}: {error}") from error


def _read_description(folder: Path) -> tuple[dict[str, Any], Parts]:
    """The object in config.json, and its parts by name."""
    if not (folder / CONFIG).is_file():
        adapter = (folder / ADAPTER_CONFIG).is_file()
        raise StoreError(f"not a model folder: {IS_ADAPTER if adapter else f'it has no {CONFIG}'}")
    description = read_object(folder / CONFIG, finite=True)
    version = description.get("format_version")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{CONFIG} has format_version {version!r}, not {FORMAT_VERSION}; a Hugging Face folder is converted "
            f"by: paradec import {folder} DST"
        )
    parts = {}
    for name, section in description["parts"].items():
        if name not in (NETWORK, HEAD):
            raise StoreError(
                f"{CONFIG} has a part {name!r}, unknown to this version ({NETWORK}, {HEAD})"
            )
        family, weights = section["family"], section["weights"]
        if not isinstance(weights, dict) or any(Path(file).name != file for file in weights):
            raise StoreError(
                f"weights of {name} must be files with SHA-256, not {weights!r:.50}: export a folder "
                "of an earlier commit there, and import it here (paradec import)"
            )
        kind = ResidualHeadConfig if family == name == HEAD else family_named(family).config
        parts[name] = _built(kind, section["config"]), weights
    return description, parts


def _built(cls: type, values: Mapping[str, Any]) -> Any:
    """A dataclass of these fields, whose lists are tuples."""
    return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})


def _check_ids(model: Model) -> None:
    """Refuses special tokens beyond the vocabulary, and a tokenizer of another; texts may not use
    its last ids.
    """
    size, spec, tokenizer = model.config.vocab_size, model.token_spec, model.tokenizer
    optional = [token for token in (spec.bos, spec.mask) if token is not None]
    for token in (*optional, *spec.stop, spec.pad):
        if isinstance(token, bool | float) or not 0 <= token < size:
            raise StoreError(
                f"token_spec holds {token!r}, which is no id of a vocabulary of {size}"
            )
    if tokenizer is not None and tokenizer.vocab_size > size:
        last = tokenizer.vocab_size - 1
        if last >= size + FEW:  # of another model; a few are added without rows for them
            raise StoreError(
                f"the tokenizer has the token id {last}, but the vocabulary ends at {size - 1}"
            )
        tokenizer.rows = size


def _check_leaves(config: Any, leaves: Mapping[str, Any]) -> None:
    """Refuses parameters of other paths, shapes or types than a config asks for, and unknown types."""
    check_words(config, dtype=PARAM_DTYPES, param_dtype=PARAM_DTYPES)
    fields = vars(config).items()
    layers = max(
        value for name, value in fields if name.endswith("layers") and isinstance(value, int)
    )
    if layers > len(leaves):  # before the shapes of so many are made
        raise StoreError(
            f"the config asks for {layers} layers, but there are only {len(leaves)} parameters"
        )
    expected = flatten_dict(parameter_shapes(config), sep="/")
    for path in sorted(expected.keys() | leaves.keys()):
        if path not in leaves:
            raise StoreError(f"parameter {path} is missing, although the config asks for it")
        if path not in expected:
            raise StoreError(f"parameter {path} is there, although the config does not ask for it")
        have, asked = (f"{of[path].dtype} {of[path].shape}" for of in (leaves, expected))
        if have != asked:
            raise StoreError(f"parameter {path} is {have}, but the config asks for {asked}")


def _check_head(
    head: ResidualHeadConfig, network: ModelConfig, trained_on: object, backbone: str
) -> None:
    """Refuses the head of another network, by its shape or by the fingerprint that it names."""
    check_fits(head, network)
    if trained_on != backbone:
        raise StoreError(
            f"the residual head was trained on another backbone (fingerprint {str(trained_on)[:12]}) than the one "
            f"beside it ({backbone[:12]})"
        )


def _open_part(folder: Path, config: Any, weights: Mapping[str, str], allow_nonfinite: bool) -> Any:
    """The parameters of a part, which lie in unchanged files and are those that its config asks
    for.
    """
    tensors: dict[str, Lazy] = {}
    for file in weights:
        tensors |= open_tensors(folder / file)
    _check_leaves(config, tensors)
    for file in weights:
        if sha256_of(folder / file) != weights[file]:
            raise StoreError(f"{file} differs from its digest in {CONFIG}")
    if not allow_nonfinite:
        tensors = {path: finite(path, tensor) for path, tensor in tensors.items()}
    return unflatten_dict(tensors, sep="/")


def _fingerprint(parts: Parts) -> str:
    """The digest of what tells parts from others: shapes, and digests of files."""
    content = {}
    for name, (config, weights) in parts.items():
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        fields = config.to_dict().items()
        counting = {k: v for k, v in fields if k not in IDLE_FIELDS and v != defaults[k]}
        content[name] = {"family": config.family, "config": counting, "weights": weights}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
