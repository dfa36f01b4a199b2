"""From logits to one token: temperature, top-k, top-p, min-p, and the draw."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.nn.precision import at_least_float32

TOP_P_RULES = ("drop", "keep", "drop-renormalised", "keep-renormalised")
COLDEST = 1e-6  # temperatures below it are 0: float32 does not resolve what they would tell apart
TINY = float(jnp.finfo(jnp.float32).tiny)  # programs may take smaller numbers for 0
ROUNDING = 1e-6  # relative error of a sum of probabilities: .5 + .3 reach a top-p of .8
NONE = jnp.iinfo(jnp.int32).max  # no token: beyond every vocabulary
LOWEST = -1e6  # the logarithm of no probability, finite so that its gradient is 0 and not NaN


def is_hot(temperature: Any) -> Bool[Array, ""]:
    """Whether tokens are drawn at this temperature; one below 1e-6 is 0."""
    return jnp.asarray(temperature) >= COLDEST


def tempered(logits: Float[Array, "*shape V"], temperature: Any) -> Float[Array, "*shape V"]:
    """`(logits - their maximum) / temperature` in at least float32; at temperature 0 divided by 1.

    The softmax is that of `logits / temperature`, however small the temperature is; one below 1e-6
    is 0.
    """
    return divided(logits, jnp.where(is_hot(temperature), temperature, 1.0))


def divided(logits: Float[Array, "*shape V"], temperature: Any) -> Float[Array, "*shape V"]:
    """As `tempered`, but without a coldest temperature; 0 is the smallest number above it."""
    logits = at_least_float32(logits)
    # A compiler may fuse x / T - max(x / T), and what one of the two was rounded by then remains. 0
    # / T is 0.
    most = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return (logits - most) / jnp.maximum(temperature, TINY)


def penalised(
    logits: Float[Array, "B W V"],
    text: Int[Array, "B S"],
    lengths: Int[Array, "B"],
    before: Int[Array, "B W K"],
    penalty: Any,
) -> Float[Array, "B W V"]:
    """The logits, those of tokens that occur divided by the penalty where positive, else multiplied
    by it; as they are where it is None.

    Args:
      text, lengths: rows, and how many of their tokens count.
      before: tokens between them and each position, `NONE` in empty places.
    """
    if penalty is None:
        return logits
    logits, vocab = at_least_float32(logits), logits.shape[-1]

    # Row by row under vmap: indices of rows would gather what lies on several devices.
    def occurs(text: Array, length: Array, before: Array) -> Array:
        text = jnp.where(jnp.arange(text.shape[0]) < length, text, NONE)
        everywhere = jnp.zeros(vocab, bool).at[text].set(True, mode="drop")
        return jax.vmap(lambda ids: everywhere.at[ids].set(True, mode="drop"))(before)

    seen = jax.vmap(occurs)(text, lengths, before)
    penalty = jnp.asarray(penalty, logits.dtype)
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def earlier(guesses: Int[Array, "*shape K"]) -> Int[Array, "*shape W K"]:
    """The guesses before each of W = K + 1 positions, `NONE` in the place of later ones."""
    count = guesses.shape[-1]
    return jnp.where(jnp.tri(count + 1, count, -1, dtype=bool), guesses[..., None, :], NONE)


def filtered_probabilities(
    logits: Float[Array, "*shape V"],
    knobs: Any,
    *,
    top_p_rule: str = "keep",
) -> Float[Array, "*shape V"]:
    """Softmax of `logits / temperature` after top-k, top-p and min-p, in this order, renormalised.

    Each filter works on what the one before left, without renormalising in between. The rules of
    top-p differ in the token that crosses the threshold: "keep" keeps it, so that the smallest set
    of at least that mass stays; "drop" removes it (Huginn's release), but never the most probable
    token. "drop-renormalised" and "keep-renormalised" renormalise first what top-k left (the
    serving engine of Jacobi Forcing, which accepts a draft x when u < p(x); SDAR and transformers).
    """
    vocab = logits.shape[-1]
    probs = jax.nn.softmax(tempered(logits, knobs.temperature), axis=-1)

    top_k = vocab if knobs.top_k is None else jnp.minimum(knobs.top_k, vocab)

    def most_probable(probs: Array) -> Array:
        ordered = jnp.flip(jnp.sort(probs, axis=-1), axis=-1)
        kth = jnp.take_along_axis(
            ordered, jnp.broadcast_to(top_k - 1, (*probs.shape[:-1], 1)), axis=-1
        )
        probs = renormalised(jnp.where(probs < kth, 0.0, probs))
        order = jnp.argsort(-probs, axis=-1, stable=True)
        ordered = jnp.take_along_axis(probs, order, axis=-1)
        mass = jnp.cumsum(ordered, axis=-1)
        beyond = mass > knobs.top_p
        if top_p_rule.startswith("keep"):
            beyond = mass - ordered >= knobs.top_p * (1 - ROUNDING)
        # Rounding may lift the whole mass above 1; a threshold of 1 must still keep everything.
        outside = beyond & (jnp.arange(vocab) > 0) & (jnp.asarray(knobs.top_p) < 1)
        rank = jnp.argsort(order, axis=-1)
        return jnp.where(jnp.take_along_axis(outside, rank, axis=-1), 0.0, probs)

    def renormalised(probs: Array) -> Array:
        if not top_p_rule.endswith("renormalised"):
            return probs
        return probs / jnp.sum(probs, axis=-1, keepdims=True)

    # Three sorts of the vocabulary, at every position drawn: only where one of the two filters is
    # set.
    probs = lax.cond(
        (jnp.asarray(top_k) < vocab) | (jnp.asarray(knobs.top_p) < 1),
        most_probable,
        renormalised,
        probs,
    )
    probs = jnp.where(probs < knobs.min_p * jnp.max(probs, axis=-1, keepdims=True), 0.0, probs)
    return probs / jnp.maximum(jnp.sum(probs, axis=-1, keepdims=True), 1e-10)


def distribution(
    logits: Float[Array, "*shape V"], knobs: Any, top_p_rule: str, greedy: bool
) -> Float[Array, "*shape V"]:
    """What `sample` draws a token from: at temperature 0 all of it is at the most probable one."""

    def point(logits: Array) -> Array:
        best = jnp.argmax(logits, axis=-1)
        return jax.nn.one_hot(best, logits.shape[-1], dtype=at_least_float32(logits).dtype)

    if greedy:
        return point(logits)
    spread = functools.partial(filtered_probabilities, knobs=knobs, top_p_rule=top_p_rule)
    return lax.cond(is_hot(knobs.temperature), spread, point, logits)


def filtered_logits(
    logits: Float[Array, "*shape V"], knobs: Any, *, top_p_rule: str
) -> Float[Array, "*shape V"]:
    """The logarithm of `filtered_probabilities`; a token that the filters took away has no share
    and no gradient.
    """
    probs = filtered_probabilities(logits, knobs, top_p_rule=top_p_rule)
    some = probs > 0
    return jnp.where(some, jnp.log(jnp.where(some, probs, 1.0)), LOWEST)


def filters(knobs: Any, vocab: int) -> Bool[Array, ""]:
    """Whether top-k, top-p or min-p is set."""
    some = (jnp.asarray(knobs.top_p) < 1) | (jnp.asarray(knobs.min_p) > 0)
    return some if knobs.top_k is None else some | (jnp.asarray(knobs.top_k) < vocab)


def inverse_cdf(
    probs: Float[Array, "*shape V"], uniform: Float[Array, "*shape"]
) -> Int[Array, "*shape"]:
    """First index whose cumulative probability exceeds the number."""
    exceeds = jnp.cumsum(probs, axis=-1) > uniform[..., None]
    return jnp.argmax(exceeds, axis=-1).astype(jnp.int32)


def draw(probs: Float[Array, "B W V"], keys: Array) -> Int[Array, "B W"]:
    """One token of each distribution, with one key each: `argmax(log p + g)`, g Gumbel noise in
    float32.
    """
    return jnp.argmax(jnp.log(probs) + gumbel(keys, probs.shape[-1]), axis=-1).astype(jnp.int32)


def gumbel(keys: Array, vocab: int) -> Float[Array, "B W V"]:
    """Gumbel noise of a vocabulary for each key, in float32, exact far up its tail.

    That of 23 random bits ends at 15.9, so that tokens of a probability below 1e-7 would never be
    drawn.
    """
    return jax.vmap(
        jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32, mode="high"))
    )(keys)


def sample(
    logits: Float[Array, "B W V"],
    positions: Int[Array, "B W"],
    keys: Array,
    knobs: Any,
    uniforms: Float[Array, "P"] | None = None,
    *,
    top_p_rule: str = "keep",
    purpose: Purpose = Purpose.TOKEN,
    step: Int[Array, "B"] | None = None,
) -> Int[Array, "B W"]:
    """Draws the token of each position with Gumbel noise, `argmax(log p + g)`; temperature 0 is
    argmax.

    The noise belongs to the position, not to the step: a decoder that revises a position sees the
    same noise each time, so its candidate settles once the logits do, and every decoder draws the
    same token from the same logits.

    Args:
      logits, positions: scores and absolute positions of the tokens to be drawn.
      keys: one key a row.
      uniforms: recorded numbers by position, used through the inverse cumulative distribution in
        place of noise.
      top_p_rule: see `filtered_probabilities`.
      step: sampler step of each row, for decoders that draw a position anew in every step.
    """

    def greedy(logits: Array) -> Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def stochastic(logits: Array) -> Array:
        probs = filtered_probabilities(logits, knobs, top_p_rule=top_p_rule)
        if uniforms is not None:
            return inverse_cdf(probs, uniforms[jnp.minimum(positions, len(uniforms) - 1)])
        return draw(probs, fold(keys, purpose, positions, step))

    return lax.cond(is_hot(knobs.temperature), stochastic, greedy, logits)


def log_probability(
    logits: Float[Array, "*shape V"], tokens: Int[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Log-probability of each token under the unfiltered softmax, in nats."""
    log_probs = jax.nn.log_softmax(at_least_float32(logits), axis=-1)
    return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
