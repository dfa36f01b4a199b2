"""What calls and training updates cost at least: bytes that are read and floating-point operations.

A multiplication and an addition are two operations. Weights are read once a call, by a core once a
recurrence, and meet every position; an embedding is not counted, an output matrix is where the
network has one.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from paradec_jax.sharding import axes

BACKWARD = 2  # times the operations of the forward pass
# Of a batch and the loss's metrics.
Flops = Callable[[Mapping[str, Any], Mapping[str, float]], int | float]


class Work(NamedTuple):
    """Bytes that a network call must read and floating-point operations it must do."""

    bytes: int
    flops: int


def call_work(
    network: Any, batch: int, positions: int, context: int, logits: float | None = None
) -> Work:
    """The least that one call of a network can cost; keys and values that a layer sees of the
    context are read once.

    Args:
      batch, positions, context: rows, positions of each in this call, and cached positions before
        them.
      logits: positions of each row that output scores are computed at; all when None.

    Raises:
      ValueError: a context of a network that keeps no cache.
    """
    c, rows = network.config, batch * positions
    weights, layers = _passed(network)
    if context and not hasattr(network, "init_cache"):
        raise ValueError(
            f"a denoiser keeps no cache, so there is no context of {context} positions"
        )
    head = network.vocab_size * c.width
    reach = c.windows or (None,) * layers  # a window's first position sees one less of the cache
    near = sum(context if window is None else min(context, window - 1) for window in reach)
    seen = sum(min(context + positions, window or context + positions) for window in reach)
    cached = 2 * near * c.kv_heads * c.head_dim * batch
    of_weights, of_cache = jnp.dtype(c.param_dtype).itemsize, jnp.dtype(c.dtype).itemsize
    moved = (weights + head) * of_weights + cached * of_cache
    attention = 4 * c.heads * c.head_dim * rows * seen
    scored = rows if logits is None else round(batch * logits)
    return Work(moved, 2 * weights * rows + 2 * head * scored + attention)


def _passed(network: Any) -> tuple[int, int]:
    """Weights that each position meets, the output matrix left out, and layers of attention."""
    c = network.config
    if not hasattr(network, "init_cache"):
        # Of a denoiser, whose shifts, scales and gates are constants of the weights.
        return c.layers * (4 * c.width**2 + 2 * c.width * c.feed_forward), c.layers
    kind: Any = type(network)
    of = _sizes(kind, c)
    if "recurrences" not in network.counters:
        return sum(of.values()), c.layers
    r, once = network.recurrence, of["prelude"] + of["coda"] + of["final"]
    weights = once + r * (of["core"] + of["adapter"])
    return weights, c.prelude_layers + c.coda_layers + r * c.core_layers


@functools.lru_cache
def _sizes(kind: Any, config: Any) -> dict[str, int]:
    """Numbers of each part of a class of networks, which are known by tracing one."""
    return axes.sizes(kind.table, kind.shapes(config))


def update_flops(
    network: Any,
    rows: int,
    length: int,
    recurrence: int | float | None = None,
    backprop_depth: int | None = None,
) -> int | float:
    """Operations of an update by the family's objective: a forward and twice as many backward,
    nothing anew.

    Of a recurrent model r recurrences go forward, and the last min(r, K) backward. Block diffusion
    reads a row twice: the clean copy, and the noisy one beside it. Optimizer, teachers and remat
    are not counted.

    Args:
      rows, length: B and T of the batch, padding included.
      recurrence: r of a recurrent network, which may be a mean; the config's mean draw, M + 1, when
        None.
      backprop_depth: K of a recurrent network; the config's when None.
    """
    forward = network.work(rows, length, 0).flops
    if "recurrences" in network.counters:
        r = network.config.mean_recurrence + 1 if recurrence is None else recurrence
        k = network.config.mean_backprop_depth if backprop_depth is None else backprop_depth
        once, twice = (network.at(n).work(rows, length, 0).flops for n in (1, 2))
        ahead, back = (once + (n - 1) * (twice - once) for n in (r, min(r, k)))
        return ahead + BACKWARD * back
    if network.visibility == "block":
        forward += network.work(rows, length, length).flops
    return (1 + BACKWARD) * forward


def batch_flops(network: Any, backprop_depth: int | None = None) -> Flops:
    """`update_flops` of `tokens` [B, T] at the logged recurrence, for `Log(flops=)`."""

    def flops(batch: Mapping[str, Any], metrics: Mapping[str, float]) -> int | float:
        rows, length = batch["tokens"].shape
        return update_flops(network, rows, length, metrics.get("recurrence"), backprop_depth)

    return flops
