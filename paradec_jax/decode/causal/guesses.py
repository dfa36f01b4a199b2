"""Drafts by masks: where masks stand in a call, and what they propose (`drafted`).

::

    position    a    a+1   a+2 | after 0 drafts   | after 1          | after 2
    windows     x  > d1    d2  | m1    m2         |       m1    m2   |             m1    m2
    stands at                  | a+1   a+2        |       a+2   a+3  |             a+3   a+4

x is the newest token. Masks after each place are a comb: whatever is accepted, the masks there have
seen the text that stays. Masks after one place alone are a line.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine import Rows, Windows, accept_by_ratio
from paradec_jax.decode.rules import (
    Purpose,
    distribution,
    earlier,
    filtered_probabilities,
    fold,
    gumbel,
    is_hot,
    pad_slots,
    penalised,
    select,
    uniform_at,
)
from paradec_jax.records import pytree


@pytree
class Guesses:
    """Drafts of the tokens after the committed ones.

    Attributes:
      tokens: the drafts, [B, K].
      count: how many of them are fed, [B].
      ids: tokens that each was drawn from, [B, K, C].
      shares: q, their probabilities, [B, K, C]; every other token's is 0.
    """

    tokens: Int[Array, "B K"]
    count: Int[Array, "B"]
    ids: Int[Array, "B K C"]
    shares: Float[Array, "B K C"]

    @property
    def fed(self) -> Bool[Array, "B K"]:
        """Which drafts are fed."""
        return jnp.arange(self.tokens.shape[1]) < self.count[:, None]

    @property
    def counted(self) -> Int[Array, "B K"]:
        """The drafts that are fed, -1 in the place of the others."""
        return jnp.where(self.fed, self.tokens, -1)

    def proposals(self, vocab: int) -> Float[Array, "B K V"]:
        """q over the whole vocabulary."""

        def of_place(ids: Array, shares: Array) -> Array:
            return jnp.zeros(vocab).at[ids].set(shares)

        return jax.vmap(jax.vmap(of_place))(self.ids, self.shares)

    def likely(self, count: int) -> tuple[Int[Array, "B P"], Bool[Array, "B P"]]:
        """The numbers of drafts that are most probably accepted, and which can be at all.

        Draft i is taken to be accepted with its own share q(d_i); all numbers, in their order, where
        so many are asked for.
        """
        batch, size = self.tokens.shape
        if count == size + 1:
            places = jnp.broadcast_to(jnp.arange(count), (batch, count))
            return places, places <= self.count[:, None]
        of_token = jnp.sum(jnp.where(self.ids == self.tokens[..., None], self.shares, 0), axis=-1)
        each = pad_slots(of_token * self.fed, size + 1)
        reached = jnp.cumprod(jnp.pad(each[:, :-1], ((0, 0), (1, 0)), constant_values=1), axis=1)
        exactly = reached * (1 - each)  # so many are accepted, and the next one is not
        places = select.best(jnp.where(reached > 0, exactly, -1.0), count)
        return places, places <= self.count[:, None]


def windows_of(
    newest: Int[Array, "B 1"],
    at: Int[Array, "B"],
    guesses: Guesses,
    places: Int[Array, "B P"],
    reads: Bool[Array, "B P"],
    mask: int,
    running: Bool[Array, "B"],
) -> Windows:
    """The windows of a call: the newest token, its drafts, and K masks after each of P places.

    Args:
      newest, at: the newest token, and its position.
      guesses: the drafts.
      places: how many drafts stand before the masks.
      reads: whether a row reads them.
      mask: id of the first mask.
      running: rows that read anything.
    """
    (batch, size), count = guesses.tokens.shape, places.shape[1]
    masks = jnp.broadcast_to(mask + jnp.arange(size), (batch, count, size))
    first = jnp.stack([pad_slots(newest, size), guesses.tokens], axis=1)
    zeros, fed = jnp.zeros_like(at)[:, None], guesses.count[:, None] > 0
    # Masks after i drafts follow the i-th of them; after none, the newest token.
    behind = (places > 0).astype(jnp.int32)
    return Windows(
        jnp.concatenate([first, masks], axis=1),
        at[:, None] + jnp.concatenate([zeros, zeros + 1, 1 + places], axis=1),
        running[:, None] & jnp.concatenate([jnp.ones_like(fed), fed, reads], axis=1),
        parent=jnp.concatenate([zeros - 1, zeros, behind], axis=1),
        row=jnp.concatenate([zeros, zeros, jnp.maximum(places - 1, 0)], axis=1),
        lengths=(1, *[size] * (count + 1)),
        stored=(True, True, *[False] * count),
        path=1 + size,
    )


def propose(
    decoder: Any,
    params: Any,
    rows: Rows,
    hidden: Float[Array, "B K D"],
    ids: Int[Array, "B K C"],
    ready: Bool[Array, "B"] | bool,
    knobs: Any,
) -> Guesses:
    """Drafts of the tokens after the newest one, each drawn with the one before it known.

    Args:
      decoder, params: with fields `network` and `drafter`, and the parameters of both.
      rows: the rows, whose newest token the masks stand after.
      hidden: states of K masks.
      ids: tokens that each may draft.
      ready: rows that have masks there.
      knobs: knobs of the decoder.
    """
    drafter = decoder.drafter

    def noise(position: Array, ids: Array) -> Float[Array, "B C"]:
        at = position[:, None]
        if decoder.acceptance == "equal":  # that of the prediction, which is equal the more often
            keys = fold(rows.keys, Purpose.TOKEN, at)
            everywhere = gumbel(keys, decoder.network.vocab_size)[:, 0]
            return jnp.take_along_axis(everywhere, ids, axis=1)
        # Drawn anew from each place, so that no draft depends on one that was refused.
        return gumbel(fold(rows.keys, Purpose.DRAFT, at, rows.length), ids.shape[1])[:, 0]

    def one(before: Array, of_mask: tuple[Array, Array, Array]) -> tuple[Array, Any]:
        place, hidden, ids = of_mask
        informed = drafter.informed(params, hidden, before)
        scores = drafter.scores(params, informed, ids)
        shares = filtered_probabilities(scores, knobs, top_p_rule=decoder.top_p_rule)
        if not decoder.greedy:
            scores = lax.cond(
                is_hot(knobs.temperature),
                lambda: jnp.log(shares) + noise(rows.length + place, ids),
                lambda: scores,
            )
        best = jnp.argmax(scores, axis=1)[:, None]
        token = jnp.take_along_axis(ids, best, axis=1)[:, 0]
        return token, (token, shares)

    by_mask = jnp.arange(hidden.shape[1]), hidden.swapaxes(0, 1), ids.swapaxes(0, 1)
    _, (tokens, shares) = lax.scan(one, rows.newest[0][:, 0], by_mask)
    tokens, shares = tokens.T, shares.swapaxes(0, 1)
    sure = jnp.max(shares, axis=-1) >= knobs.draft_threshold
    count = jnp.where(ready & ~rows.done, select.leading_run(sure), 0)
    return Guesses(tokens, count, ids, shares)


def by_ratio(
    decoder: Any, logits: Float[Array, "B W V"], rows: Rows, guesses: Guesses, knobs: Any
) -> tuple[Int[Array, "B"], Int[Array, "B W"]]:
    """How many drafts are accepted by p over q, and what the text goes on with (`accept_by_ratio`).

    Args:
      decoder, knobs: as for `propose`.
      logits: logits of the newest token's row and of each draft's.
      rows, guesses: the rows, and their drafts.
    """
    width, vocab = logits.shape[1:]
    drafts, places = guesses.tokens[:, : width - 1], rows.length[:, None] + jnp.arange(width)
    seen = rows.tokens, rows.length, earlier(drafts)
    logits = penalised(logits, *seen, knobs.repetition_penalty)
    law = distribution(logits, knobs, decoder.top_p_rule, decoder.greedy)
    # Numbers of the drafts' own places, drawn anew from each length: no draft is judged twice.
    uniforms = uniform_at(rows.keys, Purpose.ACCEPT, places[:, :-1], rows.length)
    last = fold(rows.keys, Purpose.RESIDUAL, places[:, :1], rows.length)
    shares, fed = guesses.proposals(vocab)[:, : width - 1], guesses.counted[:, : width - 1]
    accepted, token = accept_by_ratio(fed, shares, law, uniforms, last)
    here = jnp.arange(width) == accepted[:, None]
    return accepted, jnp.where(here, token, pad_slots(drafts, width))
