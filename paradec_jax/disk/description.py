"""The texts of a model folder, dataclasses from the objects in its config.json, and what these say of parameters."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from paradec_jax.config import TokenSpec
from paradec_jax.disk.folders import StoreError
from paradec_jax.io import read_object
from paradec_jax.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16")
CHAT_TEMPLATE = "chat_template.jinja"
LAYERS = ("layers", "prelude_layers", "core_layers", "coda_layers")  # fields of configs that count layers
IDLE_FIELDS = (
    "attention",
    "remat",
    "scan_layers",
    "mean_backprop_depth",
    "dropout",
)  # of a config: they change no output


def read_description(folder: Path, version: int) -> dict[str, Any]:
    """The config.json of a model folder of that format.

    Raises:
      StoreError: when it is missing, no JSON object, or that of something else.
    """
    path = folder / "config.json"
    foreign = f"{folder} is a Hugging Face folder; convert it first: python -m convert import {folder} DST"
    if not path.is_file():
        if any(folder.glob("model*.safetensors")):
            raise StoreError(foreign)
        raise StoreError(f"{folder} is not a model folder: it has no config.json")
    description = stored(lambda: read_object(path))
    if "format_version" not in description:
        if "model_type" in description or any(folder.glob("model*.safetensors")):
            raise StoreError(foreign)
        raise StoreError(f"{path} has no format_version: not a model of paradec_jax")
    given = description["format_version"]
    if not matches(given, int) or given != version:
        raise StoreError(f"{folder} has format {given!r}, but this version reads format {version} alone")
    return description


def stored(read: Callable[[], Any]) -> Any:
    """What `read` returns, its errors as those of a folder.

    Raises:
      StoreError: where it raises ValueError or OSError.
    """
    try:
        return read()
    except (ValueError, OSError) as error:
        raise StoreError(str(error)) from error


def build(cls: type, values: Any, where: str) -> Any:
    """A dataclass from its JSON object; unknown fields are refused."""
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
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"{where} is wrong: {error}") from error


def matches(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a plain type: integers pass for floats, booleans for nothing but bool."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def check_names(expected: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuses a parameter that is missing, or that the config does not ask for."""
    for path in sorted(expected.keys() - names):
        raise StoreError(f"parameter {path} is missing, although the config asks for it")
    for path in sorted(names - expected.keys()):
        raise StoreError(f"parameter {path} is there, although the config does not ask for it")


def check_layers(config: Any, count: int) -> None:
    """Refuses more layers than there are parameters, before a tree of so many is made."""
    for name in LAYERS:
        if getattr(config, name, 0) > count:
            raise StoreError(
                f"the config asks for {getattr(config, name)} {name}, but there are only {count} parameters"
            )


def check_leaf(expected: Mapping[str, Any], path: str, leaf: Any) -> None:
    """Refuses a parameter of another shape or type than the config asks for."""
    want = expected[path]
    if leaf.shape != want.shape:
        raise StoreError(f"parameter {path} has shape {leaf.shape}, but the config asks for {want.shape}")
    if str(leaf.dtype) != str(want.dtype):
        raise StoreError(f"parameter {path} is {leaf.dtype}, but the config asks for {want.dtype}")


def counting(config: Any) -> dict[str, Any]:
    """The fields of a config that are not at their defaults, without those that change no output."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in IDLE_FIELDS and value != defaults[name]
    }


def identity(config: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a network that one: its shape, without what changes no output, and the digests."""
    return {"family": config.family, "config": counting(config), "sha256": recorded}


def sha256(content: Mapping[str, Any]) -> str:
    """The digest of a JSON object."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_facts(config: Any, token_spec: TokenSpec) -> None:
    """Numeric types are known ones, and special tokens lie in the vocabulary."""
    check_dtypes(config)
    optional = [i for i in (token_spec.bos, token_spec.mask) if i is not None]
    for token in (*optional, *token_spec.stop, token_spec.pad):
        if not matches(token, int) or not 0 <= token < config.vocab_size:
            raise StoreError(
                f"token_spec holds {token!r}, which is no id of a vocabulary of {config.vocab_size}"
            )


def check_dtypes(config: Any) -> None:
    """Numeric types are known ones."""
    for name in ("dtype", "param_dtype"):
        if getattr(config, name) not in DTYPES:
            raise StoreError(f"{name} must be one of {', '.join(DTYPES)}, not {getattr(config, name)!r}")


def read_texts(folder: Path, description: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """A model folder's tokenizer, chat template and special tokens, by the names that `store.Model` has for them.

    Raises:
      StoreError: when one of them cannot be read.
    """
    words = folder / "tokenizer.json"
    special = description.get("special_tokens", {})
    if not isinstance(special, dict) or not all(isinstance(text, str) for text in special.values()):
        raise StoreError(
            f"special_tokens of {folder / 'config.json'} must be texts by name, not {special!r:.200}"
        )
    return {
        "tokenizer": read_tokenizer(words, vocab_size) if words.exists() else None,
        "chat_template": read_chat_template(folder / CHAT_TEMPLATE),
        "special_tokens": special,
    }


def read_chat_template(path: Path) -> str | None:
    """The text of a chat_template.jinja, or None where there is no such file.

    Raises:
      StoreError: when it is not a text in UTF-8, or no template.
    """
    if not path.is_file():
        return None
    from paradec_jax import chat  # here, because few folders have a template and Jinja takes long to import

    try:
        template = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise StoreError(f"{path} is not a text in UTF-8 ({error})") from error
    try:
        chat.check(template)
    except ValueError as error:
        raise StoreError(f"{path}: {error}") from error
    return template


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer.json of a model with that vocabulary.

    Raises:
      StoreError: when it cannot be read, or has ids beyond the vocabulary.
    """
    tokenizer = stored(lambda: Tokenizer.from_file(path))
    check_ids(tokenizer, vocab_size, str(path))
    return tokenizer


def check_ids(tokenizer: Tokenizer, vocab_size: int, name: str = "the tokenizer") -> None:
    """Refuses a tokenizer that may give an id beyond the vocabulary. Raises StoreError."""
    if tokenizer.vocab_size > vocab_size:
        raise StoreError(
            f"{name} has the token id {tokenizer.vocab_size - 1}, but the model's vocabulary ends at {vocab_size - 1}"
        )
