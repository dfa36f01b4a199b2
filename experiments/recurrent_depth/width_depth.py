"""Depth against width: s recurrences of each token or s copies of it (arXiv 2510.14961, appendix
C).

`python -m experiments.recurrent_depth.width_depth` counts exactly what reading a prompt costs where
a recurrent-depth network is scaled by s; `--preset huginn-0125` counts the large model. No network
runs. Three variants of one factor::

    depth       the core does s times as many recurrences over n positions
    no_share    s copies of each token; one sees all copies of earlier tokens, and its own up to itself
    kv_share    the same, but only the last copy of each earlier token is seen

Products are counted as floating-point operations, a multiplication and an addition each; norms,
softmax and rotations are left out. Attention is counted over the pairs of a query and a key that it
sees, as a kernel without waste does it, and, as `dense`, over all pairs of the window, as an
attention does it that masks scores: masks alone save no time.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import tyro

from experiments.common.command import run
from experiments.common.record import write_record
from paradec_jax.config import RECURRENT_PRESETS, RecurrentDepthConfig

VARIANTS = ("depth", "no_share", "kv_share")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to count.

    Attributes:
      preset: a named shape.
      tokens: prompt lengths n.
      factors: s.
      recurrence: recurrences of the unscaled network.
      out: path of the JSON.
    """

    preset: str = "tiny-recurrent"
    tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    factors: tuple[int, ...] = (1, 2, 4, 8)
    recurrence: int = 1
    out: Path = Path("experiments/recurrent_depth/results/width_depth.json")

    def __post_init__(self) -> None:
        if self.preset not in RECURRENT_PRESETS:
            raise ValueError(
                f"preset must be one of {', '.join(RECURRENT_PRESETS)}, not {self.preset!r}"
            )
        if min(self.recurrence, *self.tokens, *self.factors) < 1:
            raise ValueError("recurrence, tokens and factors must be at least 1")


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one prefill.

    Attributes:
      positions: positions that a layer computes at once.
      layers: layers one after the other, the critical path.
      linear: operations of products with weights, logits of the last position among them.
      pairs: visible pairs of a query and a key, of all layers.
      attention: operations of scores and weighted sums on these pairs.
      dense: the same on all pairs of the window.
      kept: keys (and as many values) that later tokens need, of all layers, where recurrences share
        one slot.
      total: operations, attention on visible pairs alone.
      parallelism: operations that can be done at once on average, `total / layers`.
    """

    positions: int
    layers: int
    linear: int
    pairs: int
    attention: int
    dense: int
    kept: int
    total: int
    parallelism: float


def pairs_at_once(variant: str, tokens: int, factor: int) -> int:
    """Visible pairs of a query and a key in one pass of a layer.

    ::

        depth       n (n + 1) / 2
        kv_share    s n (n - 1) / 2 + n s (s + 1) / 2      earlier tokens, own copies
        no_share    s n (s n + 1) / 2

    A scaled layer is passed s times in depth and once in width, so for equal factors depth <=
    kv_share <= no_share, their differences being `n s (s - 1) / 2` and `n (n - 1) s (s - 1) / 2`.
    """
    if variant == "kv_share":
        return factor * tokens * (tokens - 1) // 2 + tokens * factor * (factor + 1) // 2
    wide = tokens if variant == "depth" else tokens * factor
    return wide * (wide + 1) // 2


def prefill(
    config: RecurrentDepthConfig, variant: str, tokens: int, factor: int, recurrence: int = 1
) -> Cost:
    """Counts a prefill of n tokens at factor s.

    Only the core is repeated in depth, `recurrence * factor` times. Copies pass through prelude and
    coda too, whose keys depend on the copy, so width costs more there than depth even where the
    core costs the same. A layer's products cost `2 (4 D^2 + 3 D F)` a position, a pair `4 D`.
    """
    deep = variant == "depth"
    positions = tokens if deep else tokens * factor
    recurrences = recurrence * factor if deep else recurrence
    stored = config.prelude_layers + config.core_layers + config.coda_layers
    layers = stored + config.core_layers * (recurrences - 1)
    layer = 2 * (4 * config.width**2 + 3 * config.width * config.feed_forward)
    weights = layers * layer + recurrences * 4 * config.width**2  # the adapter is [2D, D]
    linear = positions * weights + 2 * config.width * config.vocab_size
    pairs = layers * pairs_at_once(variant, tokens, factor)
    attention = pairs * 4 * config.width
    return Cost(
        positions=positions,
        layers=layers,
        linear=linear,
        pairs=pairs,
        attention=attention,
        dense=layers * positions**2 * 4 * config.width,
        kept=stored * (positions if variant == "no_share" else tokens),
        total=linear + attention,
        parallelism=(linear + attention) / layers,
    )


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Counts, prints and writes one row a variant, length and factor."""
    config, rows = RECURRENT_PRESETS[options.preset], []
    for tokens, factor in itertools.product(options.tokens, options.factors):
        for variant in VARIANTS:
            cost = prefill(config, variant, tokens, factor, options.recurrence)
            row: dict[str, Any] = {"what": "prefill", "tokens": tokens, "factor": factor}
            rows.append(row | {"variant": variant} | dataclasses.asdict(cost))
            print(
                f"n {tokens:5d}  s {factor}  {variant:8s}  linear {cost.linear:.4e}  attention "
                f"{cost.attention:.4e}  total {cost.total:.4e}  in {cost.layers} layers"
            )
    write_record(options.out, options, {"rows": rows})


if __name__ == "__main__":
    run(main)
