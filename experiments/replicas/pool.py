"""Rejection recycling as the released programs do it: a pool of token sequences and the candidates
it yields.

Every network call that rejects something pushes two sequences, so a pool of four remembers two
network calls::

    newest   [0] rejected tail                 not searched
             [1] blocks of the block call, joined    first place of the known next token -> candidate
             [2] tail of the network call before       ...
             [3] ...
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """Token sequences of one row, newest first.

    Attributes:
      tokens: [G, L].
      lengths: tokens of each, 0 where there is none, [G].
    """

    tokens: Int[Array, "G L"]
    lengths: Int[Array, "G"]


def empty(sequences: int, length: int) -> Pool:
    """A pool of `sequences` places for up to `length` tokens each."""
    return Pool(jnp.zeros((sequences, length), jnp.int32), jnp.zeros(sequences, jnp.int32))


def push(pool: Pool, tokens: Int[Array, "_"], keep: Bool[Array, "_"]) -> Pool:
    """The tokens to be kept, closed up, as the newest sequence; the oldest falls out. Nothing
    changes without any.
    """
    room = pool.tokens.shape[1]
    place = jnp.where(keep, jnp.cumsum(keep) - 1, room)
    sequence = jnp.zeros(room, jnp.int32).at[place].set(tokens, mode="drop")
    length = jnp.sum(keep, dtype=jnp.int32)
    pushed = Pool(
        jnp.concatenate([sequence[None], pool.tokens[:-1]]),
        jnp.concatenate([length[None], pool.lengths[:-1]]),
    )
    return jax.tree.map(lambda new, old: jnp.where(length > 0, new, old), pushed, pool)


def candidates(
    pool: Pool, known: Int[Array, ""], block: Int[Array, "n"], done: Int[Array, ""]
) -> tuple[Int[Array, "R n"], Int[Array, ""]]:
    """Drafts that start with the known token, out of all sequences but the newest.

    A candidate is a sequence from its first `known` on, completed with the block's own draft. There
    are none unless at least two sequences hold the token; equal candidates stay.

    Args:
      pool: the pool.
      known: the next token, which the block's draft starts with.
      block: accepted tokens and draft.
      done: accepted tokens.

    Returns:
      R = G drafts, the block itself first, then the candidates from newest to oldest, and how many
      of them count.
    """
    tokens, lengths = pool.tokens[1:], pool.lengths[1:]
    hit = (tokens == known) & (jnp.arange(tokens.shape[1]) < lengths[:, None])
    found = jnp.any(hit, axis=1)
    source = jnp.argmax(hit, axis=1)[:, None] + jnp.arange(block.shape[0]) - done
    inside = (jnp.arange(block.shape[0]) >= done) & (source < lengths[:, None])
    taken = jnp.take_along_axis(tokens, jnp.clip(source, 0, tokens.shape[1] - 1), axis=1)
    drafts = jnp.where(inside & found[:, None], taken, block)
    drafts = drafts[jnp.argsort(~found, stable=True)]
    number = jnp.sum(found, dtype=jnp.int32)
    return jnp.concatenate([block[None], drafts]), jnp.where(number >= 2, 1 + number, 1)
