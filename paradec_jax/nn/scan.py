"""How a stream passes the blocks of a network: one by one, or by a loop that compiles one of them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from paradec_jax.nn.visibility import Stream, View

# (block, stream, what is given to the block) -> the stream after it, and what it leaves
Call = Callable[[Any, Stream, Any], tuple[Stream, Any]]


def in_turn(
    call: Call, x: Stream, blocks: Sequence[Any], given: Sequence[Any] | None
) -> tuple[Stream, Any]:
    """`x` after all blocks, and what each leaves; `given` is what each reads, such as its cache."""
    left = []
    for block, one in zip(blocks, given or [None] * len(blocks), strict=True):
        x, output = call(block, x, one)
        left.append(output)
    return x, tuple(left)


def traced_once(
    call: Call, x: Stream, block: Any, layers: Sequence[Any], given: Sequence[Any] | None
) -> tuple[Stream, Any]:
    """As `in_turn`, of blocks of one shape: the first is traced, and the program repeats it for
    each layer.

    The program is that of `in_turn`, traced in 0.3 to 0.4 of its time. A loop (`scanned`) would
    also compile one layer alone, but copies the weights of each out of their stack: on a CPU a call
    on one position took 1.9 times the processor time in float32 and 2.2 times in bfloat16 (30
    layers of 576 x 1,536).
    """

    @jax.jit(inline=True)
    def turn(params: Any, x: Stream, one: Any) -> tuple[Stream, Any]:
        return call(functools.partial(block.apply, {"params": params}), x, one)

    return in_turn(turn, x, layers, given)


def scanned(
    call: Call,
    x: Stream,
    block: Any,
    layers: Sequence[Any],
    dtype: str,
    given: Sequence[Any] | None,
) -> tuple[Stream, Any]:
    """As `in_turn`, by a loop over the stacked parameters of blocks of one shape; `block` is one
    without a parent.

    Matrices of attention and MLPs are cast to the dtype of their products before they are stacked:
    on a mesh those of a layer are then gathered in that dtype, in its turn of the loop.
    """

    def stack(path: tuple[Any, ...], *leaves: Array) -> Array:
        part = jax.tree_util.keystr(path, simple=True, separator="/")
        product = leaves[0].ndim > 1 and part.startswith(("attention/", "mlp/"))
        return jnp.stack([leaf.astype(dtype) if product else leaf for leaf in leaves])

    stacked = jax.tree_util.tree_map_with_path(stack, *layers)
    each = None if given is None else jax.tree.map(lambda *leaves: jnp.stack(leaves), *given)

    def turn(x: Stream, layer: tuple[Any, Any]) -> tuple[Stream, Any]:
        params, one = layer
        return call(functools.partial(block.apply, {"params": params}), x, one)

    x, left = lax.scan(turn, x, (stacked, each))
    return x, tuple(jax.tree.map(lambda leaf, i=i: leaf[i], left) for i in range(len(layers)))


def reading(view: View) -> Call:
    """How a block reads a window: it is given its cached keys and values, and leaves new ones.

    Where layers have sliding windows, it is given its window beside them.
    """
    seen = dataclasses.replace(view, cache=None)  # each block is handed its part
    if view.positions is None:
        return lambda block, x, prefix: block(x, seen, prefix)
    return lambda block, x, given: block(x, seen.within(given[1]), given[0])
