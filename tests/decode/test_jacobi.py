"""Jacobi decoding: against plain Python on a stub, and what it saves on a recorded model that accepts drafts.

The folder of the recorded model is `PARADEC_GOLDEN/jacobi`, or `tests/golden/jacobi`.
"""

import functools
import itertools
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from plain_jacobi import plain_row
from recorded_jacobi import arrays, model, models, recorded_rows

from paradec_jax import decode
from paradec_jax.testing import PROMPTS, StubCausal, tiny_request

COUNTING = StubCausal(weights=(1, 0), slope=0)  # the next token is one more
REPEATING = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0)  # the text has period 3
LONG = 32


# Every step is that of plain Python


def steps_of(state):
    """Records lengths and the rows of the next call."""
    return state.progress.length, state.drafts


@pytest.mark.parametrize(
    ("stub", "kind", "options", "knobs"),
    [
        (REPEATING, decode.Jacobi, {"block": 5}, {}),
        (COUNTING, decode.Jacobi, {"block": 6, "running": True, "pool": 2, "rows": 5}, {}),
        (REPEATING, decode.MultiBlock, {"block": 4, "blocks": 3, "pool": 2}, {"spawn": 0.5}),
        (COUNTING, decode.MultiBlock, {"block": 5, "blocks": 2, "pool": 1, "rows": 3}, {"spawn": 0.6}),
        (REPEATING, decode.MultiBlock, {"block": 3, "blocks": 3}, {"spawn": 0.0}),
    ],
)
def test_steps_are_those_of_plain_python(stub, kind, options, knobs):
    decoder = kind(stub, LONG + 5, **options)
    request = tiny_request(LONG, seed=3)
    result, (lengths, drafts) = decode.trace(
        decoder, None, request, kind.Knobs(**knobs), n=LONG, record=steps_of
    )
    lengths, drafts = np.asarray(lengths), np.asarray(drafts)
    saved = 0
    for i, prompt in enumerate(PROMPTS):
        plain = plain_row({**options, **knobs}, stub, i, seed=3)
        for step in range(LONG):
            plain.step()
            if len(plain.text) >= len(prompt) + LONG:
                break
            assert lengths[step, i] == len(plain.text)
            some = len(plain.drafts)
            assert drafts[step, i, :some].tolist() == plain.drafts
            assert (drafts[step, i, some:] == drafts[step, i, 0]).all()
        assert (lengths[step:, i] == len(prompt) + LONG).all()
        assert (plain.calls, plain.positions) == (result.network_calls[i], result.positions[i])
        assert result.completions()[i] == plain.text[len(prompt) :][:LONG] == stub.expected(prompt, LONG)
        saved += LONG - plain.calls
    assert saved > 0


def test_a_share_of_a_block_is_not_rounded_up():
    """In float32 0.6 * 25 is more than 15."""
    decoder = decode.MultiBlock(REPEATING, 60, block=25, blocks=2)
    state = next(decode.stream(decoder, None, tiny_request(50)))
    knobs = decoder.Knobs(spawn=jnp.float32(0.6))
    horizon = decoder.horizon(state.progress, state.horizon, jnp.array([14, 15, 16]), knobs)
    assert (horizon - state.horizon).tolist() == [0, 25, 25]


# Sampling


def test_samples_have_the_distribution_of_the_network():
    """Tokens 2 to 4 of many rows, each with a key of its own, against the product of their probabilities."""
    vocab, draws, new = 4, 4096, 4
    stub = StubCausal(vocab_size=vocab, weights=(1, 1, 0), sharpness=1.0)
    request = tiny_request(new, prompts=[(1, 2)] * draws, seed=5)
    decoder = decode.MultiBlock(stub, 2 + new, block=2, blocks=2, rows=3)
    result = decode.run(decoder, None, request, decoder.Knobs(temperature=1.0, spawn=0.0))
    assert result.network_calls.mean() < 0.8 * new
    tokens = np.asarray(result.completions())
    counts = np.zeros((vocab,) * new)
    np.add.at(counts, tuple(tokens.T), 1)

    favoured = math.e / (math.e + vocab - 1)
    probabilities = np.zeros_like(counts)
    for text in itertools.product(range(vocab), repeat=new):
        right = [stub.expected((1, 2, *text[:i]), 1)[0] == token for i, token in enumerate(text)]
        probabilities[text] = np.prod(np.where(right, favoured, (1 - favoured) / (vocab - 1)))
    counts, expected = counts.sum(0), draws * probabilities.sum(0)
    assert expected.sum() == pytest.approx(draws) and expected.min() > 10
    chi_squared = np.sum((counts - expected) ** 2 / expected)
    freedom = counts.size - 1
    assert abs(chi_squared - freedom) < 4 * math.sqrt(2 * freedom), chi_squared


# The recorded models

DECODING = ("jacobi_decode", "multiblock_main", "multiblock_promote")


@functools.cache
def recorded_runs(name: str) -> dict[str, tuple[int, int, int]]:
    """Block size, calls after the prompt's and generated tokens of each recorded run, summed over its prompts."""
    runs: dict[str, tuple[int, int, int]] = {}
    for kind in DECODING:
        for run in arrays(name, kind)["names"].tolist():
            tag = run.split("/")[0]
            _, calls, tokens = runs.get(tag, (0, 0, 0))
            more = arrays(name, kind)
            calls, tokens = calls + len(more[f"{run}/it_call"]), tokens + len(more[f"{run}/output"])
            runs[tag] = int(re.search(r"_n(\d+)", tag)[1]), calls, tokens
    return runs


def decoded(name: str, decoder, copies: int, knobs=None):
    """The recorded prompts, each with several keys, decoded in one batch; and the recorded outputs of the rows."""
    network, params, spec = model(name)
    prompts, outputs = recorded_rows(name)
    budget = max(map(len, outputs))
    request = decode.make_request(prompts * copies, max_new_tokens=budget, stop=spec.stop)
    bound = decoder.bind(network, max(map(len, prompts)) + budget)
    return decode.run(bound, params, request, knobs), outputs * copies


BLOCKS = sorted({block for name in models("jacobi_decode") for block, _, _ in recorded_runs(name).values()})


@pytest.mark.parametrize("name", models("jacobi_decode"))
def test_block_jacobi_saves_what_was_recorded(name):
    """On random weights next to nothing; other random guesses, so not to the call."""
    runs = [run for tag, run in recorded_runs(name).items() if tag.startswith("vanilla")]
    block, calls, tokens = sorted(runs)[-2]
    result, outputs = decoded(name, decode.Jacobi(block=block, greedy=True), 3)
    assert result.completions() == outputs
    assert (result.network_calls <= result.generated).all()
    saved = float(result.generated.sum() / (result.network_calls - 1).sum())
    assert saved == pytest.approx(tokens / calls, rel=0.15)


@functools.cache
def learned() -> str:
    """The model that accepts most drafts."""
    return max(
        models("multiblock_main"), key=lambda name: max(t / c for _, c, t in recorded_runs(name).values())
    )


def fewer_calls(block: int, copies: int, decoder, **knobs) -> None:
    """Calls of the best recorded model, summed over prompts and averaged over keys, are below every recorded run."""
    name = learned()
    result, outputs = decoded(name, decoder, copies, decoder.Knobs(**knobs))
    assert result.completions() == outputs
    best = min(calls for size, calls, _ in recorded_runs(name).values() if size == block)
    calls = float((result.network_calls - 1).sum() / copies)
    print(f"{decoder} {knobs}: {calls:.1f} calls, recorded {best}")
    assert calls < best


@pytest.mark.parametrize("block", BLOCKS[-2:-1])
def test_fewer_calls_than_every_recorded_run(block):
    fewer_calls(block, 5, decode.MultiBlock(block=block, blocks=2, rows=4, greedy=True), spawn=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS[-3:])
def test_fewer_calls_on_average_over_many_keys(block):
    fewer_calls(block, 20, decode.MultiBlock(block=block, blocks=2, rows=4, greedy=True), spawn=0.0)
    fewer_calls(block, 20, decode.MultiBlock(block=block, blocks=2, pool=4, greedy=True), spawn=0.0)
    fewer_calls(block, 20, decode.Jacobi(block=block, running=True, rows=4, greedy=True))


COVERING = [
    (decode.Jacobi, {"block": 4}, {}, 8),
    (decode.Jacobi, {"block": 64, "pool": 1}, {}, 1),
    (decode.Jacobi, {"block": 16, "pool": 4}, {}, 8),
    (decode.Jacobi, {"block": 8, "running": True, "pool": 2}, {}, 1),
    (decode.Jacobi, {"block": 32, "running": True, "rows": 3}, {}, 8),
    (decode.MultiBlock, {"block": 4, "blocks": 4, "pool": 3}, {"spawn": 0.85}, 1),
    (decode.MultiBlock, {"block": 8, "blocks": 3}, {"spawn": 0.0}, 8),
    (decode.MultiBlock, {"block": 16, "blocks": 1, "pool": 4}, {"spawn": 0.5}, 1),
    (decode.MultiBlock, {"block": 16, "blocks": 2, "pool": 4, "rows": 8}, {"spawn": 0.5}, 8),
    (decode.MultiBlock, {"block": 32, "blocks": 2, "rows": 4}, {"spawn": 0.85}, 1),
    (decode.MultiBlock, {"block": 32, "blocks": 3, "pool": 2}, {"spawn": 0.0}, 1),
    (decode.MultiBlock, {"block": 64, "blocks": 2}, {"spawn": 0.5}, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "options", "knobs", "batch"), COVERING)
def test_output_is_that_of_static_decoding(kind, options, knobs, batch, temperature):
    name = learned()
    network, params, spec = model(name)
    prompts, outputs = recorded_rows(name)
    budget = max(map(len, outputs))
    chosen = [prompts[i % len(prompts)] for i in range(batch)]
    request = decode.make_request(chosen, max_new_tokens=budget, stop=spec.stop, seed=batch)
    size = max(map(len, prompts)) + budget
    decoder, one = kind(network, size, **options), decode.AutoRegressive(network, size)
    result = decode.run(decoder, params, request, kind.Knobs(temperature=temperature, **knobs))
    static = decode.run(one, params, request, one.Knobs(temperature=temperature))
    assert result.completions() == static.completions()
    assert result.reasons.tolist() == static.reasons.tolist()
    assert (result.network_calls <= static.network_calls).all()
    if temperature == 0:
        assert result.completions() == [outputs[i % len(prompts)] for i in range(batch)]
