"""Reads config.json: fields and their types, those that admit one value, contradictions, token ids."""

from collections.abc import Mapping
from typing import Any

from convert.engine import ConvertError
from paradec_jax.disk.description import DTYPES, matches

# Our field: official names (aliases after the first must agree with it), type, default (None: required).
Fields = dict[str, tuple[tuple[str, ...], type, Any]]

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how many a layer chooses from


def parse_fields(fields: Mapping[str, Any], table: Fields) -> dict[str, Any]:
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
        try:
            ours[field] = kind(next(iter(given.values()), default))
        except OverflowError as error:  # a whole number beyond all floats
            raise ConvertError(f"field {names[0]} of config.json is too large") from error
    return ours


def check_fixed(fields: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Refuses another value of a field for which one alone is implemented.

    Raises:
      ConvertError: naming the field.
    """
    for name, value in fixed.items():
        if fields.get(name, value) != value:
            raise ConvertError(f"field {name} of config.json must be {value!r}, not {fields[name]!r}")


def check_dense(fields: Mapping[str, Any]) -> None:
    """Refuses a mixture of experts.

    Raises:
      ConvertError: naming the field that tells of it.
    """
    kind = fields.get("model_type")
    found = [name for name in EXPERTS if fields.get(name)]
    if found or str(kind).endswith("_moe"):
        name = found[0] if found else "model_type"
        raise ConvertError(
            f"config.json describes a mixture of experts ({name} = {fields[name]!r}), which is not supported"
        )


def check_derived(fields: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
    """Refuses a field that contradicts the others, from which it follows.

    Raises:
      ConvertError: naming the field.
    """
    for name, value in derived.items():
        if fields.get(name, value) != value:
            raise ConvertError(
                f"field {name} of config.json is {fields[name]!r}, but the others make it {value}"
            )


def activation_dtype(fields: Mapping[str, Any], default: str) -> str:
    """The type in which the network computes.

    Raises:
      ConvertError: when it is not one of ours.
    """
    dtype = fields.get("torch_dtype") or fields.get("dtype") or default
    if dtype not in DTYPES:
        raise ConvertError(f"field torch_dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    return dtype


def token_ids(fields: Mapping[str, Any], name: str, file: str = "config.json") -> list[int]:
    """Token ids of a field that holds one, a list of them, or nothing.

    Raises:
      ConvertError: when it holds anything else.
    """
    value = fields.get(name)
    values = [] if value is None else value if isinstance(value, list) else [value]
    for token in values:
        if not matches(token, int) or token < 0:
            raise ConvertError(f"field {name} of {file} must hold token ids, not {value!r}")
    return values
