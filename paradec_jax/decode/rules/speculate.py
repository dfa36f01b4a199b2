"""Speculative sampling (arXiv 2211.17192): drafts of a distribution p, judged by another one, q.

A draft x ~ p that is accepted with min(1, q(x) / p(x)), and else replaced by a draw from (q - p)+,
has the law q.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.windows import entry_of


def judge(
    p: Float[Array, "B W V"],
    q: Float[Array, "B W V"],
    drafts: Int[Array, "B W"],
    span: Bool[Array, "B W"],
    exponent: Any,
    uniforms: Float[Array, "B W"],
) -> tuple[Float[Array, "B W"], Bool[Array, "B W"], Bool[Array, "B W"], Float[Array, "B 1 V"]]:
    """Accepts drafts of a span from left to right, up to the first refusal.

    Args:
      p, q: distributions that drafts were drawn from, and that judge them.
      drafts: a token of p at each position.
      span: an unbroken run of positions that are judged.
      exponent: t; only with 1 the law is q.
      uniforms: numbers in [0, 1); a draft passes while its own is below its chance.

    Returns:
      The chance `min(1, (q(x) / p(x))^t)` of each draft x, which are accepted, which is the first
      refused one, and `(q - p)+` there, renormalised, or q where rounding leaves nothing of it.
    """
    chance = jnp.minimum(1.0, (share(q, drafts) / share(p, drafts)) ** exponent)
    accepted = span & select.leading((uniforms < chance) | ~span)
    refused = select.first(span & ~accepted, 1)
    p, q = entry_of((p, q), jnp.argmax(refused, axis=1))
    rest = jnp.maximum(q - p, 0)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    rest = jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), q)
    return chance, accepted, refused, rest[:, None]


def share(probs: Float[Array, "B W V"], tokens: Int[Array, "B W"]) -> Float[Array, "B W"]:
    """The probability of each token."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def expected_run(chances: Float[Array, "B W"], span: Bool[Array, "B W"]) -> Float[Array, "B"]:
    """E = sum over k of prod over i <= k of alpha_i: tokens of a span that are accepted one after
    the other, if each is with a chance alpha.
    """
    return jnp.sum(jnp.cumprod(jnp.where(span, chances, 1.0), axis=1) * span, axis=1)
