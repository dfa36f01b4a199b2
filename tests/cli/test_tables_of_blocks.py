"""What the table of `paradec compare` shows of block diffusion beside the other families."""

import numpy as np

from paradec_jax.cli.tables import print_table
from paradec_jax.evaluate.compare import Comparison

ROW = {
    "model": "m",
    "decoder": "block",
    "problems": 2,
    "exact": 1,
    "interval": [0.1, 0.9],
    "tokens_per_second": 10.0,
    "speedup": 1.0,
    "speedup_interval": [1.0, 1.0],
    "decode_speedup": 1.0,
    "network_calls_per_token": 0.5,
    "tokens_per_network_call": 2.0,
    "recurrences_per_token": 0.5,
    "positions_per_token": 4.25,
    "head_calls_per_token": 0.75,
    "flops_per_token": 3.5e6,
    "equals_greedy": 1.0,
    "batch": 1,
    "timed_problems": 1,
    "passes": [1.0],
    "dtype": "float32",
    "device": "cpu",
    "core_pass_microseconds": None,
}


def shown(capsys, **changes):
    rows = [ROW | changes]
    print_table(Comparison(rows, ["rule static"], 0, np.ones((1, 2), bool), {}), (2, 4), 1, "test")
    return capsys.readouterr().out


def test_positions_head_calls_and_operations(capsys):
    out = shown(capsys, family="block_diffusion")
    assert "4.25" in out and "0.75" in out and "3.50" in out and "MFLOP/token: an estimate" in out
    out = shown(capsys, family="block_diffusion", flops_per_token=None)
    assert "3.50" not in out and "0.75" in out
    out = shown(capsys, family="causal")
    assert "4.25" not in out and "MFLOP" not in out
