"""Reads config.json: fields and their types, those that admit one value, contradictions, token ids."""

from collections.abc import Mapping
from typing import Any

from convert.engine import ConvertError
from paradec_jax.disk import tensors
from paradec_jax.disk.description import DTYPES, matches

# Our field: official names (aliases after the first must agree with it), type, default (None: required).
Fields = dict[str, tuple[tuple[str, ...], type, Any]]

# PyTorch's other names of floating types.
SPELLED = {"float": "float32", "half": "float16", "double": "float64"}
DTYPE_FIELDS = ("dtype", "torch_dtype")  # the newer one, which counts, first
QUANTISED = ("quantization_config", "quantization")
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
        if fields.get(name) is not None and fields[name] != value:
            raise ConvertError(
                f"field {name} of config.json must be {value!r}, not {fields[name]!r}: it changes what the model "
                "computes, and only that is supported"
            )


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


def check_quantised(fields: Mapping[str, Any]) -> None:
    """Refuses quantised weights.

    Raises:
      ConvertError: naming the field that tells of them.
    """
    for name in QUANTISED:
        values = fields.get(name)
        if values:
            method = values.get("quant_method") if isinstance(values, dict) else None
            told = f"{name}, quant_method {method}" if method else name
            raise ConvertError(
                f"config.json describes quantised weights ({told}), which are not supported: take the folder that "
                "was quantised"
            )


def check_derived(fields: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
    """Refuses a field that contradicts the others, from which it follows.

    Raises:
      ConvertError: naming the field.
    """
    for name, value in derived.items():
        if fields.get(name) is not None and fields[name] != value:
            raise ConvertError(
                f"field {name} of config.json is {fields[name]!r}, but the others make it {value}"
            )


def named_dtypes(fields: Mapping[str, Any]) -> dict[str, str]:
    """The floating types that config.json names, by their fields, the one that counts first.

    Raises:
      ConvertError: when a field holds anything else.
    """
    found = {}
    for name in DTYPE_FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        plain = str(value).removeprefix("torch.")
        plain = SPELLED.get(plain, plain)
        if not isinstance(value, str) or plain not in tensors.DTYPES.values():
            known = ", ".join(tensors.DTYPES.values())
            raise ConvertError(f"field {name} of config.json must be one of {known}, not {value!r}")
        found[name] = plain
    return found


def activation_dtype(fields: Mapping[str, Any], default: str) -> str:
    """The type in which the network computes: that of config.json where it is one of ours, else the default.

    Raises:
      ConvertError: as `named_dtypes`.
    """
    named = next(iter(named_dtypes(fields).values()), default)
    return named if named in DTYPES else default


def dtype_notes(fields: Mapping[str, Any], dtype: str) -> list[str]:
    """Sentences about types of config.json that contradict each other or that no network computes in.

    Args:
      fields: config.json.
      dtype: the type in which the network computes.
    """
    named, notes = named_dtypes(fields), []
    if len(set(named.values())) > 1:
        listed = ", ".join(f"{name} = {value}" for name, value in named.items())
        notes.append(f"fields of config.json contradict each other: {listed}; {DTYPE_FIELDS[0]} counts")
    first = next(iter(named.values()), dtype)
    if first not in DTYPES:
        notes.append(f"config.json says {first}, in which nothing is computed here: {dtype} takes its place")
    return notes


def token_ids(fields: Mapping[str, Any], name: str, file: str = "config.json") -> list[int]:
    """Token ids of a field that holds one, a list of them, or nothing, which some files write as -1.

    Raises:
      ConvertError: when it holds anything else.
    """
    value = fields.get(name)
    values = [] if value in (None, -1) else value if isinstance(value, list) else [value]
    for token in values:
        if not matches(token, int) or token < 0:
            raise ConvertError(f"field {name} of {file} must hold token ids, not {value!r}")
    return values
