"""Rejection recycling: a rejected iterate may hold the right tokens at the wrong place (Jacobi
Forcing, section 4).

::

    iterate of an earlier call    x  a  b  t  c  d  e      t the newest token now
    candidate                     c  d  e  q3 q4           completed by the draft q
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.rules import select

EMPTY = -1  # no token: equal to none


def recycle(
    draft: Int[Array, "B K"],
    pool: Int[Array, "B G _"],
    newest: Int[Array, "B 1"],
    after: Float[Array, "B V"] | None,
    known: Int[Array, "B 1"],
    count: int,
) -> Int[Array, "B R K"]:
    """R candidates: the draft, what followed the newest token in earlier iterates, and repairs of
    the draft's first guess.

    Args:
      draft: guesses of the K tokens after the newest one.
      pool: G iterates, the newest first.
      newest: the newest token.
      after: logits of the first guess, whose next-best tokens repair it; None for the draft alone.
      known: guesses of the draft that the network predicts; a random one is not repaired.
      count: R.
    """
    if after is None:
        return draft[:, None]
    recycled, there = jax.vmap(jax.vmap(after_token, (0, None, None)))(pool, newest[:, 0], draft)
    repairs = jnp.repeat(draft[:, None], count - 1, axis=1)
    repairs = repairs.at[:, :, 0].set(select.best(after, count)[:, 1:])
    valid = jnp.concatenate([there, jnp.broadcast_to(known > 0, repairs.shape[:2])], axis=1)
    return distinct(draft, jnp.concatenate([recycled, repairs], axis=1), valid, count)


def after_token(
    iterate: Array, token: Array, draft: Array
) -> tuple[Int[Array, " drafts"], Bool[Array, ""]]:
    """What stood after a token's first occurrence in an iterate, completed by the draft; whether
    anything did.
    """
    hits = iterate[:-1] == token
    room = jnp.pad(iterate, (0, len(draft)), constant_values=EMPTY)
    stood = lax.dynamic_slice_in_dim(room, jnp.argmax(hits) + 1, len(draft))
    return jnp.where(stood == EMPTY, draft, stood), jnp.any(hits) & (stood[0] != EMPTY)


def distinct(
    draft: Int[Array, "B K"], others: Int[Array, "B M K"], valid: Bool[Array, "B M"], count: int
) -> Int[Array, "B R K"]:
    """The draft and the first candidates that are valid and new, `count` together.

    Where there are fewer, the rest are repetitions of the draft, which change nothing.
    """
    everything = jnp.concatenate([draft[:, None], others], axis=1)
    valid = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)
    equal = jnp.all(everything[:, :, None] == everything[:, None], axis=-1)
    new = valid & ~jnp.any(jnp.tril(equal, -1) & valid[:, None], axis=-1)
    order = jnp.argsort(~new, axis=1, stable=True)[:, :count]
    chosen = jnp.take_along_axis(everything, order[:, :, None], axis=1)
    return jnp.where(jnp.take_along_axis(new, order, axis=1)[:, :, None], chosen, draft[:, None])
