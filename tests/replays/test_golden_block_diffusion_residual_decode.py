"""Recorded decodes of multi-token residual prediction: direct, speculative in both variants, as a
veto.

`recorded_block_diffusion` says where they lie; settings are read from `mrp_decode_cases.json`,
sizes from the arrays.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
from marks import over
from recorded import equal
from recorded_block_diffusion import (
    arrays,
    assert_close,
    cases,
    head,
    model,
    prompts,
    request_of,
    steps_in,
    traced,
)

from experiments.decoders.residual_veto import ResidualVeto
from experiments.replicas import LossyPositionWise, ReleasedSpeculative, ReleasedVeto
from paradec_jax import decode

PROBABILITIES, LOGITS = 1e-4, 2e-4
RULES = {"low_confidence_static": "static", "low_confidence_dynamic": "dynamic"}
RECORDED = cases("mrp_decode_cases")
SIZE = max(len(tokens) for name, tokens in arrays("mrp_decode").items() if name.endswith(".tokens"))
STEPS = 2 * SIZE


def named(mode: str) -> list[str]:
    return [name for name, case in RECORDED.items() if case["mode"] == mode]


SPECULATIVE = [name for name in named("spec") if RECORDED[name]["variant"] == "fresh"]
OFFICIAL = [name for name in named("spec") if RECORDED[name]["variant"] == "official"]


def found(name: str, kind: str) -> np.ndarray:
    return arrays("mrp_decode")[f"{name}.{kind}"]


def prompt_of(name: str) -> np.ndarray:
    return prompts()[RECORDED[name]["prompt"]]


def asked(name: str) -> decode.Request:
    prompt = prompt_of(name)
    return request_of(prompt, len(found(name, "tokens")) - len(prompt))


def assert_text(result: decode.Decoded, name: str) -> None:
    want = found(name, "tokens")
    equal(result.tokens[0, : len(want)], want)


def calls_of(result: decode.Decoded) -> tuple[int, int]:
    """Calls of the network and of the head."""
    return int(result.counts["network_calls"][0]), int(result.counts["head_calls"][0])


def rule_of(name: str) -> tuple[str, dict[str, Any]]:
    """The rule of a case and its knobs; static where none is told."""
    case = RECORDED[name]
    rule = RULES[case.get("strategy") or case.get("backbone") or "low_confidence_static"]
    return rule, {"threshold": case["tau"]} if rule == "dynamic" else {}


def everything(state, info):
    """Records the canvas, drafts where there are any, and what a call did."""
    return state.rows.tokens, getattr(state, "where", ()), getattr(state, "tokens", ()), info


@cache
def replayed(name: str, decoder: Any, **knobs: float) -> tuple[Any, Any]:
    """The result of a decode, and what `everything` recorded of each step."""
    (network, params, spec), (head_network, head_params) = model(), head()
    with_head = decoder.head is None
    # The residual is linear in the gain of the norm that it ends with.
    gain = head_params["final_norm"] * RECORDED[name].get("scale", 1.0)
    given: Any = {"network": params, "head": head_params | {"final_norm": gain}}
    if with_head:
        decoder = type(decoder)(**{**vars(decoder), "head": head_network})
    decoder = decoder.bind(network, SIZE, spec)
    return traced(decoder, given, asked(name), knobs, STEPS, everything)


def stores_of(name: str) -> tuple[int, int]:
    """Calls on the prompt's whole blocks, and stores: of every later block but the last."""
    block = model()[0].block
    given = len(prompt_of(name)) // block
    return int(given > 0), len(found(name, "tokens")) // block - given - 1


def masks_before(tokens: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The states before each of several reveals [R, W] that led to `tokens` [W]."""
    later = np.flip(np.cumsum(np.flip(where, 0), axis=0), 0) > 0
    return np.where(later, model()[2].mask, tokens)


# The base decoder, and direct decoding


@over(named("base"))
def test_base(name):
    rule, knobs = rule_of(name)
    network, params, spec = model()
    plain = {"fuse_store": False, "fuse_prompt": False}
    decoder = decode.BlockDenoising(network, SIZE, spec, rule=rule, **plain)
    result, (tokens, *_, info) = traced(decoder, params, asked(name), knobs, STEPS, everything)
    steps = steps_in(tokens, info)
    assert len(steps["block"]) == RECORDED[name]["target_denoise"]
    assert_text(result, name)
    for kind, got in steps.items():
        equal(got, found(name, kind), err_msg=kind)


def direct_of(name: str, **fused: bool) -> tuple[decode.Residual, dict[str, Any]]:
    """The decoder of a direct case, and its knobs."""
    case, (rule, knobs) = RECORDED[name], rule_of(name)
    steps = "dynamic" if "dynamic" in case.get("mrp", "") else "static"
    mix = "none" if case["mix"] == "none" else "sum"
    return decode.Residual(
        rule=rule, head_rule=steps, head_steps=case["K"], mix=mix, **fused
    ), knobs


@over(named("direct"))
def test_direct(name):
    """Every round of every call: without fusions a recorded call is a call."""
    decoder, knobs = direct_of(name, fuse_store=False, fuse_prompt=False)
    result, (tokens, _, _, info) = replayed(name, decoder, **knobs)
    block, rows = model()[0].block, []
    for i in np.flatnonzero(info.reads):
        rounds = np.flatnonzero(info.where[i].any(axis=-1))
        assert rounds.tolist() == list(range(len(rounds))), "a round reveals, or none follows it"
        at, where = info.at[i], info.where[i][rounds]
        before = masks_before(tokens[i][at : at + block], where)
        for it in rounds:
            choice = info.tokens[i][it], info.scores[i][it]
            rows.append((at // block, info.step[i], it, before[it], where[it], *choice))
    kinds = ("block", "step", "it", "before", "reveal", "tok", "conf")
    made = dict(zip(kinds, map(np.array, zip(*rows, strict=True)), strict=True))
    for kind, got in made.items():
        if kind == "conf":
            assert_close(got, found(name, kind), PROBABILITIES)
        else:
            equal(got, found(name, kind), err_msg=kind)
    assert_text(result, name)
    case, more = RECORDED[name], sum(stores_of(name))
    counts = case["target_denoise"], case.get("mrp_forwards", 0)
    assert calls_of(result) == tuple(count + more for count in counts)


def rounds_of(records: Any, block: int) -> list[dict[str, np.ndarray]]:
    """The rounds of the fresh variant: each begins where a call ended, and the next call verifies
    what it drafts.
    """
    _, where, drafted, info = records
    rounds: list[dict[str, np.ndarray]] = []
    for i in range(len(info.at)):
        if info.stored[i]:
            continue
        last = info.accepted[i]
        if rounds and "accepted" not in rounds[-1]:
            rounds[-1] |= {"accepted": last + 1, "end": info.drafts.tokens[i][last]}
        start, reveal = info.drafts.tokens[i][last], info.choices.where[i][last]
        if (start != model()[2].mask).all():  # the last draft was right
            continue
        reveals = np.concatenate([reveal[None], where[i]])
        tokens = np.concatenate([info.choices.tokens[i][last][None], drafted[i]])
        states = [start]
        for shown, drawn in zip(reveals, tokens, strict=True):
            states.append(np.where(shown, drawn, states[-1]))
        new = {
            "block": info.at[i] // block,
            "start": start,
            "cands": np.stack(states),
            "draft_reveal": reveals,
            "draft_tok": tokens,
        }
        if (states[1] != model()[2].mask).all():  # complete without a draft: nothing to verify
            new |= {"accepted": np.int32(1), "end": states[1]}
        rounds.append(new)
    return rounds


def assert_rounds(rounds: list[dict[str, np.ndarray]], name: str) -> None:
    """Rounds are those recorded; of drafts beyond the last one the recorded tokens say nothing."""
    made = {kind: np.stack([each[kind] for each in rounds]) for kind in rounds[0]}
    some = found(name, "draft_reveal").any(axis=-1)
    for kind, got in made.items():
        want = found(name, kind)
        if kind == "draft_tok":
            got, want = got[some], want[some]
        equal(got, want, err_msg=kind)
    case = RECORDED[name]
    assert (len(rounds), int(some.sum())) == (case["rounds"], case["drafts"])


@over([name for name in SPECULATIVE if RECORDED[name]["K"] > 1])
def test_speculative(name):
    """Every round of the fresh variant, without fusions; calls and the head's calls, stores and
    prompts counted.
    """
    case, (rule, knobs) = RECORDED[name], rule_of(name)
    plain = {"fuse_store": False, "fuse_prompt": False, "ride": False}
    decoder = decode.ResidualSpeculative(rule=rule, candidates=case["K"], **plain)
    result, records = replayed(name, decoder, **knobs)
    assert_text(result, name)
    assert_rounds(rounds_of(records, model()[0].block), name)
    more = sum(stores_of(name))
    calls = case["seed_forwards"] + case["verify_forwards"]
    assert calls_of(result) == (calls + more, case["drafts"] - case["rounds"] + more)


@over(SPECULATIVE, SPECULATIVE[1:])  # the laws prove the same on stubs
def test_speculation_repeats_the_base(name):
    """With all fusions, riding and not: the base decoder's text, never in more calls than without
    them.
    """
    case, (rule, knobs) = RECORDED[name], rule_of(name)
    counts = []
    for ride in (False, True):
        decoder = decode.ResidualSpeculative(rule=rule, candidates=max(case["K"], 2), ride=ride)
        result, _ = replayed(name, decoder, **knobs)
        assert_text(result, name)
        counts.append(calls_of(result)[0])
    if case["K"] > 1:
        assert counts[0] == case["seed_forwards"] + case["verify_forwards"]
    assert counts[1] <= counts[0]


@over(OFFICIAL)
def test_the_released_loop(name):
    """Drafts from scores of one reveal before; with and without the head's cache."""
    case = RECORDED[name]
    decoder = ReleasedSpeculative(candidates=case["K"], context=case["mrp_prefix_kv"])
    result, (tokens, where, drafted, info) = replayed(name, decoder)
    block = model()[0].block
    assert_text(result, name)
    rounds = []
    for i in np.flatnonzero(info.drafts.exists[:, 1:].any(axis=-1)):
        at, states = info.at[i], info.drafts.tokens[i]
        rounds.append(
            {
                "block": at // block,
                "start": states[0],
                "cands": states,
                "draft_reveal": where[i - 1],
                "draft_tok": drafted[i - 1],
                "accepted": info.accepted[i],
                "end": tokens[i][at : at + block],
            }
        )
    assert_rounds(rounds, name)
    more = sum(stores_of(name))
    # The last block is stored too, for a row ends there; the head is asked for what is drafted, and
    # no more.
    of_head = case["drafts"] - case["rounds"] + case["mrp_prefix_kv"] * more
    calls = case["seed_forwards"] + case["verify_forwards"] + more + 1
    assert calls_of(result) == (calls, of_head)


@pytest.mark.slow
def test_judging_positions_is_lossy():
    """The form that the text describes writes something else than its base, in more than a tenth of
    all tokens.
    """
    names = [name for name in named("base") if rule_of(name)[0] == "static"]
    different = total = 0
    for name in names:
        result, _ = replayed(name, LossyPositionWise(candidates=3))
        start, want = len(prompt_of(name)), found(name, "tokens")
        other = np.asarray(result.tokens)[0, : len(want)] != want
        different += int(other[start:].sum())
        total += len(want) - start
    assert different > total / 10


@over([*named("remask"), *named("remask_conf")])
def test_veto(name):
    case = RECORDED[name]
    judge = "change" if case["mode"] == "remask" else "confidence"
    knobs = {"threshold": case["tau"], **({"delta": case["delta"]} if "delta" in case else {})}
    if case["mrp_prefix_kv"]:
        decoder: Any = ResidualVeto(judge=judge, fuse_store=False, fuse_prompt=False)
    else:
        decoder = ReleasedVeto(judge=judge)
    result, (tokens, _, _, info) = replayed(name, decoder, **knobs)
    assert_text(result, name)
    reads = info.reads
    asked = info.asked[reads]
    made = {"tok": info.tokens[reads], "proposed": info.proposed[reads]}
    for kind, got in (made | steps_in(tokens, info)).items():
        equal(got, found(name, kind), err_msg=kind)
    assert_close(info.scores[reads], found(name, "conf"), PROBABILITIES)
    assert_close(info.gate[reads][asked], found(name, "gate")[asked], LOGITS)
    assert asked.any() and len(asked) == case["target_denoise"]
    equal(asked, found(name, "proposed").sum(axis=1) > 1)
    if case["mrp_prefix_kv"]:
        fused, _ = replayed(name, ResidualVeto(judge=judge), **knobs)
        assert_text(fused, name)
        assert fused.counts["network_calls"][0] == case["target_denoise"]


def test_every_array_is_read():
    """So that none of a folder is left out in silence."""
    kinds = {
        "base": "tokens block step before reveal",
        "direct": "tokens block step it before tok conf reveal",
        "spec": "tokens block start cands draft_reveal draft_tok accepted end",
        "remask": "tokens block step before tok conf proposed gate reveal",
    }
    of_case = {
        name: kinds[case["mode"].partition("_")[0]].split() for name, case in RECORDED.items()
    }
    known = {f"{name}.{kind}" for name, each in of_case.items() for kind in each}
    assert arrays("mrp_decode").keys() == known
    modes = [name for mode in ("base", "direct", "remask", "remask_conf") for name in named(mode)]
    assert sorted([*modes, *SPECULATIVE, *OFFICIAL]) == sorted(RECORDED)
