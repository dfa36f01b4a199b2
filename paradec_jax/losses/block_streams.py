"""Reads packed samples as block diffusion trains them: as they are, and a noisy copy whose blocks follow clean ones.

::

    query \\ key    noisy         clean
    noisy          same block    blocks before it
    clean          never         same block and blocks before it          within a sample; no sample sees another

Blocks are counted within a sample. Two forwards read this (the clean copy, then the noisy one with the clean keys as
its cache), or one of both copies side by side, the doubled layout of the released code; both compute the same.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Prefix
from paradec_jax.nn import masks
from paradec_jax.noise import BlockNoise, Hidden


class Layout(NamedTuple):
    """Where the samples of packed rows lie.

    Attributes:
      positions: of each token within its sample.
      block: length of the blocks of each row; they are counted within a sample.
      samples, blocks: the numbers of its sample and of its block within the row.
    """

    positions: Int[Array, "B T"]
    block: Int[Array, "B"]
    samples: Int[Array, "B T"]
    blocks: Int[Array, "B T"]


class Masks(NamedTuple):
    """Who sees whom: clean tokens one another, noisy tokens one another, noisy tokens the clean ones."""

    clean: Bool[Array, "B T T"]
    noisy: Bool[Array, "B T T"]
    before: Bool[Array, "B T T"]


class Streams(NamedTuple):
    """Head inputs of both copies."""

    clean: Float[Array, "B T D"]
    noisy: Float[Array, "B T D"]


def layout_of(positions: Int[Array, "B T"], block: int | Int[Array, "B"]) -> Layout:
    """Finds samples by their positions, which begin with 0 in each; zeros at the end of a row are one more sample.

    As in the released code those zeros, which are padding, get the positions 0, 1, 2, ... (SDAR's `position_ids`).

    Args:
      positions: of packed rows.
      block: length of a block, or one a row.
    """
    at = jnp.arange(positions.shape[1])
    last = jnp.max(jnp.where(positions != 0, at, -1), axis=1, keepdims=True)
    positions = jnp.where(at > last, at - last - 1, positions)
    length = jnp.broadcast_to(jnp.asarray(block), positions.shape[:1])
    samples = jnp.cumsum(positions == 0, axis=1) - 1
    blocks = jnp.cumsum(positions % length[:, None] == 0, axis=1) - 1
    return Layout(positions, length, samples, blocks)


def noised(
    batch: dict[str, Array], key: Array, lengths: tuple[int, ...], noise: BlockNoise, alignment: str
) -> tuple[Bool[Array, "B T"], Hidden, Layout]:
    """Which tokens of packed rows are labelled, which of these are hidden, and where samples and blocks lie.

    Args:
      batch: `tokens`, `labelled` and `positions` [B, T]; its own noise where it has `hidden` and `probability`.
      key: random key; the same key gives the same draws.
      lengths: of blocks, one of them drawn for each row.
      noise: drawn where the batch has none.
      alignment: with "next" the first token of a sample, which nothing predicts, counts as unlabelled.
    """
    of_lengths, of_noise = jax.random.split(key)
    labelled = batch["labelled"].astype(bool)
    drawn = jax.random.randint(of_lengths, (len(labelled),), 0, len(lengths))
    layout = layout_of(batch["positions"], jnp.asarray(lengths)[drawn])
    if alignment == "next":
        labelled &= layout.positions > 0
    if "hidden" in batch:
        return labelled, Hidden(batch["hidden"].astype(bool) & labelled, batch["probability"]), layout
    return labelled, noise.draw(of_noise, labelled, layout.samples, layout.blocks), layout


def masks_of(layout: Layout) -> Masks:
    """Visibility of both copies."""
    same = layout.samples[:, :, None] == layout.samples[:, None]
    rules = (masks.block_causal, masks.block_diagonal, masks.strictly_before)
    return Masks(*(same & rule(layout.positions, layout.block) for rule in rules))


def doubled_mask(layout: Layout) -> Bool[Array, "B 2T 2T"]:
    """Visibility of the noisy copy followed by the clean one, in one forward."""
    clean, noisy, before = masks_of(layout)
    never = jnp.zeros_like(clean)
    return jnp.concatenate(
        [jnp.concatenate([noisy, before], axis=2), jnp.concatenate([never, clean], axis=2)], axis=1
    )


def read_twice(network: Any, params: Any, clean: Array, noisy: Array, layout: Layout) -> Streams:
    """Reads the clean copy [B, T], then the noisy one, whose cache the clean keys are."""
    visible = masks_of(layout)
    first = network.forward(params, clean, layout.positions, mask=visible.clean)
    prefix = Prefix(first.kv, visible.before)
    second = network.forward(params, noisy, layout.positions, prefix, visible.noisy)
    return Streams(first.hidden, second.hidden)


def read_doubled(network: Any, params: Any, clean: Array, noisy: Array, layout: Layout) -> Streams:
    """Reads both copies [B, T] side by side, the noisy one first."""
    tokens, positions = (
        jnp.concatenate(pair, axis=1) for pair in ((noisy, clean), (layout.positions, layout.positions))
    )
    hidden = network.forward(params, tokens, positions, mask=doubled_mask(layout)).hidden
    return Streams(*reversed(jnp.split(hidden, 2, axis=1)))


def before_each(streams: Streams, layout: Layout) -> Float[Array, "B T D"]:
    """Head inputs that predict each token where a position predicts the next one.

    A token is predicted by the noisy copy of the token before it, but the first of a block by the clean copy: when a
    block is begun, the blocks before it are done. So it does not see what is known of its own block. The first token
    of a sample has none before it; what stands there means nothing.
    """
    begins = jnp.concatenate(
        [jnp.ones_like(layout.blocks[:, :1], bool), layout.blocks[:, 1:] != layout.blocks[:, :-1]], axis=1
    )
    clean, noisy = (jnp.roll(hidden, 1, axis=1) for hidden in streams)
    return jnp.where(begins[..., None], clean, noisy)
