"""What spans cost under a model that fills masks: an upper bound in nats, with its standard error.

All ids of a row but the span's are seen as they are::

    -log p(scored | seen)  <=  E over n of  (l / n) sum over hidden positions of -log p(x_i | the rest of the row)

where n ~ U{1 .. l} of the l scored positions are hidden, any as likely as another. That is the bound
of MDLM (Sahoo et al. 2024, arXiv 2406.07524) with its times summed up, as LLaDA (arXiv 2502.09992)
has it. The expectation is the mean over K draws whose counts lie evenly, with one n_0 a row::

    n_k = (round(n_0 + k l / K) - 1) mod l + 1

A single scored position has one count, so its bound is the likelihood.

In an order, "forward" or "backward", scored positions are hidden one less each time, and one is asked
for: the sum of what each costs is the negative log-likelihood of the law that writes them in that
order, not a bound. It needs a call for each position.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import check_number
from paradec_jax.decode.machine import key_of, seed_words
from paradec_jax.decode.rules import log_probability, positions_of, without_mask
from paradec_jax.decode.rules.subs import scores_of
from paradec_jax.evaluate.likelihood import Span, batches, log_likelihoods, padded
from paradec_jax.store import Model

HEADS = 1024  # positions whose logits are made at a time
DRAWS = 128
ORDERS = ("random", "forward", "backward")


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a span costs.

    Attributes:
      nats: -log p, or the mean over draws of its upper bound.
      error: standard error of the bound, as if counts were drawn one by one; evenly spread ones do
        no worse.
      count: scored positions.
      greedy: whether the most probable tokens are those of the span: one after the other where the
        model predicts the next token; where it fills masks, the one that it is surest of first. None
        where that was not asked.
    """

    nats: float
    error: float
    count: int
    greedy: bool | None = None


def is_exact(model: Model) -> bool:
    """Whether a model's likelihoods are exact: it predicts the next token from those before it."""
    return model.network.visibility == "causal" and model.token_spec.alignment == "next"


def mask_of(model: Model) -> int:
    """The mask of a model that fills masks from all other positions. Raises ValueError for any
    other model.
    """
    spec, visibility = model.token_spec, model.network.visibility
    if spec.mask is None or visibility != "full":
        raise ValueError(
            "a likelihood needs a model that predicts the next token from those before it, or one that fills masks "
            f"from all others, not one of visibility {visibility!r} and {'no' if spec.mask is None else 'a'} mask"
        )
    return spec.mask


def score_spans(
    model: Model,
    spans: Sequence[Span],
    *,
    draws: int = DRAWS,
    order: str = "random",
    streams: Sequence[int] | None = None,
    seed: int = 0,
    batch: int = 8,
) -> list[Bound]:
    """What each span costs, exactly where the model predicts the next token or an order is given.

    The seed is that of draws and of initial latent states; all else as in `bounds` and
    `log_likelihoods`.

    Raises:
      ValueError: spans that do not fit, or a model that has neither likelihoods nor bounds.
    """
    if is_exact(model):
        scores = log_likelihoods(model.network, model.params, spans, batch=batch, seed=seed)
        costs = [(-float(nats.sum(dtype=np.float64)), best) for nats, best in scores]
        return [Bound(cost, 0.0, len(best), bool(best.all())) for cost, best in costs]
    mask = mask_of(model)
    scored = [i for i, span in enumerate(spans) if span.count]
    rows = [spans[i] for i in scored]
    numbers = [i if streams is None else streams[i] for i in scored]
    each = bounds(
        model.network,
        model.params,
        rows,
        mask,
        alignment=model.token_spec.alignment,
        draws=draws,
        order=order,
        batch=batch,
        seed=seed,
        streams=numbers,
    )
    results = [Bound(0.0, 0.0, 0, True)] * len(spans)
    for i, of, greedy in zip(scored, each, is_greedy(model, rows, batch=batch), strict=True):
        results[i] = dataclasses.replace(of, greedy=greedy)
    return results


def bounds(
    network: Any,
    params: Any,
    spans: Sequence[Span],
    mask: int,
    *,
    alignment: str = "own",
    draws: int = DRAWS,
    order: str = "random",
    batch: int = 8,
    seed: int = 0,
    streams: Sequence[int] | None = None,
) -> list[Bound]:
    """The bound of each row's scored ids given all others, or what they cost in an order.

    Args:
      network: a network that fills masks.
      params: its parameters.
      spans: rows, none longer than `network.max_length`.
      mask: id of the mask.
      alignment: which token a position predicts, "own" or "next"; nothing predicts the first of a
        row where that is the next.
      draws: K, at least 2.
      order: "random" for the bound, else "forward" or "backward".
      batch: rows of a call; each draw of a text is one.
      seed: seed of counts and masks.
      streams: a number for each row, its own place among the rows when None. Rows of one number
        share their draws, position by position: what is compared, such as the choices of a
        question, differs then by less noise.

    Raises:
      ValueError: a row that is too long or scores nothing or what nothing predicts, another order,
        or a number out of range.
    """
    check_number("draws", draws, 2)
    check_number("batch", batch)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    numbers, first = streams or range(len(spans)), int(alignment == "next")
    for span in spans:
        if not first <= span.start < span.stop <= len(span.ids) <= network.max_length:
            raise ValueError(
                f"a row of {len(span.ids)} ids that scores {span.start} to {span.stop} does not fit: it must score "
                f"at least one, from {first} on, and have at most {network.max_length}"
            )
    params = network.prepare(params)
    # A single position has one draw.
    passes = [s.count if order != "random" or s.count == 1 else draws for s in spans]
    jobs = [(i, k) for i, count in enumerate(passes) for k in range(count)]
    scored: list[tuple[list[int], Array]] = []
    for size, some in batches([len(spans[i].ids) for i, _ in jobs], network.max_length, batch):
        of = [jobs[job] for job in some]
        whole = all(len(spans[i].ids) == size for i, _ in of)
        rows = padded([spans[i] for i, _ in of], batch, size)
        which = np.zeros((batch, 2), np.int32)
        which[: len(of)] = [(numbers[i], k) for i, k in of]
        plan = mask, first, order, draws
        scored.append((some, _score(network, plan, whole, params, *rows, which, seed_words(seed))))
    costs = np.zeros(len(jobs))
    for some, values in scored:  # waited for when all calls are on their way
        costs[some] = np.asarray(values)[: len(some)]
    found = []
    for span, count, end in zip(spans, passes, np.cumsum(passes), strict=True):
        each, exact = costs[end - count : end], order != "random" or span.count == 1
        error = 0.0 if exact else float(each.std(ddof=1)) / math.sqrt(draws)
        found.append(Bound(float(each.sum() if exact else each.mean()), error, span.count))
    return found


def counts_of(first: Array, draw: Array, draws: int, length: Array) -> Array:
    """n_k of a row, from n_0 on: how many of its scored positions a draw hides."""
    return (jnp.round(first + draw * (length / draws)).astype(int) - 1) % length + 1


@jax.jit(static_argnums=(0, 1, 2))
def _score(
    network: Any,
    plan: tuple[int, int, str, int],
    whole: bool,
    params: Any,
    ids: Int[Array, "B S"],
    ends: Int[Array, "B 3"],
    which: Int[Array, "B 2"],
    words: Any,
) -> Float[Array, "B"]:
    """One draw of each row's bound, or one position of an order; `plan` is (mask, first position
    that can be predicted, order, K), and `whole` says that no row is padded.
    """
    mask, first, order, draws = plan
    at = jnp.arange(ids.shape[1])
    start, stop, draw = ends[:, 1, None], ends[:, 2, None], which[:, 1, None]
    hidden = counted = (at >= start) & (at < stop)
    weight: Any = 1
    if order == "random":

        def numbers(stream: Array, draw: Array) -> tuple[Array, Array]:
            key = jax.random.fold_in(key_of(words), stream)
            of_draw = jax.random.fold_in(key, 1 + draw)
            each = jax.vmap(lambda p: jax.random.uniform(jax.random.fold_in(of_draw, p)))(at)
            return jax.random.uniform(jax.random.fold_in(key, 0)), each

        uniform, uniforms = jax.vmap(numbers)(which[:, 0], which[:, 1])
        length = jnp.maximum(stop - start, 1)
        n = counts_of(1 + jnp.floor(uniform[:, None] * length), draw, draws, length)
        ranks = jnp.argsort(jnp.argsort(jnp.where(counted, uniforms, 2), axis=1), axis=1)
        hidden, weight = counted & (ranks < n), length / n
        counted = hidden
    else:
        place = start + draw if order == "forward" else stop - 1 - draw
        hidden &= at >= place if order == "forward" else at <= place
        counted &= at == place
    view = None if whole else seen(ends, ids.shape[1])
    costs = costs_of(network, params, jnp.where(hidden, mask, ids), ids, mask, first, view)
    return jnp.sum(weight * jnp.where(counted, costs, 0), axis=1)


def seen(ends: Int[Array, "B 3"], size: int) -> Bool[Array, "B S S"]:
    """A view of all of a row but its padding."""
    within = jnp.arange(size) < ends[:, :1]
    return jnp.broadcast_to(within[:, None], (*within.shape, size))


def in_parts(score: Any, vectors: Float[Array, "B S D"], ids: Int[Array, "B S"]) -> Any:
    """What `score` makes of the vector and the id of each position, some at a time."""
    flat = vectors.reshape(ids.size, -1), ids.reshape(-1)
    each = lax.map(lambda xs: score(*xs), flat, batch_size=HEADS)
    return jax.tree.map(lambda x: x.reshape(ids.shape), each)


def costs_of(
    network: Any,
    params: Any,
    noised: Int[Array, "B S"],
    ids: Int[Array, "B S"],
    mask: int,
    first: int,
    view: Bool[Array, "B S S"] | None,
) -> Float[Array, "B S"]:
    """-log p of each id, given the canvas `noised`; positions predict that at `first` after them."""
    vectors = read(network, params, noised, view, first)

    def nll(vector: Array, target: Array) -> Array:
        return -log_probability(scores_of(network, network.logits(params, vector), mask), target)

    return in_parts(nll, vectors, ids)


def read(network: Any, params: Any, ids: Int[Array, "B S"], view: Any, first: int) -> Array:
    """What the tokens of a canvas are predicted from, [B, S, D]."""
    out = network.forward(params, ids, positions_of(ids), mask=view)
    return jnp.roll(out.hidden, first, axis=1)


def is_greedy(model: Model, spans: Sequence[Span], *, batch: int) -> list[bool]:
    """Whether the model fills each span, all hidden at first, with its tokens.

    A call reveals the position whose most probable token is the most probable (LLaDA). Rows end
    where it is another token than the span's.
    """
    network, mask = model.network, mask_of(model)
    first, params = int(model.token_spec.alignment == "next"), network.prepare(model.params)
    found = [False] * len(spans)
    for size, some in batches([len(span.ids) for span in spans], network.max_length, batch):
        right = _filled(
            network, mask, first, params, *padded([spans[i] for i in some], batch, size)
        )
        for i, value in zip(some, np.asarray(right).tolist(), strict=False):
            found[i] = value
    return found


@jax.jit(static_argnums=(0, 1, 2))
def _filled(
    network: Any,
    mask: int,
    first: int,
    params: Any,
    ids: Int[Array, "B S"],
    ends: Int[Array, "B 3"],
) -> Bool[Array, "B"]:
    """Whether each row's scored positions are filled with its tokens."""
    at = jnp.arange(ids.shape[1])

    def guess(vector: Array, _: Array) -> tuple[Array, Array]:
        logits = network.logits(params, vector)
        best = jnp.argmax(without_mask(logits, mask), axis=-1)
        return best, log_probability(scores_of(network, logits, mask), best)

    def reveal(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, wrong = carry
        # Only tokens of the span have been revealed, unless the row is wrong.
        canvas = jnp.where(hidden, mask, ids)
        vectors = read(network, params, canvas, seen(ends, ids.shape[1]), first)
        best, sure = in_parts(guess, vectors, ids)
        surest = at == jnp.argmax(jnp.where(hidden, sure, -jnp.inf), axis=1)[:, None]
        return hidden & ~surest, wrong | jnp.any(hidden & surest & (best != ids), axis=1)

    hidden = (at >= ends[:, 1, None]) & (at < ends[:, 2, None])
    wrong = jnp.zeros(len(ids), bool)
    return ~lax.while_loop(lambda c: jnp.any(c[0] & ~c[1][:, None]), reveal, (hidden, wrong))[1]
