"""Operations of a training update by a network's own `work`, for model FLOP utilisation."""

from collections.abc import Callable, Mapping
from typing import Any

BACKWARD = 2  # times the operations of the forward pass


def update_flops(
    network: Any,
    rows: int,
    length: int,
    recurrence: int | float | None = None,
    backprop_depth: int | None = None,
) -> int | float:
    """Operations of an update by the family's objective: a forward and twice as many backward, nothing anew.

    Of a recurrent model r recurrences go forward, and the last min(r, K) backward. Block diffusion reads a row twice:
    the clean copy, and the noisy one beside it. Optimizer, teachers and remat are not counted.

    Args:
      network: that is trained.
      rows, length: B and T of the batch, padding included.
      recurrence: r of a recurrent network, which may be a mean; the config's mean draw, M + 1, when None.
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


def batch_flops(
    network: Any, backprop_depth: int | None = None
) -> Callable[[Mapping[str, Any], Mapping[str, float]], int | float]:
    """As `update_flops`, for `Log(flops=)`: of batches with `tokens` [B, T], at the recurrence that the loss logs."""

    def flops(batch: Mapping[str, Any], metrics: Mapping[str, float]) -> int | float:
        rows, length = batch["tokens"].shape
        return update_flops(network, rows, length, metrics.get("recurrence"), backprop_depth)

    return flops


def head_flops(
    backbone: Any, head: Any, steps: int, layout: str = "doubled"
) -> Callable[[Mapping[str, Any], Mapping[str, float]], int | float]:
    """Operations of an update of a residual head, for `Log(flops=)`, of batches with `tokens` [B, T].

    With `layout` "doubled" backbone and head read the clean copy beside the noisy ones. The frozen backbone reads
    K + 1 noisy texts forward, the head K of them forward and back; scores are the teacher's and the student's, whose
    gradient goes to vectors alone. What is only logged is not counted.

    Args:
      backbone, head: the networks.
      steps: K.
      layout: of the objective, see `losses.ResidualRules`.
    """

    def flops(batch: Mapping[str, Any], metrics: Mapping[str, float]) -> int | float:
        del metrics
        rows, length = batch["tokens"].shape
        scores = 2 * rows * length * backbone.vocab_size * backbone.config.width
        doubled = layout == "doubled"
        context = length if doubled else 0
        read = (steps + 1) * (backbone.work(rows, length, context).flops - scores)
        taught = head.work(rows, length, context).flops
        if doubled:
            read += backbone.work(rows, length, 0).flops - scores
            taught += head.work(rows, length, 0).flops
        return read + steps * ((1 + BACKWARD) * taught + 3 * scores)

    return flops
