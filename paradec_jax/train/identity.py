"""What a run was made with, as values of JSON that are compared when it is resumed.

A loss and an optimizer are functions, and what makes one differ from another are the numbers that
it closes over: `adamw(1e-3, steps=10)` closes over 0.001 and 10, `next_token_loss(network)` over
the network's config. `plain` collects them. It does not see a number that stands in the code of a
function.
"""

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.train.processes import all_or_none

PyTree = Any
# Parts of an identity in which a resumed run may differ if its caller says so; the arrays of the
# state are none of them.
NAMES = (
    "steps",
    "data",
    "key",
    "step",
    "loss",
    "optimizer",
    "frozen",
    "rounds",
    "ema_decay",
    "accumulate",
)


def identity_of(step: Any, state: Any, data: Any, steps: int) -> dict[str, Any]:
    """What a run was made with, before its first update."""
    with all_or_none():
        if jax.process_count() > 1 and hasattr(data, "take"):
            # All rows, of which an earlier call may have taken some.
            data.take(lambda count: (0, count))
        place = data.get_state()
        batch = next(data, None)
        data.set_state(place)
    parts = {"step": step}
    if dataclasses.is_dataclass(step):
        parts = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    return {
        "steps": steps,
        "data": {
            "digest": str(getattr(data, "digest", None)),
            "first batch": plain(getattr(batch, "rows", batch)),
        },
        "arrays": shapes(state),
        "key": [str(jax.random.key_impl(state.key)), jax.random.key_data(state.key).tolist()],
        **plain(parts),
    }


def plain(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """A value as JSON holds it.

    A function is its name, its defaults and what it closes over; an array its shape, dtype and
    checksum; any other object the name of its class.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in outer:
        return "itself"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return [shapes(value)[""], int(checksum(value))]
    outer = (*outer, id(value))
    if isinstance(value, functools.partial):
        value = {"function": value.func, "given": [value.args, value.keywords]}
    elif isinstance(value, types.MethodType):
        value = {"function": value.__func__, "self": value.__self__}
    elif isinstance(value, types.FunctionType):
        defaults = {f"default {i}": item for i, item in enumerate(value.__defaults__ or ())}
        value = {
            "function": value.__qualname__,
            **defaults,
            **(value.__kwdefaults__ or {}),
            **inspect.getclosurevars(value).nonlocals,
        }
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {of.name: getattr(value, of.name, None) for of in dataclasses.fields(value)}
        value = {"type": type(value).__qualname__, **fields}
    elif hasattr(value, "__wrapped__"):  # a jitted function
        return plain(value.__wrapped__, outer)
    if isinstance(value, Mapping):
        return {str(key): plain(item, outer) for key, item in value.items()}
    if isinstance(value, tuple | list):  # named tuples too
        return [plain(item, outer) for item in value]
    return (value if isinstance(value, type) else type(value)).__qualname__


def difference(name: str, before: Any, now: Any, last: str = "") -> str:
    """The first place where a part of two identities differs, with both values if short."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        before, now = dict(enumerate(before)), dict(enumerate(now))
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
        return difference(
            name, before.get(key), now.get(key), key if isinstance(key, str) else last
        )
    where = f"{name} ({last})" if last else name
    short = max(len(str(before)), len(str(now))) <= 40
    return f"{where} [{before} there, {now} here]" if short else where


def check_allowed(allow: Iterable[str]) -> None:
    """Refuses names of which no identity has a part. Raises ValueError."""
    if isinstance(allow, str) or set(allow) - set(NAMES):
        raise ValueError(
            f"allow must hold names among {', '.join(NAMES)}, not {', '.join(allow)!r}"
        )


def shapes(tree: PyTree) -> dict[str, str]:
    """Dtype and shape of every array by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}"
        for path, x in leaves
    }


def checksums(tree: PyTree) -> list[int]:
    """Checksums of all arrays."""
    return [int(x) for x in jax.device_get([checksum(x) for x in jax.tree.leaves(tree)])]


@jax.jit
def checksum(x: jax.Array) -> jax.Array:
    """sum_i (2 i + 1) bits_i mod 2^32 of an array, on its devices: no change of one word goes
    unseen.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):  # not a ravelled iota, which would gather a sharded array
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
    return jnp.sum((2 * index + 1) * bits, dtype=jnp.uint32)
