"""Exit criteria of adaptive computation: has a token had enough recurrences? (arXiv 2502.05171)

A criterion is a pair of pure functions. `init` gives what the first check compares with; `measure`
compares and hands on what the next check compares with. All take one value a row.
"""

from collections.abc import Callable
from operator import ge, lt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paradec_jax.decode.rules import score


class Criterion(NamedTuple):
    """A named rule of `CRITERIA`.

    Attributes:
      looks_at: "latent" (raw states [B, W, D] of all positions fed) or "logits" ([B, V] of the last
        one).
      init: `(states or logits) -> previous`; receives the initial states, or logits of the right
        shape.
      measure: `(previous, states or logits, valid [B, W]) -> (value [B], previous)`.
      fires: `(value, threshold) -> [B]`.
      threshold: the default threshold.
    """

    looks_at: str
    init: Callable[[Array], Any]
    measure: Callable[[Any, Array, Array], tuple[Array, Any]]
    fires: Callable[[Array, Any], Bool[Array, "B"]]
    threshold: float


def _compared(
    view: Callable[[Array], Array], difference: Callable[..., Array]
) -> Callable[..., Any]:
    """A measure that keeps a view of what it is shown, and is its difference from the view before."""

    def measure(old: Array, seen: Array, valid: Bool[Array, "B W"]) -> tuple[Array, Any]:
        new = view(seen)
        return difference(old, new, valid), new

    return measure


def _mean(change: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    """The measure of latents whose relative change is averaged over the positions that are real."""

    def mean(old: Array, new: Array, valid: Bool[Array, "B W"]) -> Float[Array, "B"]:
        total = jnp.sum(jnp.where(valid, change(new, old), 0.0), axis=1)
        return total / jnp.maximum(jnp.sum(valid, axis=1), 1)

    return _compared(lambda latents: latents, mean)


def _uniform(logits: Array) -> Array:
    return jnp.full(logits.shape, -jnp.log(float(logits.shape[-1])), jnp.float32)


def _repeats(old: tuple[Array, Array], logits: Array, valid: Array) -> tuple[Array, Any]:
    """How often the most probable token was the same again."""
    token, run = old
    new = jnp.argmax(logits, axis=-1)
    run = jnp.where(new == token, run + 1, 0)
    return run.astype(jnp.float32), (new, run)


_entropy_change = _compared(score.entropy, lambda old, new, valid: jnp.abs(new - old))
_kl = _compared(
    lambda logits: jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1),
    lambda old, new, valid: score.kl_divergence(old, new),
)
_min_p_kl = _compared(score.min_p_log_probs, lambda old, new, valid: score.kl_divergence(old, new))

CRITERIA: dict[str, Criterion] = {
    "latent-diff": Criterion("latent", lambda s: s, _mean(score.latent_change), lt, 0.03),
    "cosine": Criterion("latent", lambda s: s, _mean(score.cosine_change), lt, 1e-3),
    "entropy-diff": Criterion(
        "logits", lambda x: jnp.full(x.shape[0], 100.0, jnp.float32), _entropy_change, lt, 1e-3
    ),
    "kl": Criterion("logits", _uniform, _kl, lt, 1e-3),
    "minp-kl": Criterion("logits", _uniform, _min_p_kl, lt, 1e-5),
    "argmax-stability": Criterion(
        "logits",
        lambda x: (jnp.full(x.shape[0], -1, jnp.int32), jnp.zeros(x.shape[0], jnp.int32)),
        _repeats,
        ge,
        5.0,
    ),
    "none": Criterion(
        "latent",
        lambda states: jnp.zeros(len(states)),
        lambda old, new, valid: (old, old),
        lambda value, threshold: value > 0,
        0.0,
    ),
}
