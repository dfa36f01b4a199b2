"""SDAR's folders: import, export, import is the identity; recorded logits; what config.json leaves out; refusals."""

import dataclasses
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from exports import WEIGHTS, assert_same, edit, fails, rewrite
from safetensors.numpy import load_file

from convert import engine, mrp, qwen2, sdar, weights
from convert.cli import main
from convert.engine import ConvertError, read_json
from paradec_jax import store
from paradec_jax.config import TokenSpec
from paradec_jax.families import PRESETS

GOLDEN = Path(__file__).parents[1] / "golden" / "block_diffusion"
CONFIG = dataclasses.replace(PRESETS["test-sdar"], head_channels=6, block=8)
SPEC = TokenSpec(bos=3, stop=(1, 2), pad=4, mask=30, alignment="own")
MODELS = {
    "own": (CONFIG, SPEC),
    "next, several lengths": (
        dataclasses.replace(CONFIG, blocks=(4, 8)),
        dataclasses.replace(SPEC, alignment="next"),
    ),
    "bfloat16": (dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="bfloat16"), SPEC),
    "tied, biases": (dataclasses.replace(CONFIG, tie_embeddings=True, qkv_bias=True, block=4), SPEC),
}


def make_model(config=CONFIG, spec=SPEC) -> store.Model:
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), store.expected_shapes(config))
    return store.Model(config, params, spec)


@pytest.fixture
def source(tmp_path) -> Path:
    """The recorded folder, to be spoilt."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("config.json", WEIGHTS):
        shutil.copyfile(GOLDEN / name, folder / name)
    return folder


def imported(source: Path, *options: str) -> store.Model:
    """What the command makes of a folder."""
    target = source.parent / "model"
    assert main(["import", str(source), str(target), "--overwrite", *options]) == 0
    return store.load(target, host=True)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_from_an_export(name, tmp_path):
    model = make_model(*MODELS[name])
    store.save(tmp_path / "model", model)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "exported")]) == 0
    assert main(["import", str(tmp_path / "exported"), str(tmp_path / "again")]) == 0
    again = store.load(tmp_path / "again", host=True)
    assert_same(again, model)
    assert (again.network.visibility, again.network.block) == ("block", model.config.block)
    assert store.fingerprint(tmp_path / "again") == store.fingerprint(tmp_path / "model")


def test_recorded_weights_are_exported_as_they_came(source, tmp_path):
    assert imported(source).token_spec == TokenSpec(None, (1,), 1, 150, "own")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "exported")]) == 0
    want, got = (load_file(folder / WEIGHTS) for folder in (GOLDEN, tmp_path / "exported"))
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array, err_msg=name)
    fields, again = read_json(GOLDEN / "config.json"), read_json(tmp_path / "exported" / "config.json")
    assert (again["architectures"], again["model_type"]) == (["SDARForCausalLM"], "sdar")
    shared = (again.keys() & fields.keys()) - {"bos_token_id", "use_cache"}
    assert {name: again[name] for name in shared} == {name: fields[name] for name in shared}
    assert {"block_size", "mask_token_id", "rope_theta", "tie_word_embeddings"} <= shared
    assert sdar.ALIGNMENT not in again


def test_recorded_logits(source, tmp_path, capsys):
    model = imported(source)
    with np.load(GOLDEN / "forward.npz", allow_pickle=False) as arrays:
        recorded = {"input_ids": arrays["full_ids"][None], "logits": arrays["full_logits"][None]}
    np.savez(tmp_path / "logits.npz", **recorded)
    command = ["check", "--logits", str(tmp_path / "logits.npz"), "--tolerance", "2e-4"]
    assert main([*command, str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.endswith("ok\n")
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, block=2))
    store.save(tmp_path / "other", other)
    assert main([*command, str(tmp_path / "other")]) == 1
    assert main(["check", str(tmp_path / "model"), "--torch", str(source)]) == 1
    assert re.search("--torch needs|runs on a GPU alone", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["sdar-1.7b", "sdar-4b", "sdar-8b"])
def test_releases(name):
    """The presets give the numbers of the released files, which tell no block length, and the other way round."""
    config = PRESETS[name]
    fields = qwen2.format_config(config, "sdar")
    assert (fields["head_dim"], fields["attention_bias"], fields["tie_word_embeddings"]) == (
        128,
        False,
        False,
    )
    dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    assert dataclasses.replace(sdar.parse_config(fields), **dtypes) == config
    axes, rows = qwen2.table(config)
    shapes = engine.table_shapes(rows, axes)
    assert len(shapes) == 11 * config.layers + 3
    assert sdar.parse_tokens(Path("nowhere"), fields, config.vocab_size, None, None).mask == 151_669


def test_what_config_json_leaves_out_is_told_by_the_caller(source, capsys):
    edit(source / "config.json", block_size=None, mask_token_id=None)
    assert "vocabulary of 160, not 151669: name it with --mask" in fails(capsys, "import", source)
    model = imported(source, "--mask", "150")
    assert (model.config.block, model.token_spec) == (4, TokenSpec(None, (1,), 1, 150, "own"))
    model = imported(source, "--mask", "149", "--block", "16", "--alignment", "next")
    assert (model.config.block, model.token_spec) == (16, TokenSpec(None, (1,), 1, 149, "next"))


def test_the_caller_is_right_where_config_json_says_something_else(source):
    edit(source / "config.json", block_size=8, alignment="next")
    assert (imported(source).config.block, imported(source).token_spec.alignment) == (8, "next")
    model = imported(source, "--mask", "7", "--block", "2", "--alignment", "own")
    assert (model.config.block, model.token_spec.mask, model.token_spec.alignment) == (2, 7, "own")


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"block_size": 0}, [], "no valid model: block must be between 1 and max_length 512, not 0"),
        ({"block_size": "4"}, [], "field block_size of config.json must be of type int, not '4'"),
        ({}, ["--block", "513"], "no valid model: block must be between 1 and max_length 512, not 513"),
        ({"block_sizes": "4"}, [], "field block_sizes of config.json must hold whole numbers, not '4'"),
        ({"block_sizes": [4, 8]}, ["--block", "2"], "no valid model: .* with block 2 among them"),
        ({}, ["--mask", "160"], "must be an id of the vocabulary of 160, not 160"),
        ({}, ["--mask", "-1"], "must be an id of the vocabulary of 160, not -1"),
        (
            {"mask_token_id": 160},
            [],
            "field mask_token_id holds 160, but config.json has a vocabulary of 160",
        ),
        (
            {"alignment": "previous"},
            [],
            "field alignment of config.json must be 'own' or 'next', not 'previous'",
        ),
        (
            {"model_type": "sdar_moe"},
            [],
            "a mixture of experts .model_type = 'sdar_moe'., which is not supported",
        ),
        ({"num_experts": 128}, [], "a mixture of experts .num_experts = 128., which is not supported"),
        ({"num_hidden_layers": 4}, [], r"tensor model\.layers\.3\.\S+ is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, [], "rope_scaling .* scales"),
        ({"tie_word_embeddings": True}, [], r"lm_head\.weight differs from .*tie_word_embeddings"),
    ],
)
def test_configs_and_options_that_are_wrong(source, capsys, fields, options, message):
    edit(source / "config.json", **fields)
    assert re.search(message, fails(capsys, "import", source, *options))


def test_tensors_that_are_wrong(source, capsys):
    name = "model.layers.1.self_attn.q_norm.weight"
    rewrite(source, lambda tensors: tensors.update({"model.extra": tensors[name]}))
    assert "tensor model.extra in " in fails(capsys, "import", source)
    rewrite(source, lambda tensors: tensors.pop("model.extra"))
    rewrite(source, lambda tensors: tensors.pop(name))
    assert f"tensor {name} is missing" in fails(capsys, "import", source)


def test_a_residual_head_is_told_apart_from_its_backbone(source, capsys):
    name = f"{mrp.PREFIX}enorm.weight"
    rewrite(source, lambda tensors: tensors.update({name: np.arange(64, dtype=np.float32)}))
    assert "field num_nextn_predict_layers is missing" in fails(capsys, "import", source)
    with weights.opened(source) as checkpoint:
        backbone, head = engine.parted(checkpoint, mrp.PREFIX)
        assert backbone.names == load_file(GOLDEN / WEIGHTS).keys() and head.names == {"enorm.weight"}
        assert (head.folder, head.shape("enorm.weight"), head.dtype("enorm.weight")) == (
            source,
            (64,),
            "float32",
        )
        np.testing.assert_array_equal(head.read("enorm.weight", slice(3, 5)), [3, 4])


def test_options_of_block_diffusion_are_refused_elsewhere(source, tmp_path, capsys):
    edit(source / "config.json", model_type="qwen3")
    for option in (["--block", "4"], ["--mask", "3"], ["--alignment", "own"]):
        want = f"{option[0]} is for models of block diffusion, but {source} holds another"
        assert want in fails(capsys, "import", source, *option)
    checkpoint = source / "last.ckpt"
    checkpoint.touch()
    assert main(["import", str(checkpoint), str(tmp_path / "x"), "--block", "4"]) == 1
    assert "--block is for models of block diffusion" in capsys.readouterr().err


def test_export_of_what_the_layout_cannot_hold(tmp_path):
    for model, message in (
        (make_model(spec=dataclasses.replace(SPEC, mask=None)), "and with a mask has the sdar layout"),
        (make_model(dataclasses.replace(CONFIG, qk_norm=False)), "norms of queries and keys and with a mask"),
        (make_model(PRESETS["test-causal"]), "a model of family causal has no sdar layout"),
    ):
        with pytest.raises(ConvertError, match=message):
            sdar.write(tmp_path, model, 1000)
    assert not list(tmp_path.iterdir())
