"""Candidates of Jacobi decoding: other guesses of the tokens to come, verified beside the draft in one call.

Two sources. *Rejection recycling* (Jacobi Forcing, section 4): an iterate that was rejected often holds the right
n-gram at the wrong place, so a small pool of earlier iterates is searched for the newest committed token and what
stood after it there becomes a candidate. *Alternatives*: the first guess of a draft rests on a token that has just
been rejected; the next-best tokens of its distribution are the likeliest repairs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

EMPTY = -1  # no token: never equal to one


def push(pool: Int[Array, "B G L"], iterate: Int[Array, "B L"]) -> Int[Array, "B G L"]:
    """The pool with a new iterate as its first; the oldest one falls out."""
    return jnp.concatenate([iterate[:, None], pool[:, :-1]], axis=1) if pool.shape[1] else pool


def recycled(
    pool: Int[Array, "B G L"], token: Int[Array, "B"], draft: Int[Array, "B drafts"]
) -> tuple[Int[Array, "B G drafts"], Bool[Array, "B G"]]:
    """What stood after the first occurrence of `token` in each iterate, the draft's own guesses after its end.

    Returns:
      One candidate for each iterate, and whether the token occurs there with a token after it.
    """
    length, count = pool.shape[-1], draft.shape[-1]

    def of_iterate(iterate: Array, token: Array, draft: Array) -> tuple[Array, Array]:
        hits = iterate[:-1] == token
        after = jnp.argmax(hits) + 1 + jnp.arange(count)
        found = jnp.where(after < length, iterate[jnp.minimum(after, length - 1)], EMPTY)
        return jnp.where(found == EMPTY, draft, found), jnp.any(hits) & (found[0] != EMPTY)

    return jax.vmap(jax.vmap(of_iterate, in_axes=(0, None, None)))(pool, token, draft)


def alternatives(
    logits: Float[Array, "B V"], draft: Int[Array, "B drafts"], count: int
) -> Int[Array, "B count drafts"]:
    """The draft with its first guess replaced by the second, third, ... best token of `logits`.

    Raises:
      ValueError: if there are not so many other tokens.
    """
    if count >= logits.shape[-1]:
        raise ValueError(f"{count} alternatives need more than {logits.shape[-1]} tokens")
    # By maxima, which sharded rows have by themselves: XLA gathers the logits of all rows for `top_k`.
    ids, best = jnp.arange(logits.shape[-1]), []
    for _ in range(count + 1):
        best.append(jnp.argmax(logits, axis=-1))
        logits = jnp.where(ids == best[-1][:, None], -jnp.inf, logits)
    copies = jnp.broadcast_to(draft[:, None], (draft.shape[0], count, draft.shape[1]))
    return copies.at[:, :, 0].set(jnp.stack(best, axis=1)[:, 1:].astype(jnp.int32))


def distinct(
    draft: Int[Array, "B drafts"],
    candidates: Int[Array, "B M drafts"],
    valid: Bool[Array, "B M"],
    count: int,
) -> Int[Array, "B count drafts"]:
    """The first `count` candidates that are valid and equal neither the draft nor an earlier one.

    Where there are fewer, the rest are repetitions, which change nothing.
    """
    everything = jnp.concatenate([draft[:, None], candidates], axis=1)
    equal = jnp.all(everything[:, :, None] == everything[:, None], axis=-1)
    earlier = jnp.tril(equal, -1) & jnp.concatenate([jnp.ones_like(valid[:, :1]), valid], axis=1)[:, None]
    useless = jnp.any(earlier, axis=-1)[:, 1:] | ~valid
    order = jnp.argsort(useless, axis=1, stable=True)[:, :count]
    chosen = jnp.take_along_axis(candidates, order[:, :, None], axis=1)
    return jnp.where(jnp.take_along_axis(useless, order, axis=1)[:, :, None], draft[:, None], chosen)
