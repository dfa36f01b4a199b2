"""Training of block diffusion (SDAR, arXiv 2510.06303): hidden tokens of a block, given it and the blocks before it.

::

    L = (1 / n) sum over hidden i of  -log p(x_i | noisy block of i, clean blocks before it) / p_i

n counts the labelled tokens of the batch, hidden or not; p_i is the probability with which token i was hidden
(`noise.blocks`). In the mean over draws, L is a bound of what a labelled token costs, in nats.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from paradec_jax.config import TokenSpec
from paradec_jax.losses.block_streams import before_each, noised, read_doubled, read_twice
from paradec_jax.losses.cross_entropy import check_chunk, in_chunks, scorer, token_losses
from paradec_jax.losses.masked_diffusion import mask_of
from paradec_jax.noise import BlockNoise
from paradec_jax.objective import Objective, Sums, weighted


@dataclasses.dataclass(frozen=True)
class BlockRules:
    """The choices of the objective; the defaults are SDAR's.

    Attributes:
      noise: which labelled tokens are hidden.
      blocks: lengths of blocks, one drawn for each row; the network's own when None.
      doubled: whether both copies are read side by side in one forward, as in the released code, or in two.
    """

    noise: BlockNoise = BlockNoise()  # noqa: RUF009
    blocks: tuple[int, ...] | None = None
    doubled: bool = False

    def __post_init__(self) -> None:
        if self.blocks is not None and min(self.blocks, default=0) < 1:
            raise ValueError(f"blocks must be lengths of at least 1, at least one of them, not {self.blocks}")


def block_diffusion_loss(
    network: Any, spec: TokenSpec, rules: BlockRules | None = None, *, chunk: int | None = None
) -> Objective:
    """The weighted cross-entropy of hidden tokens over the number of labelled ones, as released.

    Args:
      network: its keys and values are read as a cache; visibility is given to it in every call.
      spec: `mask` and `alignment` matter. Where a position predicts the "next" token, the first token of a sample,
        which nothing predicts, counts as unlabelled.
      rules: the choices; SDAR's when None.
      chunk: positions whose logits are made at a time, and again in the backward pass; all at once when None.

    Returns:
      A loss over batches of `tokens` int [B, T], `labelled` bool [B, T] and `positions` int [B, T], which begin with
      0 in each sample of a row. A batch may bring its own noise, `hidden` bool [B, T] and `probability` [B, T].
      Metrics: `accuracy` at hidden tokens, and `hidden`, their share of the labelled ones.

    Raises:
      ValueError: no mask token, no length of blocks, or a `chunk` below 1.
    """
    mask, chosen = mask_of(spec), BlockRules() if rules is None else rules
    lengths = chosen.blocks or ((network.block,) if network.block else ())
    if not lengths:
        raise ValueError("a network without blocks of its own needs the lengths of blocks (rules.blocks)")
    check_chunk(chunk)
    read = read_doubled if chosen.doubled else read_twice

    def sums(params: Any, frozen: Any, batch: dict[str, Array], key: Array) -> Sums:
        del frozen
        tokens = batch["tokens"]
        labelled, hidden, layout = noised(batch, key, lengths, chosen.noise, spec.alignment)
        streams = read(network, params, tokens, jnp.where(hidden.where, mask, tokens), layout)
        vectors = before_each(streams, layout) if spec.alignment == "next" else streams.noisy

        logits = scorer(network, params, len(tokens))

        def score(vectors: Array, targets: Array) -> tuple[Array, Array]:
            return token_losses(logits(vectors), targets)

        nll, hits = in_chunks(score, chunk, vectors, tokens)
        weights = jnp.where(hidden.where, 1 / jnp.where(hidden.where, hidden.probability, 1.0), 0.0)
        return {
            "loss": weighted(weights * nll, labelled),
            "accuracy": weighted(hits, hidden.where),
            "hidden": weighted(hidden.where, labelled),
        }

    return Objective(sums)
