"""What reading a prompt costs where a recurrent-depth network is scaled by a factor s, counted
exactly.

Three variants of one factor (arXiv 2510.14961, appendix C)::

    depth       the core does s times as many recurrences over n positions
    no_share    s copies of each token, `copies.no_share`
    kv_share    s copies of each token, `copies.kv_share`

Products are counted as floating-point operations, a multiplication and an addition each; norms,
softmax and rotations are left out. Attention is counted over the pairs of a query and a key that it
sees, as a kernel without waste does it, and, as `dense`, over all pairs of the window, as an
attention does it that masks scores.
"""

import bisect
import dataclasses

from paradec_jax.config import RecurrentDepthConfig

VARIANTS = ("depth", "no_share", "kv_share")


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
    """

    positions: int
    layers: int
    linear: int
    pairs: int
    attention: int
    dense: int
    kept: int

    @property
    def total(self) -> int:
        """Operations, attention on visible pairs alone."""
        return self.linear + self.attention

    @property
    def parallelism(self) -> float:
        """Operations that can be done at once on average: `total / layers`, work over critical
        path.
        """
        return self.total / self.layers


def _check(variant: str, tokens: int, factor: int) -> None:
    """Refuses what cannot be counted.

    Raises:
      ValueError: an unknown variant, or `tokens` or `factor` below 1.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, not {variant!r}")
    for name, value in (("tokens", tokens), ("factor", factor)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def positions_at_once(variant: str, tokens: int, factor: int) -> int:
    """Positions that one pass of a layer computes: n, or n s with copies."""
    _check(variant, tokens, factor)
    return tokens if variant == "depth" else tokens * factor


def pairs_at_once(variant: str, tokens: int, factor: int) -> int:
    """Visible pairs of a query and a key in one pass of a layer.

    ::

        depth       n (n + 1) / 2
        kv_share    s n (n - 1) / 2 + n s (s + 1) / 2      earlier tokens, own copies
        no_share    s n (s n + 1) / 2

    A scaled layer is passed s times in depth and once in width, so for equal factors depth <=
    kv_share <= no_share, their differences being `n s (s - 1) / 2` and `n (n - 1) s (s - 1) / 2`.
    """
    wide = positions_at_once(variant, tokens, factor)
    if variant == "kv_share":
        return factor * tokens * (tokens - 1) // 2 + tokens * factor * (factor + 1) // 2
    return wide * (wide + 1) // 2


def layer_linear(config: RecurrentDepthConfig) -> int:
    """Operations of a layer's products with weights, for one position: `2 (4 D^2 + 3 D F)`."""
    return 2 * (4 * config.width**2 + 3 * config.width * config.feed_forward)


def pair_attention(config: RecurrentDepthConfig) -> int:
    """Operations of one pair in one layer, all heads together, a score and a weighted sum: `4 D`."""
    return 4 * config.width


def prefill(
    config: RecurrentDepthConfig, variant: str, tokens: int, factor: int, recurrence: int = 1
) -> Cost:
    """Counts a prefill of n tokens at factor s.

    Only the core is repeated in depth. Copies pass through prelude and coda too, whose keys depend
    on the copy, so width costs more there than depth even where the core costs the same.

    Args:
      config: the network's shape.
      variant: one of `VARIANTS`.
      tokens: n.
      factor: s.
      recurrence: recurrences of the unscaled network; depth does `recurrence * factor`.

    Raises:
      ValueError: an unknown variant, or a number below 1.
    """
    if recurrence < 1:
        raise ValueError(f"recurrence must be at least 1, not {recurrence}")
    positions = positions_at_once(variant, tokens, factor)
    recurrences = recurrence * factor if variant == "depth" else recurrence
    stored = config.prelude_layers + config.core_layers + config.coda_layers
    layers = stored + config.core_layers * (recurrences - 1)
    weights = (
        layers * layer_linear(config) + recurrences * 4 * config.width**2
    )  # the adapter is [2D, D]
    pairs = layers * pairs_at_once(variant, tokens, factor)
    return Cost(
        positions=positions,
        layers=layers,
        linear=positions * weights + 2 * config.width * config.vocab_size,
        pairs=pairs,
        attention=pairs * pair_attention(config),
        dense=layers * positions**2 * pair_attention(config),
        kept=stored * (positions if variant == "no_share" else tokens),
    )


# One core layer on an ideal device: a step does any independent operations, up to the products of C
# positions.


def operations_at_once(
    config: RecurrentDepthConfig, variant: str, tokens: int, factor: int
) -> tuple[int, int]:
    """Operations of one pass of a layer that do not wait for each other: of its products, then of
    its attention.
    """
    products = positions_at_once(variant, tokens, factor) * layer_linear(config)
    return products, pairs_at_once(variant, tokens, factor) * pair_attention(config)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Width over depth at an equal factor, in one core layer.

    Width does in one pass what depth does in s, so products have s times the parallelism. Attention
    has more of it because it does more: `s (s n + 1) / (n + 1)` times in no_share, which rises to
    s^2, and `s (n + s) / (n + 1)` in kv_share, which falls to s; s^2 at any length under either
    rule where masked scores are computed too. A factor that comes from more work saves no time:
    without a limit depth takes s times as long as width, not s^2 times.

    Attributes:
      products, attention: operations at once, without a limit.
      products_achieved, attention_achieved: the same, each cut at what the device does in a step.
      speedup: steps of depth over steps of width; a pass takes a step or more for each of its two
        stages.
    """

    products: float
    attention: float
    products_achieved: float
    attention_achieved: float
    speedup: float


def width_over_depth(
    config: RecurrentDepthConfig, variant: str, tokens: int, factor: int, capacity: int
) -> Ratio:
    """Compares a layer of `variant` with s passes of depth on a device of `capacity` positions a
    step (C).
    """
    limit = capacity * layer_linear(config)
    deep = operations_at_once(config, "depth", tokens, factor)
    wide = operations_at_once(config, variant, tokens, factor)

    def steps(operations: tuple[int, int]) -> float:
        return sum(max(1.0, x / limit) for x in operations)

    return Ratio(
        products=wide[0] / deep[0],
        attention=wide[1] / deep[1],
        products_achieved=min(wide[0], limit) / min(deep[0], limit),
        attention_achieved=min(wide[1], limit) / min(deep[1], limit),
        speedup=factor * steps(deep) / steps(wide),
    )


def filling_lengths(
    config: RecurrentDepthConfig, variant: str, factor: int, capacity: int
) -> tuple[int, int]:
    """The shortest prompts whose products, and whose attention, fill the device in every step."""
    limit = capacity * layer_linear(config)

    def shortest(stage: int) -> int:
        lengths = range(1, limit + 1)  # a token brings at least one operation
        return lengths[
            bisect.bisect_left(
                lengths, limit, key=lambda n: operations_at_once(config, variant, n, factor)[stage]
            )
        ]

    return shortest(0), shortest(1)
