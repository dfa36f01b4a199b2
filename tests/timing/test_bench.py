"""Cost formulas, and the bench on a model of a few thousand parameters."""

import dataclasses
import math

import jax
import pytest

from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.decode import Static
from paradec_jax.decode.machine import drive
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.models.recurrent_depth import init_params, parameter_shapes
from paradec_jax.timing.bench import Limits, bench, limits, paced_wavefront

TINY = RECURRENT_PRESETS["test-recurrent"]
NETWORK = RecurrentDepthNetwork(TINY)
STATIC = Static(recurrence=4, greedy=True), None


def work(config, batch, positions, context, recurrence):
    return RecurrentDepthNetwork(config, recurrence=recurrence).work(batch, positions, context)


def test_work_of_one_recurrence_reads_every_parameter_but_the_embedding():
    config = RECURRENT_PRESETS["tiny-recurrent"]
    shapes = parameter_shapes(config)
    once = sum(math.prod(leaf.shape) for leaf in _leaves(shapes))  # tied: the embedding is the output matrix
    cost = work(config, batch=1, positions=1, context=0, recurrence=1)
    assert cost.bytes == 4 * once
    attention = 4 * 4 * config.width  # a position sees itself in four layers
    assert cost.flops == 2 * once + attention


def _leaves(tree):
    return [
        leaf for value in tree.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])
    ]


def test_work_grows_with_recurrences_context_and_rows():
    base = work(TINY, 1, 1, 10, 2)
    more = work(TINY, 1, 1, 10, 4)
    core = (more.bytes - base.bytes) // 2
    assert work(TINY, 1, 1, 10, 6).bytes - more.bytes == 2 * core
    cached = 2 * (1 + 1 + 2 * 2) * TINY.width * 4
    assert work(TINY, 1, 1, 11, 2).bytes - base.bytes == cached
    assert work(TINY, 3, 1, 10, 2).bytes - base.bytes == 2 * 10 * cached
    assert work(TINY, 3, 1, 10, 2).flops == 3 * base.flops
    assert work(TINY, 1, 4, 10, 2).bytes == base.bytes


@pytest.mark.parametrize("case", [STATIC, paced_wavefront(4, 2)], ids=["static", "wavefront"])
def test_bench(case):
    jitted = (drive.start, drive.advance, drive.compiled_run)
    compiled = [function._cache_size() for function in jitted]
    row = bench(
        NETWORK,
        init_params(TINY, jax.random.key(0)),
        *case,
        batch=2,
        context=8,
        tokens=12,
        passes=2,
        device=Limits(1e9, 2e9, 4e9, 1e9),
    )
    # Nothing went through `jit`, which would compile again: the two programs that were compiled were called.
    assert [function._cache_size() for function in jitted] == compiled and row["compile_seconds"] > 0
    assert row["tokens"] == 24 and row["batch"] == 2
    # A step of so small a model may take less than the noise of two timings, so no sign is asked for.
    assert row["tokens_per_second"] > 0 and row["peak_bytes"] > 4 * row["parameters"]
    assert row["bandwidth_fraction"] == pytest.approx(
        row["step_bytes"] / (row["microseconds_per_step"] * 1e-6) / 1e9
    )
    # What further recurrences read again is read twice as fast here.
    assert row["bandwidth_fraction"] / 4 < row["read_fraction"] < row["bandwidth_fraction"] / 2
    assert row["limit_fraction"] == max(row["read_fraction"], row["flops_fraction"])
    if case == STATIC:
        assert row["network_calls_per_token"] == 1
    else:  # the prompt, a step until the first position is old enough, then a token a step
        assert row["network_calls"] == 2 * (1 + 1 + 11)


def test_a_model_too_short_is_refused():
    with pytest.raises(ValueError, match="more than the 64 positions"):
        bench(NETWORK, {}, *STATIC, context=60, tokens=10, device=Limits(1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize("wrong", [{"tokens": 1}, {"passes": 0}])
def test_nothing_to_time_is_refused(wrong):
    with pytest.raises(ValueError, match="tokens must be at least 2 and passes at least 1"):
        bench(NETWORK, {}, *STATIC, context=8, device=Limits(1.0, 1.0, 1.0, 1.0), **wrong)


def test_limits_are_rates():
    measured = limits("bfloat16", weights=2**20, core=2**16, repeats=1)
    assert all(rate > 1e8 for rate in dataclasses.astuple(measured))
