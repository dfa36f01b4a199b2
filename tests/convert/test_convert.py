"""Converters: identity both ways, the golden model, and what a config.json says or must not say."""

import dataclasses
import json
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from exports import (
    CONFIG,
    GOLDEN,
    QKV,
    ROOT,
    WEIGHTS,
    WTE,
    assert_same,
    edit,
    fails,
    make_model,
    rewrite,
)
from safetensors.numpy import load_file

from convert import engine, huginn, weights
from convert.cli import main
from paradec_jax import store
from paradec_jax.config import RecurrentDepthConfig, TokenSpec
from paradec_jax.disk.writing import write_tensors
from paradec_jax.families import PRESETS


class TestIdentity:
    @pytest.mark.parametrize("shard", ["5", "0.000004"], ids=["one file", "shards"])
    @pytest.mark.parametrize(
        "config",
        [
            CONFIG,
            dataclasses.replace(CONFIG, param_dtype="bfloat16", dtype="bfloat16", prelude_layers=2),
            dataclasses.replace(
                CONFIG,
                qk_bias=False,
                tie_embeddings=False,
                rope_base=1234.5,
                remat="iteration",
                norm_eps=1e-5,
            ),
        ],
        ids=["float32", "bfloat16", "untied"],
    )
    def test_export_then_import(self, config, shard, tmp_path):
        model, a, b, c = make_model(config), *(tmp_path / name for name in "abc")
        store.save(a, model)
        assert main(["export", str(a), str(b), "--max-shard-gigabytes", shard]) == 0
        assert main(["import", str(b), str(c)]) == 0
        assert_same(store.load(c, host=True), model)
        assert (b / weights.INDEX).is_file() == (not (b / WEIGHTS).is_file()) == (shard != "5")

    def test_import_then_export_golden(self, tmp_path):
        assert main(["import", str(GOLDEN), str(tmp_path / "a")]) == 0
        assert main(["export", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
        before, after = load_file(GOLDEN / WEIGHTS), load_file(tmp_path / "b" / WEIGHTS)
        assert before.keys() == after.keys()
        np.testing.assert_allclose(before.pop("freqs_cis"), after.pop("freqs_cis"), atol=2e-6)
        for name in before:
            assert before[name].dtype == after[name].dtype
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
        fields = json.loads((GOLDEN / "config.json").read_text())
        del fields["transformers_version"]
        assert json.loads((tmp_path / "b" / "config.json").read_text()) == fields | {"pad_token_id": 0}

    def test_prefix_and_copy_of_the_embedding_change_nothing(self, source, tmp_path):
        def change(tensors):
            tensors["lm_head.weight"] = tensors[WTE]
            for name in list(tensors):
                tensors[huginn.PREFIX + name] = tensors.pop(name)

        rewrite(source, change)
        assert main(["import", str(source), str(tmp_path / "model")]) == 0
        assert_same(store.load(tmp_path / "model", host=True), make_model())

    def test_rope_table_may_be_absent_or_rounded(self, source, tmp_path):
        rewrite(source, lambda t: t.update(freqs_cis=t["freqs_cis"].astype(ml_dtypes.bfloat16)))
        assert main(["import", str(source), str(tmp_path / "a")]) == 0
        rewrite(source, lambda t: t.pop("freqs_cis"))
        assert main(["import", str(source), str(tmp_path / "b")]) == 0
        assert_same(store.load(tmp_path / "a"), store.load(tmp_path / "b"))

    def test_dtype_option_casts(self, source, tmp_path):
        assert main(["import", str(source), str(tmp_path / "model"), "--dtype", "bfloat16"]) == 0
        model = store.load(tmp_path / "model")
        assert (model.config.param_dtype, model.config.dtype) == ("bfloat16", "float32")
        want = make_model().params["adapter"].astype(ml_dtypes.bfloat16)
        assert np.asarray(model.params["adapter"]).tobytes() == want.tobytes()

    def test_layout(self, exported):
        """Entries of fused tensors, picked by hand from the specification of the release."""
        tensors, params, c = load_file(exported / WEIGHTS), make_model().params, CONFIG
        core = params["core_1"]
        d, channels, row = c.width, c.head_dim, 3
        for i, which in enumerate("qkv"):
            assert tensors[QKV][i * d + channels + row, 5] == core["attention"][which][5, 1, row]
        name = "transformer.core_block.1."
        assert tensors[name + "attn.proj.weight"][7, channels + row] == core["attention"]["out"][1, row, 7]
        for i, which in enumerate("qk"):
            bias = core["attention"][f"{which}_bias"]
            assert tensors[name + "attn.qk_bias"][i, 0, 1, row] == bias[1, row]
        fc = tensors[name + "mlp.fc.weight"]
        assert fc[row, 7] == core["mlp"]["gate"][7, row]
        assert fc[c.feed_forward + row, 7] == core["mlp"]["up"][7, row]
        assert tensors["transformer.adapter.weight"][2, d + 1] == params["adapter"][d + 1, 2]

    def test_stacked_layers(self, tmp_path):
        row = engine.Row("part/w", "part.{i}.w", "a b -> b a", layers=2)
        axes = {"a": 2, "b": 3}
        params = {"part": {"w": np.arange(12, dtype=np.float32).reshape(2, 3, 2)}}
        write_tensors(tmp_path, engine.export_tree(params, [row], axes), 1000)
        with weights.opened(tmp_path) as checkpoint:
            assert checkpoint.shape("part.1.w") == row.shapes(axes)["part.1.w"] == (2, 3)
            again = engine.import_tree(checkpoint, [row], axes, "float32")["part"]["w"]
            np.testing.assert_array_equal(again[...], params["part"]["w"])


class TestConfig:
    def test_aliases_and_defaults(self, source, tmp_path):
        fields = source / "config.json"
        edit(fields, n_heads=None, num_key_value_heads=None, num_attention_heads=2, rope_base=None)
        edit(fields, vocab_size=None, torch_dtype=None, norm_eps=None, qk_bias=None, tie_embeddings=None)
        assert main(["import", str(source), str(tmp_path / "model")]) == 0
        assert store.load(tmp_path / "model").config == CONFIG

    def test_release(self):
        """The preset gives the numbers of the released config.json, and the other way round."""
        config = PRESETS["huginn-0125"]
        fields = huginn.format_config(config)
        assert fields["init_values"]["std"] == pytest.approx(0.0087039, rel=1e-5)
        assert fields["init_values"]["out_proj"] == pytest.approx(0.00053569, rel=1e-5)
        assert fields["init_values"]["embed_scale"] == pytest.approx(72.6636, rel=1e-6)
        assert (fields["effective_expected_depth"], fields["head_dim"]) == (132, 96)
        assert fields["torch_dtype"] == "bfloat16"
        assert RecurrentDepthConfig(**huginn.parse_config(fields), dtype="bfloat16") == config
        axes, rows = huginn.table(config)
        sizes = {name: np.prod(shape) for name, shape in engine.table_shapes(rows, axes).items()}
        assert sum(sizes.values()) == 3_564_976_800

    @pytest.mark.parametrize(
        ("vocab_size", "fields", "want"),
        [
            (128, {}, TokenSpec()),
            (128, {"eos_token_id": 5, "bos_token_id": 6, "pad_token_id": 7}, TokenSpec(6, (5,), 7)),
            (128, {"eos_token_id": [5, 65505], "bos_token_id": 65504}, TokenSpec(None, (5,), 0)),
            (65536, {}, TokenSpec(65504, (65504, 65505, 65508), 65509)),
            (65536, {"eos_token_id": 65505}, TokenSpec(65504, (65504, 65505, 65508), 65509)),
            (65536, {"eos_token_id": 9, "pad_token_id": 0}, TokenSpec(65504, (65504, 65505, 65508, 9), 0)),
        ],
    )
    def test_special_tokens(self, vocab_size, fields, want):
        assert huginn.parse_tokens(fields, vocab_size) == want

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"model_type": "mamba"}, "model_type must be one of huginn_raven, qwen2, .*, not 'mamba'"),
            ({"model_type": ["llama"]}, "model_type"),
            ({"n_embd": None}, "field n_embd is missing"),
            ({"n_embd": "16"}, "field n_embd .* type int, not '16'"),
            ({"n_embd": 0, "head_dim": 0}, "no valid model: width must be at least 1"),
            ({"n_heads": 4}, "n_heads = 4, num_key_value_heads = 2"),
            ({"padded_vocab_size": 64}, "vocab_size = 32, padded_vocab_size = 64"),
            ({"head_dim": 4}, "field head_dim .* is 4, but the others make it 8"),
            ({"n_layers": 7}, "field n_layers .* is 7, but the others make it 4"),
            ({"injection_type": "add"}, "field injection_type .* must be 'linear', not 'add'"),
            ({"test_time_noise": 0.1}, "field test_time_noise"),
            ({"bias": True}, "field bias"),
            ({"torch_dtype": "int8"}, "field torch_dtype .*float32, bfloat16, float16, float64, not 'int8'"),
            ({"eos_token_id": ["a"]}, "field eos_token_id"),
            ({"rope_base": 10000}, "freqs_cis contradicts rope_base 10000"),
            ({"block_size": 32}, r"freqs_cis has shape \(1, 64, 1, 4, 2\).*\(1, 32, 1, 4, 2\)"),
            ({"intermediate_size": 25}, r"mlp.*weight has shape .*config\.json asks for"),
            ({"vocab_size": 64, "padded_vocab_size": 64}, r"wte\.weight has shape \(32, 16\).*\(64, 16\)"),
            ({"n_layers_in_coda": 2, "n_layers": 5}, r"tensor transformer\.coda\.1\.\S+ is missing"),
            (
                {"n_layers_in_recurrent_block": 1, "n_layers": 3},
                r"tensor transformer\.core_block\.1\S+ .*unknown",
            ),
            ({"qk_bias": False}, r"tensor \S+qk_bias .*unknown"),
            ({"tie_embeddings": False}, r"tensor lm_head\.weight is missing"),
        ],
    )
    def test_config_that_is_wrong(self, capsys, source, fields, message):
        edit(source / "config.json", **fields)
        assert re.search(message, fails(capsys, "import", source))


def test_command_line(tmp_path):
    """The module runs as a program and its exit code reaches the shell."""
    command = [sys.executable, "-m", "convert", "import", str(tmp_path / "none"), str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: there is no folder {tmp_path / 'none'}\n"
    assert not list(tmp_path.iterdir())
