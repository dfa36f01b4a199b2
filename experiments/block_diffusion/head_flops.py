"""What an update of a residual head costs."""

from collections.abc import Mapping
from typing import Any

from paradec_jax.models.work import BACKWARD, Flops


def head_flops(backbone: Any, head: Any, steps: int, layout: str = "doubled") -> Flops:
    """Operations of an update of a residual head, for `Log(flops=)`, of batches with `tokens` [B, T].

    With `layout` "doubled" backbone and head read the clean copy beside the noisy ones. The frozen backbone reads
    K + 1 noisy texts forward, the head K of them forward and back; scores are the teacher's and the student's, whose
    gradient goes to vectors alone. What is only logged is not counted.

    Args:
      backbone, head: the networks.
      steps: K.
      layout: layout of the objective, see `losses.ResidualRules`.
    """

    def flops(batch: Mapping[str, Any], metrics: Mapping[str, float]) -> int | float:
        del metrics
        rows, length = batch["tokens"].shape
        scores = 2 * rows * length * backbone.vocab_size * backbone.config.width
        doubled = layout == "doubled"
        context = length if doubled else 0
        read = (steps + 1) * backbone.work(rows, length, context, 0).flops
        taught = head.work(rows, length, context).flops
        if doubled:
            read += backbone.work(rows, length, 0, 0).flops
            taught += head.work(rows, length, 0).flops
        return read + steps * ((1 + BACKWARD) * taught + 3 * scores)

    return flops
