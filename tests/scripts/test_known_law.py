"""The law that is known exactly, its perfect denoiser, and the exact law of samples: all against
enumeration.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import excess

from experiments.common.known import KnownLaw
from experiments.masked_diffusion import sample_law
from experiments.masked_diffusion.markov import Chain
from experiments.masked_diffusion.sample_law import log_law, log_law_between
from paradec_jax import decode
from paradec_jax.decode.rules import partition

pytestmark = pytest.mark.slow
CHAIN, OTHER = Chain((0.7, 0.2, 0.1), 4, 1), Chain((0.5, 0.3, 0.2), 4, 2)
TEXTS = np.asarray(list(itertools.product(range(3), repeat=4)))
STEPS = 3
PARTITIONS = np.asarray(list(itertools.product(range(STEPS), repeat=4)))


def law(chain: Chain = CHAIN) -> np.ndarray:
    return np.exp(chain.log_probability(TEXTS))


def samples(network, order="random", count=20_000, **knobs):
    """Texts of a sampler and the keys that they were drawn with."""
    keys = jax.random.split(jax.random.key(4), count)
    decoder = decode.Masked(order=order).bind(network, 4, network.spec)
    request = decode.make_request(np.zeros((count, 0), int), max_new_tokens=4, keys=keys)
    params = decoder.prepare(None)
    return np.asarray(decode.run(decoder, params, request, decoder.Knobs(**knobs)).tokens)[
        :, :4
    ], keys


SEES = {  # by visibility: block, alignment, and what the positions 1 and 3 are predicted from
    "full": (None, "own", ((0, 2), (0, 2))),
    "block": (2, "own", ((0,), (0, 2))),
    "causal": (None, "next", ((0,), (0, 2))),
}


@pytest.mark.parametrize("visibility", SEES)
def test_a_network_knows_the_law_as_far_as_it_sees(visibility):
    block, alignment, seen = SEES[visibility]
    network, params = KnownLaw(CHAIN, visibility, block, alignment), None
    canvas = jnp.array([[2, 3, 1, 3]])
    whole = network.forward(params, canvas, jnp.arange(4)[None]).hidden
    # The second half over a cache of the first.
    cache = network.init_cache(jnp.zeros(1), 4)
    cache = network.write(cache, canvas[:, :2], jnp.zeros(1, int))
    before = decode.Prefix(cache, jnp.array([2]))
    half = network.forward(params, canvas[:, 2:], jnp.arange(2, 4)[None], before).hidden
    np.testing.assert_allclose(half, whole[:, 2:], atol=1e-5)
    for place, shown in zip((1, 3), seen, strict=True):
        agrees = (TEXTS[:, shown] == np.asarray(canvas)[0, list(shown)]).all(axis=1) * law()
        want = np.bincount(TEXTS[:, place], agrees, 3) / agrees.sum()
        got = np.exp(whole[0, place - (alignment == "next")])
        np.testing.assert_allclose(got, want, atol=1e-5)


@functools.cache
def known(chain: Chain, temperature: float, i: int, shown: tuple[int, ...]) -> np.ndarray:
    """How likely each text's own symbol at i is, given its symbols at `shown`, at a temperature."""
    seen = TEXTS[:, np.asarray(shown, int)]
    same = (seen[:, None] == seen).all(-1)
    posterior = np.stack([same @ (law(chain) * (TEXTS[:, i] == v)) for v in range(3)], axis=1)
    posterior **= 1 / temperature
    return posterior[np.arange(len(TEXTS)), TEXTS[:, i]] / posterior.sum(axis=1)


def given(chain: Chain, temperature: float) -> np.ndarray:
    """q(x | g) of all partitions and all texts."""
    rows = [
        [known(chain, temperature, i, tuple(np.flatnonzero(groups < groups[i]))) for i in range(4)]
        for groups in PARTITIONS
    ]
    return np.prod(np.asarray(rows), axis=1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_law_of_samples_is_the_sum_over_all_partitions(temperature):
    wanted = given(CHAIN, temperature).mean(axis=0)
    np.testing.assert_allclose(
        log_law(CHAIN, TEXTS, STEPS, temperature), np.log(wanted), rtol=1e-10
    )
    found, _ = samples(KnownLaw(CHAIN), steps=STEPS, temperature=temperature)
    assert excess(found, wanted, 3) < 4


def test_the_law_of_another_network_lies_between_two_estimates():
    network, apart = KnownLaw(OTHER), {}
    texts, keys = samples(network, count=1_000, steps=STEPS)
    positions = jnp.broadcast_to(jnp.arange(4), texts.shape)
    groups = np.asarray(partition.linear(partition.words(keys, positions), STEPS))
    exact = log_law(OTHER, texts, STEPS)
    for count in (1, 32):
        low, high = log_law_between(CHAIN, network, None, texts, groups, STEPS, draws=count)
        errors = [3 * np.std(end - exact) / math.sqrt(len(texts)) for end in (low, high)]
        assert np.mean(low - exact) < errors[0] and np.mean(high - exact) > -errors[1]
        apart[count] = np.mean(high - low)
    assert 0 < apart[32] < apart[1] / 5 and abs(np.mean(low - exact)) < 0.02


def test_divergences_are_compared_at_equal_entropy():
    rng = np.random.default_rng(0)

    def measured(cross, entropy, count=4_000):
        spread = rng.normal(size=(2, count)) * 0.01
        low = -(entropy + spread[1] - spread[1].mean())
        return sample_law.Measured(cross + spread[0] - spread[0].mean(), low, low, np.ones(count))

    # Cross-entropies of the sweep over its entropy: 0.5, 0.9, 1.5 at 0.5, 0.8, 1.0.
    sweep = [measured(1.5, 1.0), measured(0.9, 0.8), measured(0.5, 0.5)]
    found, ends = sample_law.at_equal_entropy(measured(1.3, 0.9), sweep)
    assert found == pytest.approx(1.3 - 1.2) and ends[0] < found < ends[1] < found + 0.01
    assert sample_law.at_equal_entropy(measured(1.3, 0.4), sweep) is None
    assert sample_law.apart(sweep[0], sweep[1])[0] == pytest.approx(0.5 - 0.1)
