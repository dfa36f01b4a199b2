"""Recorded decodes of LLaDA, Dream, Fast-dLLM, WINO and Prophet, call by call, and what SSD must do.

Settings and sizes come from each folder's traces.json and arrays.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from marks import over
from recorded import GOLDEN, arrays_in, equal, near
from recorded_canvas import CONFIDENCE, Run, Settings, replay
from recorded_full import json_in, model

from experiments.replicas import ReleasedCanvas
from paradec_jax import decode

FOLDER = GOLDEN / "baselines"
PARTS = ("llada", "dream", "fast_dllm/llada", "fast_dllm/dream", "wino", "prophet")
TOLD = {
    *("prompt_seed", "margins", "unique_token_ratio", "forwards", "nfe", "nfe_first_release"),
    *("batch", "left_pad_row0", "prompt_length", "masks_left", "revealed_per_step"),
    *("revealed_per_forward", "revealed", "remasked", "accept_cap_hit", "remask_cap_hit"),
    *("early_exit", "exit_step"),
}
ORDERS = {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"}
QUICK = {
    "dream entropy_full",
    "fast_dllm/llada dual_thr0p8",
    "wino b8_thr0p7_back0p5",
    "prophet exit_late_constraints",
}


def traces(part: str) -> dict[str, dict[str, Any]]:
    there = FOLDER / part
    return {
        name: settings
        for name, settings in json_in(there / "traces.json").items()
        if (there / f"trace_{name}.npz").is_file() and (there / "model.safetensors").is_file()
    }


CASES = [f"{part} {name}" for part in PARTS for name in traces(part)]


def recorded(part: str, name: str, settings: Settings) -> tuple[Run, dict[str, np.ndarray]]:
    """The run of a trace, and the arrays that are its part's own."""
    left = dict(arrays_in(FOLDER / part / f"trace_{name}.npz"))
    tokens, prompt = left.pop("tokens"), left.pop("prompt")
    if tokens.ndim == 2:
        tokens = tokens[:, None]
    seen = left.pop("attention_mask", np.ones_like(prompt)).astype(bool)
    new = tokens.shape[-1] - prompt.shape[1]
    told = settings.take("gen_length") or settings.take("max_new_tokens")
    assert new == told
    prompts = [row[real].tolist() for row, real in zip(prompt, seen, strict=True)]
    pads = prompt.shape[1] - seen.sum(axis=1)
    run = Run(tokens, pads, prompts, new)
    run.argmax, run.scores = left.pop("argmax", None), left.pop("conf", None)
    run.logits_steps, run.logits = left.pop("logits_steps"), left.pop("logits")
    if "fwd_start" in left:
        run.starts, run.sizes = left.pop("fwd_start"), left.pop("fwd_len")
        if pads.any():
            run.sizes = run.sizes - pads[0]
    left.pop("tok_idx", None)  # positions, which here count from each row's prompt
    return run, left


@over(CASES, {*CASES} - QUICK)
def test_every_call(name):
    part, case = name.split()
    settings = Settings(traces(part)[case], TOLD)
    run, left = recorded(part, case, settings)
    decoder, knobs = READERS[part](settings, run, left)
    settings.all_read()
    network, params, spec = model(FOLDER / part)
    if decoder.stops_last:  # the end of a turn, whose id its program has as a literal
        spec = dataclasses.replace(spec, stop=(*spec.stop, spec.stop[0] + 1))
    decoder = decoder.bind(network, max(map(len, run.prompts)) + run.new, spec)
    infos = replay(decoder, params, run, decoder.Knobs(**knobs), request_of(part, run, spec))[1]
    check_more(part, run, infos, left)
    assert not left, f"arrays that no replay reads: {left.keys()}"


def llada(settings: Settings, run: Run, left: dict) -> Any:
    """Decoder and knobs of LLaDA's own sampler."""
    take = settings.take
    block = take("block_length")
    knobs = {"steps": take("steps") * block // run.new, "temperature": take("temperature")}
    options = {"length": block, "rule": "static", "stops_last": take("confidence_eos_eot_inf")}
    if scale := take("cfg_scale"):
        options["guided"], knobs["guidance"] = True, scale
        run.sizes = run.sizes[:]
        left.pop("raw_logits_step0_cond"), left.pop("raw_logits_step0_uncond")
    if take("logits_eos_inf"):
        knobs["stop_bias"] = -np.inf
    if take("remasking") == "random":
        options["order"], run.draws["orders"] = "random", left.pop("random_confidence")
        run.scores = None
    if "gumbel_uniform" in left:
        run.draws["races"] = np.nan_to_num(left.pop("gumbel_uniform"), nan=0.5)
    return ReleasedCanvas(**options), knobs


def dream(settings: Settings, run: Run, left: dict) -> Any:
    """Decoder and knobs of Dream's own sampler."""
    take, alg = settings.take, settings.take("alg")
    steps, epsilon = take("steps"), take("eps")
    near(left.pop("timesteps"), np.linspace(1, epsilon, steps + 1), atol=1e-6)
    options = {"length": None, "rule": "grid", "confidence": "filtered"}
    options["order"] = ORDERS.get(alg, "confidence")
    knobs = {"steps": steps, "epsilon": epsilon, "temperature": take("temperature")}
    knobs |= {"top_p": take("top_p") or 1.0, "top_k": take("top_k")}
    if alg == "origin":  # a coin for each mask, in the order of positions
        options |= {"coin": True, "order": "random"}
        coins, masked = left.pop("uniform_draws"), run.tokens[:-1] == run.tokens[0, 0, -1]
        orders = np.full(masked.shape, 0.5)
        for call, here in enumerate(masked[:, 0]):
            orders[call, 0, here] = coins[call][: here.sum()]
        run.draws["orders"], run.every, run.scores = orders, True, None
    if take("alg_temp") is not None:  # positions that were drawn, before all others
        chosen, left["multinomial_probs"] = left.pop("multinomial_choice"), None
        options["order"], run.scores = "random", None
        orders = np.zeros((len(chosen), *run.tokens.shape[1:]))
        for call, row in np.ndindex(*chosen.shape[:2]):
            places = chosen[call, row]
            orders[call, row, places[places >= 0]] = 1
        run.draws["orders"] = orders
        left.pop("multinomial_probs")
    return ReleasedCanvas(**options), knobs


def fast(settings: Settings, run: Run, left: dict) -> Any:
    """Decoder and knobs of Fast-dLLM on LLaDA."""
    take, block = settings.take, settings.take("block_length")
    steps, threshold, factor = take("steps") * block // run.new, take("threshold"), take("factor")
    options = {"length": block, "cache": take("cache"), "rule": "static"}
    knobs: dict[str, Any] = {"steps": steps}
    if threshold is not None:
        options["rule"], knobs = "threshold", {"threshold": threshold}
    if factor is not None:
        options |= {"rule": "factor", "last_along": True}
        knobs = {"factor": factor}
    left.pop("fwd_kind"), left.pop("block_index")
    return ReleasedCanvas(**options), knobs


def fast_dream(settings: Settings, run: Run, left: dict) -> Any:
    """Decoder and knobs of Fast-dLLM on Dream: its plain generator, and that of blocks."""
    take, block, alg = settings.take, settings.take("block_length"), settings.take("alg")
    steps, threshold, cache, eps = take("steps"), take("threshold"), take("cache"), take("eps")
    options = {"length": block, "cache": cache, "confidence": "filtered"}
    knobs = {} if threshold is None else {"threshold": threshold}
    left.pop("fwd_kind", None), left.pop("block_index", None)
    if cache == "none":
        assert alg == "confidence_threshold"
        left.pop("timesteps", None)
        return ReleasedCanvas(rule="capped", **options), {"steps": steps, **knobs}
    options |= {"first_alone": True, "rule": "threshold"}
    run.argmax, run.scores = None, None if threshold is None else run.scores
    if threshold is None:
        steps = steps * block // run.new
        options |= {"rule": "grid", "order": "entropy", "unfinished": steps == 1}
        run.every = steps == 1
        knobs = {"steps": steps, "epsilon": eps}
    left.pop("timesteps", None)
    return ReleasedCanvas(**options), knobs


def wino(settings: Settings, run: Run, left: dict) -> Any:
    """Decoder and knobs of WINO."""
    take = settings.take
    knobs = {"threshold": take("threshold"), "back": take("threshold_back")}
    run.argmax, run.scores = run.argmax[:, None], left.pop("conf_main")[:, None]
    run.logits = [logits[None] for logits in run.logits]
    return decode.Wino(length=take("block_length")), knobs


def prophet(settings: Settings, run: Run, left: dict) -> Any:
    """Decoder and knobs of Prophet."""
    take, bounds = settings.take, settings.take("thresholds")
    block, held = take("block_length"), take("constraints")
    places = [len(run.prompts[0]) + int(at) for at in held]
    equal(run.tokens[0, 0, places], list(held.values()))
    knobs = {"steps": take("steps") * block // run.new, "answer": take("answer_length")}
    knobs |= {"early": bounds["early"], "middle": bounds["mid"], "late": bounds["late"]}
    return decode.Prophet(length=block), knobs | {"answer_at": take("answer_start_relative")}


READERS = {
    "llada": llada,
    "dream": dream,
    "fast_dllm/llada": fast,
    "fast_dllm/dream": fast_dream,
    "wino": wino,
    "prophet": prophet,
}


def request_of(part: str, run: Run, spec: Any) -> Any:
    """Of Prophet, where tokens are given beyond the prompt; else the prompts."""
    if part != "prophet":
        return None
    row = run.tokens[0, 0]
    given = row != spec.mask
    return decode.make_request(
        [np.where(given, row, 0).tolist()], given=[given.tolist()], max_new_tokens=0
    )


def check_more(part: str, run: Run, infos: list, left: dict) -> None:
    """The arrays that a part has beside those of all."""
    if part == "prophet":
        near([info.gap[0] for info in infos], left.pop("answer_gap"), **CONFIDENCE)
    if part != "wino":
        return
    equal([info.where.sum() for info in infos], left.pop("n_revealed"))
    equal([info.again.sum() for info in infos], left.pop("n_remasked"))
    at, first = [int(info.at[0]) for info in infos], len(run.prompts[0])
    block = infos[0].where.shape[1]
    equal((np.array(at) - first) // block, left.pop("block_index"))
    for info, want in zip(infos, left.pop("conf_shadow"), strict=True):
        stood = np.isfinite(want)
        near(info.back[0][stood], want[stood], **CONFIDENCE)
        assert not info.back[0][~stood].any()
    shown = np.array([int(info.where.sum()) for info in infos])
    opens = np.diff(at, prepend=-1) != 0
    equal(left.pop("last_accept"), np.where(opens, 30, np.roll(shown, 1)))
    masks = (run.tokens[:-1, 0] == run.tokens[0, 0, -1]) & (
        np.arange(run.tokens.shape[-1]) < (np.array(at) + block)[:, None]
    )
    most = np.clip(np.floor(0.7 * masks.sum(axis=1)), 5, 20)
    equal(left.pop("max_accept"), most)
    positions, allowed = left.pop("position_ids_first"), left.pop("attention_allowed_first")
    size = len(positions) - block
    equal(positions, [*range(size), *range(first, first + block)])
    place = np.arange(size + block)
    sees = (place < size) & (place[:, None] < size)
    shadow = place[size:]
    sees[shadow] = True
    sees[shadow, positions[size:]] = False
    equal(allowed, sees)


EXPECTED = json_in(FOLDER / "llada" / "ssd_expected.json")
DRAFTS = [
    f"{name} {count}"
    for name, of in EXPECTED.items()
    if isinstance(of, dict) and name in traces("llada")
    for count in of
]


@over(DRAFTS, {*DRAFTS} - {"semi_ar_b8 3"})
def test_speculative_steps(name):
    """SSD: tokens and order of one position a call, in the calls that an independent program made."""
    name, count = name.split()
    settings, want = traces("llada")[name], EXPECTED[name][count]
    run, _ = recorded("llada", name, Settings(settings, set()))
    network, params, spec = model(FOLDER / "llada")
    length = len(run.prompts[0]) + run.new
    decoder = decode.SpeculativeDenoising(
        network, length, spec, length=settings["block_length"], tries=int(count)
    )
    request = decode.make_request(run.prompts, max_new_tokens=run.new)
    result, infos = decode.trace(decoder, params, request, n=want["network_calls"])
    equal(result.tokens, run.tokens[-1])
    assert result.network_calls.tolist() == [want["network_calls"]]
    accepted = np.asarray(infos.accepted)[:, 0]
    rounds = want["accepted_per_round"]
    equal(accepted[: len(rounds)], rounds)
    changed = (run.tokens[1:, 0] != run.tokens[:-1, 0]).argmax(axis=1)
    places = np.asarray(infos.places)[:, 0]
    equal(np.concatenate([p[:n] for p, n in zip(places, accepted, strict=True)]), changed)


if not CASES:
    pytest.skip("no runs of full attention there", allow_module_level=True)
