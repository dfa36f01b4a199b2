"""Training of block diffusion (SDAR, arXiv 2510.06303): hidden tokens of a block, given it and the
blocks before it.

::

    L = (1 / n) sum over hidden i of  -log p(x_i | noisy block of i, clean blocks before it) / p_i

n counts the labelled tokens of the batch, hidden or not; p_i is the probability with which token i
was hidden (`noise.blocks`). In the mean over draws, L is a bound of what a labelled token costs, in
nats. Packed samples are read as they are, and as a noisy copy whose blocks follow clean ones::

    query \\ key    noisy         clean
    noisy          same block    blocks before it
    clean          never         same block and blocks before it          within a sample; no sample sees another

Blocks are counted within a sample. Two forwards read this: the clean copy, then the noisy one,
whose cache the clean keys are. The released code has one forward of both copies side by side, the
doubled layout, which computes the same.

Several blocks in flight are trained in groups of consecutive blocks (MultiTF, arXiv 2606.29215): a
noisy token sees the noisy blocks of its group up to its own, and clean blocks of earlier groups.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import Ranged, TokenSpec
from paradec_jax.decode.machine import Network, Params, Prefix
from paradec_jax.losses.cross_entropy import certain, forced, judged, scorer
from paradec_jax.losses.masked_diffusion import mask_of
from paradec_jax.nn import masks
from paradec_jax.noise import BlockNoise, Hidden, first_of_each
from paradec_jax.noise.blocks import REDRAWS
from paradec_jax.objective import Batch, Objective, Sums, weighted


def lengths_of(network: Network, blocks: tuple[int, ...] | None) -> tuple[int, ...]:
    """Lengths of blocks: those given, else the network's. Raises ValueError where it has none."""
    if blocks is None and network.block is None:
        raise ValueError(
            "a network without blocks of its own needs the lengths of blocks (rules.blocks)"
        )
    return blocks or (network.block,)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class BlockRules(Ranged):
    """The choices of the objective; the defaults are SDAR's.

    Attributes:
      noise: which labelled tokens are hidden.
      blocks: lengths of blocks, one drawn for each row; the network's own when None.
      certainty: beta of certainty forcing (`cross_entropy.forced`).
    """

    noise: BlockNoise = BlockNoise()  # noqa: RUF009
    blocks: tuple[int, ...] | None = None
    certainty: float = 0.0


SDAR = BlockRules()


def block_diffusion_loss(
    network: Network, spec: TokenSpec, rules: BlockRules = SDAR, *, chunk: int | None = None
) -> Objective:
    """The weighted cross-entropy of hidden tokens over the number of labelled ones, as released.

    Where a position predicts the "next" token, the first token of a sample, which nothing predicts,
    is unlabelled.

    Returns:
      A loss over batches of `tokens` int [B, T], `labelled` bool [B, T] and `positions` int [B, T],
      which begin with 0 in each sample of a row. Metrics: `accuracy` at hidden tokens, and
      `hidden`, their share of the labelled ones; with certainty forcing `certainty`.
    """
    mask, lengths = mask_of(spec), lengths_of(network, rules.blocks)

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        tokens, labelled, hidden, layout = noised(batch, key, lengths, rules.noise, spec.alignment)
        # The noisy copy, which reads its block and the clean blocks before it.
        streams = read_both(network, params, tokens, jnp.where(hidden.where, mask, tokens), layout)
        vectors = before_each(streams, layout) if spec.alignment == "next" else streams.noisy
        # -log p(x_i | noisy block of i, clean blocks before it)
        logits = scorer(network, params, len(tokens))
        nll, hits, entropy = judged(logits, vectors, tokens, chunk)
        # 1 / p_i at hidden i, 0 elsewhere
        weights = jnp.where(hidden.where, 1 / jnp.where(hidden.where, hidden.probability, 1.0), 0.0)
        parts = {
            # the sum over hidden i, over n labelled tokens
            "loss": weighted(weights * nll, labelled),
            "accuracy": weighted(hits, hidden.where),
            "hidden": weighted(hidden.where, labelled),
        }
        return certain(rules.certainty, parts, entropy, hidden.where & hits)

    return Objective(sums, forced(rules.certainty))


# Packed rows and their two copies


class Layout(NamedTuple):
    """Where the samples of packed rows lie.

    Attributes:
      positions: place of each token in its sample.
      block: length of the blocks of each row; they are counted within a sample.
      samples, blocks, groups: number of each token's sample, of its block and of its group of blocks
        in the row.
    """

    positions: Int[Array, "B T"]
    block: Int[Array, "B"]
    samples: Int[Array, "B T"]
    blocks: Int[Array, "B T"]
    groups: Int[Array, "B T"]


class Texts(NamedTuple):
    """Packed rows, and which of their labelled tokens are hidden.

    Attributes:
      tokens: clean tokens.
      labelled: tokens that could have been hidden.
      hidden: tokens that are, and how likely each of them was to be.
      layout: where samples and blocks lie.
    """

    tokens: Int[Array, "B T"]
    labelled: Bool[Array, "B T"]
    hidden: Hidden
    layout: Layout


class Masks(NamedTuple):
    """Who sees whom: clean tokens one another, noisy ones one another and the clean ones."""

    clean: Bool[Array, "B T T"]
    noisy: Bool[Array, "B T T"]
    before: Bool[Array, "B T T"]


class Streams(NamedTuple):
    """Hidden states of both copies."""

    clean: Float[Array, "B T D"]
    noisy: Float[Array, "B T D"]


def layout_of(positions: Int[Array, "B T"], block: int | Int[Array, "B"]) -> Layout:
    """Finds samples by their positions, which begin with 0 in each; zeros at the end of a row are
    one more sample.

    As in the released code those zeros, which are padding, get the positions 0, 1, 2, ... (SDAR's
    `position_ids`).
    """
    at = jnp.arange(positions.shape[1])
    last = jnp.max(jnp.where(positions != 0, at, -1), axis=1, keepdims=True)
    positions = jnp.where(at > last, at - last - 1, positions)
    length = jnp.broadcast_to(jnp.asarray(block), positions.shape[:1])
    samples = jnp.cumsum(positions == 0, axis=1) - 1
    blocks = jnp.cumsum(positions % length[:, None] == 0, axis=1) - 1
    return Layout(positions, length, samples, blocks, groups=blocks)


def noised(
    batch: Batch, key: Array, lengths: tuple[int, ...], noise: BlockNoise, alignment: str
) -> Texts:
    """Packed rows, some of whose labelled tokens are hidden.

    Args:
      batch: `tokens`, `labelled` and `positions` [B, T]; perhaps recorded noise.
      key: random key; the same key gives the same draws.
      lengths: lengths of blocks, one of them drawn for each row.
      alignment: with "next" the first token of a sample, which nothing predicts, counts as
        unlabelled.
    """
    of_lengths, of_noise = jax.random.split(key)
    labelled = batch["labelled"].astype(bool)
    which = jax.random.randint(of_lengths, (len(labelled),), 0, len(lengths))
    layout = layout_of(batch["positions"], jnp.asarray(lengths)[which])
    if alignment == "next":
        labelled &= layout.positions > 0

    of_groups = jax.random.fold_in(of_noise, REDRAWS + 2)  # beyond those of `draw`
    groups = noise.groups(of_groups, layout.positions, layout.block, layout.blocks)
    layout = layout._replace(groups=groups)
    if "hidden" in batch:
        hidden = Hidden(batch["hidden"].astype(bool) & labelled, batch["probability"])
    else:
        hidden = noise.draw(of_noise, labelled, layout.samples, layout.blocks, groups)
    return Texts(batch["tokens"], labelled, hidden, layout)


def masks_of(layout: Layout) -> Masks:
    """Visibility of both copies; noisy ones of a group see one another."""
    same = layout.samples[:, :, None] == layout.samples[:, None]
    clean = same & masks.block_causal(layout.positions, layout.block)
    own, earlier = (
        rule(layout.groups, 1) for rule in (masks.block_diagonal, masks.strictly_before)
    )
    return Masks(clean, clean & own, same & earlier)


def read_both(
    network: Network,
    params: Params,
    clean: Int[Array, "B T"],
    noisy: Int[Array, "B T"],
    layout: Layout,
) -> Streams:
    """Reads the clean copy, then the noisy one, whose cache the clean keys are."""
    visible = masks_of(layout)
    first = network.forward(params, clean, layout.positions, mask=visible.clean)
    prefix = Prefix(first.kv, visible.before)
    second = network.forward(params, noisy, layout.positions, prefix, visible.noisy)
    return Streams(first.hidden, second.hidden)


def before_each(streams: Streams, layout: Layout) -> Float[Array, "B T D"]:
    """Hidden states that predict each token where a position predicts the next one.

    A token is predicted by the noisy copy of the token before it, but the first of a group of blocks
    by the clean copy: when a group is begun, the blocks before it are done. So it does not see what
    is known of its own block. The first token of a sample has none before it; what stands there means
    nothing.
    """
    begins = first_of_each(layout.groups)
    clean, noisy = (jnp.roll(hidden, 1, axis=1) for hidden in streams)
    return jnp.where(begins[..., None], clean, noisy)
