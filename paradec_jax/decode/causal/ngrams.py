"""A pool of n-grams by their first token, as arrays: for each token, the G most recently used continuations.

A pool [B, V, G, n - 1] holds, for each row and token, continuations of n - 1 tokens from the least to the most
recently used, after empty places of -1. A list that drops its least recently used entry when it is full holds the
most recently used distinct ones; so many insertions are done at once, in any number.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from paradec_jax.decode.rules.windows import window

CHUNK = 64  # n-grams of a prompt that are inserted at once: work grows with its square


def empty(batch: int, vocab_size: int, places: int, length: int) -> Int[Array, "B V G m"]:
    """A pool without entries, for `places` continuations of `length` tokens a token."""
    return jnp.full((batch, vocab_size, places, length), -1, jnp.int32)


def look_up(pool: Int[Array, "B V G m"], tokens: Int[Array, "B"]) -> Int[Array, "B G m"]:
    """The continuations of one token a row."""
    return jax.vmap(lambda lists, token: lists[token])(pool, tokens)


def insert(
    pool: Int[Array, "B V G m"], ngrams: Int[Array, "B M n"], valid: Bool[Array, "B M"]
) -> Int[Array, "B V G m"]:
    """Inserts n-grams one after the other; one that is there already becomes the most recently used.

    Args:
      pool: the pool.
      ngrams: in the order of their use, n = m + 1.
      valid: which of them count.
    """
    return jax.vmap(_insert)(pool, ngrams, valid)


def _insert(
    lists: Int[Array, "V G m"], ngrams: Int[Array, "M n"], valid: Bool[Array, "M"]
) -> Int[Array, "V G m"]:
    vocab, places = lists.shape[:2]
    keys, new = ngrams[:, 0], ngrams[:, 1:]
    alike = (keys[:, None] == keys) & valid[:, None] & valid
    later = jnp.triu(jnp.ones_like(alike), 1)
    last = ~jnp.any(alike & later & jnp.all(new[:, None] == new, axis=-1), axis=1)  # uses of the same n-gram

    # Every n-gram makes the list of its key anew: old entries that are not used now, then the new ones in order.
    old = lists[keys]
    again = jnp.all(old == new[:, None], axis=-1)  # [M, G]
    unused = ~jnp.any(alike[:, :, None] & again, axis=1) & (old[..., 0] >= 0)
    kept = jnp.concatenate([unused, alike & last], axis=1)
    order = jnp.argsort(kept * jnp.arange(1, kept.shape[1] + 1), axis=1)[:, -places:]
    entries = jnp.concatenate([old, jnp.broadcast_to(new, (len(new), *new.shape))], axis=1)
    made = jnp.take_along_axis(entries, order[..., None], axis=1)
    made = jnp.where(jnp.take_along_axis(kept, order, axis=1)[..., None], made, -1)
    return lists.at[jnp.where(valid, keys, vocab)].set(made, mode="drop")


def insert_text(
    pool: Int[Array, "B V G m"], tokens: Int[Array, "B P"], lengths: Int[Array, "B"]
) -> Int[Array, "B V G m"]:
    """Inserts every n-gram of each row's first `lengths` tokens, n = m + 1."""
    n, width = pool.shape[-1] + 1, tokens.shape[1]
    starts = jnp.arange(-(-width // CHUNK) * CHUNK).reshape(-1, CHUNK)

    def some(pool: Array, starts: Array) -> tuple[Array, None]:
        at = starts[:, None] + jnp.arange(n)
        return insert(pool, tokens[:, jnp.minimum(at, width - 1)], at[:, -1] < lengths[:, None]), None

    return lax.scan(some, pool, starts)[0]


def tail(tokens: Int[Array, "B P"], lengths: Int[Array, "B"], count: int) -> Int[Array, "B K"]:
    """The last `count` of each row's first `lengths` tokens, -1 where there are fewer."""
    return window(jnp.pad(tokens, ((0, 0), (count, 0)), constant_values=-1), lengths, count)


def read_on(
    pool: Int[Array, "B V G m"],
    recent: Int[Array, "B m"] | None,
    tokens: Int[Array, "B K"],
    count: Int[Array, "B"],
) -> tuple[Int[Array, "B V G m"], Int[Array, "B m"] | None]:
    """Inserts the n-grams that end in the first `count` of some new tokens of a text.

    Args:
      pool: the pool.
      recent: the `tail` of what the pool has read of the text, m = n - 1 tokens; None where it reads none.
      tokens: what follows it.
      count: how many of them count.

    Returns:
      The pool, and the tail after these tokens.
    """
    if recent is None:
        return pool, None
    size = recent.shape[1]
    text = jnp.concatenate([recent, tokens], axis=1)
    end = jnp.arange(tokens.shape[1])
    grams = text[:, end[:, None] + jnp.arange(size + 1)]
    pool = insert(pool, grams, (end < count[:, None]) & (grams[..., 0] >= 0))
    return pool, window(text, count, size)
