"""Consistency distillation of one block (CLLM; Kou et al. 2024, arXiv 2403.00835), before `consistency_loss`.

::

    L = mean of -sum_v q_v log p_v  +  ar_weight * smoothed cross-entropy of the fixed point's sequence

p reads the prompt and a noisy iterate of the block's trajectory, q the prompt and its fixed point.
"""

from typing import Any

import chex
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array

from paradec_jax.config import TokenSpec
from paradec_jax.losses import block_passes
from paradec_jax.losses.consistency import summed
from paradec_jax.losses.cross_entropy import check_chunk, in_chunks, scorer, soft_cross_entropy, token_losses
from paradec_jax.nn import masks
from paradec_jax.objective import Metrics, Objective, Sums

SMOOTHING = 0.1  # of the labels of the next-token term, as released


def cllm_loss(
    network: Any,
    spec: TokenSpec,
    *,
    ar_weight: float = 10.0,
    pad_after_stop: bool = True,
    chunk: int | None = None,
) -> Objective:
    """CLLM's global consistency loss (its equation 5) with the next-token term; the defaults are the released ones.

    The next-token term is the mean over the whole sequence, prompt included, with labels smoothed by 0.1. It has a
    pass of its own, since the two passes of consistency hide padding inside a row. Consistency counts at each
    position p whose next noisy token is not padding, from the one that predicts the first wrong token on (there both
    read the same context, so that position adds to the loss and not to the gradient).

    Args:
      network: the causal network.
      spec: its special tokens; `stop` matters, and `pad` as what fills a row up.
      ar_weight: weight of the next-token term.
      pad_after_stop: whether everything after a stop token of the prompt (with the blocks before) becomes
        padding (released). Chat prompts whose turns end in a stop token need False.
      chunk: positions whose logits are made at a time; all at once when None.

    Returns:
      A loss over the batches of `consistency_loss` with one pair a row, [B, 1, n]; rows with `pairs` 0 count
      nowhere. Each term is the mean over rows. Its metrics: `ar` and `consistency`, the two terms (unweighted),
      and `accuracy` of the next token, all means over rows.

    Raises:
      ValueError: an argument out of range or, while tracing, more than one pair a row.
    """
    if ar_weight < 0:
        raise ValueError(f"ar_weight must not be negative, not {ar_weight}")
    check_chunk(chunk)
    forward = block_passes.forward_of(network)

    def sums(params: Any, frozen: Any, batch: dict[str, Array], key: Array) -> Sums:
        del frozen, key
        one = "cllm_loss wants one pair a row"
        chex.assert_axis_dimension(batch["noisy"], 1, 1, custom_message=one, exception_type=ValueError)
        tokens, real, lengths = _sequences(batch, spec, pad_after_stop)
        noisy, clean, plain = _read(forward, params, tokens, real)
        inside = jnp.arange(1, tokens.shape[2]) < lengths[:, None]
        differs = jnp.cumsum(tokens[:, 0] != tokens[:, 1], axis=1)[:, 1:] > 0
        keep = inside & differs & real[:, 0, 1:]
        logits = scorer(network, params, len(tokens))

        def divergence(student: Array, teacher: Array) -> Array:
            return soft_cross_entropy(logits(student), logits(teacher))[0]

        def nll(hidden: Array, targets: Array) -> tuple[Array, Array]:
            return token_losses(logits(hidden), targets, SMOOTHING)

        value = in_chunks(divergence, chunk, noisy[:, :-1], lax.stop_gradient(clean)[:, :-1])
        smoothed, hits = in_chunks(nll, chunk, plain[:, :-1], tokens[:, 1, 1:])
        rows = batch["pairs"]
        return {
            "ar": summed(smoothed, inside, rows),
            "consistency": summed(value, keep, rows),
            "accuracy": summed(hits, inside, rows),
        }

    def value(sums: Sums) -> tuple[Array, Metrics]:
        terms = {name: part.mean for name, part in sums.items()}
        return ar_weight * terms["ar"] + terms["consistency"], terms

    return Objective(sums, value)


def _sequences(batch: dict[str, Array], spec: TokenSpec, pad_after_stop: bool) -> tuple[Array, Array, Array]:
    """Noisy and clean sequence of each row, [B, 2, P + n], which of their tokens are text, and their number [B]."""
    lengths, real = batch["prompt_lengths"], block_passes.real_tokens(batch)

    def joined(prompt: Array, noisy: Array, clean: Array) -> Array:
        return block_passes.sequences(prompt, lengths, jnp.concatenate([noisy, clean], axis=1))

    tokens, text = joined(batch["prompt"], batch["noisy"], batch["clean"]), joined(*real)
    if pad_after_stop:
        before = jnp.arange(tokens.shape[2]) < lengths[:, None]
        stops = jnp.isin(tokens, jnp.asarray(spec.stop, jnp.int32)) & before[:, None]
        after = jnp.cumsum(stops, axis=2) - stops > 0
        tokens, text = jnp.where(after, spec.pad, tokens), text & ~after
    return tokens, text, lengths + batch["noisy"].shape[2]


def _read(
    forward: block_passes.Forward, params: Any, tokens: Array, real: Array
) -> tuple[Array, Array, Array]:
    """Hidden states of the noisy sequence and of the clean one, padding hidden, and of the clean one whole."""
    tokens, real = (jnp.concatenate([x, x[:, 1:]], axis=1) for x in (tokens, real))
    flat, text, seen = (
        rearrange(x, "b copy s -> (b copy) s") for x in (tokens, real, real.at[:, 2].set(True))
    )
    positions = jnp.broadcast_to(jnp.arange(flat.shape[1]), flat.shape)
    mask = masks.causal(flat.shape[1]) & seen[:, None]
    hidden = rearrange(
        forward(params, flat, text, positions, mask=mask), "(b copy) s d -> copy b s d", copy=3
    )
    return hidden[0], hidden[1], hidden[2]
