"""Exit criteria of adaptive computation: has a token had enough recurrences? (arXiv 2502.05171)

A criterion is a pair of pure functions. `init` gives what the first check compares with; `measure` compares
and hands on what the next check compares with. All take one value a row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paradec_jax.decode.rules import score

Previous = Any


@dataclasses.dataclass(frozen=True)
class Criterion:
    """A named rule of `CRITERIA`.

    Attributes:
      looks_at: "latent" (raw states [B, W, D] of all positions fed), "logits" ([B, V] of the last one) or
        "nothing".
      init: `(states or logits) -> previous`; receives the initial states, or logits of the right shape.
      measure: `(previous, states or logits, valid [B, W]) -> (value [B], previous)`.
      fires: `(value, threshold) -> [B]`.
      threshold: the default threshold.
    """

    looks_at: str
    init: Callable[[Array], Previous]
    measure: Callable[[Previous, Array, Array], tuple[Array, Previous]]
    fires: Callable[[Array, Any], Bool[Array, "B"]]
    threshold: float


def _below(value: Array, threshold: Any) -> Array:
    return value < threshold


def _mean(values: Float[Array, "B W"], valid: Bool[Array, "B W"]) -> Float[Array, "B"]:
    return jnp.sum(jnp.where(valid, values, 0.0), axis=1) / jnp.maximum(jnp.sum(valid, axis=1), 1)


def _latent_diff(old: Array, new: Array, valid: Array) -> tuple[Array, Previous]:
    return _mean(score.latent_change(new, old), valid), new


def _cosine(old: Array, new: Array, valid: Array) -> tuple[Array, Previous]:
    return _mean(score.cosine_change(new, old), valid), new


def _entropy_diff(old: Array, logits: Array, valid: Array) -> tuple[Array, Previous]:
    new = score.entropy(logits)
    return jnp.abs(new - old), new


def _kl(old: Array, logits: Array, valid: Array) -> tuple[Array, Previous]:
    new = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return score.kl_divergence(old, new), new


def _min_p_kl(old: Array, logits: Array, valid: Array) -> tuple[Array, Previous]:
    new = score.min_p_log_probs(logits)
    return score.kl_divergence(old, new), new


def _uniform(logits: Array) -> Array:
    return jnp.full(logits.shape, -jnp.log(float(logits.shape[-1])), jnp.float32)


def _argmax_stability(old: tuple[Array, Array], logits: Array, valid: Array) -> tuple[Array, Previous]:
    token, run = old
    new = jnp.argmax(logits, axis=-1)
    run = jnp.where(new == token, run + 1, 0)
    return run.astype(jnp.float32), (new, run)


def _no_token(logits: Array) -> tuple[Array, Array]:
    return jnp.full(logits.shape[0], -1, jnp.int32), jnp.zeros(logits.shape[0], jnp.int32)


CRITERIA: dict[str, Criterion] = {
    "latent-diff": Criterion("latent", lambda s: s, _latent_diff, _below, 0.03),
    "cosine": Criterion("latent", lambda s: s, _cosine, _below, 1e-3),
    "entropy-diff": Criterion(
        "logits", lambda x: jnp.full(x.shape[0], 100.0, jnp.float32), _entropy_diff, _below, 1e-3
    ),
    "kl": Criterion("logits", _uniform, _kl, _below, 1e-3),
    "minp-kl": Criterion("logits", _uniform, _min_p_kl, _below, 1e-5),
    "argmax-stability": Criterion(
        "logits", _no_token, _argmax_stability, lambda value, threshold: value >= threshold, 5.0
    ),
    "none": Criterion(
        "nothing",
        lambda s: jnp.zeros(s.shape[0]),
        lambda old, new, valid: (jnp.zeros(new.shape[0]), old),
        lambda value, threshold: jnp.zeros(value.shape, bool),
        0.0,
    ),
}
