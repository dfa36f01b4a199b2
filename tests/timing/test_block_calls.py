"""Kinds of calls of block diffusion: what they read and write, what they cost, at toy size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stubs.blocks import tiny_blocks, tiny_blocks_params, tiny_head, tiny_head_params

from paradec_jax import cli
from paradec_jax.timing import block_calls
from paradec_jax.timing.bench import Limits
from paradec_jax.timing.block_calls import Kind, cost_of, kinds, loop_of, network_calls

BLOCK, CONTEXT = 4, 8


def both():
    return {
        "network": tiny_blocks().prepare(tiny_blocks_params()),
        "head": tiny_head().prepare(tiny_head_params()),
    }


def test_positions_of_each_kind():
    widths = {kind.name: kind.positions(BLOCK) for kind in kinds((2, 3))}
    wanted = {
        "narrow": 4,
        "wide": 8,
        "head": 4,
        "verifying 2": 8,
        "riding 2": 12,
        "verifying 3": 12,
        "riding 3": 16,
    }
    assert widths == wanted


def test_a_candidate_alone_and_among_others_says_the_same():
    """Three equal candidates predict what a narrow call predicts, and write the same keys."""
    network, params = tiny_blocks(), both()["network"]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, BLOCK)), jnp.int32)
    at = jnp.full(2, CONTEXT, jnp.int32)
    cache = network.init_cache(jax.random.split(jax.random.key(0), 2), CONTEXT + 2 * BLOCK)
    one, said = network_calls(network, Kind("narrow"), params, (cache, tokens), at, 1)
    kind = Kind("verifying 3", 3)
    other, of_three = network_calls(network, kind, params, (cache, jnp.tile(tokens, (1, 3))), at, 1)
    np.testing.assert_array_equal(of_three, jnp.tile(said, (1, 3)))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rows_say_what_a_call_costs(monkeypatch):
    monkeypatch.setattr(block_calls, "LONG", 0.0)
    network, head, device = tiny_blocks(), tiny_head(), Limits(1e9, 1e9, 1e9, 1e9)
    rows = block_calls.block_calls(
        network, head, both(), device, batch=2, context=CONTEXT + 1, candidates=(2,), passes=2
    )
    found = {row["call"]: row for row in rows}
    assert list(found) == ["narrow", "wide", "head", "verifying 2", "riding 2"]
    narrow, asked = found["narrow"], found["head"]
    assert narrow["context"] == CONTEXT and narrow["of_narrow"] == 1 and narrow["break_even"] is None
    for row in rows:
        assert len(row["each"]) == 2 and row["read_fraction"] == pytest.approx(
            row["call_bytes"] / 1e3 / row["microseconds"]
        )
    spent = found["verifying 2"]["microseconds"] + asked["microseconds"]
    assert found["verifying 2"]["break_even"] == pytest.approx(spent / narrow["microseconds"] - 1)
    # The head's scores are the network's output matrix.
    own = head.work(2, BLOCK, CONTEXT)
    matrix = 32 * 16
    assert cost_of(network, head, Kind("head", 0), 2, CONTEXT) == (
        own.bytes + 4 * matrix,
        own.flops + 2 * matrix * 2 * BLOCK,
    )


def test_a_loop_is_as_long_as_a_timing_needs(monkeypatch):
    monkeypatch.setattr(block_calls, "LONG", 0.0)
    loop = loop_of(tiny_blocks(), tiny_head(), both(), Kind("head", 0), 1, CONTEXT)
    assert loop.steps == block_calls.FIRST and loop() > 0
    assert loop.buffers[1].shape == (1, BLOCK) and np.isfinite(loop.buffers[2]).all()


def test_what_cannot_be_timed_is_refused():
    for wrong in ({"passes": 0}, {"context": 124}):
        with pytest.raises(ValueError, match="need a pass and room for two blocks"):
            block_calls.block_calls(tiny_blocks(), tiny_head(), {}, Limits(1.0, 1.0, 1.0, 1.0), **wrong)


@pytest.mark.slow
def test_the_command(capsys):
    sizes = ["--context", "8", "--tokens", "8", "--passes", "1", "--candidates", "2", "--head-layers", "1"]
    assert cli.main(["bench", "--preset", "test-sdar", "--block-length", "8", *sizes]) == 0
    out = capsys.readouterr().out
    assert "8 steps of 8" in out and "4 steps of 8" in out and "kinds of calls, blocks of 8" in out
    assert "riding 2" in out and "break-even" in out
    assert cli.main(["bench", "--preset", "test-causal", "--block-length", "8"]) == 1
    assert "--block-length 8 is for block diffusion" in capsys.readouterr().err
