"""Cross-entropies to tokens and to a teacher's distribution, from logits made chunk by chunk."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from paradec_jax.config import check_number
from paradec_jax.decode.rules.score import entropy
from paradec_jax.nn.copies import with_copies
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.objective import Metrics, Sums, means, weighted

Scorer = Callable[[Array], Array]  # logits of hidden states


def cross_entropy(
    logits: Scorer,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    chunk: int | None = None,
    smoothing: float = 0.0,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """`token_losses` of the logits of hidden states, `chunk` positions at a time (`in_chunks`)."""
    return in_chunks(lambda x, y: token_losses(logits(x), y, smoothing), chunk, hidden, targets)


def judged(
    logits: Scorer, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"], chunk: int | None
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], Float[Array, "B T"]]:
    """As `cross_entropy`, with the entropy of each position's distribution, in nats."""

    def score(hidden: Array, targets: Array) -> tuple[Array, ...]:
        scores = logits(hidden)
        return *token_losses(scores, targets), entropy(scores)

    return in_chunks(score, chunk, hidden, targets)


def certain(
    beta: float, parts: Sums, entropy: Float[Array, "B T"], right: Shaped[Array, "B T"]
) -> Sums:
    """The sums of a loss with certainty forcing (dParallel): the entropies H(p_i) of hidden positions
    whose most probable token is right, as "certainty". Without beta the sums as they are.
    """
    return parts | ({"certainty": weighted(entropy, right)} if beta else {})


def forced(beta: float) -> Callable[[Sums], tuple[Array, Metrics]]:
    """The value of a loss with these sums, `L + beta mean H(p_i)`."""
    if not beta:
        return means

    def value(sums: Sums) -> tuple[Array, Metrics]:
        loss, metrics = means(sums)
        return loss + beta * sums["certainty"].mean, metrics

    return value


def token_losses(
    logits: Float[Array, "*shape V"], targets: Int[Array, "*shape"], smoothing: float = 0.0
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """Each token's negative log-likelihood in nats, and whether it has the largest logit.

    With label smoothing e: `(1 - e) nll + e mean_v(-log p_v)`.
    """
    logits = at_least_float32(logits)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if smoothing:
        uniform = jnp.full(logits.shape[-1], 1 / logits.shape[-1], logits.dtype)
        nll = (1 - smoothing) * nll + smoothing * optax.softmax_cross_entropy(logits, uniform)
    return nll, jnp.argmax(logits, axis=-1) == targets


def soft_cross_entropy(
    student: Float[Array, "*shape V"], teacher: Float[Array, "*shape V"], temperature: float = 1.0
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Cross-entropy `-sum_v q_v log p_v` of student p to teacher q, and the entropy of q, in nats.

    Both distributions are softmaxes of logits / temperature. The Kullback-Leibler divergence is the
    difference of the two; the teacher carries no gradient, so its gradient is the cross-entropy's.
    """
    teacher = at_least_float32(lax.stop_gradient(teacher)) / temperature
    student, q = at_least_float32(student) / temperature, jax.nn.softmax(teacher)
    return optax.softmax_cross_entropy(student, q), optax.softmax_cross_entropy(teacher, q)


def scorer(network: Any, params: Any, rows: int | None = None) -> Scorer:
    """`network.logits` of these parameters; one with an `output` gathers its matrix once for all
    chunks.

    On a mesh the gradient of that matrix is summed over devices once for all chunks too, see
    `nn.copies`; `rows` is B of the hidden states [B, ..., D], if it is known.
    """
    output = getattr(network, "output", None)
    return with_copies(network.logits, params if output is None else output(params), rows)


def in_chunks(score: Callable[..., Any], chunk: int | None, *arrays: Array) -> Any:
    """`score(*arrays)` for arrays [B, K, ...] and results [B, K], made from `chunk` positions at a
    time.

    The backward pass makes each chunk anew, so logits [B, K, V] never lie in memory whole. None:
    all at once.
    """
    size = arrays[0].shape[1]
    if chunk is not None:
        check_number("chunk", chunk)
    if chunk is None or chunk >= size:
        return score(*arrays)
    extra = -size % chunk

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2))
        return rearrange(x, "b (n k) ... -> n b k ...", k=chunk)

    parts = lax.map(jax.checkpoint(lambda xs: score(*xs)), tuple(split(x) for x in arrays))
    return jax.tree.map(lambda x: rearrange(x, "n b k -> b (n k)")[:, :size], parts)
