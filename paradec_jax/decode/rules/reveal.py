"""Which positions of a canvas a call reveals: pure functions from scores and schedules to Bool[B,
W].

`open_` marks masked positions that may be revealed; no rule touches another one. The lower position
wins a tie. Scores are those of `rules.score`, higher is surer, NaN the least sure. Rules combine:
at most ten, the surest of those above a threshold, are `select.top(scores, threshold(scores, open_,
0.9), 10)`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.rules import select

Bound = Float[Array, ""] | Float[Array, "B 1"] | float  # one for all rows, or for each


def threshold(
    scores: Float[Array, "B W"],
    open_: Bool[Array, "B W"],
    bound: Bound,
    *,
    strict: bool = False,
    best: Bool[Array, "B"] | bool = True,
) -> Bool[Array, "B W"]:
    """Open positions whose score reaches the bound, and the best open one (Fast-dLLM, arXiv
    2505.22618).

    ::

        scores      .9 .4 .8 .8 .7
        open         .  x  x  x  x
        bound .8     .  .  x  x  .
        bound .95    .  .  x  .  .       the best alone, the lower of two equal ones

    Args:
      bound: the threshold, or one of each row.
      strict: scores must exceed the bound (D2F, arXiv 2508.09192), instead of reach it.
      best: rows that reveal their best open position even where it fails. A loop over the others
        may stand still.
    """
    surest = select.top(scores, open_, jnp.broadcast_to(best, scores.shape[:1]).astype(jnp.int32))
    return surest | (open_ & (scores > bound if strict else scores >= bound))


def factor(
    scores: Float[Array, "B W"], open_: Bool[Array, "B W"], bound: Float[Array, ""] | float
) -> Bool[Array, "B W"]:
    """The best open positions as long as `c_r >= 1 - f / (r + 1)`, and the best one (Fast-dLLM,
    arXiv 2505.22618).

    ::

        rank r            1    2    3    4         f = 1, c_r the r-th highest probability
        1 - f / (r + 1)   any  .67  .75  .8
        c_r               .6   .9   .7   .9        (unsorted; sorted .9 .9 .7 .6: the first two are revealed)

    Args:
      scores: probability of each position's most probable token, c.
      bound: f.
    """
    ordered = -jnp.sort(jnp.where(open_, -scores, jnp.inf), axis=1)
    rank = jnp.arange(1, scores.shape[1] + 1)
    count = select.leading_run((ordered >= 1 - bound / (rank + 1)) | (rank == 1))
    return select.top(scores, open_, count)


def entropy_budget(
    entropies: Float[Array, "B W"], open_: Bool[Array, "B W"], budget: Float[Array, ""] | float
) -> Bool[Array, "B W"]:
    """The open positions of lowest entropy as long as their sum stays below the budget, and the
    lowest one.

    ::

        entropy      .1  .5  .2  .4
        open          .   x   x   x      sums .2 .6 1.1
        budget .7     .   .   x   x
        budget .1     .   .   x   .

    JetEngine's form of the entropy-bounded sampler (arXiv 2505.24857), its budget gamma in nats.
    """
    ordered = jnp.sort(jnp.where(open_, entropies, jnp.inf), axis=1)
    count = jnp.sum(jnp.cumsum(ordered, axis=1) < budget, axis=1)
    return select.top(-entropies, open_, jnp.maximum(count, 1))


def entropy_bound(
    entropies: Float[Array, "B W"], open_: Bool[Array, "B W"], bound: Float[Array, ""] | float
) -> Bool[Array, "B W"]:
    """The open positions of lowest entropy as long as their sum without its largest term is at most
    the bound.

    ::

        entropy      .1  .5  .2  .4
        open          .   x   x   x      sums without the largest 0 .2 .6
        bound .3      .   .   x   x

    As published (EB-sampler, arXiv 2505.24857, Eq. 7), its bound gamma in nats.
    """
    ordered = jnp.sort(jnp.where(open_, entropies, jnp.inf), axis=1)
    before = jnp.cumsum(ordered, axis=1) - ordered
    return select.top(-entropies, open_, jnp.maximum(jnp.sum(before <= bound, axis=1), 1))


def share(
    total: Int[Array, "B"],
    calls: Int[Array, "B"] | Int[Array, ""] | int,
    call: Int[Array, "B"] | int,
) -> Int[Array, "B"]:
    """How many of `total` positions call `call` (from 0) of `calls` reveals; the first ones take
    one more (LLaDA).

    ::

        8 positions in 3 calls   3 3 2
        2 positions in 4 calls   1 1 0 0
    """
    return total // calls + (call < total % calls)


def shares(
    total: Int[Array, "B"], calls: Int[Array, "B"] | Int[Array, ""], call: Int[Array, "B"]
) -> Int[Array, "B"]:
    """How many of `total` positions calls 0 to `call` reveal together, by `share`.

    ::

        8 positions in 3 calls   3 6 8
    """
    made = jnp.minimum(call + 1, calls)
    return total // calls * made + jnp.minimum(made, total % calls)


def rounded(
    masks: Int[Array, "B"], call: Int[Array, "B"], calls: Int[Array, "B"] | Int[Array, ""]
) -> Int[Array, "B"]:
    """How many of the masks that are left call `call` of `calls` reveals: an even share of the calls
    left, rounded, halves to the even number (the linear schedule of dllm's MDLM).

    ::

        8 masks in 3 calls   3 2 3
    """
    left = jnp.maximum(calls - call, 1)
    return jnp.round(masks / left).astype(jnp.int32)


def on_grid(
    masks: Int[Array, "B"],
    call: Int[Array, "B"],
    calls: Int[Array, "B"] | Int[Array, ""],
    epsilon: Float[Array, ""] | float,
) -> Int[Array, "B"]:
    """How many of the masks that are left call `call` of `calls` reveals on Dream's grid of times.

    ::

        trunc(n (1 - t_(i+1) / t_i)),  t_i = 1 + i (epsilon - 1) / N;  all at the last call

    The times are those of `torch.linspace` in float32, counted from the nearer end.
    """
    step = (jnp.float32(epsilon) - 1) / calls

    def time(i: Array) -> Array:
        return jnp.where(i < (calls + 1) // 2, 1 + step * i, epsilon - step * (calls - i))

    part = masks * (1 - time(call + 1) / time(call))
    return jnp.where(call >= calls - 1, masks, part.astype(jnp.int32))
