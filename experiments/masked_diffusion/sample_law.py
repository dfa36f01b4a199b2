"""How likely a sampler of N steps is to write a text, and so the exact entropy of its samples.

A sampler draws a partition g of the positions into N groups, each position's alike and apart from
the others, and reveals group after group (`paradec_jax.decode.rules.partition`)::

    q(x) = sum over g of N^-L  prod over i of  p(x_i | x_j with g_j < g_i)

*The perfect denoiser of a chain* knows x_i by its nearest revealed neighbours, at any temperature,
so that the sum over N^L partitions is a recursion over gaps. F_k(l, r) is the weight of what lies
strictly between l and r, where both are revealed before call k and nothing between them is::

    F_N(l, r) = 1 if r = l + 1 else 0
    F_k(l, r) = sum over the positions l = i_0 < i_1 < .. < i_m < r that call k reveals (any number of them) of
                prod_j p(x_{i_j} | x_l, x_r) / N  *  prod_j F_{k+1}(i_j, i_{j+1}),    i_{m+1} = r
    q(x)      = F_0(0, L + 1),   0 and L + 1 beyond the ends

*Any other network* q' has no such recursion. Partitions are drawn from the posterior r(g | x) of
the perfect denoiser, by the recursion read from its end, and weighted::

    w_k = N^-L q'(x | g_k) / r(g_k | x) = q(x) q'(x | g_k) / q(x | g_k),      q'(x) = E w

The logarithm of the mean of K weights lies below log q'(x) in the mean (Burda et al. 2015, arXiv
1509.00519). Where x was drawn from q' with the partition g_0, that of K weights and w_0 lies above
it (Sobolev and Vetrov 2019, arXiv 1905.03290). Both are unbiased where q' is the perfect denoiser,
and close where it is near to it: what lies between them is the error that is left beside the spread
of the samples.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float64, Int
from scipy.special import log_softmax, logsumexp

from experiments.common.known import KnownLaw
from experiments.masked_diffusion.markov import Chain
from paradec_jax.decode.rules.sampling import log_probability
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.evaluate.intervals import Z95

TEXTS = 128  # of a chunk of the recursion
CANVASES = 1024  # of a call of a network
Gaps = Float64[np.ndarray, "B S S"]  # S = L + 2 places, 0 and L + 1 beyond the ends


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """Samples of a model: of each the cost under the law, and what log q lies between, in nats a
    symbol.
    """

    cross: np.ndarray
    low: np.ndarray
    high: np.ndarray
    calls: np.ndarray

    @property
    def surprise(self) -> np.ndarray:
        """-log q of each, the middle of both ends."""
        return -(self.low + self.high) / 2

    @property
    def between(self) -> float:
        """The way between both ends, on average."""
        return float(np.mean(self.high - self.low))


def interval(values: np.ndarray, opened: float = 0.0) -> tuple[float, list[float]]:
    """Mean and its 95% interval, wider by half of `opened` on both sides."""
    middle = float(np.mean(values))
    spread = Z95 * float(np.std(values, ddof=1)) / len(values) ** 0.5 + max(opened, 0.0) / 2
    return middle, [middle - spread, middle + spread]


def apart(first: Measured, second: Measured) -> tuple[float, list[float]]:
    """KL of the first less that of the second, sample by sample."""
    difference = (first.cross - first.surprise) - (second.cross - second.surprise)
    return interval(difference, first.between + second.between)


def at_equal_entropy(one: Measured, sweep: Sequence[Measured]) -> tuple[float, list[float]] | None:
    """KL of a model less that of another one at the temperature at which it is as varied; None
    beyond its sweep.

    Between two temperatures a and b the other's cross-entropy is a line over its entropy, `c(h) =
    c_a + s (h - h_a)`. At equal entropy a difference of KL is one of cross-entropy, and with w the
    place between a and b it is the mean of `u - (1 - w) u_a - w u_b`, where u is a sample's cost
    under the law less s times its surprise.
    """
    entropy = float(one.surprise.mean())
    line = sorted(sweep, key=lambda point: point.surprise.mean())
    for a, b in itertools.pairwise(line):
        low, high = float(a.surprise.mean()), float(b.surprise.mean())
        if not low <= entropy <= high or low == high:
            continue
        w = (entropy - low) / (high - low)
        slope = float(b.cross.mean() - a.cross.mean()) / (high - low)
        u, u_a, u_b = (point.cross - slope * point.surprise for point in (one, a, b))
        opened = one.between + (1 - w) * a.between + w * b.between
        return interval(u - (1 - w) * u_a - w * u_b, abs(slope) * opened)
    return None


def log_law(
    chain: Chain, texts: Int[np.ndarray, "N L"], steps: int, temperature: float = 1.0
) -> np.ndarray:
    """log q of each text under the perfect denoiser and N steps, in nats, [N]."""
    parts = [_gaps(_known(chain, some, temperature) / steps, steps)[0] for some in _chunks(texts)]
    return np.log(np.concatenate([gaps[:, 0, -1] for gaps in parts]))


def log_law_between(
    chain: Chain,
    network: Any,
    params: Any,
    texts: Int[np.ndarray, "N L"],
    groups: Int[np.ndarray, "N L"],
    steps: int,
    temperature: float = 1.0,
    *,
    draws: int = 8,
    seed: int = 0,
) -> tuple[Float64[np.ndarray, "N"], Float64[np.ndarray, "N"]]:
    """What log q' of each text lies between, in the mean, for a network that has written it.

    Args:
      chain: whose perfect denoiser proposes partitions.
      network, params: what has written the texts.
      texts: its samples.
      groups: the partition that each was written by.
      steps, temperature: of the sampler.
      draws: K.
      seed: of the partitions.

    Returns:
      Lower and upper ends in nats, [N] each.
    """
    rng, perfect = np.random.default_rng(seed), KnownLaw(chain)
    law, proposed = [], []
    for some in _chunks(texts):
        known = _known(chain, some, temperature) / steps
        gaps = _gaps(known, steps)
        law.append(np.log(gaps[0][:, 0, -1]))
        proposed.append(_partitions(known, gaps, draws, rng))
    every = np.concatenate([groups[:, None], np.concatenate(proposed)], axis=1)  # [N, 1 + K, L]
    repeated = np.repeat(texts, 1 + draws, axis=0)
    theirs, ours = (
        log_conditional(one, its, repeated, every.reshape(repeated.shape), steps, temperature)
        for one, its in ((network, params), (perfect, None))
    )
    weights = np.concatenate(law)[:, None] + (theirs - ours).reshape(len(texts), 1 + draws)
    low = logsumexp(weights[:, 1:], axis=1) - np.log(draws)
    return low, logsumexp(weights, axis=1) - np.log(1 + draws)


def log_conditional(
    network: Any,
    params: Any,
    texts: Int[np.ndarray, "N L"],
    groups: Int[np.ndarray, "N L"],
    steps: int,
    temperature: float,
) -> Float64[np.ndarray, "N"]:
    """log q'(x | g): what each text costs where its partition is given, in one call a group."""
    mask, found = network.vocab_size - 1, []
    prepared = network.prepare(params)
    for start in range(0, len(texts), CANVASES):
        which = np.arange(start, start + CANVASES) % len(texts)  # the last call begins anew
        some = np.asarray(texts[which], np.int32), np.asarray(groups[which], np.int32)
        said = _said(network, mask, prepared, *some, np.int32(steps), np.float32(temperature))
        found.append(np.asarray(said, np.float64)[: len(texts) - start])
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _said(
    network: Any,
    mask: int,
    params: Any,
    texts: Int[Array, "B L"],
    groups: Int[Array, "B L"],
    steps: Int[Array, ""],
    temperature: Float[Array, ""],
) -> Float[Array, "B"]:
    positions = jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)

    def call(k: Array, total: Array) -> Array:
        hidden = network.forward(params, jnp.where(groups < k, texts, mask), positions).hidden
        scores = without_mask(network.logits(params, hidden), mask) / temperature
        return total + jnp.sum(jnp.where(groups == k, log_probability(scores, texts), 0), axis=1)

    return lax.fori_loop(0, steps, call, jnp.zeros(len(texts), jnp.float32))


def _chunks(texts: np.ndarray) -> list[np.ndarray]:
    return [texts[start : start + TEXTS] for start in range(0, len(texts), TEXTS)]


def _known(chain: Chain, texts: np.ndarray, temperature: float) -> Float64[np.ndarray, "B S S S"]:
    """p(x_i | x_l, x_r) by (l, i, r), of places l < i < r; the other entries mean nothing."""
    table, symbols, size = _table(chain, temperature), chain.symbols, texts.shape[1] + 2
    at, padded = np.arange(size), np.pad(texts, ((0, 0), (1, 1)))
    apart = np.clip(at - at[:, None] - 1, 0, chain.length - 2) * symbols  # [from, to]
    left, right = apart + padded[:, :, None], apart + padded[:, None, :]
    left[:, 0] = right[:, :, -1] = len(table) - 1
    return table[left[..., None], right[:, None], padded[:, None, :, None]]


@functools.lru_cache(maxsize=4)
def _table(chain: Chain, temperature: float) -> Float64[np.ndarray, "K K V"]:
    """p(v | nearest) by distance and symbol of the one before, of the one after, and v; last, where
    there is none.
    """
    symbols, logs = chain.symbols, np.log(chain.powers[1:])
    before = np.concatenate([logs.reshape(-1, symbols), np.log(chain.stationary)[None]])
    after = np.concatenate([logs.swapaxes(1, 2).reshape(-1, symbols), np.zeros((1, symbols))])
    return np.exp(log_softmax((before[:, None] + after) / temperature, axis=-1))


def _gaps(known: np.ndarray, steps: int) -> list[Gaps]:
    """F_0, F_1, .. F_N, from what is known over N; entries of l < r mean something."""
    batch, size = known.shape[:2]
    gaps = [np.broadcast_to(np.eye(size, k=1), (batch, size, size))]
    for _ in range(steps):
        after = gaps[0]
        ways, before = _ways(known, after), np.zeros((batch, size, size))
        for r in range(1, size):
            before[:, :r, r] = np.einsum("bli,bi->bl", ways[:, :r, r, :r], after[:, :r, r])
        gaps.insert(0, before)
    return gaps


def _ways(known: np.ndarray, after: Gaps) -> Float64[np.ndarray, "B S S S"]:
    """Weight of all choices of a call between l and r of which i is the last, by (l, r, i); i = l:
    none so far.
    """
    batch, size = known.shape[:2]
    at, found = np.arange(size), np.zeros((batch, size, size, size))
    found[:, at, :, at] = 1
    for j in range(1, size - 1):
        reached = np.einsum("blri,bi->blr", found[:, :j, j + 1 :, :j], after[:, :j, j])
        found[:, :j, j + 1 :, j] = known[:, :j, j, j + 1 :] * reached
    return found


def _partitions(
    known: np.ndarray, gaps: list[Gaps], draws: int, rng: Any
) -> Int[np.ndarray, "B K L"]:
    """Partitions of each text from their posterior under the perfect denoiser.

    Call after call, from the right end to the left: at a place that is revealed the nearest one
    before it that is revealed too, in this call or before it, is drawn; what is passed over waits
    for later calls.
    """
    (batch, size), steps = known.shape[:2], len(gaps) - 1
    groups = np.full((batch, draws, size), steps)
    groups[..., [0, -1]] = -1
    at, rows = np.arange(size), np.arange(batch)[:, None]
    for call in range(steps):
        ways, after = _ways(known, gaps[call + 1]), gaps[call + 1]
        shown = groups < call
        left = np.maximum.accumulate(np.where(shown, at, 0), axis=-1)
        right = np.minimum.accumulate(np.where(shown, at, size - 1)[..., ::-1], axis=-1)[..., ::-1]
        place = np.full((batch, draws), size - 1)
        for j in range(size - 1, 0, -1):
            here, start = place == j, left[..., j - 1]
            odds = np.cumsum(ways[rows, start, right[..., j], :j] * after[:, None, :j, j], axis=-1)
            chosen = np.sum(odds <= rng.random((batch, draws, 1)) * odds[..., -1:], axis=-1)
            new = np.nonzero(here & (chosen > start))
            groups[(*new, chosen[new])] = call
            place = np.where(here, chosen, place)
    return groups[..., 1:-1]
