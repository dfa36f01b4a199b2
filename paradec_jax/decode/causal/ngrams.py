"""The n-grams that a decoder has seen, by their first token.

Of each token the G most recently used continuations are kept. A list that drops its least recently
used entry when it is full holds the distinct ones of the latest uses; so any number of insertions
is done at once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from paradec_jax.decode.rules import entry_of, pad_slots, window
from paradec_jax.records import pytree

CHUNK = 64  # tokens of a prompt that are read at once: work grows with their square


@pytree
class NGrams:
    """The pool of each row, n-grams of n = m + 1 tokens.

    Attributes:
      lists: continuations by first token, from the least to the most recently used, after empty
        places of -1, [B, V, G, m].
      recent: newest m tokens of the text that the pool has read, -1 where there are fewer, [B, m];
        None where it reads no text.
    """

    lists: Int[Array, "B V G m"]
    recent: Int[Array, "B m"] | None = None

    def after(self, token: Int[Array, "B 1"]) -> Int[Array, "B G m"]:
        """The continuations of a token."""
        return entry_of(self.lists, token[:, 0])

    def insert(self, ngrams: Int[Array, "B M n"], valid: Bool[Array, "B M"]) -> "NGrams":
        """The pool after the use of those n-grams that are valid, one after another."""
        return NGrams(jax.vmap(used)(self.lists, ngrams, valid), self.recent)

    def read(self, tokens: Int[Array, "B K"], count: Int[Array, "B"]) -> "NGrams":
        """The pool after the first `count` of some new tokens of its text; itself where it has
        none.
        """
        if self.recent is None:
            return self
        size, end = self.recent.shape[1], jnp.arange(tokens.shape[1])
        text = jnp.concatenate([self.recent, tokens], axis=1)
        grams = text[:, end[:, None] + jnp.arange(size + 1)]
        pool = self.insert(grams, (end < count[:, None]) & (grams[..., 0] >= 0))
        return NGrams(pool.lists, window(text, count, size))

    def read_prompt(self, tokens: Int[Array, "B P"], lengths: Int[Array, "B"]) -> "NGrams":
        """The pool of a text after its first `lengths` tokens."""
        batch, width = tokens.shape
        begun = NGrams(self.lists, jnp.full_like(self.lists[:, 0, 0], -1))
        starts = jnp.arange(0, width, CHUNK)
        chunks = pad_slots(tokens, len(starts) * CHUNK).reshape(batch, -1, CHUNK)

        def some(pool: NGrams, at: tuple[Array, Array]) -> tuple[NGrams, None]:
            return pool.read(at[0], jnp.clip(lengths - at[1], 0, CHUNK)), None

        return lax.scan(some, begun, (chunks.swapaxes(0, 1), starts))[0]


def used(
    lists: Int[Array, "V G m"], ngrams: Int[Array, "M n"], valid: Bool[Array, "M"]
) -> Int[Array, "V G m"]:
    """A row's lists after the use of M n-grams, those that are valid, one after another.

    Each n-gram makes the list of its first token anew: what stood there, then all n-grams that
    begin with this token in the order of their use. Of equal ones the latest stays, and of those
    the last G.
    """
    vocab, places = lists.shape[:2]
    first, new = ngrams[:, 0], ngrams[:, 1:]
    stood, count = lists[first], len(ngrams)
    joins = (first[:, None] == first) & valid  # [M, M]: which n-grams join the list of each
    again = jnp.any(joins[:, :, None] & jnp.all(stood == new[:, None], axis=-1), axis=1)
    later = joins & ~jnp.tri(count, dtype=bool) & jnp.all(new[:, None] == new, axis=-1)
    stays = jnp.concatenate(
        [(stood[..., 0] >= 0) & ~again, joins & ~jnp.any(later, axis=1)], axis=1
    )
    place = jnp.sort(jnp.where(stays, jnp.arange(places + count), -1), axis=1)[:, -places:, None]
    entries = jnp.concatenate([stood, jnp.broadcast_to(new, (count, *new.shape))], axis=1)
    made = jnp.where(place >= 0, jnp.take_along_axis(entries, place, axis=1), -1)
    return lists.at[jnp.where(valid, first, vocab)].set(made, mode="drop")
