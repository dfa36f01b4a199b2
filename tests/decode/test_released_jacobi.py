"""Laws of the released Jacobi decoders on a small network of random weights, with drafts from the requests' keys."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from experiments.replicas import (
    ReleasedJacobi,
    ReleasedMultiBlock,
    ReleasedRunningWindow,
)
from experiments.replicas.trajectories import trajectories
from paradec_jax import decode
from paradec_jax.config import CAUSAL_PRESETS, TokenSpec
from paradec_jax.families import init_params
from paradec_jax.models import TransformerNetwork

NETWORK = TransformerNetwork(dataclasses.replace(CAUSAL_PRESETS["test-causal"], tie_embeddings=False))
PROMPTS = ([3, 1, 4], [1, 5, 2, 6, 5, 9, 8], [2, 7], [11, 12, 13, 14])
BUDGETS = (20, 9, 14, 1)
BLOCK, SIZE = 5, 40
DECODERS = {
    "blocks": (ReleasedJacobi, {}, {}),
    "complete": (ReleasedJacobi, {"complete_blocks": True}, {}),
    "window": (ReleasedRunningWindow, {}, {"max_iterations": 3}),
    "main": (ReleasedMultiBlock, {}, {"spawn_ratio": 0.4}),
    "tail": (ReleasedMultiBlock, {"variant": "tail", "in_flight": 3}, {"spawn_ratio": 0.4}),
    "plain": (ReleasedMultiBlock, {"variant": "plain", "in_flight": 3}, {"spawn_ratio": 0.4}),
}
QUICK = ("blocks", "window", "main")
EVERY = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DECODERS]
)


def decoder_of(name: str) -> Any:
    kind, options, _ = DECODERS[name]
    return kind(NETWORK, SIZE, block=BLOCK, spec=TokenSpec(pad=31), **options)


def knobs_of(name: str) -> Any:
    kind, _, knobs = DECODERS[name]
    return kind.Knobs(**knobs)


@functools.cache
def params() -> Any:
    """Weights that care more for the last token than for those before it, so that some drafts are accepted."""
    drawn = init_params(NETWORK.config, jax.random.key(7))

    def gained(path: Any, leaf: Any) -> Any:
        return (1.5 if jax.tree_util.keystr(path).endswith("['out']") else 3) * leaf

    return jax.tree_util.tree_map_with_path(gained, drawn)


@functools.cache
def greedy() -> list[list[int]]:
    request = decode.make_request(list(PROMPTS), max_new_tokens=2 * SIZE)
    return decode.run(decode.AutoRegressive(NETWORK, 3 * SIZE), params(), request).completions()


def request_of(stop: tuple[int, ...] = (), **options: Any) -> decode.Request:
    return decode.make_request(list(PROMPTS), max_new_tokens=BUDGETS, stop=stop, **options)


@functools.cache
def result_of(name: str) -> decode.Decoded:
    return decode.run(decoder_of(name), params(), request_of(), knobs_of(name))


@pytest.mark.slow
@EVERY
def test_output_is_greedy_decoding_and_overruns_the_budget(name):
    result = result_of(name)
    over = {"window": BLOCK - 2, "blocks": BLOCK - 1, "complete": BLOCK}.get(name)
    for tokens, expected, budget in zip(result.completions(), greedy(), BUDGETS, strict=True):
        assert tokens == expected[: len(tokens)]
        assert len(tokens) >= budget
        if over is not None:
            assert len(tokens) <= budget + over
        if name in ("blocks", "complete"):
            assert len(tokens) % BLOCK == 0
    assert (np.asarray(result.reasons) == decode.Reason.BUDGET).all()


def test_trace_records_trajectories():
    decoder = decoder_of("complete")
    result, infos = decode.trace(decoder, params(), request_of(), n=40)
    for row, blocks in enumerate(trajectories(infos)):
        assert sum(block.network_calls for block in blocks) == int(result.network_calls[row]) - 1
        tokens = [token for block in blocks for token in block.points[-1]]
        assert tokens == result.completions()[row] == greedy()[row][: len(tokens)]
        for block in blocks:
            right = np.cumprod(block.points == block.points[-1], axis=1).sum(axis=1)
            assert (np.diff(right) >= 0).all() and right[0] >= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReleasedJacobi(block=0), "block must be at least 1, not 0"),
        (lambda: ReleasedJacobi(greedy=False), "ReleasedJacobi is greedy"),
        (lambda: ReleasedJacobi(log_probs=True), "keeps no log-probabilities"),
        (lambda: ReleasedRunningWindow(block=1), "block must be at least 2"),
        (lambda: ReleasedMultiBlock(variant="dev"), "variant must be one of main, tail, plain, not 'dev'"),
        (lambda: ReleasedMultiBlock(pool=-1), "pool must be at least 0, not -1"),
        (lambda: ReleasedMultiBlock(in_flight=0), "in_flight must be at least 1, not 0"),
        (lambda: ReleasedMultiBlock.Knobs(blocks=0).check(), "blocks must be at least 1, not 0"),
        (lambda: ReleasedMultiBlock.Knobs(spawn_ratio=1.5).check(), "spawn_ratio must be between 0 and 1"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sampling_is_refused():
    knobs = dataclasses.replace(knobs_of("blocks"), temperature=1.0)
    with pytest.raises(ValueError, match="is greedy, so temperature must be 0"):
        decode.run(decoder_of("blocks"), params(), request_of(), knobs)
