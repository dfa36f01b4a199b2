"""Recorded decodes of CoDA, Open-dCoder and of a2d's masked sampler, call by call.

Settings and sizes come from each folder's traces.json and arrays.
"""

import dataclasses
from typing import Any

import numpy as np
from marks import over
from recorded import GOLDEN, arrays_in, part_of
from recorded_canvas import Run, Settings, replay
from recorded_full import folders_in, json_in, model

from experiments.replicas import ReleasedCanvas, ReplayedPlanned

FOLDER = GOLDEN / "full"
TOLD = {"calls", "denoise_calls", "margins", "noise_seed", "remasked", "masks_left", "sampler"}
ORDERS = {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"}


def cases() -> list[str]:
    found = []
    for name in folders_in(FOLDER):
        settings = json_in(FOLDER / name / "traces.json")["cases"]
        there = (FOLDER / name / "decode.npz").is_file()
        found += [
            f"{name} {case}"
            for case, of in settings.items()
            if there and of.get("sampler") != "bd3lm"
        ]
    return found


CASES = cases()
QUICK = {"a2d_mdlm mdlm_batch2", "coda entropy", "opendcoder p2"}


@over(CASES, {*CASES} - QUICK)
def test_every_call(name):
    folder, case = name.split()
    settings = Settings(json_in(FOLDER / folder / "traces.json")["cases"][case], TOLD)
    want = part_of(arrays_in(FOLDER / folder / "decode.npz"), f"{case}.")
    network, params, spec = model(FOLDER / folder)
    take = settings.take
    run, new = recorded(want), take("max_new_tokens")
    knobs: dict[str, Any] = {"temperature": take("temperature", 0.0)}
    steps, options = take("steps"), {}
    if "result" in want:  # dllm's masked sampler
        block = take("block_size")
        options = {"length": block, "rule": "rounded"}
        steps = -(-steps // -(-new // block))
        if take("right_shift_logits", False):
            spec = dataclasses.replace(spec, alignment="next")
        if scale := take("cfg_scale", 0.0):
            options["guided"], knobs["guidance"] = True, scale
            run.logits_steps = ()  # of both readings
    else:
        alg = take("alg")
        options = {"length": None, "rule": "grid", "order": ORDERS.get(alg, "confidence")}
        options["confidence"] = "filtered"
        knobs |= {"top_p": take("top_p", 1.0), "top_k": take("top_k")}
        if (spread := take("alg_temp")) is not None:
            knobs["spread"], run.scores = spread, None
        if alg == "origin":
            options |= {"coin": True, "order": "random"}
            run.every, run.scores = True, None
    settings.all_read()
    if options["rule"] == "grid" and alg == "p2":
        decoder = ReplayedPlanned(confidence="filtered")
    else:
        decoder = ReleasedCanvas(**options)
    run.new = new
    decoder = decoder.bind(network, max(map(len, run.prompts)) + new, spec)
    replay(decoder, params, run, decoder.Knobs(steps=steps, **knobs))


def recorded(want: dict[str, np.ndarray]) -> Run:
    """The arrays of a case; every one is read."""
    left = dict(want)
    tokens = left.pop("tokens")
    if "result" in want:
        prompts = [left.pop(f"prompt_{row}") for row in range(tokens.shape[1])]
        assert (left.pop("result") == tokens[-1]).all()
        assert (left.pop("call_start") == 0).all() and (left.pop("call_len") > 0).all()
    else:
        tokens, prompts = tokens[:, None], [left.pop("prompt")]
    run = Run(tokens, np.zeros(len(prompts), int), [p.tolist() for p in prompts], 0)
    run.logits_steps, run.logits = left.pop("logits_steps", ()), left.pop("logits", ())
    if "result" not in want:
        run.logits = [logits[None] for logits in run.logits]
        run.argmax, run.scores = left.pop("candidate")[:, None], left.pop("confidence")[:, None]
    for name, kind in (
        ("gumbel_uniform", "races"),
        ("uniform_sample", "samples"),
        ("u_transfer", "orders"),
        ("u_gumbel", "orders"),
    ):
        if (numbers := left.pop(name, None)) is None:
            continue
        if name in ("uniform_sample", "u_transfer"):
            mask = ... if np.isfinite(numbers).all() else tokens[:-1] == tokens[0, 0, -1]
            numbers = placed(numbers[:, None], mask)
        elif name == "u_gumbel":
            numbers = numbers[:, None]
        run.draws[kind] = np.nan_to_num(numbers, nan=0.5)
    assert not left, f"arrays that no replay reads: {left.keys()}"
    return run


def placed(numbers: np.ndarray, masked: Any) -> np.ndarray:
    """Numbers of the masks in order, at their positions; as they are where every position has one."""
    if masked is ...:
        return numbers
    spread = np.full(numbers.shape, np.nan)
    for call, rows in enumerate(masked):
        for row, here in enumerate(rows):
            spread[call, row, here] = numbers[call, row, : here.sum()]
    return spread
