"""Speculative residual decoding: the base decoder's text, whoever drafts; what riding saves.

The base decoder is `BlockDenoising` of the same rule, knobs and keys. "A liar costs calls, never a
token."
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from marks import slow
from stubs import (
    StubDenoiser,
    StubHead,
    infilling,
    tiny_blocks,
    tiny_blocks_params,
    tiny_head,
    tiny_head_params,
    tiny_request,
)

from paradec_jax import decode
from paradec_jax.config import TokenSpec

SIZE, BUDGETS = 32, (22, 3, 17)
STUB = StubDenoiser(block=8, sharpness=6.0)
PARAMS = {"network": None, "head": None}
HEADS = {kind: StubHead(STUB, kind) for kind in ("right", "liar", "random")} | {"zero": "zero"}
# 3, 3 and 2 of a block, so that there is a draft to verify
RULES = {
    "static": ("static", {}),
    "quotas": ("static", {"steps": 5}),
    "dynamic": ("dynamic", {"threshold": 0.3}),
    "threshold": ("threshold", {"threshold": 0.3}),
    "top-p": ("threshold", {"threshold": 0.3, "top_p": 0.9}),
}


SPEC = TokenSpec(mask=STUB.mask, alignment="own", pad=9)


def at(temperature: float) -> StubDenoiser:
    return dataclasses.replace(STUB, sharpness=3.0) if temperature else STUB


@functools.cache
def base(rule: str, temperature: float = 0.0, **options: Any) -> Any:
    name, knobs = RULES[rule]
    decoder = decode.BlockDenoising(
        at(temperature), SIZE, SPEC, rule=name, log_probs=True, **options
    )
    knobs = decoder.Knobs(temperature=temperature, **knobs)
    return decode.run(decoder, None, tiny_request(BUDGETS, seed=4), knobs)


@functools.cache
def drafted(rule: str, head: str, temperature: float = 0.0, knobs: Any = (), **options: Any) -> Any:
    stub, (name, own), by = at(temperature), RULES[rule], HEADS[head]
    by = by if isinstance(by, str) else dataclasses.replace(by, of=stub)
    decoder = decode.ResidualSpeculative(
        stub, SIZE, SPEC, head=by, rule=name, log_probs=True, **options
    )
    values = decoder.Knobs(temperature=temperature, **own, **dict(knobs))
    return decode.run(decoder, PARAMS, tiny_request(BUDGETS, seed=4), values)


def assert_same(result: Any, wanted: Any) -> None:
    assert result.completions() == wanted.completions()
    assert result.reasons.tolist() == wanted.reasons.tolist()
    np.testing.assert_allclose(result.log_probs, wanted.log_probs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("rule", ["quotas", "dynamic", slow("static"), slow("threshold")])
@pytest.mark.parametrize("head", HEADS)
def test_it_writes_what_its_base_writes(head, rule, temperature):
    """Greedy and sampled, token for token; K 2 to 4, riding or not; never in more calls than the
    base.
    """
    wanted = base(rule, temperature=temperature)
    for most, ride in itertools.product((3,) if rule == "quotas" else (2, 4), (True, False)):
        result = drafted(rule, head, temperature=temperature, candidates=most, ride=ride)
        assert_same(result, wanted)
        calls, before = np.asarray(result.network_calls), np.asarray(wanted.network_calls)
        if head == "liar" and not temperature:
            assert (calls == before).all(), "a liar saves nothing"
        elif head == "liar":
            assert (calls <= before).all(), "its noise is the base's, so chance may make it right"
        else:
            assert (calls <= before).all()
            # Uncorrected scores do not pass a threshold that corrected ones pass, and three at once
            # are seldom right.
            assert calls.sum() < before.sum() or (
                head != "right" and rule in ("dynamic", "threshold")
            )
        assert ("head_calls" in result.counts) == (head != "zero")


@pytest.mark.parametrize("confidence", [slow("tempered"), slow("raw"), slow("filtered")])
def test_it_repeats_its_base_with_any_confidence(confidence):
    """Rule "threshold", whose own confidence is the raw one, at temperature 0.7 and top-p 0.9."""
    options = {"temperature": 0.7, "confidence": confidence}
    result, wanted = drafted("top-p", "right", **options), base("top-p", **options)
    assert_same(result, wanted)
    assert result.network_calls.sum() < wanted.network_calls.sum()


@pytest.mark.slow
def test_stop_tokens_and_holes():
    """A draft that holds a stop token ends its row; given tokens in a block are seen by drafts."""
    text = [3, None, None, 4, None, None, None, 2, 5, 6, 7, 8, None, None, None, None, 1]
    holes = infilling((text, [None] * 3 + [1]), (3, 9))
    for request in (tiny_request(BUDGETS, stop=(0, 6)), holes):
        plain = decode.BlockDenoising(STUB, SIZE, SPEC, rule="static")
        wanted = decode.run(plain, None, request)
        for head in ("right", "random"):
            decoder = decode.ResidualSpeculative(
                STUB, SIZE, SPEC, head=HEADS[head], rule="static", candidates=4
            )
            result = decode.run(decoder, PARAMS, request)
            assert result.tokens.tolist() == wanted.tokens.tolist()
            assert result.reasons.tolist() == wanted.reasons.tolist()
            assert result.network_calls.sum() < wanted.network_calls.sum()


@pytest.mark.slow
def test_adaptive_drafts():
    """No draft is sure enough, or enough is revealed: the base's calls; the head stores where
    nobody asks.
    """
    wanted = base("static")
    unsure = drafted("static", "right", knobs=(("head_threshold", 2.0),))
    idle = drafted("static", "right", knobs=(("enough", 1),))
    for result in (unsure, idle):
        assert_same(result, wanted)
        assert result.network_calls.tolist() == wanted.network_calls.tolist()
        assert result.positions.tolist() == wanted.positions.tolist(), "there is nothing to verify"
    assert (idle.counts["head_calls"] < unsure.counts["head_calls"]).all()
    # of the position beside a revealed one
    beside = float(np.exp(3.0) / (np.exp(3.0) + STUB.vocab_size - 1))
    sure = drafted("static", "right", candidates=4, knobs=(("head_threshold", beside - 0.01),))
    free = drafted("static", "right", candidates=4)
    assert sure.network_calls.tolist() == free.network_calls.tolist()
    zero = drafted("static", "zero", candidates=4, knobs=(("head_threshold", beside - 0.01),))
    assert zero.network_calls.tolist() == wanted.network_calls.tolist(), (
        "its next one is a position further"
    )


PROMPTS_OF_8 = tuple(
    tuple(int(t) for t in np.random.default_rng(i).integers(0, 30, 3 + i)) for i in range(8)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "temperature", "alignment"),
    [
        ("dynamic", 0.7, "own"),
        ("static", 0.0, "next"),
        slow("static", 0.7, "own"),
        slow("dynamic", 0.0, "own"),
        slow("dynamic", 0.7, "next"),
    ],
)
def test_a_transformer_repeats_its_base(rule, temperature, alignment):
    """A head of random weights, batches of 1 and 8, K 2 to 4, riding or not."""
    network, params = (
        tiny_blocks(),
        {"network": tiny_blocks_params(gain=3.0), "head": tiny_head_params()},
    )
    spec = TokenSpec(mask=31, alignment=alignment)
    request = tiny_request(13, prompts=PROMPTS_OF_8, seed=1)
    plain = decode.BlockDenoising(network, 24, spec, rule=rule, log_probs=True)
    knobs = {"temperature": temperature, **({"threshold": 0.4} if rule == "dynamic" else {})}
    wanted = decode.run(plain, params["network"], request, plain.Knobs(**knobs))
    for head, most, ride in ((tiny_head(), 3, True), (tiny_head(), 2, False), ("zero", 4, True)):
        decoder = decode.ResidualSpeculative(
            network, 24, spec, head=head, rule=rule, candidates=most, ride=ride, log_probs=True
        )
        result = decode.run(decoder, params, request, decoder.Knobs(**knobs))
        assert result.completions() == wanted.completions()
        np.testing.assert_allclose(result.log_probs, wanted.log_probs, atol=1e-4)
        assert (result.network_calls <= wanted.network_calls).all()
        for row in (2, 5):
            alone = decode.run(decoder, params, request.take([row]), decoder.Knobs(**knobs))
            assert alone.completions() == wanted.completions()[row : row + 1]
            assert {n: int(c[0]) for n, c in alone.counts.items()} == {
                n: int(c[row]) for n, c in result.counts.items()
            }


@pytest.mark.slow
def test_infos_and_drafts():
    """What is verified in a call is what the state before it showed as drafts."""
    decoder = decode.ResidualSpeculative(STUB, SIZE, SPEC, head=HEADS["right"], rule="static")
    _, (shown, lengths, info) = decode.trace(
        decoder, PARAMS, tiny_request(14, prompts=((1,) * 8,)), n=5, record=drafts_and_info(decoder)
    )
    shown, lengths, info = jax.tree.map(np.asarray, (shown[:, 0], lengths[:, 0], info))
    assert info.at[:, 0].tolist() == [8, 8, 8, 16, 16] and info.step[:3, 0].tolist() == [1, 4, 7]
    assert info.accepted[:, 0].tolist() == [2, 2, 1, 2, 2] and info.drafts.exists.all(
        axis=-1
    ).tolist() == [
        [True],
        [True],
        [False],
        [True],
        [True],
    ]
    assert info.follows[:, 0].tolist() == [False, False, True, False, False]
    for before in (0, 3):
        drafted_tokens = shown[before][:2]
        start = lengths[before] - info.at[before + 1, 0]
        assert (
            info.drafts.tokens[before + 1, 0, -1, start : start + 2].tolist()
            == drafted_tokens.tolist()
        )


@functools.cache
def drafts_and_info(decoder):
    def record(state, info):
        return decoder.drafts(state), state.rows.length, info

    return record


@pytest.mark.slow
@pytest.mark.parametrize("alignment", ["own", "next"])
def test_blocks_of_another_length_that_the_checkpoint_serves(alignment):
    """What differs from the network's own blocks is told in masks: of narrow and wide windows and
    of candidates.
    """
    network, spec = tiny_blocks(blocks=(4, 8)), TokenSpec(mask=31, alignment=alignment)
    params, request = (
        {"network": tiny_blocks_params(1, 3.0), "head": None},
        tiny_request((13, 4, 14), seed=2),
    )

    def decoded(kind: type, of: Any = params, **options: Any) -> Any:
        return decode.run(kind(network, SIZE, spec, rule="static", **options), of, request)

    want = decoded(decode.BlockDenoising, params["network"], length=8)
    found = decoded(decode.ResidualSpeculative, head="zero", length=8)
    assert found.completions() == want.completions()
    assert found.network_calls.sum() < want.network_calls.sum()
    assert decoded(decode.ResidualSpeculative, head="zero").completions() != want.completions()
    with pytest.raises(ValueError, match=r"corrects blocks of 4, not of 8: .* or another length's"):
        decoded(
            decode.ResidualSpeculative,
            params | {"head": tiny_head_params()},
            head=tiny_head(),
            length=8,
        )
