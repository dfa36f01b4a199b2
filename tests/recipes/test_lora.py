"""`paradec train sft --lora R`: an adapter beside the merged model, and a run that goes on to the bit."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from small_tokenizers import byte_level

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.families import PRESETS, init_params


@pytest.fixture
def start(tmp_path):
    """A random model with a tokenizer, and lines of data."""
    words = byte_level()
    config = dataclasses.replace(PRESETS["test-causal"], vocab_size=words.vocab_size, param_dtype="bfloat16")
    model = pd.Model(
        config, init_params(config, jax.random.key(0)), pd.TokenSpec(bos=1, stop=(2,), pad=0), words
    )
    pd.save(tmp_path / "start", model)
    lines = [{"prompt": f"ab {i} a", "response": "b a"[: 1 + i % 3]} for i in range(20)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def trained(root, name, *options):
    files = ["--model", str(root / "start"), "--data", str(root / "lines.jsonl"), "--out", str(root / name)]
    rates = ["--learning-rate", "0.02", "--batch-tokens", "64", "--lora", "2", "--updates", "4"]
    assert main(["train", "sft", *files, *rates, *options]) == 0
    return pd.load(root / name / "model").params


@pytest.mark.parametrize("options", [(), ("--layers", "0.5", "--optimizer", "muon")], ids=str)
def test_the_start_with_the_adapter_is_the_trained_model(options, start):
    """Also where the call ended after its first update and went on."""
    with pytest.raises(SystemExit):
        trained(start, "stopped", "--minutes", "0", *options)
    params, again = trained(start, "run", *options), trained(start, "stopped", *options)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, again)))
    loaded = pd.load(start / "start", adapter=start / "run" / "adapter").params
    before = pd.load(start / "start").params
    same = jax.tree.map(np.array_equal, params, before)
    assert same["embedding"] and not same["layer_1"]["attention"]["q"]
    assert same["layer_0"]["attention"]["q"] == bool(options)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        assert a.dtype == b.dtype == "bfloat16"
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=2**-7, atol=1e-6)
