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


def knob(default: Any, unset: Any = None, needs: tuple[str, Any] | None = None) -> Any:
    """A knob that may be None.

    Args:
      default: its value where the caller says nothing.
      unset: what stands for None in the compiled program, a number or a function of the decoder.
      needs: a field of the decoder, and its least value or the values with which the knob means something.
    """
    return dataclasses.field(default=default, metadata={"unset": unset, "needs": needs})


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


@functools.cache
def alternatives(kind: type) -> dict[str, tuple[Any, ...]]:
    """What each knob may be, by its annotation: `int` for a whole number, words, an array of some shape."""
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        hints |= inspect.get_annotations(base, eval_str=True)
    return {f.name: typing.get_args(hints[f.name]) or (hints[f.name],) for f in dataclasses.fields(kind)}


def words_of(kind: type, name: str) -> tuple[str, ...]:
    """Words that may stand for the numbers 0, 1, .. of a knob."""
    literals = (
        typing.get_args(x) for x in alternatives(kind)[name] if typing.get_origin(x) is typing.Literal
    )
    return next(literals, ())


def check_types(knobs: Any) -> None:
    """Refuses what is no number of its field's kind, what 32 bits cannot hold, and NaN. Raises ValueError."""
    for field in dataclasses.fields(knobs):
        value, optional = getattr(knobs, field.name), "unset" in field.metadata
        words = words_of(type(knobs), field.name)
        if (value is None and optional) or (isinstance(value, str) and words):
            continue
        dtype = _dtype(type(knobs), field.name, value)
        if not _holds(dtype, value):
            kind = "a whole number of 32 bits" if dtype == np.int32 else "a number of float32"
            allowed = " or ".join([*words, kind, *["None"] * optional])
            raise ValueError(f"{field.name} must be {allowed}, not {value!r}")


def _dtype(kind: type, name: str, value: Any) -> Any:
    """What a knob is in a program, by its field: int32, or float32, or float64 where it is given so and allowed."""
    whole = int in alternatives(kind)[name] or words_of(kind, name)
    if whole and _given(value).ndim == 0:
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


def unneeded(knobs: Any, decoder: Any) -> dict[str, str]:
    """Knobs that mean nothing to a decoder, each with what they need instead, in words."""
    found = {}
    for field in dataclasses.fields(knobs):
        name, wanted = field.metadata.get("needs") or ("", ())
        if hasattr(decoder, name):
            value, words = getattr(decoder, name), isinstance(wanted, tuple)
            if value not in wanted if words else value < wanted:
                told = " or ".join(wanted) if words else f"of at least {wanted}"
                found[field.name] = f"{name} {told}, not {value}"
    return found


def as_arrays(knobs: Any, decoder: Any = None) -> Any:
    """The knobs as float32 and int32 scalars, so that all numbers, None and arrays trace one program.

    Args:
      knobs: as the caller gave them.
      decoder: what a knob's `unset` may depend on.

    Raises:
      ValueError: an array where one number for all rows is wanted.
    """
    kind: Any = type(knobs)
    arrays: dict[str, Array] = {}
    for field in dataclasses.fields(knobs):
        name, value = field.name, getattr(knobs, field.name)
        shape = np.shape(value)
        schedule = any(getattr(one, "dim_str", "") for one in alternatives(kind)[name])
        if schedule:
            if len(shape) > 1 or 0 in shape:
                raise ValueError(
                    f"{name} must be a number or a schedule [K] of one value an age, not of shape {shape}"
                )
        elif shape:
            raise ValueError(
                f"{name} must be one number for all rows, not of shape {shape}: use vmap to try several"
            )
        unset = field.metadata.get("unset")
        if value is None:
            value = unset(decoder) if callable(unset) else unset
        if isinstance(value, str):
            value = words_of(kind, name).index(value)
        if isinstance(value, jax.Array):
            arrays[name] = lax.convert_element_type(value, _dtype(kind, name, value))
        elif value is not None:
            # Placed on the device as it is: `jnp.asarray` compiles a program for each type.
            arrays[name] = jax.device_put(np.asarray(value).astype(_dtype(kind, name, value)))
    return dataclasses.replace(knobs, **arrays)
