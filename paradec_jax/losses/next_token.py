"""Training of causal models: the next token's cross-entropy."""

from typing import Any

from jaxtyping import Array, Bool, Int

from paradec_jax.decode.rules import positions_of
from paradec_jax.losses.cross_entropy import cross_entropy, scorer
from paradec_jax.nn import masks
from paradec_jax.objective import Batch, Objective, Sums, weighted


def packing(batch: Batch) -> tuple[Int[Array, "B T"], Bool[Array, "B T T"] | None]:
    """Positions of the tokens of a batch, and who sees whom where its rows hold several segments."""
    tokens = batch["tokens"]
    if "segments" in batch:
        return batch["positions"], masks.segments(batch["segments"])
    return positions_of(tokens), None


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

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        positions, mask = packing(batch)
        hidden = network.forward(params, batch["tokens"], positions, mask=mask).hidden
        logits, weights = scorer(network, params, len(hidden)), batch["weights"]
        # -sum w log p(target) / sum w
        nll, hits = cross_entropy(logits, hidden, batch["targets"], chunk)
        return {"loss": weighted(nll, weights), "accuracy": weighted(hits, weights)}

    return Objective(sums)
