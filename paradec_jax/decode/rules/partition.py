"""Random ordered partitions of a canvas: which positions are revealed together, and which before
which.

Over a grid of times `1 = t_0 > t_1 > .. > t_N = 0` a position that is masked at t_k is revealed by
t_{k+1} with probability `(t_k - t_{k+1}) / t_k`, whatever the network says and whatever becomes of
the others (MDLM, arXiv 2406.07524, Eq. 7). So the call that reveals it is a draw of its own, k with
probability `t_k - t_{k+1}`, which can be made before the network is called at all::

    position   0 1 2 3 4 5 6 7
    group      2 0 5 2 7 0 5 2        N = 8
    revealed   {1, 5}, then {0, 3, 7}, {2, 6}, {4}: four calls; groups 1, 3, 4 and 6 are empty

An empty group leaves the canvas as it was, so nobody need call the network for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from paradec_jax.decode.rules.randomness import Purpose, fold

NEVER = np.iinfo(np.int32).max  # the group of positions that are not to be revealed


def words(keys: Array, positions: Int[Array, "B S"]) -> UInt[Array, "B S 2"]:
    """Sixty-four random bits for each position, in two words, the higher first."""
    folded = fold(keys, Purpose.REVEAL, positions)
    return jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32)))(folded)


def fraction(bits: UInt[Array, "B S 2"]) -> Float[Array, "B S"]:
    """The bits as a number in [0, 1], with all of float32's digits where it is small: 1 - t at the
    reveal.
    """
    high, low = bits[..., 0].astype(jnp.float32), bits[..., 1].astype(jnp.float32)
    return (high + low * 2.0**-32) * 2.0**-32


def linear(bits: UInt[Array, "B S 2"], steps: Int[Array, ""] | int) -> Int[Array, "B S"]:
    """Groups of the grid `t_k = 1 - k / N`: each of 0 .. N - 1 alike, by integers (unequal by N /
    2^32 at most).
    """
    return (bits[..., 0] % jnp.asarray(steps).astype(jnp.uint32)).astype(jnp.int32)


def cosine(bits: UInt[Array, "B S 2"], steps: Int[Array, ""] | int) -> Int[Array, "B S"]:
    """Groups of the grid `t_k = cos(pi k / 2N)`, which reveals few positions first (MaskGIT, arXiv
    2202.04200).

    ::

        1 - t = 2 sin^2(pi k / 4N)   solved for k: exact where k is small and groups are rare
    """
    passed = jnp.arcsin(jnp.sqrt(fraction(bits) / 2)) * (4 / jnp.pi) * steps
    return jnp.clip(passed.astype(jnp.int32), 0, jnp.asarray(steps) - 1)


def at_times(bits: UInt[Array, "B S 2"], times: Float[Array, "K"]) -> Int[Array, "B S"]:
    """Groups of a grid of one's own: K calls at the times `1 = t_0 > .. > t_{K-1} > 0`; the last
    reveals the rest.
    """
    return jnp.searchsorted(1 - times[1:], fraction(bits), side="right").astype(jnp.int32)


def single(bits: UInt[Array, "B S 2"], open_: Bool[Array, "B S"]) -> Int[Array, "B S"]:
    """Groups of one: the open positions in random order (the limit of many steps; arXiv
    2409.02908).
    """
    order = jnp.lexsort((bits[..., 1], bits[..., 0], ~open_), axis=-1)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def next_group(groups: Int[Array, "B W"], open_: Bool[Array, "B W"]) -> Bool[Array, "B W"]:
    """The open positions of each row's earliest group; none of a row without open positions."""
    first = jnp.min(jnp.where(open_, groups, NEVER), axis=1, keepdims=True)
    return open_ & (groups == first)


def next_count(
    groups: Int[Array, "B W"], members: Bool[Array, "B W"], open_: Bool[Array, "B W"]
) -> Int[Array, "B"]:
    """How many positions the next group reveals, where other ones may have been revealed in place
    of its own.

    ::

        groups     2 0 5 2 0        sizes 2, 2, 1
        open       . x x x .        two are revealed already, whichever: the next group is the one of size 2

    `members` are the positions that are partitioned, `open_` those of them that are still masked.
    """
    groups = jnp.where(members, groups, NEVER)
    revealed = jnp.sum(members & ~open_, axis=1, keepdims=True)
    newest = jnp.take_along_axis(jnp.sort(groups, axis=1), revealed, axis=1, mode="clip")
    until = jnp.sum(members & (groups <= newest), axis=1, keepdims=True)
    return jnp.where(jnp.any(open_, axis=1), (until - revealed)[:, 0], 0)
