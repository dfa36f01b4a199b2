"""Block denoising: who is revealed when, how many calls that takes, what fusions change, what is
refused.

Steps are counted by a plain simulation of each rule on a stub whose confidences are known.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from reading import read
from stubs import PROMPTS, StubDenoiser, tiny_blocks, tiny_blocks_params, tiny_request

from experiments.replicas import ReleasedDenoising
from paradec_jax import decode
from paradec_jax.config import TokenSpec

SIZE, NEW = 24, 11
STUB = StubDenoiser(block=4, sharpness=6.0)
SPEC = TokenSpec(mask=STUB.mask, alignment="own", pad=9)


def confidences(stub: StubDenoiser, masked: int) -> list[float]:
    """c of the masked positions of a block, the first of which follows a revealed one: by their
    distance from it.
    """
    best = [math.exp(stub.sharpness / (1 + distance)) for distance in range(1, masked + 1)]
    return [x / (x + stub.vocab_size - 1) for x in best]


def entropies(stub: StubDenoiser, masked: int) -> list[float]:
    others = stub.vocab_size - 1
    rest = [(1 - c) / others for c in confidences(stub, masked)]
    return [-(1 - others * r) * math.log(1 - others * r) - others * r * math.log(r) for r in rest]


def taken(rule: str, knobs: dict[str, Any], stub: StubDenoiser, masked: int, step: int) -> int:
    """How many positions a step reveals, from left to right: confidences fall with the distance."""
    block = stub.block
    steps = knobs.get("steps", block)
    quota = min(block // steps + (step < block % steps), masked)
    sure = confidences(stub, masked)
    if rule == "dynamic":
        return max(sum(c > knobs["threshold"] for c in sure), quota)
    if rule == "threshold":
        return max(sum(c >= knobs["threshold"] for c in sure), 1)
    if rule == "factor":
        passing = [
            rank == 1 or c >= 1 - knobs["factor"] / (rank + 1) for rank, c in enumerate(sure, 1)
        ]
        return next((i for i, passes in enumerate(passing) if not passes), masked)
    if rule == "entropy":
        below = [
            total < knobs["entropy"] for total in itertools.accumulate(entropies(stub, masked))
        ]
        return max(sum(below), 1)
    return quota


def simulated(
    rule: str,
    knobs: dict[str, Any],
    stub: StubDenoiser,
    prompt: int,
    new: int,
    rides: bool,
    opens: bool,
) -> tuple[int, int]:
    """Calls and positions of a row."""
    block, length, limit = stub.block, prompt, prompt + new
    given = prompt // block * block
    calls, positions = (0, given) if opens else (int(given > 0), given)
    first = True
    while length < limit:
        end = length // block * block + block
        if not first and length % block == 0:  # the block before is stored
            calls += not rides
            positions += block
        step = 0
        while length < min(end, limit):
            calls, positions = calls + 1, positions + block
            length += taken(rule, knobs, stub, end - length, step)
            step += 1
        first = False
    return calls, positions


CASES = {
    "static": ("static", {}),
    "two-a-step": ("static", {"steps": 2}),
    "three-steps": ("static", {"steps": 3}),
    "one-step": ("sequential", {"steps": 1}),
    "sequential": ("sequential", {"steps": 3}),
    "dynamic": ("dynamic", {"threshold": 0.3}),
    "dynamic-quota": ("dynamic", {"threshold": 0.6, "steps": 2}),
    "threshold": ("threshold", {"threshold": 0.4}),
    "factor": ("factor", {"factor": 2.0}),
    "entropy": ("entropy", {"entropy": 6.0}),
}
FUSIONS = [(True, True), slow(False, False), slow(True, False), slow(False, True)]


@pytest.mark.parametrize(("rides", "opens"), FUSIONS)
@pytest.mark.parametrize("name", CASES)
def test_calls_are_those_of_the_simulation(name, rides, opens):
    rule, knobs = CASES[name]
    decoder = decode.BlockDenoising(
        STUB, SIZE, SPEC, rule=rule, fuse_store=rides, fuse_prompt=opens
    )
    prompts = (*PROMPTS, (1, 2, 3, 4), (5,) * 9)
    request = tiny_request((NEW, 3, NEW, 8, 1), prompts=prompts)
    result = decode.run(decoder, None, request, decoder.Knobs(**knobs))
    want = [
        simulated(rule, knobs, STUB, len(prompt), new, rides, opens)
        for prompt, new in zip(prompts, (NEW, 3, NEW, 8, 1), strict=True)
    ]
    assert list(zip(result.network_calls.tolist(), result.positions.tolist(), strict=True)) == want
    assert result.completions() == [
        STUB.expected([*prompt, *[None] * new])[len(prompt) :]
        for prompt, new in zip(prompts, (NEW, 3, NEW, 8, 1), strict=True)
    ]


@pytest.mark.parametrize("alignment", ["own", slow("next")])
def test_infos_say_what_a_call_did(alignment):
    """Blocks from position 0, the first with the end of the prompt; steps counted in each; stores
    of their own.
    """
    stub = dataclasses.replace(STUB, alignment=alignment)
    spec = dataclasses.replace(SPEC, alignment=alignment)
    decoder = decode.BlockDenoising(
        stub, SIZE, spec, rule="static", fuse_store=False, fuse_prompt=False
    )
    request = tiny_request(5, prompts=((3, 1, 4, 1, 5, 9), (2, 7)))
    _, info = decode.trace(decoder, None, request, decoder.Knobs(steps=2), n=6)
    info = jax.tree.map(np.asarray, info)
    assert info.at[:4, 0].tolist() == [4, 8, 8, 8] and info.at[:4, 1].tolist() == [0, 4, 4, 4]
    assert info.stored[:4, 0].tolist() == [False, True, False, False]
    assert info.reads[:4, 0].tolist() == [True, False, True, True]
    assert info.step[[0, 2, 3], 0].tolist() == [0, 0, 1]
    shown = [info.where[i, 0].nonzero()[0].tolist() for i in range(6)]
    assert shown == [[2, 3], [], [0, 1], [2, 3], [], []] and info.where[0, 1].nonzero()[
        0
    ].tolist() == [2, 3]
    hidden = jnp.asarray(info.hidden[0])
    np.testing.assert_array_equal(
        stub.logits(None, hidden).argmax(-1)[0, 2:], info.tokens[0, 0, 2:]
    )


@pytest.mark.slow
def test_a_cached_block_is_one_read_in_a_whole_text():
    """What a step reads of its block behind the cache is what a call on the whole text reads there."""
    network, params = tiny_blocks(), tiny_blocks_params(1)
    decoder = decode.BlockDenoising(
        network, SIZE, TokenSpec(mask=31, alignment="own"), rule="static"
    )
    request = tiny_request(14, prompts=((3, 1, 4, 1, 5),))
    _, (tokens, info) = decode.trace(
        decoder, params, request, decoder.Knobs(steps=2), n=7, record=canvas_and_info
    )
    for step in range(1, 6):
        start = int(info.at[step, 0])
        seen = jnp.asarray(tokens[step - 1])[:, : start + 4]
        _, whole, _ = read(network, params, seen)
        np.testing.assert_allclose(whole[:, start:], info.hidden[step], atol=2e-5)
    assert len(np.unique(np.asarray(info.at)[1:6])) > 2


def canvas_and_info(state, info):
    return state.rows.tokens, info


@pytest.mark.parametrize(("rides", "opens"), FUSIONS)
def test_holes_are_filled_block_by_block(rides, opens):
    """Given tokens of a later block are not seen before it; a block without a hole is stored as it
    is.
    """
    texts = ([3, None, None, 4, None, None, None, 2, 5, 6, 7, 8, None, None], [None, None, 1])
    request = decode.make_request(
        [[token or 0 for token in text] for text in texts],
        given=[[token is not None for token in text] for text in texts],
        max_new_tokens=0,
    )
    want = []
    for text in texts:
        known: list[int | None] = list(text)
        for start in range(0, len(text), 4):
            known[: start + 4] = STUB.expected(known[: start + 4])
        want.append(known)
    decoder = decode.BlockDenoising(
        STUB, SIZE, SPEC, rule="static", fuse_store=rides, fuse_prompt=opens
    )
    result = decode.run(decoder, None, request)
    found = [
        row[:n] for row, n in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)
    ]
    assert found == want
    assert result.generated.tolist() == [text.count(None) for text in texts]


# What released programs do otherwise


def test_jetengine_falls_back_to_the_left():
    """With a token given in the middle of a block, its neighbours are the surest."""
    request = decode.make_request(
        [[0, 0, 3, 0]], given=[[False, False, True, False]], max_new_tokens=0
    )
    shown = {}
    for program in ("evaluation", "jetengine"):
        decoder = ReleasedDenoising(STUB, 8, SPEC, program=program, rule="dynamic")
        _, info = decode.trace(decoder, None, request, decoder.Knobs(threshold=0.99), n=3)
        shown[program] = np.asarray(info.where[:, 0]).nonzero()[1].tolist()
    assert shown == {"evaluation": [1, 0, 3], "jetengine": [0, 1, 3]}


def test_confidence_after_truncation_is_one_with_top_k_one():
    """So that a dynamic step of `generate.py` reveals the whole block."""
    request = tiny_request(8, prompts=((3, 1, 4, 1),))
    calls = {}
    for program in ("generate", "evaluation"):
        decoder = ReleasedDenoising(STUB, SIZE, SPEC, program=program, rule="dynamic")
        knobs = decoder.Knobs(temperature=1.0, top_k=1, threshold=0.9)
        result = decode.run(decoder, None, request, knobs)
        assert result.completions() == [STUB.expected([3, 1, 4, 1, *[None] * 8])[4:]]
        calls[program] = int(result.network_calls[0])
    assert calls == {"generate": 1 + 2 * 2, "evaluation": 1 + 2 * 5}
