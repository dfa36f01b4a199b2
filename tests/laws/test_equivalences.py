"""Equivalences of decoders (law 2), and of a row alone with one of a batch, on small models of
random weights.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_rows import BUDGET, REPEATING, SIZE
from decoders import CAUSAL, REAL, ROWS, causal, tiny
from marks import over, slow
from results import listed, rows_of
from stubs import (
    PROMPTS,
    StubCausal,
    StubNetwork,
    tiny_blocks,
    tiny_blocks_params,
    tiny_causal,
    tiny_causal_params,
    tiny_head,
    tiny_head_params,
    tiny_network,
    tiny_params,
    tiny_request,
)

from experiments.replicas import ReleasedAdaptive
from paradec_jax import decode
from paradec_jax.config import RopeScaling, TokenSpec
from paradec_jax.decode.rules.randomness import Purpose, purpose_keys


@functools.cache
def static(cache: str, temperature: float = 0.0) -> decode.Decoded:
    decoder = tiny(decode.Static, cache, log_probs=True)
    knobs = decoder.Knobs(temperature=temperature)
    return decode.run(decoder, tiny_params(), tiny_request(BUDGET), knobs)


@functools.cache
def whole_sequence() -> Callable[..., Any]:
    """Logits [B, S, V] of whole sequences, without a cache."""
    network = tiny_network("full")

    @jax.jit
    def logits(params, tokens, keys):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        empty = network.init_cache(purpose_keys(keys, Purpose.STATE), tokens.shape[1])
        out = network.forward(params, tokens, positions, decode.Prefix(empty, None))
        return network.logits(params, out.hidden)

    return logits


def test_cached_is_uncached():
    request, result = tiny_request(BUDGET), static("full")
    tokens = np.zeros((len(PROMPTS), SIZE), np.int32)
    tokens[:, : request.tokens.shape[1]] = request.tokens
    lengths = np.array([len(p) for p in PROMPTS])
    for _ in range(BUDGET):
        logits = np.asarray(whole_sequence()(tiny_params(), jnp.asarray(tokens), request.keys))
        for i, length in enumerate(lengths):
            tokens[i, length] = logits[i, length - 1].argmax()
        lengths += 1
    assert result.completions() == [
        row[len(p) : n].tolist() for row, p, n in zip(tokens, PROMPTS, lengths, strict=True)
    ]


def test_log_probabilities_are_those_of_a_forward_pass():
    result = static("full")
    keys = tiny_request(BUDGET).keys
    logits = whole_sequence()(tiny_params(), result.tokens, keys)
    scores = jax.nn.log_softmax(logits[:, :-1])
    scores = np.asarray(jnp.take_along_axis(scores, result.tokens[:, 1:, None], axis=-1)[..., 0])
    for i in range(len(PROMPTS)):
        start, end = int(result.prompt_lengths[i]), int(result.lengths[i])
        np.testing.assert_allclose(
            result.log_probs[i, start:end], scores[i, start - 1 : end - 1], atol=2e-5
        )
        assert not np.any(result.log_probs[i, :start]) and not np.any(result.log_probs[i, end:])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (decode.SelfSpeculative, {"draft_recurrence": 2, "lookahead": 3}),
        slow(decode.Jacobi, {"block": 3}),
    ],
)
def test_drafts_of_a_recurrent_network_are_static_decoding(kind, options):
    decoder = tiny(kind, "full", **options)
    result = decode.run(decoder, tiny_params(), tiny_request(BUDGET), decoder.Knobs())
    assert result.completions() == static("full").completions()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_the_verifier_itself_are_static_decoding(temperature):
    """With drafts as deep as the verification and draws that belong to positions, sampling agrees
    too.
    """
    stub = StubNetwork(needed=(3, 1), sharpness=2.0)
    one = decode.Static(stub, SIZE)
    other = decode.SelfSpeculative(stub, SIZE, draft_recurrence=stub.recurrence, lookahead=3)
    request = tiny_request(BUDGET, seed=1)
    static = decode.run(one, None, request, one.Knobs(temperature=temperature))
    drafted = decode.run(other, None, request, other.Knobs(temperature=temperature))
    assert drafted.completions() == static.completions()
    if temperature:
        assert static.completions() != [stub.expected(prompt, BUDGET) for prompt in PROMPTS]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_wavefront_of_one_position_is_adaptive_decoding(temperature):
    wave = tiny(decode.Wavefront, "shared", window=1, inner_recurrence=2, prefill_recurrence=8)
    knobs = {"temperature": temperature, "exit_threshold": 0.4}
    waved = decode.run(
        wave,
        tiny_params(),
        tiny_request(BUDGET),
        wave.Knobs(momentum=0.0, max_recurrence=8, **knobs),
    )
    adaptive = tiny(ReleasedAdaptive, "shared", max_recurrence=8, exit_in_prefill=False)
    adapted = decode.run(
        adaptive,
        tiny_params(),
        tiny_request(BUDGET),
        adaptive.Knobs(min_recurrence=1, check_every=2, **knobs),
    )
    assert waved.completions() == adapted.completions()
    assert waved.counts["recurrences"].tolist() == adapted.counts["recurrences"].tolist()
    spread = np.asarray(adapted.counts["recurrences"] - 8) / (BUDGET - 1)
    assert (spread > 2).all() and (spread < 8).all(), f"the threshold decides nothing: {spread}"


ALONE = {"window": 1, "inner_recurrence": 2}
WITHOUT_EXIT = {
    "adaptive": (decode.Adaptive, {"max_recurrence": 4}, {}),
    "wavefront": (decode.Wavefront, ALONE, {"momentum": 0.0, "max_recurrence": 4}),
}


@pytest.mark.slow
@over(WITHOUT_EXIT, ["wavefront"], "other")
def test_prompts_may_be_read_at_a_recurrence_of_their_own(other):
    """As static decoding that reads the prompt once and a token four times."""
    request, choices = tiny_request(BUDGET), {"prefill_recurrence": 1}
    expected = decode.run(
        tiny(decode.Static, "shared", recurrence=4, **choices), tiny_params(), request
    )
    assert expected.counts["recurrences"].tolist() == [1 + 4 * (BUDGET - 1)] * len(PROMPTS)
    assert expected.completions() != static("shared").completions(), (
        "the prompt's recurrence changes nothing"
    )
    kind, options, knobs = WITHOUT_EXIT[other]
    decoder = tiny(kind, "shared", **options, **choices)
    result = decode.run(decoder, tiny_params(), request, kind.Knobs(exit_threshold=0.0, **knobs))
    assert result.completions() == expected.completions()
    assert result.counts["recurrences"].tolist() == expected.counts["recurrences"].tolist()


@pytest.mark.parametrize("running", [False, slow(True)])
@pytest.mark.slow
def test_jacobi_decoding_at_a_depth_is_static_decoding_at_that_depth(running):
    """The prompt and the first draft are read once, and each call after that four times, whatever
    the network's r.
    """
    request, depths = tiny_request(BUDGET), {"recurrence": 4, "prefill_recurrence": 1}
    one_by_one = tiny(decode.Static, "shared", **depths)
    drafted = decode.Jacobi(tiny_network(recurrence=2), SIZE, block=4, running=running, **depths)
    found, expected = (
        decode.run(decoder, tiny_params(), request) for decoder in (drafted, one_by_one)
    )
    assert found.completions() == expected.completions()
    assert found.counts["recurrences"].tolist() == (1 + 4 * (found.network_calls - 1)).tolist()
    assert (found.network_calls <= expected.network_calls).all()


@pytest.mark.slow
def test_speculation_may_read_prompts_at_a_recurrence_of_their_own():
    request, choices = tiny_request(BUDGET), {"recurrence": 4, "prefill_recurrence": 2}
    one_by_one = tiny(decode.Static, "full", **choices)
    drafted = tiny(decode.SelfSpeculative, "full", draft_recurrence=1, lookahead=3, **choices)
    found = decode.run(drafted, tiny_params(), request, drafted.Knobs())
    assert found.completions() == decode.run(one_by_one, tiny_params(), request).completions()
    assert (found.counts["recurrences"] % 7 == 2).all(), (
        "a prompt at 2, then rounds of three drafts and a verification"
    )


@pytest.mark.parametrize("temperature", [0.0, slow(1.0)])
@pytest.mark.slow
def test_a_wave_without_warm_starts_is_static_decoding(temperature):
    """Jacobi decoding of a recurrent model: with exits at every step, and no state of a token that
    was replaced.
    """
    recurrence = tiny_network().recurrence
    wave = tiny(
        decode.Wavefront,
        "shared",
        inner_recurrence=recurrence,
        window=5,
        headway=3,
        warm_start=False,
    )
    knobs = wave.Knobs(momentum=0.0, exit_threshold=np.inf, temperature=temperature)
    waved = decode.run(wave, tiny_params(), tiny_request(BUDGET), knobs)
    assert waved.completions() == static("shared", temperature).completions()
    assert (waved.network_calls <= static("shared", temperature).network_calls).all()


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "penalty"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.8)])
@over(CAUSAL)
def test_drafts_of_any_origin_are_static_decoding(name, temperature, penalty):
    """On a stub whose drafts are often right, each position with its own draw, and on a model,
    whose are not.
    """
    kind, options = CAUSAL[name]
    knobs = kind.Knobs(temperature, repetition_penalty=penalty)
    stub, size = StubCausal(**REPEATING, sharpness=4.0), 45
    request = tiny_request(40, seed=1)
    static = decode.run(decode.AutoRegressive(stub, size), None, request, knobs).completions()
    drafted = decode.run(kind(stub, size, **options), None, request, knobs)
    assert drafted.completions() == static
    assert (drafted.network_calls < 36).all(), drafted.network_calls
    right = [
        stub.expected(prompt, len(tokens)) for prompt, tokens in zip(PROMPTS, static, strict=True)
    ]
    assert (static == right) == (temperature == 0)

    request = tiny_request((BUDGET, 4, 7), stop=(2,))
    static = decode.run(causal(decode.AutoRegressive), tiny_causal_params(), request, knobs)
    drafted = decode.run(causal(kind, **options), tiny_causal_params(), request, knobs)
    assert drafted.completions() == static.completions()
    assert drafted.reasons.tolist() == static.reasons.tolist()
    np.testing.assert_allclose(drafted.log_probs, static.log_probs, atol=2e-5)
    assert (drafted.network_calls <= static.network_calls).all()
    if temperature and kind is not decode.Jacobi:  # whose guesses know the draws of their positions
        assert (drafted.network_calls >= 0.8 * static.network_calls).all()


@pytest.mark.parametrize(
    "name", ["prompt-lookup", "jacobi", slow("lookahead"), slow("jacobi-blocks")]
)
@pytest.mark.slow
def test_drafts_under_sliding_windows_are_static_decoding(name):
    """A layer that sees 6 positions below one that sees all, with positions scaled by their number."""
    kind, options = CAUSAL[name]
    scaling = RopeScaling(kind="dynamic", factor=4.0, original=8)
    network = tiny_causal(sliding_window=6, sliding_layers=(True, False), rope_scaling=scaling)
    params, request = tiny_causal_params(), tiny_request(30)
    for knobs in (kind.Knobs(), kind.Knobs(temperature=1.0)):
        static = decode.run(decode.AutoRegressive(network, 45), params, request, knobs)
        drafted = decode.run(kind(network, 45, **options), params, request, knobs)
        assert drafted.completions() == static.completions()
        plain = decode.run(decode.AutoRegressive(tiny_causal(), 45), params, request, knobs)
        assert plain.completions() != static.completions()


@pytest.mark.slow
@over(REAL)
def test_rows_of_a_model_are_independent(name):
    kind, cache, options, knobs = REAL[name]
    request = tiny_request((BUDGET, 3, 6))
    knobs = kind.Knobs(temperature=1.0, **knobs)
    together = decode.run(tiny(kind, cache, **options), tiny_params(), request, knobs)
    row, padded = 2, request.take([2])
    padded = dataclasses.replace(
        padded, tokens=jnp.pad(padded.tokens, [(0, 0), (0, 2)], constant_values=7)
    )
    alone = decode.run(kind(tiny_network(cache), SIZE + 4, **options), tiny_params(), padded, knobs)
    assert rows_of(alone, 0, columns=SIZE) == rows_of(together, row)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lookahead", "jacobi-blocks"])
def test_rows_of_a_causal_model_are_independent(name):
    kind, options = CAUSAL[name]
    request, knobs = tiny_request((BUDGET, 4, 7), stop=(2,)), kind.Knobs(temperature=1.0)
    together = rows_of(decode.run(causal(kind, **options), tiny_causal_params(), request, knobs), 2)
    padded = request.take([2])
    padded = dataclasses.replace(
        padded, tokens=jnp.pad(padded.tokens, [(0, 0), (0, 2)], constant_values=7)
    )
    decoder = causal(kind, SIZE + 4, **options)
    alone = rows_of(decode.run(decoder, tiny_causal_params(), padded, knobs), 0, columns=SIZE)
    np.testing.assert_allclose(alone.pop("log_probs"), together.pop("log_probs"), atol=2e-5)
    assert alone == together


@pytest.mark.slow
def test_buckets_change_nothing():
    kind, cache, options, knobs = REAL["wavefront"]
    request, knobs = tiny_request((BUDGET, 3, 6)), kind.Knobs(temperature=1.0, **knobs)
    plain = decode.run(tiny(kind, cache, **options), tiny_params(), request, knobs)
    bucketed = decode.run(
        tiny(kind, cache, buckets=(2, 3), **options), tiny_params(), request, knobs
    )
    assert listed(bucketed) == listed(plain)


# Blocks: what rides with another call changes no token

RIDING = ("block", "residual")
SELDOM = (
    "soft-block",
    "residual-speculative",
    "block-next",
    "block-random",
    "residual-next",
    "residual-speculative-next",
    "residual-veto",
    "self-verified",
    "self-verified-by-score",
    "multi-block",
    "multi-block-edits",
)


def fused_and_plain(decoder, params, request: decode.Request, knobs):
    """Results with stores and prompts that ride with other calls, and without."""
    for fused in (True, False):
        options = {
            name: fused for name in ("fuse_store", "fuse_prompt", "ride") if hasattr(decoder, name)
        }
        yield decode.run(
            dataclasses.replace(decoder, log_probs=True, **options), params, request, knobs
        )


@over((*RIDING, *SELDOM), SELDOM)
def test_fusions_change_no_token(name):
    """Drawn tokens too: noise belongs to a step of a block, not to a call."""
    row, request = ROWS[name], tiny_request((BUDGET, 4, 11), stop=(0,), seed=2)
    knobs = row.values(temperature=3.0)
    fused, plain = fused_and_plain(row.decoder(), row.params, request, knobs)
    assert fused.completions() == plain.completions()
    assert fused.reasons.tolist() == plain.reasons.tolist()
    np.testing.assert_allclose(fused.log_probs, plain.log_probs, atol=1e-5)
    assert (fused.network_calls <= plain.network_calls).all()
    assert fused.network_calls.sum() < plain.network_calls.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("alignment", "head"), [("own", True), ("next", False)])
def test_fusions_and_batches_change_no_token_of_a_model(alignment, head):
    """With a head of random weights and without: what is stored while the next block is read, and
    what it sees.
    """
    spec, options = TokenSpec(mask=31, alignment=alignment), {"head": tiny_head()} if head else {}
    params = {"network": tiny_blocks_params(1, 3.0), "head": tiny_head_params()}
    params = params if head else params["network"]
    decoder = (decode.Residual if head else decode.BlockDenoising)(
        tiny_blocks(), 24, spec, **options
    )
    knobs = decoder.Knobs(temperature=0.9, threshold=0.6, steps=2)
    request = tiny_request((11, 4, 14), seed=2)
    fused, plain = fused_and_plain(decoder, params, request, knobs)
    assert fused.completions() == plain.completions()
    np.testing.assert_allclose(fused.log_probs, plain.log_probs, atol=1e-4)
    assert (fused.network_calls < plain.network_calls).all()
    for i in range(len(PROMPTS)):
        alone, _ = fused_and_plain(decoder, params, request.take([i]), knobs)
        assert rows_of(alone, 0)["tokens"] == rows_of(fused, i)["tokens"]
        assert {n: c.tolist() for n, c in alone.counts.items()} == {
            n: c[i : i + 1].tolist() for n, c in fused.counts.items()
        }
    assert len({tuple(tokens) for tokens in plain.completions()}) == len(PROMPTS)


# Random weights accept no drafts (law 10)


def test_random_weights_accept_few_drafts():
    decoder = tiny(decode.SelfSpeculative, "full", draft_recurrence=2, lookahead=3)
    rounds = (
        int(decode.run(decoder, tiny_params(2), tiny_request(BUDGET)).network_calls.max()) - 1
    ) / 4
    assert rounds > 0.8 * (BUDGET - 1), f"{rounds} rounds"
