"""`paradec train head` on a tiny model of blocks: a head beside the same network, and what decoding
gains by it.
"""

import jax
import numpy as np
import pytest
from commands import ran, words

import paradec_jax as pd
from paradec_jax.cli import main

DIRECT = ("--init", "zero_gain", "--direct", "--packed", "--layers", 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), DIRECT])
def test_a_head_lies_beside_the_same_network(source, options, tmp_path):
    last = ran(source, tmp_path, *options, updates=3, objective="head")
    start, made = pd.load(source / "sdar"), pd.load(tmp_path / "model")
    assert made.decoder == f"residual --head-steps 2 --mix {'none' if options else 'sum'}"
    assert made.head.config.layers == 1 and made.head.config.param_dtype == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, dict(made.params), dict(start.params))
    assert np.asarray(made.head.params["final_norm"]).any()
    assert last["before"]["kl_ratio"] == 1 != last["after"]["kl_ratio"]
    assert last["before"].keys() == last["after"].keys() > {"tokens a call", "equal to one by one"}


def test_a_head_has_no_adapter(source, tmp_path, capsys):
    assert main(words(source, tmp_path / "run", "--lora", 2, objective="head")) == 1
    assert (
        "lora is no option of head" in capsys.readouterr().err and not (tmp_path / "run").exists()
    )
