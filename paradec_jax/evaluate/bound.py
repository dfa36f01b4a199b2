"""Upper bounds on what texts cost under a masked denoiser, in nats, with their standard errors.

A row is a sequence of ids of which those from `start` to `end` are scored and all others are seen as they are::

    -log p(scored | seen)  <=  E over t of  w(t) * sum over hidden positions of -log p(x_i | the rest of the row)

where each scored position is hidden with the probability m(t) and w(t) = m'(t) / m(t) (MDLM; Sahoo et al. 2024, arXiv
2406.07524). The expectation is the mean over K draws whose times lie evenly, `(u + k / K) mod 1` with one u a row.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode.rules.sampling import log_probability
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.evaluate.likelihood import bucket
from paradec_jax.noise import LOGLINEAR, Schedule, hide

HEADS = 1024  # positions whose logits are made at a time


@dataclasses.dataclass(frozen=True)
class Span:
    """A row: `ids[start:end]` are scored, all others are seen. `end` None is the end of the row."""

    ids: tuple[int, ...]
    start: int = 0
    end: int | None = None

    @property
    def stop(self) -> int:
        """The position after the last scored one."""
        return len(self.ids) if self.end is None else self.end

    @property
    def count(self) -> int:
        """Scored positions."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Bound:
    """The bound of one row.

    Attributes:
      nats: the mean over draws.
      error: its standard error, as if times were drawn one by one; evenly spread ones do no worse.
      count: scored positions.
    """

    nats: float
    error: float
    count: int


def bounds(
    network: Any,
    params: Any,
    spans: Sequence[Span],
    mask: int,
    *,
    draws: int = 32,
    batch: int = 8,
    seed: int = 0,
    streams: Sequence[int] | None = None,
    schedule: Schedule | None = None,
    floor: float = 1e-5,
) -> list[Bound]:
    """The bound of each row's scored ids given all others.

    Args:
      network: a denoiser whose logits at a position predict its own token.
      params: its parameters.
      spans: the rows, none longer than `network.max_length`.
      mask: the mask's id.
      draws: K, at least 2.
      batch: rows of a call; each draw of a text is one.
      seed: of times and masks.
      streams: a number for each row, its own place among the rows when None. Rows of one number share times and
        masks, position by position: what is compared, such as the choices of a question, differs then by less noise.
      schedule: of the noise; log-linear when None.
      floor: the smallest time.

    Raises:
      ValueError: a row that is too long or scores nothing, or a number out of range.
    """
    if draws < 2 or batch < 1 or not 0 < floor < 1:
        raise ValueError(
            f"draws must be at least 2, batch at least 1 and floor in (0, 1), not {draws}, {batch}, {floor}"
        )
    numbers = list(range(len(spans))) if streams is None else list(streams)
    if len(numbers) != len(spans):
        raise ValueError(f"streams must be one number a row, not {len(numbers)} for {len(spans)} rows")
    _check(spans, network.max_length)
    plan = (schedule or LOGLINEAR, mask, draws, floor)
    params = network.prepare(params)
    found = np.zeros((len(spans), draws))
    sizes = [bucket(len(span.ids), network.max_length) for span in spans]
    scored: list[tuple[list[tuple[int, int]], Array]] = []
    for size in sorted(set(sizes)):
        jobs = [(i, k) for i in range(len(spans)) if sizes[i] == size for k in range(draws)]
        whole = all(len(spans[i].ids) == size for i, _ in jobs)
        for start in range(0, len(jobs), batch):
            some = jobs[start : start + batch]
            filled = [some[j % len(some)] for j in range(batch)]
            rows = _rows([spans[i] for i, _ in filled], size)
            which = np.asarray([(numbers[i], k) for i, k in filled], np.int32)
            scored.append((some, _score(network, plan, whole, params, *rows, which, np.uint32(seed))))
    for some, values in scored:  # waited for when all calls are on their way
        rows_of, draws_of = np.asarray(some).T
        found[rows_of, draws_of] = np.asarray(values)[: len(some)]
    errors = found.std(axis=1, ddof=1) / math.sqrt(draws)
    means = found.mean(axis=1)
    return [Bound(float(m), float(e), s.count) for m, e, s in zip(means, errors, spans, strict=True)]


def per_token(found: Sequence[Bound]) -> tuple[float, float]:
    """Nats a scored position over all rows, and the standard error of that ratio over rows and draws.

    R = sum n / sum c; its error is that of independent rows, `sqrt(N / (N - 1) sum (n_i - R c_i)^2) / sum c`,
    infinite for a single row.

    Raises:
      ValueError: no row.
    """
    if not found:
        raise ValueError("a mean over rows needs at least one")
    nats, counts = np.asarray([(bound.nats, bound.count) for bound in found]).T
    mean = nats.sum() / counts.sum()
    if len(found) == 1:
        return float(mean), math.inf
    scale = len(found) / (len(found) - 1)
    return float(mean), float(math.sqrt(scale * np.sum((nats - mean * counts) ** 2)) / counts.sum())


def _check(spans: Sequence[Span], most: int) -> None:
    for span in spans:
        if not 0 <= span.start < span.stop <= len(span.ids) <= most:
            raise ValueError(
                f"a row of {len(span.ids)} ids that scores {span.start} to {span.stop} does not fit: it must score "
                f"at least one and have at most {most}"
            )


def _rows(spans: Sequence[Span], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [B, S], padded with zeros, and (length, start, stop) [B, 3]."""
    ids = np.zeros((len(spans), size), np.int32)
    for row, span in enumerate(spans):
        ids[row, : len(span.ids)] = span.ids
    return ids, np.asarray([(len(span.ids), span.start, span.stop) for span in spans], np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score(
    network: Any,
    plan: tuple[Schedule, int, int, float],
    whole: bool,
    params: Any,
    ids: Int[Array, "B S"] | Int[np.ndarray, "B S"],
    ends: Int[Array, "B 3"] | Int[np.ndarray, "B 3"],
    which: Int[Array, "B 2"] | Int[np.ndarray, "B 2"],
    seed: Any,
) -> Float[Array, "B"]:
    """One draw of each row's bound; `whole` says that no row is padded."""
    schedule, mask, draws, floor = plan
    (batch, size), ids, which = ids.shape, jnp.asarray(ids), jnp.asarray(which)
    at = jnp.arange(size)

    def numbers(stream: Array, draw: Array) -> tuple[Array, Array]:
        key = jax.random.fold_in(jax.random.key(seed), stream)
        of_draw = jax.random.fold_in(key, 1 + draw)
        each = jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(of_draw, position)))(at)
        return (jax.random.uniform(jax.random.fold_in(key, 0)) + draw / draws) % 1, each

    tau, uniforms = jax.vmap(numbers)(which[:, 0], which[:, 1])
    t = floor + (1 - floor) * tau
    length, start, stop = (ends[:, i, None] for i in range(3))
    noised, hidden = hide(ids, uniforms, schedule.mask_probability(t), mask, (at >= start) & (at < stop))
    view = None if whole else jnp.broadcast_to((at < length)[:, None], (batch, size, size))
    positions = jnp.broadcast_to(at, ids.shape)
    vectors = network.forward(params, noised, positions, mask=view).hidden

    def nll(vector: Array, target: Array) -> Array:
        return -log_probability(without_mask(network.logits(params, vector), mask), target)

    flat = vectors.reshape(batch * size, -1), ids.reshape(-1)
    costs = lax.map(lambda xs: nll(*xs), flat, batch_size=HEADS).reshape(batch, size)
    return schedule.weight(t) * jnp.sum(jnp.where(hidden, costs, 0), axis=1)
