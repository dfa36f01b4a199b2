"""The masked samplers: the law of what they write, who is revealed in which call, how many calls
that takes.

Laws are counted by enumeration: of an N-step sampler over all partitions of a small canvas, with
the exact posterior of a joint law in the network's place.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import excess
from marks import over, slow
from results import listed
from stubs import JointDenoiser, StubDenoiser, tiny_denoiser

from experiments import replicas
from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine import drive
from paradec_jax.decode.rules import partition
from paradec_jax.families import parameter_shapes

DRAWS = 100_000
WEIGHTS = tuple(np.random.default_rng(3).gamma(0.5, size=27).tolist())
JOINT = JointDenoiser(3, 3, WEIGHTS)
HOLE = None
KEYS = jax.random.split(jax.random.key(5), DRAWS)


def spec(network: Any) -> TokenSpec:
    return TokenSpec(mask=network.mask, alignment="own")


def texts(
    decoder: Any, text: tuple[int | None, ...], knobs: Any, size: int | None = None
) -> np.ndarray:
    """`DRAWS` texts around the given tokens of one, [draws, L], from a buffer of `size` positions."""
    given = [token is not HOLE for token in text]
    rows = np.tile([token or 0 for token in text], (DRAWS, 1))
    if any(given):
        request = decode.make_request(
            rows, given=np.tile(given, (DRAWS, 1)), max_new_tokens=0, keys=KEYS
        )
    else:
        request = decode.make_request(np.zeros((DRAWS, 0)), max_new_tokens=len(text), keys=KEYS)
    decoder = decoder.bind(decoder.network, size or len(text), spec(decoder.network))
    return np.asarray(decode.run(decoder, None, request, knobs).tokens)[:, : len(text)]


def masses(times: np.ndarray) -> np.ndarray:
    """How likely each call of a grid is to reveal a position, `t_k - t_{k+1}`."""
    return -np.diff([*times, 0.0])


def linear(steps: int) -> np.ndarray:
    return masses(1 - np.arange(steps) / steps)


def cosine(steps: int) -> np.ndarray:
    return masses(np.cos(np.pi * np.arange(steps) / (2 * steps)))


def enumerated(joint: JointDenoiser, text: tuple[int | None, ...], mass: np.ndarray) -> np.ndarray:
    """The exact law of an N-step sampler over the texts of `len(text)` positions, by all of its
    partitions.
    """
    length = len(text)
    every, law = joint.texts, joint.law
    outcomes = np.asarray(list(itertools.product(range(joint.symbols), repeat=length)))
    marginal = np.asarray([law[(every[:, :length] == x).all(1)].sum() for x in outcomes])
    open_ = [p for p in range(length) if text[p] is HOLE]
    shown = [p for p in range(length) if text[p] is not HOLE]
    possible = (outcomes[:, shown] == [text[p] for p in shown]).all(1)
    found = np.zeros(len(outcomes))
    for groups in itertools.product(range(len(mass)), repeat=len(open_)):
        weight = math.prod(mass[g] for g in groups)
        for i in np.flatnonzero(possible):
            likely, known = 1.0, list(shown)
            for group in sorted(set(groups)):
                same = (outcomes[:, known] == outcomes[i, known]).all(1)
                members = [p for p, g in zip(open_, groups, strict=True) if g == group]
                for p in members:
                    hits = marginal[same & (outcomes[:, p] == outcomes[i, p])].sum()
                    likely *= hits / max(marginal[same].sum(), 1e-300)
                known += members
            found[i] += weight * likely
    return found


FREE, AROUND = (HOLE,) * 3, (HOLE, 1, HOLE)
GRID = np.asarray([1.0, 0.8, 0.3], np.float32)
LAWS = {  # decoder, knobs, given tokens, probabilities of the calls
    "linear": (decode.Masked(JOINT), {"steps": 3}, FREE, linear(3)),
    "cosine": (decode.Masked(JOINT), {"steps": 3, "grid": "cosine"}, FREE, cosine(3)),
    "own-grid": (decode.Masked(JOINT), {"grid": GRID}, FREE, masses(GRID)),
    "one-call": (decode.Masked(JOINT), {"steps": 1}, FREE, linear(1)),
    "infilled": (decode.Masked(JOINT), {"steps": 2}, AROUND, linear(2)),
    "released": (replicas.ReleasedMasked(JOINT, steps=3, sampler="ancestral"), {}, FREE, linear(3)),
    "released-cached": (replicas.ReleasedMasked(JOINT, steps=2), {}, AROUND, linear(2)),
    "released-analytic": (
        replicas.ReleasedMasked(JOINT, steps=2, sampler="analytic"),
        {},
        FREE,
        linear(2),
    ),
}


@functools.cache
def law_of(name: str) -> np.ndarray:
    _, _, text, mass = LAWS[name]
    return enumerated(JOINT, text, mass)


def drawn(name: str, network: Any = JOINT) -> np.ndarray:
    decoder, knobs, text, _ = LAWS[name]
    decoder = dataclasses.replace(decoder, network=network)
    return texts(decoder, text, decoder.Knobs(**knobs))


@over(LAWS, ("cosine", "own-grid", "one-call", "released", "released-cached", "released-analytic"))
def test_texts_have_the_law_of_the_steps(name):
    assert excess(drawn(name), law_of(name), 3) < 4


FULL, HOT = {"rule": "static", "order": "random"}, {"temperature": 1.0}
ONE_A_CALL = {
    "single": (decode.Masked(JOINT, order="single"), {}),
    "strided": (decode.Strided(JOINT, order="single", width=3, stride=2), {}),
    "blocks": (decode.SemiAutoregressive(JOINT, length=2, **FULL), HOT),
    "whole": (decode.SemiAutoregressive(JOINT, length=None, **FULL), HOT),
    "speculative": (decode.SpeculativeDenoising(JOINT, order="random", tries=2), HOT),
}


@over(ONE_A_CALL, ("whole", "speculative"))
def test_a_position_a_call_has_the_joint_law(name):
    decoder, knobs = ONE_A_CALL[name]
    assert excess(texts(decoder, FREE, decoder.Knobs(**knobs)), JOINT.law, 3) < 4


@pytest.mark.slow
def test_rows_of_unequal_lengths_have_the_laws_of_their_own():
    """In one batch and one buffer, two positions longer than the longest."""
    lengths = np.arange(DRAWS) % 2 + 2
    request = decode.make_request(np.zeros((DRAWS, 0)), max_new_tokens=lengths, keys=KEYS)
    decoder = decode.Masked(JOINT, 5, spec(JOINT))
    tokens = np.asarray(decode.run(decoder, None, request, decoder.Knobs(steps=2)).tokens)
    for length in (2, 3):
        some = tokens[lengths == length, :length]
        assert excess(some, enumerated(JOINT, (HOLE,) * length, linear(2)), 3) < 4


# How many calls


def test_a_batch_takes_its_longest_rows_groups():
    network = StubDenoiser(max_length=64)
    decoder = decode.Masked(network, 40, spec(network), chunk=3)
    keys = KEYS[:4]
    request = decode.make_request(np.zeros((4, 0)), max_new_tokens=[40, 10, 25, 1], keys=keys)
    result, infos = decode.trace(decoder, None, request, decoder.Knobs(steps=16), n=20)
    words = partition.words(keys, jnp.broadcast_to(jnp.arange(40), (4, 40)))
    drawn = np.asarray(partition.linear(words, 16))
    want = [len(np.unique(row[:n])) for row, n in zip(drawn, (40, 10, 25, 1), strict=True)]
    assert result.network_calls.tolist() == want
    assert result.positions.tolist() == [
        calls * n for calls, n in zip(want, (40, 10, 25, 1), strict=True)
    ]
    where = np.asarray(infos.where)
    assert (where.any(axis=2).sum(axis=0) == want).all() and (where.sum(axis=0) <= 1).all()
    for row, length in enumerate((40, 10, 25, 1)):
        shown = where[:, row, :length].argmax(axis=0)
        ranks = np.unique(drawn[row, :length], return_inverse=True)[1]
        assert shown.tolist() == ranks.tolist()


@pytest.mark.parametrize("grid", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 3, 128])
def test_groups_have_the_probabilities_of_the_grid(grid, steps):
    positions = jnp.broadcast_to(jnp.arange(100), (1_000, 100))
    drawn = getattr(partition, grid)(partition.words(KEYS[:1_000], positions), steps)
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=steps)
    expected = {"linear": linear, "cosine": cosine}[grid](steps) * 100_000
    enough = expected >= 5
    chi_squared = np.sum((counts[enough] - expected[enough]) ** 2 / expected[enough])
    assert chi_squared < enough.sum() + 4.5 * math.sqrt(2 * enough.sum())
    assert len(counts) == steps


def test_rare_groups_of_a_cosine_grid_are_not_lost():
    """The first of 10,000 has probability 1.2e-8, less than a float32 near 1 can tell."""
    bits = jnp.asarray([[[0, 0], [49, 0], [60, 0], [2**32 - 1, 2**32 - 1]]], jnp.uint32)
    assert partition.cosine(bits, 10_000).tolist() == [[0, 0, 1, 9_999]]
    assert partition.linear(bits, 10_000)[0, :3].tolist() == [0, 49, 60]


# Draws that lose no rare token


def zipf(count: int = 50_000) -> np.ndarray:
    """Zipf's law with an offset, of entropy 8.26 nats."""
    law = 1 / (np.arange(1, count + 1) + 2.7)
    return law / law.sum()


@dataclasses.dataclass(frozen=True)
class ZipfDenoiser(JointDenoiser):
    """The same law at every position, whatever is revealed."""

    def forward(self, params, inputs, positions, prefix=None, mask=None):
        return decode.Forward(jnp.zeros((*inputs.shape, 1)), None, {})

    def logits(self, params, hidden):
        law = jnp.append(jnp.log(jnp.asarray(zipf(self.symbols), jnp.float32)), 5.0)
        return jnp.broadcast_to(law, (*hidden.shape[:-1], len(law)))


@pytest.mark.slow
def test_many_steps_lose_no_rare_token():
    """A race that decides reveals too draws a token (1/a) / (e^(1/a) - 1) times as often, a = 2^24
    p (t - s) / s: the mean below would be 6.4.
    """
    law = zipf()
    network = ZipfDenoiser(50_000, 1, (), max_length=1_024)
    decoder = decode.Masked(network, 2, spec(network), chunk=1)
    # The first of 1,024 steps that reveals anything, in many texts.
    request = decode.make_request(np.zeros((320, 0)), max_new_tokens=2, keys=KEYS[:320])
    _, first = decode.trace(
        decoder, None, request, decoder.Knobs(steps=1_024), n=1, record=canvas_of
    )
    surprise = -np.log(law[np.asarray(first)[first < network.mask]])
    assert len(surprise) >= 320
    error = surprise.std() / math.sqrt(len(surprise))
    entropy = -np.sum(law * np.log(law))  # the mean where tokens have the law
    assert surprise.mean() == pytest.approx(entropy, abs=4 * error) and error < 0.2


def canvas_of(state, info):
    return state.rows.tokens


@pytest.mark.parametrize(
    ("order", "options", "score"),
    [
        ("margin", {}, 0.311824),  # Dream's: after temperature and top-p
        slow("margin", {"confidence": "tempered"}, 0.304980),
        ("margin", {"confidence": "raw"}, 0.2),
        ("entropy", {}, -0.904663),
        slow("entropy", {"confidence": "raw"}, -1.142120),
        ("confidence", {}, {0: 0.5, 1: 0.3}),  # LLaDA's: of the raw softmax
        ("confidence", {"confidence": "filtered"}, {0: 0.602010, 1: 0.290186, 2: 0.107804}),
    ],
)
def test_scores_are_taken_from_the_distribution_of_the_paper(order, options, score):
    """One position of law .5, .3, .15, .05 at temperature 0.7 and top-p 0.9; see `test_rules.py`."""
    network = JointDenoiser(4, 1, (0.5, 0.3, 0.15, 0.05))
    decoder = decode.Masked(network, 1, spec(network), order=order, **options)
    request = decode.make_request(np.zeros((8, 0)), max_new_tokens=1, keys=KEYS[:8])
    knobs = decoder.Knobs(steps=1, temperature=0.7, top_p=0.9)
    result, info = decode.trace(decoder, None, request, knobs, n=1)
    tokens = result.tokens[:, 0].tolist()
    want = [score[token] if isinstance(score, dict) else score for token in tokens]
    np.testing.assert_allclose(info.scores[0, :, 0], want, atol=2e-6)


# What the samplers share


def test_one_window_is_the_masked_sampler_and_a_soft_token_a_hard_one():
    network = StubDenoiser(sharpness=1.0)
    request = decode.make_request([[3], [], [1, 2]], max_new_tokens=[9, 5, 7])
    for kind, options in ((decode.Strided, {"order": "confidence"}), (decode.SoftMasked, {})):
        plain = decode.Masked(network, 12, spec(network), log_probs=True, **options)
        other = kind(network, 12, spec(network), log_probs=True, **options)
        want = listed(decode.run(plain, None, request, plain.Knobs(steps=4)))
        assert listed(decode.run(other, None, request, other.Knobs(steps=4))) == want


def test_windows_go_on_where_the_network_ends():
    network = StubDenoiser(sharpness=30.0, max_length=8)
    decoder = decode.Strided(network, spec=spec(network), width=8, stride=3)
    decoder = decoder.bind(network, 30, spec(network))
    request = decode.make_request([[3], [4, 1]], max_new_tokens=[29, 20])
    result = decode.run(decoder, None, request, decoder.Knobs(steps=4, temperature=0.0))
    chain = lambda start, count: [(start + 2 * (i + 1)) % 10 for i in range(count)]  # noqa: E731
    assert result.completions() == [chain(3, 29), chain(1, 20)]


def test_what_is_drawn_at_a_position_does_not_depend_on_the_chunk():
    network = StubDenoiser(sharpness=1.0)
    request = decode.make_request([[3], []], max_new_tokens=[11, 12])
    results = [
        listed(
            decode.run(
                decode.Masked(network, 12, spec(network), chunk=chunk, bounded=bounded),
                None,
                request,
            )
        )
        for chunk, bounded in ((1, False), (64, False), (5, True))
    ]
    assert all(result == results[0] for result in results[1:])


READ: list[int] = []


@dataclasses.dataclass(frozen=True)
class CountedDenoiser(StubDenoiser):
    """Tells how many positions of a row its output matrix meets in each call of it."""

    def logits(self, params, hidden):
        jax.debug.callback(lambda: READ.append(hidden.shape[1]))
        return super().logits(params, hidden)


@pytest.mark.parametrize("order", ["random", "confidence"])
def test_the_output_matrix_meets_what_may_be_revealed_a_few_positions_at_a_time(order):
    """Of the fullest row what it reveals, or what is masked where the surest are looked for."""
    network = CountedDenoiser(max_length=64)
    decoder = decode.Masked(
        network, 40, TokenSpec(mask=network.mask, alignment="own"), chunk=3, order=order
    )
    request = decode.make_request(np.zeros((4, 0)), max_new_tokens=[40, 10, 25, 1], seed=5)
    READ.clear()
    _, infos = decode.trace(decoder, None, request, decoder.Knobs(steps=16), n=20)
    jax.effects_barrier()
    shown = np.asarray(infos.where).sum(axis=2)
    met = shown if order == "random" else np.cumsum(shown[::-1], axis=0)[::-1]
    chunks = int(np.ceil(met.max(axis=1) / 3).sum())
    assert [3] * chunks == READ and chunks > 10


def test_logits_never_lie_in_memory_whole():
    network = tiny_denoiser(vocab_size=97)
    decoder = decode.Masked(network, 40, TokenSpec(mask=96, alignment="own"), chunk=3)
    request, knobs = decode.make_request(np.zeros((2, 0)), max_new_tokens=40), decoder.knobs(None)
    params = parameter_shapes(network.config)
    text = drive.compiled_run.lower(decoder, params, request, knobs, np.int32(40)).as_text()
    assert "x3x97xf32" in text and "x40x97x" not in text
