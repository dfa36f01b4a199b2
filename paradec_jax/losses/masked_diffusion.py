"""Training of models that fill a canvas: the bound of MDLM (Sahoo et al. 2024, arXiv 2406.07524) on
the log-likelihood, which LLaDA (arXiv 2502.09992) and Dream (arXiv 2508.15487) train by too.

::

    L = mean over tokens of  w(t) * -log p(x_i | x_t)   at hidden positions, 0 elsewhere

A time t is drawn for each row, each token is hidden with the probability m(t) of the schedule, w(t)
= m'(t) / m(t). What a row's tokens cost together is an upper bound of its negative log-likelihood
in nats, in the mean over draws. Where the logits of a position predict the next token, the first
one of a row is always seen and costs nothing.

CART, Dream's other weight, is no bound. Of a hidden token it is the larger the nearer what is seen::

    w_i = 1/2 sum over seen j of  p (1 - p)^(|i - j| - 1)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from paradec_jax.config import Ranged, TokenSpec, check_words
from paradec_jax.decode.rules import positions_of
from paradec_jax.decode.rules.subs import scores_of
from paradec_jax.losses.cross_entropy import (
    certain,
    forced,
    in_chunks,
    judged,
    scorer,
    soft_cross_entropy,
)
from paradec_jax.losses.recorded import recorded_or
from paradec_jax.nn.masks import block_causal
from paradec_jax.noise import LOGLINEAR, MDLM_TIMES, Schedule, Times, hide, monotone, rounded_up
from paradec_jax.objective import Batch, Objective, Sums, weighted


@dataclasses.dataclass(frozen=True)
class BoundRules(Ranged):
    """The choices of the objective; the defaults are MDLM's.

    Attributes:
      schedule: schedule of the noise.
      times: how the times of a batch are drawn.
      steps: T of the discrete-time bound, whose times are multiples of 1 / T; continuous time when
        None. It is finite where the original divides zero by zero (t = 1 / T).
      measure: what is drawn evenly: the "time", or the log mask probability, whose weight is
        constant, either by way of the time ("importance") or directly ("change_of_variables").
      cart: p of CART's weights, which take the place of w(t); None for the bound.
      certainty: beta of certainty forcing (`cross_entropy.forced`).
      released: the weights of the released code: `-f_0` for `f_T - f_0` where the log mask
        probability is drawn, and in discrete time `1 / min(t, 1 - 1e-4)` for 1 / t.
    """

    schedule: Schedule = LOGLINEAR
    times: Times = MDLM_TIMES
    steps: int | None = None
    measure: str = "time"
    cart: float | None = None
    certainty: float = 0.0
    released: bool = False

    BOUNDS = {"cart": (1e-3, 1)}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, measure=("time", "importance", "change_of_variables"))
        if self.steps is not None and (self.measure != "time" or self.schedule != LOGLINEAR):
            raise ValueError(
                "discrete time (steps) is known for the log-linear schedule and measure 'time' alone"
            )

    def at(self, t: Float[Array, "B"]) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
        """Mask probability and weight of the loss of rows whose drawn times are t."""
        if self.steps is not None:
            t = rounded_up(t, self.steps)
            weight = 1 / (jnp.minimum(t, 1 - 1e-4) if self.released else t)
            return self.schedule.mask_probability(t), weight
        if self.measure == "time":
            return self.schedule.mask_probability(t), self.schedule.weight(t)
        low, high = self.schedule.log_range
        weight = jnp.full_like(t, -low if self.released else high - low)
        if self.measure == "importance":
            return self.schedule.mask_probability(self.schedule.importance(t)), weight
        return jnp.exp(low + t * (high - low)), weight


MDLM = BoundRules()


def mask_of(spec: TokenSpec) -> int:
    """The id of the mask. Raises ValueError for a checkpoint without one."""
    if spec.mask is None:
        raise ValueError(
            "a denoiser is trained with a mask token, but the checkpoint's token spec has none"
        )
    return spec.mask


def read(network: Any, params: Any, tokens: Array, dropout: Array | None = None) -> Array:
    """Hidden states [B, S, D] of whole canvases; with a key activations are dropped."""
    positions = positions_of(tokens)
    options = {} if dropout is None else {"dropout": dropout}
    return network.forward(params, tokens, positions, **options).hidden


def masked_diffusion_loss(
    network: Any,
    spec: TokenSpec,
    rules: BoundRules = MDLM,
    *,
    dropout: bool = True,
    chunk: int | None = None,
) -> Objective:
    """The negative bound, `sum w(t) nll / sum weights`, over all real tokens.

    With `dropout` activations are dropped, at the rate of the network's config if it has one.

    Returns:
      A loss over batches of `tokens` [B, S] and perhaps `weights` [B, S], 0 at padding, and
      `labelled` [B, S], tokens that may be hidden. Metrics: `accuracy` at hidden positions and
      `hidden`, their share.
    """
    mask, first = mask_of(spec), int(spec.alignment == "next")
    dropout = dropout and hasattr(network.config, "dropout")

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        tokens, (of_times, of_masks, of_dropout) = batch["tokens"], jax.random.split(key, 3)
        # Nothing predicts the first token where each predicts the next.
        predicted = jnp.broadcast_to(jnp.arange(tokens.shape[1]) >= first, tokens.shape)
        weights = batch.get("weights", 1) * predicted.astype(jnp.float32)
        batch = batch | {"labelled": batch.get("labelled", True) & predicted}
        # t, x_t ~ q(x_t | x), and w(t)
        noised, hidden, weight = noise(batch, rules, mask, of_times, of_masks)
        weight = weight[:, None] if rules.cart is None else near(~hidden, rules.cart)
        logits = scorer(network, params, len(tokens))
        vectors = read(network, params, noised, of_dropout if dropout else None)
        # -log p(x_i | x_t)
        likely, vectors = lambda x: scores_of(network, logits(x), mask), jnp.roll(vectors, first, 1)
        nll, hits, entropy = judged(likely, vectors, tokens, chunk)
        counted = hidden * weights
        parts = {
            # mean of w(t) * nll over real tokens, 0 where nothing is hidden
            "loss": weighted(weight * hidden * nll, weights),
            "accuracy": weighted(hits, counted),
            "hidden": weighted(hidden, weights),
        }
        return certain(rules.certainty, parts, entropy, counted * hits)

    return Objective(sums, forced(rules.certainty))


@dataclasses.dataclass(frozen=True)
class ForcingRules(Ranged):
    """The choices of discrete diffusion forcing; the defaults are those of D2F's released code.

    Attributes:
      block: B, tokens of a block.
      low, high: bounds of the share of a block that is hidden, which rises from block to block.
      labels: what hidden tokens are drawn to, the distributions of the "teacher" or the tokens of
        the "data".
      certainty: beta of certainty forcing (`cross_entropy.forced`).
    """

    block: int = 16
    low: float = 0.2
    high: float = 0.7
    labels: str = "teacher"
    certainty: float = 0.0

    BOUNDS = {"low": (0, 1), "high": (0, 1)}  # noqa: RUF012
    WORDS = {"labels": ("teacher", "data")}  # noqa: RUF012


D2F = ForcingRules()


def forcing_loss(
    network: Any, spec: TokenSpec, rules: ForcingRules = D2F, *, chunk: int | None = None
) -> Objective:
    """Discrete diffusion forcing (D2F, arXiv 2508.09192): a student that sees in blocks says what a
    teacher that sees all says.

    ::

        L = mean over hidden i of  -sum_v q_i(v) log p_i(v) / p_block(i)

    Blocks count from the first labelled token; what is before it is one of them, which is never
    hidden. Student p and teacher q read the same noisy text. Numbers `mask_uniforms` of a batch that
    fall with the call in which a teacher revealed a position hide what it revealed last (the
    pseudo-trajectories of d3LLM, arXiv 2601.07568, with the data's labels).

    Returns:
      A loss whose second argument holds the teacher's parameters; None where labels are the data's.
      Batches are those of `masked_diffusion_loss`. Metrics: `accuracy` at hidden tokens,
      and `hidden`, their share of the labelled ones; with certainty forcing `certainty`.
    """
    mask, first = mask_of(spec), int(spec.alignment == "next")

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        tokens, at = batch["tokens"], positions_of(batch["tokens"])
        labelled = jnp.broadcast_to(batch.get("labelled", True) & (at >= first), tokens.shape)
        labelled &= batch.get("weights", jnp.ones(tokens.shape)) > 0
        prompt = jnp.argmax(labelled, axis=1).astype(jnp.int32)
        # Shares of hidden tokens that rise from block to block
        of_shares, of_masks = jax.random.split(key)
        block = (at - prompt[:, None]) // rules.block
        share = recorded_or(
            batch, "probability", lambda: monotone(of_shares, block, rules.low, rules.high)
        )
        numbers = recorded_or(
            batch, "mask_uniforms", lambda: jax.random.uniform(of_masks, tokens.shape)
        )
        hidden = recorded_or(batch, "hidden", lambda: numbers < share)
        hidden, noisy = hidden & labelled, jnp.where(hidden & labelled, mask, tokens)
        # The student sees its block and those before it, all of them noisy; the teacher sees all.
        sees = block_causal(at, rules.block, prompt)

        def states(params: Any, sees: Array) -> Array:
            return jnp.roll(network.forward(params, noisy, at, mask=sees).hidden, first, axis=1)

        vectors, logits = states(params, sees), scorer(network, params, len(tokens))
        nll, hits, entropy = judged(logits, vectors, tokens, chunk)
        if rules.labels == "teacher":
            teacher = lax.stop_gradient(frozen)
            taught, wanted = states(teacher, jnp.ones_like(sees)), scorer(network, teacher)
            nll, _ = in_chunks(
                lambda p, q: soft_cross_entropy(logits(p), wanted(q)), chunk, vectors, taught
            )
        parts = {
            # mean over hidden tokens of their cross-entropy over their block's share
            "loss": weighted(nll / jnp.where(hidden, share, 1), hidden),
            "accuracy": weighted(hits, hidden),
            "hidden": weighted(hidden, labelled),
        }
        return certain(rules.certainty, parts, entropy, hidden & hits)

    return Objective(sums, forced(rules.certainty))


def noise(
    batch: Batch, rules: BoundRules, mask: int, of_times: Array, of_masks: Array
) -> tuple[Array, Array, Array]:
    """Noised tokens [B, S], which of them are hidden [B, S], and the weight of each row [B]."""
    tokens = batch["tokens"]
    rows = len(tokens)
    uniforms = recorded_or(batch, "time_uniforms", lambda: None)
    t = rules.times.draw(of_times, rows) if uniforms is None else rules.times.at(uniforms, rows)
    probability, weight = rules.at(t)
    uniforms = recorded_or(
        batch, "mask_uniforms", lambda: jax.random.uniform(of_masks, tokens.shape)
    )
    return *hide(tokens, uniforms, probability, mask, batch.get("labelled")), weight


def near(seen: Bool[Array, "B S"], p: float) -> Float[Array, "B S"]:
    """CART's weight of each position: half the sum of Geo(p) at its distances to those seen."""
    at = jnp.arange(seen.shape[1])
    distance = jnp.abs(at[:, None] - at)
    return seen @ jnp.where(distance > 0, p / 2 * (1 - p) ** (distance - 1.0), 0)
