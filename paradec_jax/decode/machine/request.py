"""What a decoder is asked: prompts or canvases, budgets, keys."""

import dataclasses
import reprlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from paradec_jax.config import check_number
from paradec_jax.records import pytree


@pytree
class RecordedDraws:
    """Draws recorded from another program; they take the place of the keys. Decoders with more
    draws extend it.

    Attributes:
      uniforms: number in [0, 1) that samples the token at each position, for all rows, [P].
    """

    uniforms: Float[Array, "P"] | None = None
    per_row: ClassVar[tuple[str, ...]] = ()  # fields whose first axis counts rows

    def take(self, rows: Array) -> "RecordedDraws":
        """The record of some rows of a request: that of all rows, but for the fields that `per_row`
        names.
        """
        taken = jax.tree.map(
            lambda x: x[rows], {name: getattr(self, name) for name in self.per_row}
        )
        return dataclasses.replace(self, **taken)


@pytree
class Request:
    """Prompts and all that belongs to a row: its budget, its stop tokens, its key.

    ::

        tokens    a b c . . d e | budget ...      `lengths` = 7
        given     x x x - - x x                   holes at 3 and 4: to be generated

    Attributes:
      tokens: the text as far as it is prescribed, right-padded, [B, P].
      lengths: prescribed positions of each row, [B]; 0 where the decoder can start from nothing.
      budgets: new tokens each row may have after them, [B]; 0 only where there is a hole.
      keys: one typed PRNG key a row, [B].
      stop: token ids that end a row (and stay in its output), [B, K]; -1 stands for none.
      given: False marks a hole to fill, [B, P]; None where there is none.
      recorded: recorded draws that take the place of the keys, of the decoder's own type.
    """

    tokens: Int[Array, "B P"]
    lengths: Int[Array, "B"]
    budgets: Int[Array, "B"]
    keys: Array
    stop: Int[Array, "B K"]
    given: Bool[Array, "B P"] | None = None
    recorded: Any = None

    @property
    def batch(self) -> int:
        """B, number of rows."""
        return self.tokens.shape[0]

    def take(self, rows: Any) -> "Request":
        """Some rows of the request."""
        rows = jnp.asarray(rows)
        recorded = None if self.recorded is None else self.recorded.take(rows)
        taken = jax.tree.map(lambda x: x[rows], dataclasses.replace(self, recorded=None))
        return dataclasses.replace(taken, recorded=recorded)


def make_request(
    tokens: Any,
    lengths: Any = None,
    *,
    max_new_tokens: Any,
    stop: Any = (),
    seed: Any = 0,
    keys: Array | None = None,
    given: Any = None,
    recorded: Any = None,
) -> Request:
    """A request from prompt tokens [B, P] or a list of unequal prompts.

    Args:
      tokens: array [B, P] (right-padded where `lengths` is given) or a list of token lists.
      lengths: prescribed positions [B]; by default each list's length, or P.
      max_new_tokens: one budget for all rows, or one a row; 0 only for rows with a hole.
      stop: token ids that end a row.
      seed: row i draws with `fold_in(key(seed), i)` unless `keys` are given; see `seed_words`.
      keys: one typed key a row.
      given: [B, P], or a list of lists as unequal as the prompts; False marks a hole.
      recorded: recorded draws.

    Raises:
      ValueError: a length beyond P, a budget below 1 without a hole, `given` of another shape, a
        negative token, or tokens, lengths, budgets, stop tokens or a seed that are no whole numbers
        of 32 bits (the seed of 64).
    """
    if isinstance(tokens, list | tuple):
        if isinstance(given, list | tuple):
            given = _padded(given, bool)
        tokens = [whole_numbers(f"tokens of row {i}", row) for i, row in enumerate(tokens)]
        if {row.ndim for row in tokens} != {1}:
            raise ValueError(
                "tokens must be [B, P] with at least one row, or a list of lists of ids"
            )
        lengths = [len(row) for row in tokens] if lengths is None else lengths
        tokens = _padded(tokens, np.int32)
    # a copy: a device may read the host's buffer later, or in place
    tokens = whole_numbers("tokens", tokens)
    if tokens.ndim != 2 or tokens.shape[0] == 0:
        raise ValueError(
            f"tokens must be [B, P] with at least one row, not of shape {tokens.shape}"
        )
    check_number("tokens", tokens.min(initial=0), 0)
    batch, width = tokens.shape
    lengths = np.full(batch, width) if lengths is None else whole_numbers("lengths", lengths)
    budgets = np.broadcast_to(whole_numbers("max_new_tokens", max_new_tokens), (batch,))
    stops = whole_numbers("stop", stop)
    if stops.ndim != 1:
        raise ValueError(f"stop must be a list of token ids, not {stop!r}")
    if lengths.shape != (batch,) or lengths.min() < 0 or lengths.max() > width:
        raise ValueError(
            f"lengths must be {batch} numbers from 0 to {width}, not {lengths.tolist()}"
        )
    holes = np.zeros(batch, bool)
    if given is not None:
        given = np.array(given, bool)
        if given.shape != tokens.shape:
            raise ValueError(
                f"given must be of the shape of tokens, {tokens.shape}, not {given.shape}"
            )
        holes = (~given & (np.arange(width) < lengths[:, None])).any(axis=1)
    if budgets.min() < 0 or (budgets[~holes] < 1).any():
        raise ValueError(
            f"max_new_tokens must be at least 1 (0 where given leaves a hole), not {budgets.min()}"
        )
    # Placed on the device without a program of its own for each shape, which `jnp.asarray` would
    # compile.
    stops = np.broadcast_to(stops, (batch, len(stops)))
    arrays = tokens, lengths.astype(np.int32), budgets, stops, given if holes.any() else None
    tokens, lengths, budgets, stops, given = jax.device_put(arrays, may_alias=False)
    if keys is None:
        keys = keys_of_rows(seed, batch)
    return Request(tokens, lengths, budgets, keys, stops, given, recorded)


def whole_numbers(name: str, values: Any, bits: int = 32) -> np.ndarray:
    """A copy of the values as signed integers of so many bits.

    Raises:
      ValueError: floats, bools, texts, lists of unequal lengths, or numbers beyond these bits.
    """
    try:
        array = np.asarray(values)
        if isinstance(values, list | tuple) and {bool, np.bool_} & {*map(type, values)}:
            array = np.asarray(None)  # NumPy takes a bool among numbers for one
    except ValueError:
        array = np.asarray(None)
    dtype = np.dtype(f"int{bits}")
    limits = np.iinfo(dtype)
    whole = array.size == 0 or np.issubdtype(array.dtype, np.integer)
    if not whole or np.any((array < limits.min) | (array > limits.max)):
        raise ValueError(f"{name} must be whole numbers of {bits} bits, not {reprlib.repr(values)}")
    return np.array(array, dtype)


def seed_words(seed: Any) -> UInt32[np.ndarray, "2"]:
    """The words of a seed, the lower one first, since devices compute with 32 bits.

    The upper one is 0 where 32 bits hold the seed, signed or not: `key_of` is then
    `jax.random.key(seed)`.

    Raises:
      ValueError: a seed that is no whole number of 64 bits.
    """
    number = whole_numbers("seed", seed, 64).item()
    upper = 0 if -(2**31) <= number < 2**32 else number >> 32
    return np.asarray([number, upper]).astype(np.uint32)


def key_of(words: Any) -> Array:
    """The key of a seed's words: that of the lower one, with the upper one folded in where it is
    not 0.
    """
    key = jax.random.key(words[0])
    return jnp.where(words[1] == 0, key, jax.random.fold_in(key, words[1]))


@jax.jit
def keys_of(words: UInt32[Array, "2"], numbers: Int[Array, "N"] | UInt[Array, "N"]) -> Array:
    """A key for each number, `fold_in(key_of(words), number)`, [N], in one program."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key_of(words), numbers)


def keys_of_rows(seed: Any, count: int) -> Array:
    """A key for each of `count` rows, by its number."""
    return keys_of(seed_words(seed), np.arange(count, dtype=np.int32))


def _padded(rows: Any, dtype: Any) -> np.ndarray:
    padded = np.zeros((len(rows), max((len(row) for row in rows), default=0)), dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded
