"""What the released programs of block Jacobi decoding share: prefill, verification, drafts, when a
row ends.

A *block call* decodes a block of n tokens after the committed ones. Its first draft comes from the
prefill, the later ones are the known next token and n - 1 tokens drawn from everything generated so
far::

    prefill        p p p p r r r r              prompt and n random prompt tokens
    block call 0           d d d d              what it predicts from the last prompt token on
    block call 1                   d r r r      the token after block call 0, and random ones

Stop tokens and budgets are looked at where the programs look: a budget only between block calls, so
that it is overrun. A decoder here has a field `block`, n.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.request import RecordedDraws, Request
from paradec_jax.decode.machine.rows import Reason, Rows, is_stop
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.windows import put

MAX_BLOCK_CALLS = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedBlocks(RecordedDraws):
    """Recorded drafts, each row's own; where one of them is -1, the row's key draws in its place.

    Attributes:
      prefill_drafts: random tokens that the prefill reads after each prompt, [B, n].
      drafts: draft with which each block call begins; its first token, which is known, is not read,
        [B, calls, n].
      windows: fill of the running window before each network call after the tokens it knows, [B, T,
        n].
    """

    prefill_drafts: Int[Array, "B n"] | None = None
    drafts: Int[Array, "B calls n"] | None = None
    windows: Int[Array, "B T n"] | None = None
    per_row: ClassVar[tuple[str, ...]] = ("prefill_drafts", "drafts", "windows")


def check_settings(decoder: Any, least_block: int = 1, why: str = "") -> None:
    """Refuses a block that is too short, sampling and log-probabilities. Raises ValueError."""
    if decoder.block < least_block:
        raise ValueError(f"block must be at least {least_block}{why}, not {decoder.block}")
    if not decoder.greedy or decoder.log_probs:
        raise ValueError(f"{type(decoder).__name__} is greedy and keeps no log-probabilities")


def verify(
    block: Int[Array, "R n"], done: Int[Array, "R"], predicted: Int[Array, "R n"]
) -> tuple[Int[Array, "R n"], Int[Array, "R"]]:
    """Accepts the draft of a block as far as its own predictions repeat it; they replace the rest.

    Tokens before `done` are accepted, the others are the draft; `predicted[x]` is what token x
    predicts. The first token of a draft is known to be right. Three tokens were accepted, now six
    are::

        x           0 1 2 3 4 5 6 7
        block       a a a d d d d d
        agrees            . = = x        d[x] == predicted[x - 1]
        afterwards  a a a a a a g g      g[x] =  predicted[x - 1], a refreshed draft

    Args:
      block: accepted tokens and draft.
      done: accepted tokens.
      predicted: argmax at each token; entries before `done` are not read, except that the last
        accepted one is where the draft is empty.

    Returns:
      The block afterwards, and its accepted tokens, more than before unless there was no draft. The
      token after the accepted ones is `predicted[accepted - 1]`.
    """
    n = block.shape[1]
    sure = jnp.arange(n - 1) < done[:, None]
    accepted = 1 + select.leading_run(sure | (block[:, 1:] == predicted[:, :-1]))
    refreshed = jnp.concatenate([block[:, :1], predicted[:, :-1]], axis=1)
    return jnp.where(jnp.arange(n) < accepted[:, None], block, refreshed), accepted


def until_stop(
    rows: Rows, tokens: Int[Array, "B W"], count: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """Which of the first `count` tokens come up to the first stop token: how many, and whether
    there is one.
    """
    hits = is_stop(tokens, rows.stop) & (jnp.arange(tokens.shape[1]) < count[:, None])
    return jnp.argmax(hits, axis=1) + 1, jnp.any(hits, axis=1)


def extend(rows: Rows, tokens: Int[Array, "B W"], count: Int[Array, "B"]) -> Rows:
    """Appends `count` tokens to each running row and cuts nothing, for programs that run over their
    budget.
    """
    count = jnp.where(rows.done, 0, count)
    written = put(rows.tokens, tokens, rows.length, jnp.arange(tokens.shape[1]) < count[:, None])
    return dataclasses.replace(rows, tokens=written, length=rows.length + count)


def read(
    decoder: Any, params: Any, request: Request, scratch: int, overrun: int
) -> tuple[Rows, Any, Int[Array, "B n"]]:
    """Reads prompts and n random prompt tokens after each in one call; commits nothing.

    Args:
      decoder: the decoder.
      params, request: as for `init`.
      scratch: positions that buffers hold after `size`.
      overrun: how many of them a row may hold beyond its budget.

    Returns:
      Rows, a cache that holds the prompts, and the predictions from the last prompt token on.
    """
    ahead = request.lengths[:, None] + jnp.arange(decoder.block)
    drawn = draw(request.keys, ahead, request.lengths)
    drawn = jnp.take_along_axis(request.tokens, drawn, axis=1)
    recorded = request.recorded
    if recorded is not None and recorded.prefill_drafts is not None:
        drawn = jnp.where(recorded.prefill_drafts < 0, drawn, recorded.prefill_drafts)
    rows, cache, out = decoder.prefill_ahead(params, request, drawn, scratch)
    predicted = predict(decoder, params, out.hidden[:, :-1])
    rows = rows.spend(out.counts, request.lengths + decoder.block)
    return dataclasses.replace(rows, size=decoder.size + overrun), cache, predicted


def predict(decoder: Any, params: Any, hidden: Float[Array, "B *R W D"]) -> Int[Array, "B *R W"]:
    """The most probable next token at each position."""
    return jnp.argmax(decoder.network.logits(params, hidden), axis=-1).astype(jnp.int32)


def first_draft(rows: Rows, predicted: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """The draft of block call 0: what the prefill predicted, unless another one was recorded."""
    return _recorded_draft(rows, predicted, jnp.zeros_like(rows.length))


def next_draft(
    rows: Rows, known: Int[Array, "B"], block_call: Int[Array, "B"], block: int
) -> Int[Array, "B n"]:
    """The draft of a later block call: the known next token, and tokens drawn from all that the row
    holds.
    """
    ahead = rows.length[:, None] + jnp.arange(block)
    drawn = jnp.take_along_axis(
        rows.tokens, draw(rows.keys, ahead, rows.length, block_call), axis=1
    )
    return _recorded_draft(rows, drawn.at[:, 0].set(known), block_call)


def _recorded_draft(
    rows: Rows, draft: Int[Array, "B n"], block_call: Int[Array, "B"]
) -> Int[Array, "B n"]:
    recorded = rows.recorded
    if recorded is None or recorded.drafts is None:
        return draft
    calls = recorded.drafts.shape[1]
    at = jnp.minimum(block_call, calls - 1)[:, None, None]
    given = jnp.take_along_axis(recorded.drafts, at, axis=1)[:, 0]
    taken = (given >= 0) & (block_call < calls)[:, None] & (jnp.arange(draft.shape[1]) > 0)
    return jnp.where(taken, given, draft)


def reasoned(
    rows: Rows,
    stopped: Bool[Array, "B"],
    over: Bool[Array, "B"],
    used_up: Bool[Array, "B"],
    block_calls: Int[Array, "B"],
) -> Rows:
    """Rows with the reason of those that `stopped`, or whose block call is over with nothing left
    for another.
    """
    return ended(rows, stopped, over & (used_up | (block_calls >= MAX_BLOCK_CALLS)))


def ended(rows: Rows, stopped: Bool[Array, "B"], used_up: Bool[Array, "B"]) -> Rows:
    """Rows with the reason of running ones that end now, at a stop token or for want of budget."""
    reason = jnp.where(stopped, Reason.STOP, jnp.where(used_up, Reason.BUDGET, Reason.RUNNING))
    return dataclasses.replace(rows, reason=jnp.where(rows.done, rows.reason, reason))


def draw(
    keys: Array,
    positions: Int[Array, "B W"],
    below: Int[Array, "B"],
    step: Int[Array, "B"] | None = None,
) -> Int[Array, "B W"]:
    """A uniform number from 0 to `below - 1` for each position."""
    folded = fold(keys, Purpose.DRAFT, positions, step)
    uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(folded)
    drawn = jnp.floor(uniform * below[:, None]).astype(jnp.int32)
    return jnp.minimum(drawn, below[:, None] - 1)
