"""What spans cost under a model that fills masks: an upper bound in nats, with its standard error.

All ids of a row but the span's are seen as they are::

    -log p(scored | seen)  <=  E over t of  w(t) * sum over hidden positions of -log p(x_i | the rest of the row)

where each scored position is hidden with the probability m(t) and w(t) = m'(t) / m(t) of the
log-linear schedule (MDLM; Sahoo et al. 2024, arXiv 2406.07524). The expectation is the mean over K
draws whose times lie evenly, `(u + k / K) mod 1` with one u a row.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.config import check_number
from paradec_jax.decode.machine import key_of, seed_words
from paradec_jax.decode.rules import log_probability, positions_of, without_mask
from paradec_jax.evaluate.likelihood import Span, batches, log_likelihoods, padded
from paradec_jax.noise import LOGLINEAR, hide
from paradec_jax.store import Model

HEADS = 1024  # positions whose logits are made at a time
FLOOR = 1e-5  # the smallest time
DRAWS = 32


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a span costs.

    Attributes:
      nats: -log p, or the mean over draws of its upper bound.
      error: standard error of the bound, as if times were drawn one by one; evenly spread ones do
        no worse.
      count: scored positions.
      greedy: whether the most probable tokens are those of the span: one after the other where the
        model predicts the next token, all at once from what is seen where it fills masks. None
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
    if spec.mask is None or spec.alignment != "own" or visibility != "full":
        raise ValueError(
            "a likelihood needs a model that predicts the next token from those before it, or one that fills masks "
            f"from all others, not one of visibility {visibility!r}, alignment {spec.alignment!r} and "
            f"{'no mask' if spec.mask is None else 'a mask'}"
        )
    return spec.mask


def score_spans(
    model: Model,
    spans: Sequence[Span],
    *,
    draws: int = DRAWS,
    streams: Sequence[int] | None = None,
    seed: int = 0,
    batch: int = 8,
) -> list[Bound]:
    """What each span costs, exactly where the model predicts the next token.

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
        draws=draws,
        batch=batch,
        seed=seed,
        streams=numbers,
    )
    results = [Bound(0.0, 0.0, 0, True)] * len(spans)
    for i, row, of, ids in zip(scored, rows, each, fill(model, rows, batch=batch), strict=True):
        results[i] = dataclasses.replace(of, greedy=ids == row.ids[row.start : row.stop])
    return results


def bounds(
    network: Any,
    params: Any,
    spans: Sequence[Span],
    mask: int,
    *,
    draws: int = DRAWS,
    batch: int = 8,
    seed: int = 0,
    streams: Sequence[int] | None = None,
) -> list[Bound]:
    """The bound of each row's scored ids given all others.

    Args:
      network: a denoiser whose logits at a position predict its own token.
      spans: rows, none longer than `network.max_length`.
      draws: K, at least 2.
      batch: rows of a call; each draw of a text is one.
      seed: seed of times and masks.
      streams: a number for each row, its own place among the rows when None. Rows of one number
        share times and masks, position by position: what is compared, such as the choices of a
        question, differs then by less noise.

    Raises:
      ValueError: a row that is too long or scores nothing, or a number out of range.
    """
    check_number("draws", draws, 2)
    check_number("batch", batch)
    numbers = list(range(len(spans))) if streams is None else list(streams)
    if len(numbers) != len(spans):
        raise ValueError(
            f"streams must be one number a row, not {len(numbers)} for {len(spans)} rows"
        )
    for span in spans:
        if not 0 <= span.start < span.stop <= len(span.ids) <= network.max_length:
            raise ValueError(
                f"a row of {len(span.ids)} ids that scores {span.start} to {span.stop} does not fit: it must score "
                f"at least one and have at most {network.max_length}"
            )
    params = network.prepare(params)
    jobs = [(i, k) for i in range(len(spans)) for k in range(draws)]
    scored: list[tuple[list[int], Array]] = []
    for size, some in batches([len(spans[i].ids) for i, _ in jobs], network.max_length, batch):
        of = [jobs[job] for job in some]
        whole = all(len(spans[i].ids) == size for i, _ in of)
        rows = padded([spans[i] for i, _ in of], batch, size)
        which = np.zeros((batch, 2), np.int32)
        which[: len(of)] = [(numbers[i], k) for i, k in of]
        words = seed_words(seed)
        scored.append((some, _score(network, (mask, draws), whole, params, *rows, which, words)))
    costs = np.zeros(len(jobs))
    for some, values in scored:  # waited for when all calls are on their way
        costs[some] = np.asarray(values)[: len(some)]
    each = costs.reshape(len(spans), draws)
    errors = each.std(axis=1, ddof=1) / math.sqrt(draws)
    means = each.mean(axis=1).tolist()
    return [Bound(m, e, s.count) for m, e, s in zip(means, errors.tolist(), spans, strict=True)]


@jax.jit(static_argnums=(0, 1, 2))
def _score(
    network: Any,
    plan: tuple[int, int],
    whole: bool,
    params: Any,
    ids: Int[Array, "B S"],
    ends: Int[Array, "B 3"],
    which: Int[Array, "B 2"],
    words: Any,
) -> Float[Array, "B"]:
    """One draw of each row's bound; `plan` is (mask, K), and `whole` says that no row is padded."""
    (mask, draws), (batch, size) = plan, ids.shape
    at = jnp.arange(size)

    def numbers(stream: Array, draw: Array) -> tuple[Array, Array]:
        key = jax.random.fold_in(key_of(words), stream)
        of_draw = jax.random.fold_in(key, 1 + draw)
        each = jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(of_draw, position)))(
            at
        )
        return (jax.random.uniform(jax.random.fold_in(key, 0)) + draw / draws) % 1, each

    tau, uniforms = jax.vmap(numbers)(which[:, 0], which[:, 1])
    t = FLOOR + (1 - FLOOR) * tau
    length, start, stop = (ends[:, i, None] for i in range(3))
    noised, hidden = hide(
        ids, uniforms, LOGLINEAR.mask_probability(t), mask, (at >= start) & (at < stop)
    )
    view = None if whole else jnp.broadcast_to((at < length)[:, None], (batch, size, size))
    positions = positions_of(ids)
    vectors = network.forward(params, noised, positions, mask=view).hidden

    def nll(vector: Array, target: Array) -> Array:
        return -log_probability(without_mask(network.logits(params, vector), mask), target)

    flat = vectors.reshape(batch * size, -1), ids.reshape(-1)
    costs = lax.map(lambda xs: nll(*xs), flat, batch_size=HEADS).reshape(batch, size)
    return LOGLINEAR.weight(t) * jnp.sum(jnp.where(hidden, costs, 0), axis=1)


def fill(model: Model, spans: Sequence[Span], *, batch: int = 8) -> list[tuple[int, ...]]:
    """The most probable token of each scored position, all of a span hidden at once, in one call of
    the network.
    """
    network, mask = model.network, mask_of(model)
    params = network.prepare(model.params)
    filled: list[tuple[int, ...]] = [()] * len(spans)
    for size, some in batches([len(span.ids) for span in spans], network.max_length, batch):
        rows = padded([spans[i] for i in some], batch, size)
        best = np.asarray(_best(network, mask, params, *rows))
        for place, i in enumerate(some):
            filled[i] = tuple(best[place, spans[i].start : spans[i].stop].tolist())
    return filled


@jax.jit(static_argnums=(0, 1))
def _best(
    network: Any,
    mask: int,
    params: Any,
    ids: Int[Array, "B T"],
    ends: Int[Array, "B 3"],
) -> Int[Array, "B T"]:
    """The most probable token at each position of rows whose scored positions are hidden, and
    padding unseen.
    """
    positions = positions_of(ids)
    length, start, stop = (ends[:, i, None] for i in range(3))
    hidden = jnp.where((positions >= start) & (positions < stop), mask, ids)
    view = jnp.broadcast_to((positions < length)[:, None], (*ids.shape, ids.shape[1]))
    vectors = network.forward(params, hidden, positions, mask=view).hidden
    best = lax.map(
        lambda vector: jnp.argmax(without_mask(network.logits(params, vector), mask), axis=-1),
        vectors.reshape(ids.size, -1),
        batch_size=HEADS,
    )
    return best.reshape(ids.shape)
