"""Training of causal models: the next token's cross-entropy."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.losses.cross_entropy import check_chunk, cross_entropy, scorer
from paradec_jax.nn import masks
from paradec_jax.objective import Batch, Objective, Sums, weighted


def packing(batch: Batch) -> tuple[Int[Array, "B T"], Bool[Array, "B T T"] | None]:
    """Positions of the tokens of a batch, and who sees whom where its rows hold several segments."""
    tokens = batch["tokens"]
    if "segments" in batch:
        return batch["positions"], masks.segments(batch["segments"])
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), None


def next_token_loss(network: Any, *, chunk: int | None = None) -> Objective:
    """Mean cross-entropy of the next token in nats, `-sum w log p(target) / sum w`, of a causal
    network.

    Returns:
      A loss over batches of `tokens`, `targets` [B, T] and `weights` [B, T]; packed rows have
      `positions` and `segments` [B, T] too, and no segment sees another. Metric: `accuracy`.

    Raises:
      ValueError: a network that sees what it would have to predict.
    """
    if network.visibility != "causal":
        raise ValueError(
            f"next_token_loss trains networks of visibility 'causal', but this one's is {network.visibility!r}: "
            "it sees the token that it would be asked for"
        )
    check_chunk(chunk)

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        positions, mask = packing(batch)
        hidden = network.forward(params, batch["tokens"], positions, mask=mask).hidden
        logits, weights = scorer(network, params, len(hidden)), batch["weights"]
        # -sum w log p(target) / sum w
        nll, hits = cross_entropy(logits, hidden, batch["targets"], chunk)
        return {"loss": weighted(nll, weights), "accuracy": weighted(hits, weights)}

    return Objective(sums)
