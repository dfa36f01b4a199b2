"""Consistency distillation of one block (CLLM; Kou et al. 2024, arXiv 2403.00835), before
`consistency_loss`.

::

    L = mean of -sum_v q_v log p_v  +  ar_weight * smoothed cross-entropy of the fixed point's sequence

p reads the prompt and a noisy iterate of the block's trajectory, q the prompt and its fixed point.
"""

from typing import Any

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from paradec_jax.config import TokenSpec
from paradec_jax.decode.rules import positions_of
from paradec_jax.losses.consistency import hidden_states, real_tokens, summed
from paradec_jax.losses.cross_entropy import (
    cross_entropy,
    in_chunks,
    scorer,
    soft_cross_entropy,
)
from paradec_jax.nn import masks
from paradec_jax.objective import Batch, Metrics, Objective, Sums

SMOOTHING = 0.1  # of the labels of the next-token term, as released


def cllm_loss(
    network: Any, spec: TokenSpec, *, ar_weight: float = 10.0, chunk: int | None = None
) -> Objective:
    """CLLM's global consistency loss (its equation 5) with the next-token term, as released.

    The next-token term is the mean over the whole sequence, prompt included, with labels smoothed
    by 0.1. It has a pass of its own, since the two passes of consistency hide padding inside a row.
    Consistency counts at each position p whose next noisy token is not padding, from the one that
    predicts the first wrong token on (there both read the same context, so that position adds to
    the loss and not to the gradient). As released, everything after a stop token of the prompt
    becomes padding: chat prompts, whose turns end in one, want a spec without stop tokens.

    Returns:
      A loss over the batches of `consistency_loss` with one pair a row, [B, 1, n]; rows with
      `pairs` 0 count nowhere. Each term is the mean over rows. Its metrics: `ar` and `consistency`,
      the two terms (unweighted), and `accuracy` of the next token, all means over rows.
    """
    if ar_weight < 0:
        raise ValueError(f"ar_weight must not be negative, not {ar_weight}")

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        if batch["noisy"].shape[1] != 1:
            raise ValueError("cllm_loss wants one pair a row")
        tokens, real = sequences(batch, spec)
        noisy, clean, whole = read(network, params, tokens, real)
        lengths = batch["prompt_lengths"] + batch["noisy"].shape[2]
        inside = jnp.arange(1, tokens.shape[2]) < lengths[:, None]
        # Positions p from the one that predicts the first wrong token on.
        differs = jnp.cumsum(tokens[:, 0] != tokens[:, 1], axis=1)[:, 1:] > 0
        keep = inside & differs & real[:, 0, 1:]
        logits = scorer(network, params, len(tokens))

        # L_GC (equation 5): -sum_v q_v log p_v at each of them, without gradient towards q.
        value = in_chunks(
            lambda student, teacher: soft_cross_entropy(logits(student), logits(teacher))[0],
            chunk,
            noisy[:, :-1],
            lax.stop_gradient(clean)[:, :-1],
        )
        # L_AR: the next token of the whole clean sequence.
        smoothed, hits = cross_entropy(logits, whole[:, :-1], tokens[:, 2, 1:], chunk, SMOOTHING)
        rows = batch["pairs"]
        return {
            "ar": summed(smoothed, inside, rows),
            "consistency": summed(value, keep, rows),
            "accuracy": summed(hits, inside, rows),
        }

    def value(sums: Sums) -> tuple[Array, Metrics]:
        terms = {name: part.mean for name, part in sums.items()}
        # L = L_GC + w L_AR (equation 7)
        return ar_weight * terms["ar"] + terms["consistency"], terms

    return Objective(sums, value)


def sequences(batch: Batch, spec: TokenSpec) -> tuple[Array, Array]:
    """Noisy, clean and again clean sequence of each row, [B, 3, P + n], and which tokens are text.

    Blocks stand directly after their prompts, so that padding comes last, where no causal query
    sees it.
    """
    width, size = batch["prompt"].shape[1], batch["noisy"].shape[2]
    at = jnp.arange(width + size) - batch["prompt_lengths"][:, None]

    def joined(prompt: Array, noisy: Array, clean: Array) -> Array:
        blocks = jnp.concatenate([noisy, clean, clean], axis=1)
        index = jnp.broadcast_to(jnp.clip(at, 0, size - 1)[:, None], (len(at), 3, width + size))
        before = jnp.pad(prompt, [(0, 0), (0, size)])[:, None]
        return jnp.where((at < 0)[:, None], before, jnp.take_along_axis(blocks, index, axis=2))

    tokens = joined(batch["prompt"], batch["noisy"], batch["clean"])
    real = joined(*real_tokens(batch))
    stops = jnp.isin(tokens, jnp.asarray(spec.stop, jnp.int32)) & (at < 0)[:, None]
    stopped = jnp.cumsum(stops, axis=2) - stops > 0
    return jnp.where(stopped, spec.pad, tokens), real & ~stopped


def read(network: Any, params: Any, tokens: Array, real: Array) -> Float[Array, "3 B S D"]:
    """Hidden states of the noisy and of the clean sequence, as the two passes of the consistency
    term have them (padding is not seen), and of the clean one whole, for the next-token term.

    Source: the released trainer of CLLM (arXiv 2403.00835), `compute_loss`.
    """
    seen = real.at[:, 2].set(True)
    flat, text, seen = (rearrange(x, "b copy s -> (b copy) s") for x in (tokens, real, seen))
    positions = positions_of(flat)
    mask = masks.causal(flat.shape[1]) & seen[:, None]
    hidden = hidden_states(network, params, flat, text, positions, mask)
    return rearrange(hidden, "(b copy) s d -> copy b s d", copy=3)
