"""Speculative sampling with a draft that is one token, not a distribution.

::

    drafted      x1 x2 x3 x4       p_i  the distribution of token i given the tokens before it, u_i uniform in [0, 1)
    accepted     =  =  /           u_1 < p_1(x1), u_2 < p_2(x2), u_3 >= p_3(x3)
    committed    x1 x2 y           y ~ p_3 without x3, renormalised; y ~ p_5 where all four are accepted

The drafted x comes out with probability p(x), any other token y with (1 - p(x)) p(y) / (1 - p(x)) = p(y). So the
tokens committed are distributed as one-by-one sampling draws them, whatever was drafted, as long as no draft looks
at the numbers that judge it (Leviathan et al. 2023, with a proposal that puts all its mass on x).

It is the rule of the serving engine released with Jacobi Forcing, with these departures: the engine draws no token
after a window that is accepted as a whole; where it must avoid x it draws again up to 16 times and then takes the
best other token, which is not quite p; its top-p is stricter (`top_p_rule="drop-renormalised"` is that one); and
it takes temperature 0 as 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.partition import fraction
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.sampling import draw

NONE = -1  # no token is proposed


def accept(
    probs: Float[Array, "*shape V"], drafted: Int[Array, "*shape"], uniform: Float[Array, "*shape"]
) -> Bool[Array, "*shape"]:
    """Whether each drafted token x is accepted: `u < p(x)`, u uniform in [0, 1); `NONE` never is."""
    probability = jnp.take_along_axis(probs, drafted[..., None], axis=-1)[..., 0]
    return (drafted != NONE) & (uniform < probability)


def residual(probs: Float[Array, "*shape V"], rejected: Int[Array, "*shape"]) -> Float[Array, "*shape V"]:
    """p without the rejected token (`NONE` removes nothing), renormalised; p itself where that leaves nothing.

    Nothing is left where p(x) is 1 up to rounding, and u may still lie above it.
    """
    rest = jnp.where(jnp.arange(probs.shape[-1]) == rejected[..., None], 0.0, probs)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), probs)


def verify(
    probs: Float[Array, "B W V"],
    drafts: Int[Array, "B drafts"],
    inside: Bool[Array, "B drafts"],
    positions: Int[Array, "B W"],
    keys: Array,
    step: Int[Array, "B"],
) -> tuple[Int[Array, "B W"], Bool[Array, "B drafts"]]:
    """Judges the W - 1 drafts of a window and draws the token after those that are accepted.

    Args:
      probs: p of each position, given the drafts before it.
      drafts: tokens drafted for all positions but the last.
      inside: drafts that are proposals; the others are not looked at.
      positions: absolute positions of the tokens.
      keys: one key a row.
      step: sampler step of each row. Numbers are drawn anew in every step.

    Returns:
      The leading accepted drafts, the token drawn after them, then the most probable tokens, which the engine
      drafts next; and which drafts are accepted.
    """
    proposed = jnp.pad(jnp.where(inside, drafts, NONE), ((0, 0), (0, 1)), constant_values=NONE)
    # Numbers of many digits: on a grid of 2^-23 an unlikely draft would be accepted whenever 0 is drawn.
    drawn_bits = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32)))
    uniform = fraction(drawn_bits(fold(keys, Purpose.ACCEPT, positions, step)))
    accepted = accept(probs, proposed, uniform)

    count = select.leading_run(accepted)[:, None]
    rest = residual(
        jnp.take_along_axis(probs, count[..., None], axis=1), jnp.take_along_axis(proposed, count, axis=1)
    )
    drawn = draw(rest, fold(keys, Purpose.TOKEN, jnp.take_along_axis(positions, count, axis=1), step))

    slots = jnp.arange(probs.shape[1])
    best = jnp.argmax(probs, axis=-1).astype(jnp.int32)
    tokens = jnp.where(slots < count, proposed, jnp.where(slots == count, drawn, best))
    return tokens, accepted[:, :-1]
