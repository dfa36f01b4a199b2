"""Recorded decodes of S2D2's program: every step of every block, whole texts, calls.

Settings are read from `traces.json`, sizes from the arrays.
"""

import collections
import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest
from marks import over
from recorded import GOLDEN, arrays_in, equal, imported, near, part_of

from experiments.replicas import RecordedVerifications, ReleasedVerified
from paradec_jax import decode

FOLDER = GOLDEN / "selfverify" / "s2d2"
PROBABILITIES, LOGITS, SCORES = 1e-4, 5e-4, 1e-3
LEFT_OUT = ("ucb", "legacy")  # a bandit that learns while it decodes, and an older span rule
RESULTS = (
    "n_denoise",
    "total_forward_steps",
    "decoding_order",
    "margins",
    "verify_rate",
    "accepted_counts",
    "noise_seed",
    "prompt",
)
RULES = {
    "low_confidence_dynamic": "dynamic",
    "low_confidence_static": "static",
    "sequential": "sequential",
}
ESTIMATORS = {
    "soft_entropy_negexp": "entropy",
    "hard_margin_threshold": "margin",
    "soft_renyi_2_entropy": "renyi",
    "soft_confidence_power": "power",
}
EVERY = json.loads((FOLDER / "traces.json").read_text(encoding="utf-8"))["cases"]
NAMES = [name for name in EVERY if not any(word in name for word in LEFT_OUT)]


@functools.cache
def recorded(name: str) -> dict[str, np.ndarray]:
    return part_of(arrays_in(FOLDER / "decode.npz"), f"{name}.")


@functools.cache
def prompts() -> dict[str, np.ndarray]:
    return part_of(arrays_in(FOLDER / "decode.npz"), "prompt_")


def setting(name: str) -> tuple[ReleasedVerified, Any, int, tuple[int, ...]]:
    """Decoder, knobs, new tokens and stop tokens of a case; a setting that is not known fails."""
    left = {key: value for key, value in EVERY[name].items() if key not in RESULTS}
    take = left.pop
    options = {
        "length": take("block_length", 8),
        "rule": RULES[take("remasking_strategy")],
        "estimator": ESTIMATORS[take("token_acceptance_estimator", "hard_margin_threshold")],
        "sampled": take("do_sample", False),
        "resample": take("allow_resample", True),
        "all_spans": take("ssd_threshold_all_spans", False),
        "extras": take("always_check_high_confidence", False),
        "causal": take("cache_ver", False),
        "causal_draft": take("draft_ver", False),
    }
    knobs = {
        "steps": take("denoising_steps", 8),
        "temperature": take("temperature", 1.0),
        "top_k": take("top_k", 0) or None,
        "top_p": take("top_p", 1.0),
        "exponent": take("ssd_ratio_tempering_factor", 1.0),
        "ratio": take("ssd_ratio_threshold", None),
    }
    knobs["steps"] = min(knobs["steps"], options["length"])
    threshold = take("confidence_threshold", 0.85)
    policy, span = take("do_verify_policy", "mask_span_length"), take("min_ssd_span_length", 1)
    low = take("do_verify_score_threshold", -1.0)
    on, off = take("hysteresis_threshold_on", 0.0), take("hysteresis_threshold_off", -1.0)
    kind, price = (
        take("do_verify_score_type", "difference_dynamic"),
        take("score_penalty_coef", 2.0),
    )
    margin, power = take("ssd_confidence_margin_threshold", 0.05), take("ssd_confidence_power", 1.0)
    if policy == "mask_span_length":
        options["route"], knobs["span"] = "span", span
    else:
        options["route"] = "score"
        assert span == 1, "spans have a least length, or scores a least value"
        each = {"difference_static": False, "difference_dynamic": True}[kind]
        knobs |= {"price": price * (not each), "price_each": price * each}
        if policy == "score_hysteresis":  # which begins strictly above its bound
            knobs["verify_from"] = float(np.nextafter(np.float32(on), np.float32(np.inf)))
            knobs["verify_until"] = off
        else:
            assert policy == "score_threshold"
            knobs["verify_from"] = low
    if options["estimator"] == "margin":
        knobs["margin"] = margin
    if options["estimator"] == "power":
        knobs["power"] = power
    stop, new = tuple(take("stopping_criteria_idx", ())), take("gen_length")
    assert not left, f"settings that are not known: {left}"
    decoder = ReleasedVerified(**options)
    return decoder, decoder.Knobs(**knobs, threshold=threshold), new, stop


def draws(want: dict[str, np.ndarray]) -> RecordedVerifications:
    """The recorded numbers; what was not drawn is not read."""
    numbers = [
        np.nan_to_num(want[name]).astype(np.float32)[None] for name in ("u_accept", "u_resample")
    ]
    drafts = want.get("u_draft")
    if drafts is not None:
        drafts = drafts.astype(np.float32)[None]
    return RecordedVerifications(drafts=drafts, accepts=numbers[0], residuals=numbers[1])


@functools.cache
def replayed(name: str):
    """Result, and infos of all steps of the row with the block after each."""
    decoder, knobs, new, stop = setting(name)
    network, params, spec = imported(FOLDER)
    config = dataclasses.replace(network.config, block=decoder.length)
    network = dataclasses.replace(network, config=config)
    prompt, want = prompts()[str(EVERY[name]["prompt"])], recorded(name)
    whole = -(-(len(prompt) + new) // decoder.length) * decoder.length
    decoder = decoder.bind(network, whole, spec)
    request = decode.make_request(prompt[None], max_new_tokens=new, stop=stop, recorded=draws(want))

    def record(state, info):
        block = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, decoder.length))
        return state.rows.done, block(state.rows.tokens, info.at), state.verified, info

    with jax.default_matmul_precision("highest"):
        steps = EVERY[name]["total_forward_steps"] + 2
        result, (done, *records) = decode.trace(
            decoder, params, request, knobs, n=steps, record=record
        )
    running = ~np.concatenate([[False], np.asarray(done)[:-1, 0]])
    return decoder, result, *jax.tree.map(lambda x: np.asarray(x)[running][:, 0], records)


@over(NAMES)
def test_steps(name):
    want = recorded(name)
    decoder, _, after, on, info = replayed(name)
    reads, spec = info.reads, imported(FOLDER)[2]
    after, on, info = jax.tree.map(lambda x: x[reads], (after, on, info))
    equal(info.at, want["start"])
    equal(info.before, want["before"])
    equal(info.draft, want["draft"])
    near(info.confidence, want["conf"], atol=PROBABILITIES)
    equal(info.span, want["span"])
    equal(info.verifies, want["verify"])
    equal(after, want["after"])
    # of steps that were verified
    judged = info.span & info.verifies[:, None]
    for found, kind in ((info.judged, "q"), (info.chance, "ratio")):
        near(np.where(judged, found, np.nan), want[kind], atol=PROBABILITIES)
    equal(np.where(info.verifies, info.accepted.sum(1), -1), want["accepted"])
    place = np.where(info.refused.any(1) & decoder.resample, info.refused.argmax(1), -1)
    equal(place, want["resampled_at"])
    token = np.take_along_axis(info.tokens, place[:, None], axis=1)[:, 0]
    equal(np.where(place < 0, -1, token), want["resampled_token"])
    equal(info.sees, want["attention_within_block"])
    if "score" in want:
        near(info.value, want["score"], atol=SCORES)
    if "hysteresis_on" in want:
        equal(on, want["hysteresis_on"])
    if "draft_logits" in want:
        near(info.logits, want["draft_logits"], atol=LOGITS)
        verifier = np.where(info.verifies[:, None, None], info.verifier, np.nan)
        near(verifier, want["verifier_logits"], atol=LOGITS)
        rest = np.where((place < 0)[:, None], np.nan, info.rest[:, 0])
        near(rest, want["residual"], atol=PROBABILITIES)
    assert (info.before == spec.mask).any(1).all()


@over(NAMES)
def test_texts_and_calls(name):
    want, entry = recorded(name), EVERY[name]
    decoder, result, _, _, info = replayed(name)
    length, whole = int(result.lengths[0]), len(want["tokens"])
    tokens = np.asarray(result.tokens)[0, :length]
    equal(tokens[:whole], want["tokens"])
    if whole < length:
        assert tokens[whole] in entry["stopping_criteria_idx"]
    if "store_attention_within_block" in want:
        equal(info.sees[info.stored], want["store_attention_within_block"])
    assert int(result.network_calls[0]) == entry["total_forward_steps"] == len(want["calls"])
    assert entry["n_denoise"] == len(want["start"]) == info.reads.sum()
    assert np.mean(info.verifies[info.reads]) == pytest.approx(entry["verify_rate"])
    # Kinds of calls, their first positions, and tokens that they read
    calls = collections.Counter(map(tuple, want["calls"][:, :3].tolist()))
    block, prompt = decoder.length, len(prompts()[str(entry["prompt"])])
    made = [(0, 0, prompt // block * block)] * (prompt >= block)
    for kind, rows, count in (
        (1, info.reads, block),
        (2, info.verifies, 2 * block),
        (3, info.stored, block),
    ):
        made += [(kind, int(at), count) for at in info.at[rows]]
    assert calls == collections.Counter(made)
    assert int(result.counts["positions"][0]) == want["calls"][:, 2].sum()


@over([name for name in NAMES if "verify_input_first" in recorded(name)])
def test_what_the_verifier_reads(name):
    """Tokens and visibility of the first verification, as the mask that is drawn in the README."""
    want, first = recorded(name), int(recorded(name)["verify"].argmax())
    decoder, _, _, _, info = replayed(name)
    block, mask = decoder.length, imported(FOLDER)[2].mask
    fed = np.where(want["before"][first] == mask, want["draft"][first], want["before"][first])
    equal(want["verify_input_first"], [*fed, *[mask] * block])
    sees = want["verify_mask_first"].astype(bool)
    assert sees.shape[1] == int(info.at[info.reads][first]) + 2 * block


def test_every_array_is_read():
    """So that none of a folder is left out in silence."""
    kinds = ["tokens", "calls", "start", "before", "after", "draft", "conf", "u_draft", "span"]
    kinds += ["score", "verify", "hysteresis_on", "q", "ratio", "u_accept", "accepted"]
    kinds += ["resampled_at", "resampled_token", "u_resample", "attention_within_block"]
    kinds += ["draft_logits", "verifier_logits", "residual", "verify_input_first"]
    kinds += ["verify_mask_first", "store_attention_within_block"]
    known = {f"{name}.{kind}" for name in NAMES for kind in kinds}
    known |= {f"prompt_{number}" for number in prompts()}
    others = [name for name in EVERY if name not in NAMES]
    found = {
        name
        for name in arrays_in(FOLDER / "decode.npz")
        if name.partition(".")[0] not in others and name.rpartition(".")[0] not in others
    }
    assert found <= known and len(NAMES) + len(others) == len(EVERY)
