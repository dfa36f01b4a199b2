"""Reads and writes config.json: fields and their types, types of numbers, token ids."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paradec_jax.config import TokenSpec
from paradec_jax.disk import tensors
from paradec_jax.store.model import PARAM_DTYPES

from .engine import ConvertError, Json

# Our field: official names (aliases after the first must agree), type, default (None: required).
Field = tuple[tuple[str, ...], type, Any]
Fields = dict[str, Field]
Config = TypeVar("Config")
# Fields that tell of what is not supported, and the words for it.
EXPERTS = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts"), "a mixture of experts"
)
QUANTISED = "quantised weights (take the folder that was quantised)"
UNSUPPORTED = EXPERTS | dict.fromkeys(("quantization_config", "quantization"), QUANTISED)


def field(kind: type, *names: str, default: Any = None) -> Field:
    """A row of `Fields`."""
    return names, kind, default


whole, real = functools.partial(field, int), functools.partial(field, float)
flag = functools.partial(field, bool, default=False)


def matches(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a plain type; integers pass for floats, booleans for bool alone."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def parse_fields(fields: Json, table: Fields) -> dict[str, Any]:
    """Our config fields from the official ones.

    Raises:
      ConvertError: naming the field that is missing, of a wrong type or contradictory.
    """
    ours = {}
    for field, (names, kind, default) in table.items():
        given = {name: fields[name] for name in names if fields.get(name) is not None}
        for name, value in given.items():
            if not matches(value, kind):
                raise ConvertError(
                    f"field {name} of config.json must be of type {kind.__name__}, not {value!r}"
                )
        if not given and default is None:
            raise ConvertError(f"field {names[0]} is missing from config.json")
        if len(set(given.values())) > 1:
            listed = ", ".join(f"{name} = {value!r}" for name, value in given.items())
            raise ConvertError(f"fields of config.json contradict each other: {listed}")
        ours[field] = kind(next(iter(given.values()), default))
    return ours


def built(config: Callable[..., Config], ours: Json) -> Config:
    """A config of these fields. Raises ConvertError when no model has these sizes."""
    try:
        return config(**ours)
    except ValueError as error:
        raise ConvertError(f"config.json describes no valid model: {error}") from error


def check_fixed(fields: Json, fixed: Json) -> None:
    """Refuses other values of fields that admit one. Raises ConvertError."""
    for name, value in fixed.items():
        if fields.get(name) not in (None, value):
            raise ConvertError(
                f"field {name} of config.json must be {value!r}, not {fields[name]!r}: another value is not supported"
            )


def check_plain(fields: Json) -> None:
    """Refuses a mixture of experts and quantised weights, naming the field that tells of it."""
    for name, what in UNSUPPORTED.items():
        if fields.get(name):
            raise ConvertError(
                f"config.json describes {what}, which is not supported: {name} = {fields[name]!r:.200}"
            )


def typed(config: Config, fields: Json, param_dtype: str) -> Config:
    """A config with its two types: that of its parameters, in which the network computes unless a
    field names another.

    Raises:
      ConvertError: when the field names no floating type.
    """
    given, known = present(fields), tensors.DTYPES.values()
    named = given.get("dtype", given.get("torch_dtype", param_dtype))
    plain = str(named).removeprefix("torch.")
    if plain not in known:
        raise ConvertError(
            f"field dtype or torch_dtype of config.json must be one of {', '.join(known)}, not {named!r}"
        )
    dtype = plain if plain in PARAM_DTYPES else param_dtype
    return dataclasses.replace(config, dtype=dtype, param_dtype=param_dtype)  # type: ignore[type-var]


def token_ids(fields: Json, name: str, vocab_size: int, file: str = "config.json") -> list[int]:
    """Token ids of a field: one, a list of them, or nothing, which some files write as -1.

    Raises:
      ConvertError: when it holds anything else, or ids beyond the vocabulary.
    """
    value = fields.get(name)
    values = [] if value in (None, -1) else value if isinstance(value, list) else [value]
    for token in values:
        if not matches(token, int) or token < 0:
            raise ConvertError(f"field {name} of {file} must hold token ids, not {value!r}")
        if token >= vocab_size:
            raise ConvertError(
                f"field {name} of {file} holds {token}, but the vocabulary ends at {vocab_size - 1}"
            )
    return values


def token_spec(
    bos: Sequence[int],
    stop: Sequence[int],
    pad: Sequence[int],
    mask: Sequence[int] = (),
    alignment: str = "next",
) -> TokenSpec:
    """Special tokens by the ids that files name, the first of each but of those that end a text."""
    stops = tuple(dict.fromkeys(stop))
    return TokenSpec(next(iter(bos), None), stops, [*pad, 0][0], next(iter(mask), None), alignment)


def format_tokens(tokens: TokenSpec) -> dict[str, Any]:
    """Special tokens as fields of config.json, None where there is none."""
    stop: Any = list(tokens.stop) or None
    return {
        "bos_token_id": tokens.bos,
        "eos_token_id": stop[0] if len(tokens.stop) == 1 else stop,
        "pad_token_id": tokens.pad,
        **({} if tokens.mask is None else {"mask_token_id": tokens.mask}),
    }


def present(fields: Json) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def write_config(folder: Path, fields: Json, tokens: TokenSpec) -> None:
    """Writes config.json, with the special tokens that there are."""
    write_json(folder / "config.json", {**fields, **present(format_tokens(tokens))})


def write_json(path: Path, fields: Json) -> None:
    """Writes an object as a JSON file that is easy to read."""
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
