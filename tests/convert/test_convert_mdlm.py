"""MDLM's and SDTT's folders: import, export, import is the identity; recorded logits; configs that are wrong."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from exports import assert_same, edit, fails
from safetensors.numpy import load_file

from convert import mdlm
from convert.cli import main
from convert.engine import ConvertError, read_json
from paradec_jax import store
from paradec_jax.config import TokenSpec
from paradec_jax.families import PRESETS

GOLDEN = Path(__file__).parents[1] / "golden" / "masked_diffusion"
CONFIG = PRESETS["test-mdlm"]
WEIGHTS = "model.safetensors"


@pytest.fixture
def source(tmp_path) -> Path:
    """A Hugging Face folder to be spoilt."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("config.json", WEIGHTS):
        shutil.copyfile(GOLDEN / name, folder / name)
    return folder


def make_model(config=CONFIG, spec=None) -> store.Model:
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), store.expected_shapes(config))
    return store.Model(config, params, spec or TokenSpec(bos=3, stop=(1, 2), pad=4, mask=31, alignment="own"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_comes_back_from_an_export(tmp_path, dtype):
    model = make_model(
        CONFIG.__class__(**CONFIG.to_dict() | {"dtype": dtype, "param_dtype": dtype, "dropout": 0.0})
    )
    store.save(tmp_path / "model", model)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "exported")]) == 0
    assert main(["import", str(tmp_path / "exported"), str(tmp_path / "again")]) == 0
    assert_same(store.load(tmp_path / "again", host=True), model)
    assert store.load(tmp_path / "again").network.visibility == "full"


def test_recorded_weights_are_exported_as_they_came(source, tmp_path):
    assert main(["import", str(source), str(tmp_path / "model")]) == 0
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "exported")]) == 0
    want, got = (load_file(folder / WEIGHTS) for folder in (GOLDEN, tmp_path / "exported"))
    assert got.keys() == want.keys()
    for name, array in want.items():
        close = {"rtol": 1e-6} if name.endswith(mdlm.ROPE) else {"rtol": 0}
        np.testing.assert_allclose(got[name], array, err_msg=name, **close)
    fields, again = read_json(GOLDEN / "config.json"), read_json(tmp_path / "exported" / "config.json")
    assert again.keys() >= fields.keys() and all(again[name] == value for name, value in fields.items())
    assert again["mask_token_id"] == fields["vocab_size"] - 1


def test_recorded_logits(source, tmp_path, capsys):
    assert main(["import", str(source), str(tmp_path / "model")]) == 0
    with np.load(GOLDEN / "forward.npz", allow_pickle=False) as arrays:
        np.savez(tmp_path / "logits.npz", input_ids=arrays["xt"], logits=arrays["raw_logits"])
    options = ["--logits", str(tmp_path / "logits.npz"), "--tolerance", "1e-4"]
    assert main(["check", str(tmp_path / "model"), *options]) == 0
    assert capsys.readouterr().out.endswith("ok\n")
    assert main(["check", str(tmp_path / "model"), "--torch", str(source)]) == 1
    assert re.search("--torch needs|runs on a GPU alone", capsys.readouterr().err)


def test_special_tokens_of_known_vocabularies():
    assert mdlm.parse_tokens({}, 50_258) == TokenSpec(50_256, (50_256,), 50_256, 50_257, "own")
    assert mdlm.parse_tokens({}, 30_522).mask == 103 and mdlm.parse_tokens({}, 35).mask == 4
    assert mdlm.parse_tokens({"eos_token_id": 5}, 128) == TokenSpec(None, (5,), 5, 127, "own")
    given = {"mask_token_id": 9, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}
    assert mdlm.parse_tokens(given, 50_258) == TokenSpec(1, (2, 3), 0, 9, "own")
    with pytest.raises(
        ConvertError, match=r"mask_token_id holds 128, but config.json has a vocabulary of 128"
    ):
        mdlm.parse_tokens({"mask_token_id": 128}, 128)
    with pytest.raises(ConvertError, match="a mask and of alignment 'own'"):
        mdlm.format_tokens(TokenSpec(mask=3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cond_dim": None}, "field cond_dim is missing"),
        ({"n_heads": "4"}, "field n_heads of config.json must be of type int"),
        ({"n_heads": 5}, "describes no valid model: width 64 must split into 5 heads"),
        (
            {"vocab_size": 127},
            r"linear.bias has shape \(128,\), but config.json asks for \(127,\)",
        ),
        ({"time_conditioning": True}, "field time_conditioning of config.json must be False"),
        ({"n_blocks": 3}, "tensor blocks.2.* is missing"),
        ({"model_type": "ddit"}, "model_type must be one of .*mdlm, not 'ddit'"),
    ],
)
def test_configs_that_are_wrong(source, capsys, fields, message):
    edit(source / "config.json", **fields)
    assert re.search(message, fails(capsys, "import", source))


def test_training_configs(source, tmp_path, capsys):
    nested = read_json(GOLDEN / "sdtt_config.json")
    (source / "config.json").write_text(json.dumps(nested | {"parameterization": "sedd"}))
    assert "field parameterization of config.json must be 'subs', not 'sedd'" in fails(
        capsys, "import", source
    )
    (source / "config.json").write_text(
        json.dumps(nested | {"parameterization": "subs", "torch_dtype": "bfloat16"})
    )
    assert main(["import", str(source), str(tmp_path / "model")]) == 0
    config = store.load(tmp_path / "model", host=True).config
    assert (config.vocab_size, config.max_length, config.dtype) == (128, 32, "bfloat16")
    del nested["model"]["length"]
    (source / "config.json").write_text(json.dumps(nested))
    assert main(["import", str(source), str(tmp_path / "other")]) == 1
    assert "field model_length is missing" in capsys.readouterr().err
