"""How much what a network says of a block moves as the block is revealed: the motive of residual
prediction (MRP).

::

    delta(s, k) = f_{s+k} - f_s          f_s: head inputs or logits of a block of which s tokens are revealed
    residual_k  = mean over blocks and s of RMS(delta(s, k)),    k = 1 .. B
    reference   = mean over blocks and s < B of RMS(f_s)

RMS is over all entries of all positions, in float64. The last state, s = B, is an end of
differences and not part of the reference. A head that adds residuals counts on small ratios of the
first to the second.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

from paradec_jax.decode.block.denoising import Denoised
from paradec_jax.decode.machine.network import Network, Prefix


class Magnitudes(NamedTuple):
    """Root mean squares.

    Attributes:
      residual: of the differences, by k - 1.
      reference: of the features themselves.
    """

    residual: Float64[np.ndarray, "K"]
    reference: float

    @property
    def ratios(self) -> Float64[np.ndarray, "K"]:
        """Residuals as shares of the reference."""
        return self.residual / self.reference


def magnitudes(features: Float[np.ndarray, "N S W D"]) -> Magnitudes:
    """How far features of N blocks lie apart in their S = B + 1 states.

    Raises:
      ValueError: fewer than two states.
    """
    if features.shape[1] < 2:
        raise ValueError(f"features need at least two states of a block, not {features.shape[1]}")
    wide = features.astype(np.float64)
    apart = [rms(wide[:, k:] - wide[:, :-k]).mean() for k in range(1, wide.shape[1])]
    return Magnitudes(np.asarray(apart), float(rms(wide[:, :-1]).mean()))


def rms(features: Float64[np.ndarray, "N S W D"]) -> Float64[np.ndarray, "N S"]:
    """Root mean square of a block's entries."""
    return np.sqrt(np.mean(np.square(features), axis=(2, 3)))


def read_states(
    network: Network,
    params: Any,
    context: Int[np.ndarray, "P"],
    states: Int[np.ndarray, "N S W"],
    size: int | None = None,
) -> Float[np.ndarray, "N S W D"]:
    """Head inputs of a block in each of its states, one block after the other.

    Args:
      network: of visibility "block"; W is its block length.
      params: its parameters.
      context: the blocks before the first one, whole.
      states: tokens of N consecutive blocks; the last state of each is what the next ones follow.
      size: positions that the text is filled up to, so that contexts of any length share their
        programs.

    Raises:
      ValueError: another block length, or a context that ends inside a block.
    """
    width = states.shape[2]
    if network.block != width or len(context) % width:
        raise ValueError(
            f"states must be those of blocks of {network.block} after whole blocks, not of {width} after "
            f"{len(context)} tokens"
        )
    text = np.concatenate([context, states[:, -1].ravel()])
    starts = len(context) + width * np.arange(len(states))
    text = np.pad(text, (0, max((size or 0) - len(text), 0)))  # nobody sees what follows
    kv = _whole(network, params, jnp.asarray(text)[None])
    return np.stack(
        [
            np.asarray(_block(network, params, kv, jnp.asarray(block), jnp.asarray(start)))
            for block, start in zip(states, starts, strict=True)
        ]
    )


class Visit(NamedTuple):
    """A block that was revealed one position after the other.

    Attributes:
      row: of the batch.
      start: its first position.
      states: its tokens before the first step and after each, S = B + 1.
    """

    row: int
    start: int
    states: Int[np.ndarray, "S W"]


def visited(steps: Denoised, lengths: Int[np.ndarray, "B"], mask: int) -> Iterator[Visit]:
    """The whole blocks after each prompt, row by row, that static decoding revealed in B steps of
    one position.

    Args:
      steps: what each call did, stacked on a leading axis (`trace`), of a decoder that reads
        prompts in a call of their own.
      lengths: of the prompts.
      mask: the mask's id.
    """
    at, where, tokens, reads = (
        np.asarray(getattr(steps, name)) for name in ("at", "where", "tokens", "reads")
    )
    width = where.shape[2]
    for row, length in enumerate(lengths):
        for start in np.unique(at[:, row]):
            mine = np.flatnonzero((at[:, row] == start) & reads[:, row])
            states = [np.full(width, mask)]
            for i in mine:
                states.append(np.where(where[i, row], tokens[i, row], states[-1]))
            if start >= length and len(states) == width + 1 and (states[-1] != mask).all():
                yield Visit(row, int(start), np.stack(states))


@functools.partial(jax.jit, static_argnums=0)
def _whole(network: Network, params: Any, text: Int[Array, "1 T"]) -> Any:
    """Keys and values of a text."""
    return network.forward(params, text, jnp.arange(text.shape[1])[None]).kv


@functools.partial(jax.jit, static_argnums=0)
def _block(
    network: Network, params: Any, kv: Any, states: Int[Array, "S W"], start: Int[Array, ""]
) -> Float[Array, "S W D"]:
    """What the network says of each state of the block that begins at `start`."""
    count, width = states.shape
    positions = jnp.broadcast_to(start + jnp.arange(width), states.shape)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), kv)
    return network.forward(params, states, positions, Prefix(rows, jnp.full(count, start))).hidden
