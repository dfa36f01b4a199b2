"""Candidates: several guesses of the same positions in one call, sharing one prefix; and how much of a call runs.

::

    tokens     a b c | d e f | g h i        R = 3 candidates of W = 3 tokens
    positions  p . . | p . . | p . .        each stands at the same positions
    mask       no candidate sees another; within one: causal, or full where the network sees in blocks

A row often has one candidate alone, or short ones. So smaller calls are compiled beside the largest, and the smallest
that holds what the running rows have is the one that runs. No other file decides this.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.rules.windows import pad_slots, where_rows
from paradec_jax.nn import masks

Shape = tuple[int, int]  # candidates and the tokens of each
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What each row has of the R candidates of W tokens that it is given.

    Attributes:
      count: candidates of each row, the first ones, [B].
      width: tokens of each of them, [B].
      running: rows that count, [B].
      widths: compiled numbers of tokens below W; a call has one candidate or all.
      bounded: compile the largest call alone, since reverse mode would keep something of every one.
    """

    count: Int[Array, "B"]
    width: Int[Array, "B"]
    running: Bool[Array, "B"]
    widths: tuple[int, ...] = ()
    bounded: bool = False


@dataclasses.dataclass(frozen=True)
class Following:
    """A block that a call reads after one of the candidates, for networks that see in blocks.

    Attributes:
      tokens: the block, [B, W].
      carrier: candidate that it follows and sees, [B].
      where: rows that read it, [B].
    """

    tokens: Shaped[Array, "B W *rest"]
    carrier: Int[Array, "B"]
    where: Bool[Array, "B"]


class Reading(NamedTuple):
    """What is read from the hidden states of r candidates of w tokens, which a call computes.

    Keys, values and logits of all of them are large: where one candidate is chosen here, a call hands on no others.

    Attributes:
      outputs: leaves [B, r, w, ...]; of the chosen candidate alone, [B, 1, w, ...].
      candidate: the chosen one, [B]; None for all of them.
      kept: further leaves, of shapes that r and w do not change.
    """

    outputs: Any
    candidate: Int[Array, "B"] | None = None
    kept: Any = None


@dataclasses.dataclass(frozen=True)
class CandidateCall:
    """What a call returns; zeros of what it did not compute.

    Attributes:
      outputs: hidden states of the candidates, or what was `read` from them, leaves [B, R, W, ...].
      kept: what else was read.
      following: the same of the block that follows, leaves [B, W, ...]; None where there is none.
      kv: keys and values of all candidates, one after the other; where one was chosen, or a block follows, of that
        candidate alone.
      width: tokens of a candidate in `kv`.
      counts: amounts of the network's counters.
      positions: positions that were computed for each row, [B].
      shape: R and W.
    """

    outputs: Any
    kept: Any
    following: Any
    kv: Any
    width: Int[Array, ""]
    counts: dict[str, Any]
    positions: Int[Array, "B"]
    shape: Shape

    def kv_of(self, network: Any, candidate: Int[Array, "B"], width: int | None = None) -> Any:
        """Keys and values of one candidate of each row, of its first `width` tokens (by default all W).

        Where a block follows it must be the carrier.
        """
        count, widest = self.shape
        if self.following is not None or (count == 1 and width in (None, widest)):
            return self.kv
        return network.pick(self.kv, candidate * self.width, widest if width is None else width)


def forward_candidates(
    network: Any,
    params: Any,
    cache: Any,
    fed: Shaped[Array, "B R W *rest"],
    at: Int[Array, "B"],
    sizes: Sizes,
    read: Callable[[Any], Reading] = Reading,
    following: Following | None = None,
) -> CandidateCall:
    """One call of the network on R candidates, in the smallest compiled shape that holds those of all running rows.

    Args:
      network, params: the network that is called, and its parameters.
      cache: its cache, of which each row sees the first `at` positions.
      fed: R candidates of W tokens (or vectors).
      at: position of each candidate's first token.
      sizes: what each row has of them.
      read: hidden states [B, r, w, D] -> what to hand on; logits are made here, so that a small call makes few.
      following: a block after one of the candidates. Then a call has all W tokens of each.
    """
    batch, most, widest = fed.shape[:3]
    counts, count = (1, most), _rounded(sizes.count, (1, most))
    if following is None:
        widths: tuple[int, ...] = (*sizes.widths, widest)
        needed = _rounded(sizes.width, widths)
        positions = count * needed
    else:  # the wider call is the one with the block that follows
        widths = (widest, 2 * widest)
        needed = jnp.where(following.where, 2 * widest, widest)
        positions = count * widest + following.where * widest

    def call(shape: Shape) -> tuple[Any, ...]:
        count, width = shape[0], min(shape[1], widest)
        own = at[:, None] + jnp.arange(width)
        inputs = fed[:, :count, :width].reshape(batch, count * width, *fed.shape[3:])
        seen, carrier = jnp.tile(own, (1, count)), None
        if following is not None and shape[1] > widest:
            inputs = jnp.concatenate([inputs, following.tokens], axis=1)
            seen, carrier = jnp.concatenate([seen, own + width], axis=1), following.carrier
        mask = _mask(network, count, width, carrier)
        out = network.forward(params, inputs, seen, Prefix(cache, at), mask)
        hidden = out.hidden[:, : count * width].reshape(batch, count, width, -1)
        outputs, chosen, kept = read(hidden)
        there, held, kv = (count, most, out.kv) if chosen is None else (1, 1, out.kv)
        outputs = jax.tree.map(lambda x: pad_slots(x, held, widest), outputs)
        if following is None:
            if chosen is not None and there < count:
                kv = network.pick(kv, chosen * width, width)
            if there * width < held * widest:
                kv = network.widen(kv, held * widest)
            return outputs, kept, None, kv, jnp.int32(width), out.counts
        kv = kv if inputs.shape[1] == width else network.pick(kv, following.carrier * width, width)
        after = jax.tree.map(lambda x: x[:, 0], read(out.hidden[:, None, -width:]).outputs)
        return outputs, kept, after, kv, jnp.int32(width), out.counts

    if sizes.bounded:
        result = call((most, widths[-1]))
    else:
        result = on_smallest(call, counts, widths, count, needed, sizes.running)
    outputs, kept, after, kv, width, amounts = result
    if following is not None:
        after = where_rows(following.where, after, jax.tree.map(jnp.zeros_like, after))
    return CandidateCall(outputs, kept, after, kv, width, amounts, positions, (most, widest))


def _mask(
    network: Any, count: int, width: int, carrier: Int[Array, "B"] | None
) -> Bool[Array, "*B RW RW"] | None:
    """What candidates, and a block after the `carrier`, see of one another; None where the network's rule says it."""
    if count == 1 and network.block in (None, width):
        return None
    if carrier is not None:
        return masks.carried(count, width, carrier)
    slots = jnp.arange(count * width)[None]
    if network.visibility == "causal":
        return masks.segments(slots // width)[0]
    return masks.block_diagonal(slots, width)[0]


def _rounded(needed: Int[Array, "B"], compiled: Sequence[int]) -> Int[Array, "B"]:
    """The smallest compiled number that is not below what each row needs."""
    numbers = jnp.asarray(compiled, jnp.int32)
    return numbers[jnp.searchsorted(numbers, needed)]


def of_candidate(tree: Any, candidate: Int[Array, "B"]) -> Any:
    """What belongs to one candidate of each row, leaves [B, ...] of leaves [B, R, ...]."""

    def pick(x: Array) -> Array:
        return jnp.take_along_axis(x, candidate.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]

    return jax.tree.map(pick, tree)


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


def on_smallest(
    call: Callable[[Shape], Result],
    counts: Sequence[int],
    widths: Sequence[int],
    count: Int[Array, "B"],
    width: Int[Array, "B"],
    running: Bool[Array, "B"],
) -> Result:
    """`call` in the smallest shape that holds the candidates of every running row, which share the call.

    Args:
      call: shape -> arrays of the same shapes and dtypes for every shape.
      counts, widths: compiled numbers of candidates and of tokens, each ascending; every pair is a shape.
      count, width: what each row has.
      running: rows that count.
    """
    shapes = list(itertools.product(sorted(set(counts)), sorted(set(widths))))
    if len(shapes) == 1:
        return call(shapes[0])
    most, widest = (jnp.max(jnp.where(running, x, 1)) for x in (count, width))
    holds = jnp.stack([(most <= r) & (widest <= w) for r, w in shapes])
    return lax.switch(jnp.argmax(holds), [functools.partial(call, shape) for shape in shapes])


def unless_idle(
    call: Callable[[], Result], needed: Bool[Array, "B"], like: Callable[[], Any] | None = None
) -> Result:
    """What a call returns, or zeros where no row needs it; `like` has the same results and is quicker to trace."""

    def skip() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(like or call))

    return lax.cond(jnp.any(needed), call, skip)
