"""Drafts against the network's own predictions.

::

    fed          x  d1 d2 d3 d4      x the newest committed token, d a draft of the tokens after it
    predictions  g0 g1 g2 g3 g4      g_i the token that belongs after fed token i
    agrees          =  =  /          d1 = g0, d2 = g1, d3 != g2: 2 are accepted
    to commit    g0 g1 g2            they and the token after them

The first prediction follows from committed tokens alone, and each accepted draft makes the next one
follow from them too. So what is committed is what the network writes by itself, whatever the draft.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.machine.tree import Reading, Windows, forward_tree
from paradec_jax.decode.rules import (
    draw,
    entry_of,
    pad_slots,
    select,
    speculate,
    window,
    write_after_read,
)


class Verified(NamedTuple):
    """What a call says of its drafts.

    Attributes:
      winner: draft of which most is accepted, the first among equals, [B].
      accepted: its tokens that are, [B]; they and one more may be committed.
      tokens: what the network predicts after the newest token and after each token of the winner,
        [B, W].
      log_probs: their log-probabilities where they are kept, [B, W].
      agrees: tokens of the winner that the rule accepts, after a refused one too, [B, K].
      after: logits of the first token that stays uncertain, the one after those that may be
        committed, [B, V]; None where there is one draft.
      rows: the rows, to which the call is counted; nothing is committed.
      cache: the cache with the winner's keys and values.
    """

    winner: Int[Array, "B"]
    accepted: Int[Array, "B"]
    tokens: Int[Array, "B W"]
    log_probs: Float[Array, "B W"] | None
    agrees: Bool[Array, "B K"]
    after: Float[Array, "B V"] | None
    rows: Rows
    cache: Any


def accept(
    drafts: Int[Array, "B R K"], predictions: Int[Array, "B R W"]
) -> tuple[Int[Array, "B"], Int[Array, "B"], Bool[Array, "B R K"]]:
    """The rule of acceptance, in its only place: a drafted token that equals the prediction.

    What a rule keeps: given that all tokens before a place are accepted, the prediction there has
    the network's distribution, and is the drafted token where that is accepted. Predictions are
    drawn with the noise of their position, so a token x is accepted with probability p(x), and the
    one in its place is else drawn from p without x: exact speculative sampling (arXiv 2211.17192)
    of a draft with all of the proposal's mass.

    Args:
      drafts: R drafts of K tokens, -1 in the place of what does not count.
      predictions: the token after what comes before each place of a draft, and after the last, W =
        K + 1.

    Returns:
      The draft whose leading run of accepted tokens is the longest, the first among equals; the
      length of the run; which tokens are accepted.
    """
    agrees = drafts == predictions[..., :-1]
    runs = jax.vmap(select.leading_run)(agrees)
    return jnp.argmax(runs, axis=1), jnp.max(runs, axis=1), agrees


def accept_by_ratio(
    drafts: Int[Array, "B K"],
    proposals: Float[Array, "B K V"],
    predictions: Float[Array, "B W V"],
    uniforms: Float[Array, "B K"],
    keys: Array,
) -> tuple[Int[Array, "B"], Int[Array, "B 1"]]:
    """Exact speculative sampling (Leviathan et al., arXiv 2211.17192): a draft x ~ q is accepted with
    min(1, p(x) / q(x)); the token after those that are is drawn from (p - q)+, or p after the last.

    ::

        P(x) = q min(1, p / q) + (p - q)+        min(p, q) + (p - q)+ = p

    Args:
      drafts: the drafts, -1 in the place of what does not count.
      proposals: q, the distribution that each was drawn from.
      predictions: p after what comes before each draft, and after the last, W = K + 1.
      uniforms: numbers in [0, 1), one a draft.
      keys: keys that draw the token after those that are accepted, [B, 1].

    Returns:
      How many are accepted, and the token after them.
    """
    fed, width = drafts >= 0, predictions.shape[1]
    # After the last draft nothing is proposed: whatever stands there is refused, and p is left.
    span = jnp.arange(width) <= jnp.sum(fed, axis=1)[:, None]
    proposals = pad_slots(jnp.where(fed[..., None], proposals, 0), width)
    uniforms = jnp.pad(jnp.where(fed, uniforms, 1), ((0, 0), (0, 1)), constant_values=1)
    tokens = pad_slots(jnp.maximum(drafts, 0), width)
    _, accepted, _, left = speculate.judge(proposals, predictions, tokens, span, 1.0, uniforms)
    return jnp.sum(accepted, axis=1), draw(left, keys)


def verify(
    decoder: Any,
    params: Any,
    state: Any,
    drafts: Int[Array, "B R K"],
    lengths: Int[Array, "B"],
    knobs: Any,
    widths: tuple[int, ...] = (),
) -> Verified:
    """One call of the network on the newest token and R drafts after it.

    Args:
      decoder, params, state, knobs: as for `step`; `state` is a `CachedState`.
      drafts: the drafts, K tokens each. One is computed where that is enough for all rows.
      lengths: tokens of a draft that count.
      widths: compiled numbers of tokens below W = K + 1, as for `forward_tree`.
    """
    rows, at, (batch, count, size) = state.rows, state.cached, drafts.shape
    newest = jnp.broadcast_to(rows.newest[0][:, None], (batch, count, 1))
    # A row needs one draft where the others repeat it, and `lengths` tokens of each.
    reads = jnp.where(jnp.any(drafts != drafts[:, :1], axis=(1, 2)), count, 1)
    counts = jnp.arange(count)[:, None] < reads[:, None, None]
    counts &= jnp.arange(size) < lengths[:, None, None]
    guesses = jnp.where(counts, drafts, -1)

    def read(hidden: Array) -> Reading:
        tokens, logits = decoder.predict(params, rows, knobs, hidden, drafts)
        few, width = tokens.shape[1:]
        winner, accepted, agrees = accept(guesses[:, :few, : width - 1], tokens)
        tokens, agrees, likely = entry_of((tokens, agrees, logits), winner)
        after = None
        if count > 1:  # by one slice: the logits of all drafts are large
            place = winner * width + jnp.minimum(accepted + 1, width - 1)
            after = window(logits.reshape(batch, few * width, -1), place, 1)[:, 0]
        one = tokens, decoder.scores(likely, tokens), agrees
        return Reading(one=one, rest=(winner, accepted, after), kept=winner)

    call = forward_tree(
        decoder.network,
        params,
        Prefix(state.cache, at),
        Windows.star(jnp.concatenate([newest, drafts], axis=2), at, reads * ~rows.done),
        read,
        width=1 + lengths,
        widths=widths,
        bounded=decoder.bounded,
    )
    (tokens, log_probs, agrees), (winner, accepted, after) = call.one, call.rest
    rows = rows.spend(call.counts, call.positions)
    cache = decoder.network.write(state.cache, call.kv, write_after_read(at, tokens))
    return Verified(winner, accepted, tokens, log_probs, agrees[:, :-1], after, rows, cache)


def counted(draft: Int[Array, "B K"], count: Int[Array, "B"]) -> Int[Array, "B K"]:
    """A draft with -1 after what counts of it."""
    return jnp.where(jnp.arange(draft.shape[1]) < count[:, None], draft, -1)
