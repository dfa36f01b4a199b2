"""Knobs: small pytrees of numbers that steer a decoder. Changing them never recompiles, `vmap` over
them works.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode.rules import TINY
from paradec_jax.records import pytree

UNLIMITED = np.iinfo(np.int32).max
Number, Whole = Float[Array, ""] | float, Int[Array, ""] | int
Scheduled = Float[Array, "..."] | float  # a number, or a schedule [K] of one for each age


class Range(NamedTuple):
    """What the numbers of a knob may be, as a function of them and in words."""

    holds: Callable[[Any], Any]
    words: str


NOT_NEGATIVE = Range(lambda x: x >= 0, "at least 0")
POSITIVE = Range(lambda x: x > 0, "above 0")
COUNT = Range(lambda x: x >= 1, "at least 1")
SHARE = Range(lambda x: (x >= 0) & (x <= 1), "between 0 and 1")


def knob(
    default: Any,
    allowed: Range | None = None,
    *,
    unset: Any = None,
    needs: tuple[str, Any] | None = None,
) -> Any:
    """A knob with a range, or one that may be None.

    Args:
      default: its value where the caller says nothing.
      allowed: what its numbers may be; any when None.
      unset: what stands for None in the compiled program, a number or a function of the decoder;
        without it the program is another one.
      needs: a field of the decoder, and its least value or the values with which the knob means
        something.
    """
    return dataclasses.field(
        default=default, metadata={"allowed": allowed, "unset": unset, "needs": needs}
    )


@pytree
class SamplingKnobs:
    """Numbers that shape the token distribution, the root of all knobs.

    Attributes:
      temperature: T; 0, or a number below 1e-6, takes the most probable token.
      top_k: tokens kept, ties at the k-th included; None keeps all.
      top_p: probability mass kept, by the fewest tokens that reach it; 1 keeps all.
      min_p: smallest probability kept, relative to the largest; 0 keeps all.
    """

    temperature: Number = knob(0.0, NOT_NEGATIVE)
    top_k: Whole | None = knob(
        None, Range(COUNT.holds, "at least 1 (None keeps all tokens)"), unset=UNLIMITED
    )
    top_p: Number = knob(1.0, Range(lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"))
    min_p: Number = knob(0.0, SHARE)

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        for field in dataclasses.fields(self):
            if allowed := field.metadata.get("allowed"):
                check_range(getattr(self, field.name), field.name, *allowed)


@pytree
class RepetitionKnobs(SamplingKnobs):
    """Sampling of decoders that append tokens one after the other.

    Attributes:
      repetition_penalty: number by which positive logits of tokens that the row holds, its prompt
        included, are divided, and other logits of these tokens multiplied, before the temperature.
        1 changes nothing, and a program for None holds no code for it. Log-probabilities that are
        kept are those without it.
    """

    repetition_penalty: Number | None = knob(None, POSITIVE)


def at_age(knob: Any, age: Int[Array, "*shape"]) -> Array:
    """`knob[min(age, K - 1)]` of a schedule [K], of the shape of `age`; a number stays that number
    at every age.

    The age is the number of steps that a position, or its block, has done.
    """
    knob = jnp.asarray(knob)
    return knob if knob.ndim == 0 else knob[jnp.minimum(age, knob.shape[0] - 1)]


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
    """What each knob may be, by its annotation: `int` for a whole number, words, an array of some
    shape.
    """
    hints = typing.get_type_hints(kind)
    return {
        f.name: typing.get_args(hints[f.name]) or (hints[f.name],) for f in dataclasses.fields(kind)
    }


def unneeded(knobs: Any, decoder: Any) -> dict[str, str]:
    """Knobs that mean nothing to a decoder, each with what they need instead, in words."""
    missing = {}
    for field in dataclasses.fields(knobs):
        name, wanted = field.metadata.get("needs") or ("", ())
        if not hasattr(decoder, name):
            continue
        value, words = getattr(decoder, name), isinstance(wanted, tuple)
        if value not in wanted if words else value < wanted:
            need = " or ".join(map(str, wanted)) if words else f"of at least {wanted}"
            missing[field.name] = f"{name} {need}, not {value}"
    return missing


def as_arrays(knobs: Any, decoder: Any = None) -> Any:
    """The knobs as float32 and int32 arrays, so that all numbers and arrays trace one program, and
    None where something stands for it.

    Args:
      knobs: as the caller gave them.
      decoder: what a knob's `unset` may depend on.

    Raises:
      ValueError: what is no number of its field's kind, what 32 bits cannot hold, NaN, and an array
        where one number for all rows is wanted; values out of their range, by `check`.
    """
    arrays, options_of = {}, alternatives(knobs.__class__)
    for field in dataclasses.fields(knobs):
        name, unset = field.name, field.metadata.get("unset")
        options, value = options_of[name], getattr(knobs, name)
        if value is None and type(None) in options:
            value = unset(decoder) if callable(unset) else unset
        arrays[name] = _array(name, options, value, unset is not None or "threshold" in name)
    knobs.check()
    return dataclasses.replace(knobs, **arrays)


def _array(name: str, options: tuple[Any, ...], value: Any, endless: bool) -> Any:
    """A field's value as an array of the dtype that it has in a program; None as it is.

    Where it is `endless`, infinity stands for None or for a threshold that all pass.
    """
    optional = type(None) in options
    # Words may stand for the numbers 0, 1, ..
    words = next(
        (typing.get_args(x) for x in options if typing.get_origin(x) is typing.Literal), ()
    )
    if value is None and optional:
        return None
    if isinstance(value, str) and words:
        # The class refuses other words.
        return np.asarray(words.index(value) if value in words else 0, np.int32)
    try:
        given = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:  # a list of lists of unequal lengths
        given = np.asarray(None)

    whole = given.ndim == 0 and (int in options or bool(words))
    wide = type(value) is not float and jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    dtype = np.dtype(
        np.int32 if whole else np.float64 if wide and given.dtype == np.float64 else np.float32
    )
    kinds = (jnp.integer,) if whole else (jnp.floating, jnp.integer, jnp.bool_)
    right = any(jnp.issubdtype(given.dtype, kind) for kind in kinds)
    if right and not isinstance(value, jax.core.Tracer):
        exact = np.asarray(given)
        with np.errstate(over="ignore"):
            cast = exact.astype(dtype)
        right = bool(
            np.all(cast == exact if whole else np.isinf(exact) & endless | np.isfinite(cast))
        )
    if not right:
        number = "a whole number of 32 bits" if whole else "a number of float32"
        allowed = " or ".join([*words, number, *["None"] * optional])
        raise ValueError(f"{name} must be {allowed}, not {value!r}")
    schedule = any(getattr(option, "dim_str", "") for option in options)
    if given.ndim > int(schedule) or 0 in given.shape:
        shape = (
            "a number or a schedule [K] of one value an age"
            if schedule
            else "one number for all rows"
        )
        raise ValueError(
            f"{name} must be {shape}, not of shape {given.shape} (vmap tries several numbers)"
        )
    # An array of the host is placed as it is: `jnp.asarray` compiles a program for each type.
    return (
        lax.convert_element_type(value, dtype)
        if isinstance(value, jax.Array)
        else jax.device_put(cast)
    )
