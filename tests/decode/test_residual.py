"""Residual decoding, direct and as a veto: what a head reveals, when it is asked, what the zero
head is worth.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import stubs
from marks import slow

from experiments.decoders.residual_veto import ResidualVeto
from experiments.replicas import ReleasedVeto
from paradec_jax import decode
from paradec_jax.config import TokenSpec

SIZE, BUDGETS = 24, (11, 3, 14)
STUB = stubs.StubDenoiser(block=4, sharpness=6.0)
SPEC = TokenSpec(mask=STUB.mask, alignment="own", pad=9)
PARAMS = {"network": None, "head": None}
REAL = TokenSpec(mask=31, alignment="own")


def run(
    kind: type,
    head: Any,
    knobs: dict[str, Any] | None = None,
    budgets: Any = BUDGETS,
    **options: Any,
) -> Any:
    alignment = options.pop("alignment", "own")
    stub, spec = (dataclasses.replace(x, alignment=alignment) for x in (STUB, SPEC))
    if isinstance(head, stubs.StubHead):
        head = dataclasses.replace(head, of=stub)
    decoder = kind(stub, SIZE, spec, head=head, **options)
    return decode.run(
        decoder, PARAMS, stubs.tiny_request(budgets, seed=2), decoder.Knobs(**(knobs or {}))
    )


@functools.cache
def base(rule: str = "static", budgets: Any = BUDGETS, **knobs: Any) -> Any:
    decoder = decode.BlockDenoising(STUB, SIZE, SPEC, rule=rule)
    return decode.run(decoder, None, stubs.tiny_request(budgets, seed=2), decoder.Knobs(**knobs))


def totals(result: Any) -> list[tuple[int, ...]]:
    """Calls, positions and, where one runs, the head's calls of each row."""
    names = [name for name in ("network_calls", "positions", "head_calls") if name in result.counts]
    return list(zip(*(result.counts[name].tolist() for name in names), strict=True))


RIGHT, LIAR = stubs.StubHead(STUB), stubs.StubHead(STUB, "liar")


# Direct decoding


@pytest.mark.slow
def test_a_liar_is_believed():
    """Direct decoding asks nobody: the first token of a call is the network's, the next one the
    head's.
    """
    result = run(decode.Residual, LIAR, rule="static")
    assert all(a != b for a, b in zip(result.completions(), base().completions(), strict=True))
    assert totals(result) == totals(run(decode.Residual, RIGHT, rule="static"))


@pytest.mark.parametrize("steps", [1, slow(3)])
def test_a_head_without_confidence_is_the_base_decoder(steps):
    """No step of the head is sure enough: the base's text and calls; where much was revealed nobody
    asks.
    """
    plain = base()
    unsure = run(decode.Residual, LIAR, {"head_threshold": 2.0}, rule="static", head_steps=steps)
    assert unsure.completions() == plain.completions()
    assert unsure.network_calls.tolist() == plain.network_calls.tolist()
    idle = run(decode.Residual, LIAR, {"enough": 1}, rule="static", head_steps=steps)
    assert idle.completions() == plain.completions()
    stores = [
        sum(p % 4 == 0 for p in range(len(prompt) + 1, len(prompt) + new - 1))
        + (len(prompt) >= 4 and new > 1)
        for prompt, new in zip(stubs.PROMPTS, BUDGETS, strict=True)
    ]
    assert idle.counts["head_calls"].tolist() == stores, "what remains is the head's cache"
    assert (unsure.counts["head_calls"] > idle.counts["head_calls"]).all()


@pytest.mark.slow
def test_a_head_goes_on_while_it_is_sure():
    """Confidences fall with the distance from what is revealed: of three steps those that reach the
    threshold.
    """
    beside = float(np.exp(3.0) / (np.exp(3.0) + STUB.vocab_size - 1))
    free = run(decode.Residual, RIGHT, rule="static", head_steps=3)
    some = run(
        decode.Residual, RIGHT, {"head_threshold": beside - 0.01}, rule="static", head_steps=3
    )
    none = run(
        decode.Residual, RIGHT, {"head_threshold": beside + 0.01}, rule="static", head_steps=3
    )
    assert (
        totals(some) == totals(free)
        and none.network_calls.tolist() == base().network_calls.tolist()
    )
    zero = run(
        decode.Residual, "zero", {"head_threshold": beside - 0.01}, rule="static", head_steps=3
    )
    assert zero.network_calls.tolist() == base().network_calls.tolist(), (
        "whose next one is a position further"
    )


@pytest.mark.slow
@pytest.mark.parametrize("head", ["zero", RIGHT], ids=["zero", "right"])
def test_the_threshold_of_the_heads_steps(head):
    """Head rule "dynamic": everything above the threshold of the rule, at least one."""
    knobs = {"threshold": 0.3}
    one = run(decode.Residual, head, knobs, rule="dynamic", head_steps=1)
    all_ = run(decode.Residual, head, knobs, rule="dynamic", head_rule="dynamic", head_steps=1)
    assert one.completions() == all_.completions() == base("dynamic", **knobs).completions()
    assert (np.asarray(all_.network_calls) <= np.asarray(one.network_calls)).all()
    strict = run(
        decode.Residual, head, {"threshold": 2.0}, rule="dynamic", head_rule="dynamic", head_steps=1
    )
    assert totals(strict) == totals(run(decode.Residual, head, rule="static", head_steps=1))


def model_run(decoder: Any, knobs: Any = None, head: bool = True, batch: Any = (0, 1, 2)) -> Any:
    """A decode on a small transformer with a head of random weights."""
    params = {"network": stubs.tiny_blocks_params(gain=3.0), "head": stubs.tiny_head_params()}
    bound = decoder.bind(stubs.tiny_blocks(), SIZE, REAL)
    request = stubs.tiny_request(BUDGETS, seed=2).take(list(batch))
    return decode.run(bound, params if head else params["network"], request, knobs)


@pytest.mark.slow
def test_the_zero_head_takes_the_surest_of_a_call():
    """K steps of a head that adds nothing are one step with a quota of K + 1."""
    for steps, quota in ((1, 2), (3, 1)):
        zero = model_run(decode.Residual(head="zero", head_steps=steps, rule="static"))
        plain = decode.BlockDenoising(rule="static")
        wanted = model_run(plain, plain.Knobs(steps=quota), head=False)
        assert zero.completions() == wanted.completions()
        assert zero.network_calls.tolist() == wanted.network_calls.tolist()
        assert "head_calls" not in zero.counts


@pytest.mark.slow
def test_residuals_change_what_is_written():
    """A real head is heard, in both mixes."""
    texts = []
    for options in ({"head": "zero"}, {"mix": "sum"}, {"mix": "none"}):
        decoder = decode.Residual(
            **{"head": stubs.tiny_head(), "head_steps": 2, "rule": "static"} | options
        )
        texts.append(model_run(decoder).completions())
    assert texts[0] != texts[2] != texts[1]


# Veto


JUDGES = pytest.mark.parametrize("judge", [slow("change"), "confidence"])


@pytest.mark.slow
@JUDGES
def test_a_veto_leaves_masked_what_the_head_doubts(judge):
    """A liar has every proposal of a step fall but one, so a call reveals one position, whichever
    that is.

    By change that is the one furthest from what is revealed, whose logit is lowest. By confidence
    all are as unsure, and roundings choose; so texts end with their blocks, where the order of
    reveals changes no count.
    """
    knobs, budgets = {"threshold": 0.3}, (13, 3, 14)
    assert [
        (len(prompt) + new) % 4 for prompt, new in zip(stubs.PROMPTS, budgets, strict=True)
    ] == [0, 0, 0]
    plain = base("dynamic", budgets, **knobs)
    trusting = run(ResidualVeto, "zero", knobs, budgets, judge=judge)
    assert trusting.completions() == plain.completions() and "head_calls" not in trusting.counts
    assert trusting.network_calls.tolist() == plain.network_calls.tolist()
    asked = knobs | ({"delta": 0.5} if judge == "change" else {})
    doubting = run(ResidualVeto, LIAR, asked, budgets, judge=judge)
    assert doubting.completions() == plain.completions(), "the head reveals nothing itself"
    assert (
        doubting.network_calls.tolist()
        == base("static", budgets).network_calls.tolist()
        == list(budgets)
    )
    assert (np.asarray(doubting.network_calls) > np.asarray(plain.network_calls)).any()
    assert (doubting.counts["head_calls"] > 0).all()


@JUDGES
def test_without_a_head_nothing_falls_of_what_fewer_steps_reveal(judge):
    knobs = {"threshold": 0.999, "steps": 2}
    plain, trusting = base("dynamic", **knobs), run(ResidualVeto, "zero", knobs, judge=judge)
    assert trusting.completions() == plain.completions()
    assert trusting.network_calls.tolist() == plain.network_calls.tolist()
    assert (plain.network_calls < base("static").network_calls).all()


@pytest.mark.slow
def test_a_liar_takes_back_nothing_that_a_schedule_adds():
    """None passes the threshold, so what two steps reveal was never sure, and nobody is asked."""
    knobs = {"threshold": 0.999, "steps": 2}
    plain, doubting = base("dynamic", **knobs), run(ResidualVeto, LIAR, knobs, judge="confidence")
    assert doubting.completions() == plain.completions()
    assert doubting.network_calls.tolist() == plain.network_calls.tolist()


@pytest.mark.slow
def test_a_head_that_agrees_vetoes_nothing():
    knobs = {"threshold": 0.3}
    right = run(ResidualVeto, RIGHT, knobs, judge="change")
    assert right.network_calls.tolist() == base("dynamic", **knobs).network_calls.tolist()
    alone = run(ResidualVeto, RIGHT, knobs, judge="change", fuse_store=False, fuse_prompt=False)
    blind = run(ReleasedVeto, RIGHT, knobs, judge="change")
    assert blind.network_calls.sum() > alone.network_calls.sum(), "without its cache it errs"
