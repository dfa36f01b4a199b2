"""Knobs: small pytrees of numbers that steer a decoder. Changing them never recompiles, `vmap` over them works."""

import dataclasses
import functools
import inspect
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode.rules.sampling import TINY

UNLIMITED = np.iinfo(np.int32).max


def knob(default: Any, **metadata: Any) -> Any:
    """A knob's field. Its annotation says whether it holds whole numbers (`int`) or any (`float`).

    Args:
      default: its value where the caller says nothing.
      metadata: `unset`, what stands for None in the compiled program, a number or a function of the decoder;
        `schedule=True` allows one value for each age, an array [K]; `names`, words that may stand for the numbers
        0, 1, ..; `needs`, a field of the decoder and the value below which, or the values without which, the knob
        must be None; `most`, a number of the decoder that it may not exceed.
    """
    return dataclasses.field(default=default, metadata=metadata)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingKnobs:
    """Numbers that shape the token distribution, the root of all knobs.

    Attributes:
      temperature: T; 0, or a number below 1e-6, takes the most probable token.
      top_k: tokens kept, ties at the k-th included; None keeps all.
      top_p: probability mass kept; 1 keeps all.
      min_p: smallest probability kept, relative to the largest; 0 keeps all.
    """

    temperature: Float[Array, ""] | float = 0.0
    top_k: Int[Array, ""] | int | None = knob(None, unset=UNLIMITED)
    top_p: Float[Array, ""] | float = 1.0
    min_p: Float[Array, ""] | float = 0.0

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        check_range(self.temperature, "temperature", lambda x: x >= 0, "at least 0")
        check_range(self.top_k, "top_k", lambda x: x >= 1, "at least 1 (None keeps all tokens)")
        check_range(self.top_p, "top_p", lambda x: (x > 0) & (x <= 1), "above 0 and at most 1")
        check_range(self.min_p, "min_p", lambda x: (x >= 0) & (x <= 1), "between 0 and 1")


def check_range(value: Any, name: str, allowed: Any, text: str) -> None:
    """Refuses a knob outside its range, unless it is traced or not set. Raises ValueError.

    A number below 1.2e-38, which a program may take for 0, is 0 here.
    """
    if value is None or isinstance(value, jax.core.Tracer):
        return
    value = np.asarray(value)
    if not np.all(allowed(np.where(np.abs(value) < TINY, np.zeros_like(value), value))):
        raise ValueError(f"{name} must be {text}, not {value}")


def check_types(knobs: Any) -> None:
    """Refuses what is no number of its field's kind, what 32 bits cannot hold, and NaN. Raises ValueError."""
    for field in dataclasses.fields(knobs):
        value, optional = getattr(knobs, field.name), "unset" in field.metadata
        if (value is None and optional) or (isinstance(value, str) and "names" in field.metadata):
            continue
        dtype = _dtype(knobs, field.name)
        if not _holds(dtype, value):
            kind = "a whole number of 32 bits" if dtype == np.int32 else "a number of float32"
            allowed = " or ".join([*field.metadata.get("names", ()), kind, *["None"] * optional])
            raise ValueError(f"{field.name} must be {allowed}, not {value!r}")


@functools.cache
def _whole(kind: type) -> frozenset[str]:
    """Fields that hold whole numbers: annotated so, or words that stand for them."""
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        hints |= inspect.get_annotations(base, eval_str=True)
    return frozenset(
        field.name
        for field in dataclasses.fields(kind)
        if "names" in field.metadata or int in (hints[field.name], *typing.get_args(hints[field.name]))
    )


def _dtype(knobs: Any, name: str) -> Any:
    """What a knob is in a program, by its field: int32, or float32, or float64 where it is given so and allowed."""
    value = getattr(knobs, name)
    if name in _whole(knobs.__class__) and _given(value).ndim == 0:
        return np.dtype(np.int32)
    wide = type(value) is not float and jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    return np.dtype(np.float64 if wide and _given(value).dtype == np.float64 else np.float32)


def _given(value: Any) -> Any:
    """The value as an array; lists of unequal lengths, which are none, as an object."""
    try:
        return value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:
        return np.asarray(None)


def _holds(dtype: Any, value: Any) -> bool:
    """Whether a number, or each of an array, is one of this type but for rounding."""
    given = _given(value)
    if dtype == np.int32:
        number, whole = jnp.issubdtype(given.dtype, jnp.integer), np.iinfo(dtype)
        return number and (isinstance(value, jax.core.Tracer) or whole.min <= int(given) <= whole.max)
    if not any(jnp.issubdtype(given.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        return False
    if isinstance(value, jax.core.Tracer):
        return True
    given = np.asarray(given)
    with np.errstate(over="ignore"):
        return bool(np.all(np.isinf(given) | np.isfinite(given.astype(dtype))))


def check_most(knobs: Any, decoder: Any) -> None:
    """Refuses a knob above what its decoder allows, the `most` of its field. Raises ValueError."""
    for field in dataclasses.fields(knobs):
        value = getattr(knobs, field.name)
        if "most" in field.metadata and not _same(value, field.metadata.get("unset")):
            name = field.metadata["most"]
            most = getattr(decoder, name)
            check_range(value, field.name, lambda x, most=most: x <= most, f"at most the {name}'s {most}")


def _same(value: Any, unset: Any) -> bool:
    """Whether a knob stands as `as_arrays` leaves one that is not set."""
    return not isinstance(value, jax.core.Tracer) and np.ndim(value) == 0 and bool(np.asarray(value) == unset)


Need = tuple[str, int | tuple[str, ...]]


def unneeded(knobs: Any, decoder: Any) -> dict[str, Need]:
    """Knobs that mean nothing to a decoder, each with what it `needs`: a field, and its least value or its values."""
    needs = {f.name: f.metadata["needs"] for f in dataclasses.fields(knobs) if "needs" in f.metadata}
    return {
        knob: (name, wanted)
        for knob, (name, wanted) in needs.items()
        if hasattr(decoder, name) and not _meets(getattr(decoder, name), wanted)
    }


def _meets(value: Any, wanted: int | tuple[str, ...]) -> bool:
    return value in wanted if isinstance(wanted, tuple) else value >= wanted


def told_need(need: Need) -> str:
    """What a knob needs, in words."""
    name, wanted = need
    return f"{name} {' or '.join(wanted)}" if isinstance(wanted, tuple) else f"{name} of at least {wanted}"


def as_arrays(knobs: Any, decoder: Any = None) -> Any:
    """The knobs as float32 and int32 scalars, so that all numbers, None and arrays trace one program.

    Args:
      knobs: as the caller gave them.
      decoder: what a knob's `unset` may depend on.

    Raises:
      ValueError: an array where one number for all rows is wanted.
    """
    for field in dataclasses.fields(knobs):
        shape, name = np.shape(getattr(knobs, field.name)), field.name
        if field.metadata.get("schedule"):
            if len(shape) > 1 or 0 in shape:
                raise ValueError(
                    f"{name} must be a number or a schedule [K] of one value an age, not of shape {shape}"
                )
        elif shape:
            raise ValueError(
                f"{name} must be one number for all rows, not of shape {shape}: use vmap to try several"
            )
    unset = {
        field.name: _value_of(field.metadata["unset"], decoder)
        for field in dataclasses.fields(knobs)
        if getattr(knobs, field.name) is None and "unset" in field.metadata
    }
    words = {
        field.name: field.metadata["names"].index(getattr(knobs, field.name))
        for field in dataclasses.fields(knobs)
        if isinstance(getattr(knobs, field.name), str)
    }
    knobs = dataclasses.replace(knobs, **unset, **words)
    values = {field.name: getattr(knobs, field.name) for field in dataclasses.fields(knobs)}
    arrays = {name: _as_array(x, _dtype(knobs, name)) for name, x in values.items() if x is not None}
    return dataclasses.replace(knobs, **arrays)


def _value_of(unset: Any, decoder: Any) -> Any:
    return unset(decoder) if callable(unset) else unset


def _as_array(x: Any, dtype: Any) -> Array:
    if isinstance(x, jax.Array):
        return lax.convert_element_type(x, dtype)
    # Placed on the device as it is: `jnp.asarray` compiles a program for each type.
    return jax.device_put(np.asarray(x).astype(dtype))
