"""Candidates of a block, verified in one call: its states after one step, two, .., each seeing the prefix and itself.

::

    tokens      _ b _ _ | _ b c _ | a b c d | _ _ _ _        K = 3 candidates of B = 4, and the block after the last
    positions   4 . . . | 4 . . . | 4 . . . | 8 . . .
    sees        itself    itself    itself    itself, and the candidate that carries it

A complete candidate has nothing to be verified. It is read where it *carries* the next block: if it turns out right,
its keys and values are those to be stored, and the next block's first step is done.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.canvas import BlockCanvas, of_rows, visible
from paradec_jax.decode.machine.candidates import Shape, on_smallest, place
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.rules.windows import window
from paradec_jax.nn import masks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """Drafted states of each row's open block, and how a call reads them.

    Attributes:
      tokens: C_1 .. C_K, [B, K, W]; the first one is the canvas.
      masked: what each has still to reveal, [B, K, W].
      exists: which are there, [B, K].
      count: candidates that the call reads of each row, [B].
      carrier: the complete one that it reads, 0 where it reads none, [B].
      carries: rows where it reads one, [B].
    """

    tokens: Int[Array, "B K W"]
    masked: Bool[Array, "B K W"]
    exists: Bool[Array, "B K"]
    count: Int[Array, "B"]
    carrier: Int[Array, "B"]
    carries: Bool[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CandidateCall:
    """What a call returns of candidates, zeros of those that it did not read.

    Attributes:
      hidden: head inputs of each, [B, K, W, D].
      following: those of the block after the carrier, [B, W, D].
      kv: the carrier's keys and values.
      counts: amounts of the network's counters.
    """

    hidden: Float[Array, "B K W D"]
    following: Float[Array, "B W D"]
    kv: Any
    counts: dict[str, Any]


def candidates_of(
    canvas: BlockCanvas,
    where: Bool[Array, "B drafts W"],
    tokens: Int[Array, "B drafts W"],
    rides: bool,
) -> Candidates:
    """The states that drafts make of the block at `cached`.

    Args:
      canvas: the canvas, which is C_1.
      where: positions that each draft reveals, none where there is no draft.
      tokens: what it reveals there.
      rides: whether a complete draft is read, to carry the next block; the canvas is where it is complete.
    """
    at, block = canvas.cached, canvas.block
    state, open_ = window(canvas.rows.tokens, at, block), window(canvas.open, at, block)
    states, masked = [state], [open_]
    for draft in range(where.shape[1]):
        states.append(jnp.where(where[:, draft], tokens[:, draft], states[-1]))
        masked.append(masked[-1] & ~where[:, draft])
    drafted = jnp.any(where, axis=2)
    exists = jnp.concatenate([jnp.ones((len(at), 1), bool), drafted], axis=1)
    left = jnp.stack(masked, axis=1) & exists[:, :, None]
    complete = exists & ~jnp.any(left, axis=2)
    goes_on = window(canvas.inside, at + block, block)[:, :1] & rides
    carries = complete & jnp.concatenate([exists[:, :1], jnp.broadcast_to(goes_on, drafted.shape)], axis=1)
    return Candidates(
        tokens=jnp.stack(states, axis=1),
        masked=left,
        exists=exists,
        count=jnp.sum((exists & ~complete) | carries, axis=1, dtype=jnp.int32),
        carrier=jnp.argmax(carries, axis=1).astype(jnp.int32),
        carries=jnp.any(carries, axis=1),
    )


def read_candidates(
    decoder: Any, params: Any, canvas: BlockCanvas, drafts: Candidates, follows: Bool[Array, "B"] | None
) -> CandidateCall:
    """One call of the network on each row's candidates, in the smallest shape that holds those of all running rows.

    Args:
      decoder, params: with fields `network` and `bounded`, and its parameters.
      canvas: of which candidates begin at `cached`.
      drafts: the candidates.
      follows: rows that read the block after the carrier along with it; None where there is no such row ever.
    """
    network, at, block = decoder.network, canvas.cached, canvas.block
    batch, most, _ = drafts.tokens.shape

    def call(shape: Shape) -> tuple[Any, ...]:
        count, width = shape
        own = at[:, None] + jnp.arange(block)
        tokens, positions = drafts.tokens[:, :count].reshape(batch, -1), jnp.tile(own, (1, count))
        if width > block:
            tokens = jnp.concatenate([tokens, window(canvas.rows.tokens, at + block, block)], axis=1)
            positions = jnp.concatenate([positions, own + block], axis=1)
        if count == 1:
            mask = visible(network, positions, block)
        elif width > block:
            mask = masks.carried(count, block, drafts.carrier)
        else:
            mask = masks.candidates(count, block)
        out = network.forward(params, tokens, positions, Prefix(canvas.cache, at), mask)
        hidden = out.hidden[:, : count * block].reshape(batch, count, block, -1)
        kv = out.kv if tokens.shape[1] == block else network.pick(out.kv, drafts.carrier * block, block)
        return place(hidden, most, block), out.hidden[:, -block:], kv, of_rows(out.counts, at)

    widths = (block,) if follows is None else (block, 2 * block)
    own = jnp.full_like(at, block) if follows is None else jnp.where(follows, 2 * block, block)
    if decoder.bounded:  # reverse mode would keep something of every shape
        hidden, following, kv, counts = call((most, widths[-1]))
    else:
        running = ~canvas.rows.done
        hidden, following, kv, counts = on_smallest(call, (1, most), widths, drafts.count, own, running)
    read = jnp.arange(most) < drafts.count[:, None]
    hidden = jnp.where(read[..., None, None], hidden, 0)
    following = jnp.where((own > block)[:, None, None], following, 0)
    return CandidateCall(hidden, following, kv, counts)
