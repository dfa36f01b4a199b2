"""One call of the network on a small tree of windows, which share one cached prefix.

::

    star     a b c | d e f | g h i       guesses of the same positions: none sees another
    chain    a b c > d e f > g h i       a block and those after it: each sees all before it
    comb     a b c,  a > _ _,  b > _     a short window after each row of another

A window sees the prefix, itself by the network's visibility or token-causally, and of each ancestor
the rows up to the one where its path leaves. A window of fewer tokens than the longest costs no
more than it has.

A row often reads some windows alone, or the first tokens of each. So smaller calls are compiled
beside the largest, and the smallest that holds what all rows read is the one that runs.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from paradec_jax.decode.machine.network import Counts, Prefix
from paradec_jax.decode.machine.shapes import on_smallest
from paradec_jax.decode.rules import entry_of, pad_slots
from paradec_jax.nn import masks


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of a call, and which of them each row reads.

    Attributes:
      tokens: R windows of at most W tokens, or vectors in their place, [B, R, W, ...].
      at: position of the first token of each, [B, R].
      reads: windows that the row reads, [B, R]; none where it has stopped.
      parent: window that each one follows, the index of an earlier one, [B, R]; -1 where it follows
        the prefix alone. None where all do. Without B it is the same in all rows.
      row: last row of its parent that each one sees, as `parent`; None is the parent's last one.
      lengths: tokens of each window; None is W.
      stored: windows whose keys and values may reach the cache; None is all of them.
      path: positions that the stored windows of a path have together, at most; None where no stored
        window follows another.
      causal: rows that see no later one of their window, [B, R, W]; None is the network's
        visibility.
    """

    tokens: Shaped[Array, "B R W *rest"]
    at: Int[Array, "B R"]
    reads: Bool[Array, "B R"]
    parent: Int[Array, "*B R"] | None = None
    row: Int[Array, "*B R"] | None = None
    lengths: Sequence[int] | None = None
    stored: Sequence[bool] | None = None
    path: int | None = None
    causal: Bool[Array, "B R W"] | None = None

    @classmethod
    def star(
        cls, tokens: Shaped[Array, "B R W *rest"], at: Int[Array, "B"], count: Int[Array, "B"]
    ) -> "Windows":
        """Windows that begin at one position, of which a row reads the first `count`."""
        index = jnp.arange(tokens.shape[1])
        return cls(tokens, at[:, None] + 0 * index, index < count[:, None])

    def sees(self) -> Int[Array, "*B R R"]:
        """How many rows of each other window, its ancestors, each window sees."""
        count, width = self.tokens.shape[1:3]
        if self.parent is None:
            return jnp.zeros((count, count), jnp.int32)
        follows = self.parent[..., None] == jnp.arange(count)
        rows = jnp.asarray(self.lengths or width) if self.row is None else self.row[..., None] + 1
        sees = of_parent = jnp.where(follows, rows, 0)
        for _ in range(count - 2):  # a path has at most so many ancestors beyond the parent
            above = jnp.where(follows[..., None], sees[..., None, :, :], 0)
            sees = of_parent + jnp.sum(above, axis=-2)
        return sees


class Reading(NamedTuple):
    """What a call hands on, given the hidden states of the r windows of w tokens that it computes.

    Keys, values and logits of all windows are large, so one window's are handed on where one is
    enough.

    Attributes:
      each: what is read of every window, leaves [B, r, w, ...].
      one: what is read of one window, leaves [B, w, ...], or of one path.
      rest: further leaves, of shapes that r and w do not change.
      kept: the window with which the path ends whose keys and values are handed on, [B]; 0 is the
        first one.
    """

    each: Any = None
    one: Any = None
    rest: Any = None
    kept: Int[Array, "B"] | int = 0


class TreeCall(NamedTuple):
    """What a call returns; zeros of what it did not compute.

    Attributes:
      windows: what was read.
      each: as read, leaves [B, R, W, ...], zero of windows that the row does not read.
      one, rest: as read, leaves [B, W, ...], or as long as a path, and any.
      kv: keys and values of the path that is kept, for `path` or W positions of the cache.
      counts: amounts of the network's counters.
      positions: positions that were computed for each row, [B].
    """

    windows: Windows
    each: Any
    one: Any
    rest: Any
    kv: Any
    counts: Counts
    positions: Int[Array, "B"]


def forward_tree(
    network: Any,
    params: Any,
    prefix: Prefix,
    windows: Windows,
    read: Callable[[Any], Reading] = Reading,
    *,
    smaller: Sequence[tuple[int, ...]] = ((0,),),
    width: Int[Array, "B"] | int = 0,
    widths: Sequence[int] = (),
    bounded: bool = False,
) -> TreeCall:
    """One call of the network on a tree, in the smallest compiled shape for what all rows read.

    Args:
      network, params: the network that is called, and its parameters.
      prefix: its cache, and what every window sees of it.
      windows: R windows of at most W tokens.
      read: hidden states [B, r, w, D], zero after a shorter window's, -> what to hand on. Logits
        that are made here are made of few positions in a small call.
      smaller: windows of the calls that are compiled beside that of all, the fewest first.
      width: tokens of each window that the row reads; it matters where there are `widths`.
      widths: compiled numbers of tokens below W, ascending.
      bounded: compile the largest call alone: reverse mode would keep something of every one.
    """
    (count, most), sees = windows.tokens.shape[1:3], windows.sees()
    every, reads = tuple(range(count)), windows.reads
    shapes = list(dict.fromkeys(itertools.product((*smaller, every), (*widths, most))))
    lengths = windows.lengths or (most,) * count
    sizes = {(of, w): [min(lengths[r], w) for r in of] for of, w in shapes}
    outside = jnp.asarray([[r not in of for r in every] for of, _ in shapes])
    fits = ~jnp.any(reads[:, None] & outside, axis=2)
    asked = jnp.where(jnp.any(reads, axis=1), width, 0)[:, None]
    fits &= asked <= jnp.asarray([w for _, w in shapes])

    def call(shape: tuple[tuple[int, ...], int]) -> tuple[Any, ...]:
        of, tokens = shape[0], sizes[shape]
        index = slice(len(of)) if of == every[: len(of)] else np.asarray(of)
        fed = side_by_side(windows.tokens[:, index], tokens)
        positions = windows.at[:, index, None] + jnp.arange(max(tokens))
        mask, seen = None, sees[..., index]
        causal: Any = network.visibility == "causal"
        if windows.causal is not None:
            causal = side_by_side(windows.causal[:, index], tokens)
        # A network alone counts blocks from position 0.
        counted = (
            network.block in (None, *tokens) and getattr(network, "origin", "start") == "start"
        )
        if len(of) > 1 or not counted or windows.causal is not None:
            mask = masks.windows(tokens, seen[..., index, :], causal)
        out = network.forward(params, fed, side_by_side(positions, tokens), prefix, mask)
        each, one, rest, kept = read(apart(out.hidden, tokens))
        kv = path_of(network, out.kv, windows, seen, of, tokens, kept)
        one = jax.tree.map(lambda x: pad_slots(x, windows.path or most), one)
        each = jax.tree.map(lambda x: pad_slots(x, count, most), each)
        if not isinstance(index, slice):  # zeros stand after the last of these windows
            places = np.asarray([of.index(r) if r in of else len(of) for r in every])
            each = jax.tree.map(lambda x: x[:, places], each)
        return each, one, rest, kv, out.counts

    each, one, rest, kv, counts = on_smallest(call, shapes, fits, bounded=bounded)
    each = jax.tree.map(lambda x: jnp.where(jnp.expand_dims(reads, range(2, x.ndim)), x, 0), each)
    positions = jnp.asarray([sum(tokens) for tokens in sizes.values()], jnp.int32)
    return TreeCall(windows, each, one, rest, kv, counts, positions[jnp.argmax(fits, axis=1)])


def path_of(
    network: Any,
    kv: Any,
    windows: Windows,
    seen: Int[Array, "*B R r"],
    of: Sequence[int],
    sizes: Sequence[int],
    kept: Int[Array, "B"] | int,
) -> Any:
    """Keys and values of the path that ends with a window, of those of r windows side by side."""
    kept, most = jnp.broadcast_to(kept, windows.at.shape[:1]), windows.tokens.shape[2]
    if windows.path is None and len({*sizes}) == 1:  # it is one of the windows
        if len(of) > 1:
            kv = network.pick(kv, sum(kept > r for r in of) * sizes[0], sizes[0])
        return network.widen(kv, most) if sizes[0] < most else kv
    rows = entry_of(jnp.broadcast_to(seen, (len(kept), *seen.shape[-2:])), kept)
    rows = jnp.where(kept[:, None] == jnp.asarray(of), jnp.asarray(sizes), rows)
    if windows.stored is not None:
        rows *= jnp.asarray([windows.stored[r] for r in of])
    on_path = side_by_side(jnp.arange(max(sizes)) < rows[..., None], sizes)
    # Position p is held by the first slot up to which p + 1 slots are on the path.
    passed = jnp.cumsum(on_path, axis=1)[:, None]
    held = jnp.sum(passed <= jnp.arange(windows.path or most)[:, None], axis=2)
    return network.take(kv, held)


def side_by_side(
    windows: Shaped[Array, "B r w *rest"], sizes: Sequence[int]
) -> Shaped[Array, "B _ *rest"]:
    """Windows one after the other, of each its first so many rows."""
    if len({*sizes}) == 1:
        rows = windows[:, :, : sizes[0]]
        return rows.reshape(len(rows), -1, *rows.shape[3:])
    return jnp.concatenate([windows[:, r, :size] for r, size in enumerate(sizes)], axis=1)


def apart(rows: Shaped[Array, "B _ D"], sizes: Sequence[int]) -> Shaped[Array, "B r w D"]:
    """What `side_by_side` puts together, with zeros after the rows of a shorter window."""
    if len({*sizes}) == 1:
        return rows.reshape(len(rows), len(sizes), sizes[0], -1)
    parts = jnp.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return jnp.stack([pad_slots(part, max(sizes)) for part in parts], axis=1)
