"""Acceptance by rejection: the two pure functions, one window, and the distribution of what decoders commit."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from results import listed
from stubs import tiny_causal, tiny_causal_params, tiny_request

from paradec_jax import decode
from paradec_jax.decode.rules import rejection, windows
from paradec_jax.decode.rules.sampling import filtered_probabilities

VOCAB, PROMPT, NEW, DRAWS = 5, (1, 3), 4, 4096
GAIN = 1.5  # random weights so large that the network has preferences


def as_expected(counts, probabilities) -> None:
    """Pearson's chi-square of counts; cells of less than 5 expected ones are put together."""
    counts, expected = counts.ravel(), np.asarray(probabilities, np.float64).ravel() * counts.sum()
    assert expected.sum() == pytest.approx(counts.sum(), rel=1e-4)
    assert (counts[expected == 0] == 0).all()
    few = expected < 5
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], max(expected[few].sum(), 1e-9))
    chi_squared, freedom = np.sum((counts - expected) ** 2 / expected), len(counts) - 1
    assert chi_squared < freedom + 4.5 * math.sqrt(2 * freedom), (chi_squared, freedom)


# The pure functions


def test_a_draft_is_accepted_below_its_probability():
    probs, uniform = jnp.array([[0.2, 0.8, 0.0]] * 5), jnp.array([0.19, 0.2, 0.0, 0.99, 0.0])
    drafted = jnp.array([0, 0, 2, 1, rejection.NONE])
    assert rejection.accept(probs, drafted, uniform).tolist() == [True, False, False, False, False]
    assert rejection.accept(jnp.array([0.0, 1.0]), jnp.array(1), jnp.array(1 - 2.0**-24)).tolist()


def test_the_residual_has_no_rejected_token():
    probs = jnp.array(
        [[0.2, 0.5, 0.3], [0.2, 0.8, 0.0], [1.0, 0.0, 0.0], [1 - 2.0**-20, 0.0, 0.0], [0.2, 0.5, 0.3]]
    )
    rest = rejection.residual(probs, jnp.array([1, 2, 0, 0, rejection.NONE]))
    np.testing.assert_allclose(rest[:2], [[0.4, 0.0, 0.6], [0.2, 0.8, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(rest[2:4], probs[2:4])  # nothing else is left
    np.testing.assert_allclose(rest[4], probs[4], rtol=1e-6)
    tiny = rejection.residual(jnp.array([1.0, 1e-30, 3e-30]), jnp.array(0))
    np.testing.assert_allclose(tiny, [0.0, 0.25, 0.75], rtol=1e-5)


# One window


@functools.cache
def window(inside: tuple[bool, bool], draws: int = 20_000):
    """Tokens [draws, 3] and accepted drafts of many rows that share their probabilities and drafts."""
    probs = jnp.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.0, 0.25, 0.0, 0.75]])
    rows = functools.partial(jnp.tile, reps=(draws, 1))
    keys = jax.random.split(jax.random.key(0), draws)
    tokens, accepted = jax.jit(rejection.verify)(
        jnp.tile(probs, (draws, 1, 1)),
        rows(jnp.array([0, 2])),
        rows(jnp.array(inside)),
        rows(jnp.array([5, 6, 7])),
        keys,
        jnp.ones(draws, jnp.int32),
    )
    return np.asarray(probs, np.float64), np.asarray(tokens), np.asarray(accepted)


def test_a_window_commits_drafts_and_one_token():
    probs, tokens, accepted = window((True, True))
    assert accepted.mean(0) == pytest.approx([0.5, 0.3], abs=0.015)
    one, all_ = ~accepted[:, 0], accepted.all(1)
    two = accepted[:, 0] & ~accepted[:, 1]
    assert (tokens[accepted[:, 0], 0] == 0).all() and (tokens[all_, 1] == 2).all()
    for rows, slot, rest in (
        (one, 0, [0.0, 0.6, 0.4, 0.0]),
        (two, 1, [1 / 7, 2 / 7, 0.0, 4 / 7]),
        (all_, 2, probs[2]),
    ):
        as_expected(np.bincount(tokens[rows, slot], minlength=4), rest)
    assert (tokens[one, 1:] == [3, 3]).all() and (tokens[two, 2] == 3).all()  # the most probable ones


def test_what_is_not_inside_is_no_proposal():
    probs, tokens, accepted = window((False, True))
    assert not accepted[:, 0].any()
    as_expected(np.bincount(tokens[:, 0], minlength=4), probs[0])
    assert (tokens[:, 1:] == [3, 3]).all()


def test_a_certain_token_is_never_replaced():
    """A probability of 1 up to rounding, which is exaggerated here; drafted right and wrong."""
    draws, certain = 2_000, jnp.array([0.0, 1.0, 0.0])
    judge = jax.jit(rejection.verify)
    for mass, draft in itertools.product((0.75, 1.0, 1.25), (1, 2)):
        tokens, accepted = judge(
            jnp.tile(mass * certain, (draws, 2, 1)),
            jnp.full((draws, 1), draft),
            jnp.ones((draws, 1), bool),
            jnp.tile(jnp.arange(2), (draws, 1)),
            jax.random.split(jax.random.key(1), draws),
            jnp.zeros(draws, jnp.int32),
        )
        assert (tokens == 1).all()
        assert accepted.mean() == pytest.approx(min(mass, 1.0) * (draft == 1), abs=0.05)


# Decoders


NETWORK = tiny_causal(vocab_size=VOCAB)


@functools.cache
def params():
    return tiny_causal_params(gain=GAIN, vocab_size=VOCAB)


@jax.jit
def logits_of(params, tokens):
    """Logits [B, S, V] of whole texts."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return NETWORK.logits(params, NETWORK.forward(params, tokens, positions, None, None).hidden)


def probabilities(knobs):
    """Of every continuation of the prompt: the product of the network's probabilities."""
    texts = np.array(list(itertools.product(range(VOCAB), repeat=NEW)))
    fed = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], axis=1)
    probs = filtered_probabilities(logits_of(params(), jnp.asarray(fed)), knobs)[:, len(PROMPT) - 1 : -1]
    chosen = np.take_along_axis(np.asarray(probs, np.float64), texts[..., None], axis=2)[..., 0]
    return np.prod(chosen, axis=1).reshape((VOCAB,) * NEW)


@functools.partial(jax.jit, static_argnums=0)
def decode_with(decoder, params, request, knobs, guesses):
    """Decodes with drafts from one guessed text [S] in every step, or with the decoder's own where it is -1."""
    guesses = jnp.broadcast_to(guesses, (request.batch, len(guesses)))

    def body(state, _):
        guessed = windows.window(guesses, state.rows.length, decoder.width - 1)[:, None]
        guessed = jnp.where(guessed < 0, state.candidates, guessed)
        state = dataclasses.replace(state, candidates=guessed)
        return decoder.step(params, state, knobs)[0], None

    state, _ = lax.scan(body, decoder.init(params, request, knobs), length=NEW)
    return decoder.finish(state)


DECODERS = {
    "running": decode.Jacobi(NETWORK, 6, block=3, running=True, acceptance="rejection"),
    "blocks": decode.Jacobi(NETWORK, 6, block=2, blocks=2, acceptance="rejection"),
}
FILTERED = {"top_k": 4, "top_p": 0.95, "min_p": 0.02}


@pytest.mark.parametrize(
    ("name", "drafts", "knobs", "calls"),
    [
        ("running", "best", {"temperature": 0.25}, (2.0, 2.9)),
        ("running", "worst", {"temperature": 0.5}, (3.6, 4.0)),
        ("running", "own", {"temperature": 1.0}, (2.0, 3.9)),
        ("running", "best", {"temperature": 1.5, **FILTERED}, (2.0, 3.9)),
        ("blocks", "best", {"temperature": 1.0}, (2.0, 3.9)),
        ("blocks", "own", {"temperature": 1.5, **FILTERED}, (2.0, 3.9)),
    ],
)
def test_samples_have_the_distribution_of_the_network(name, drafts, knobs, calls):
    """Tokens 2 to 4 of many rows, each with a key of its own, against the product of their probabilities."""
    decoder = DECODERS[name]
    knobs = decoder.Knobs(**{name: jnp.asarray(value) for name, value in knobs.items()})
    expected = probabilities(knobs)
    guesses = np.full(16, -1)
    if drafts != "own":
        places = range(NEW)
        marginals = [expected.sum(tuple(set(places) - {place})) for place in places]
        best = np.unravel_index(np.argmax(expected), expected.shape)
        worst = [np.argmin(marginal) for marginal in marginals]
        guesses[len(PROMPT) : len(PROMPT) + NEW] = best if drafts == "best" else worst
    request = tiny_request(NEW, prompts=[PROMPT] * DRAWS, seed=7)
    result = decode_with(decoder, params(), request, knobs, jnp.asarray(guesses))
    counts = np.zeros_like(expected)
    np.add.at(counts, tuple(np.asarray(result.completions()).T), 1)
    as_expected(counts.sum(0), expected.sum(0))
    print(name, drafts, result.network_calls.mean())
    assert calls[0] <= result.network_calls.mean() <= calls[1]


def judged(acceptance, temperature):
    """A result with log-probabilities; the temperature makes no new program."""
    decoder = decode.Jacobi(NETWORK, 16, block=3, log_probs=True, acceptance=acceptance)
    knobs = decoder.Knobs(temperature=temperature)
    return decode.run(decoder, params(), tiny_request((9, 3, 6), stop=(2,)), knobs)


def test_temperature_0_is_greedy_decoding():
    """All of the result, calls included, is that of the other rule."""
    assert listed(judged("rejection", 0.0)) == listed(judged("coupled", 0.0))


def test_log_probabilities_are_those_of_the_network():
    result = judged("rejection", 1.0)
    assert result.completions() != judged("rejection", 0.0).completions()
    scores = jax.nn.log_softmax(logits_of(params(), result.tokens)[:, :-1])
    scores = np.asarray(jnp.take_along_axis(scores, result.tokens[:, 1:, None], axis=-1)[..., 0])
    for i, (start, end) in enumerate(zip(result.prompt_lengths, result.lengths, strict=True)):
        np.testing.assert_allclose(result.log_probs[i, start:end], scores[i, start - 1 : end - 1], atol=2e-5)
