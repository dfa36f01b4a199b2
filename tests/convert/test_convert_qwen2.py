"""The converter of Qwen2, Qwen3 and Llama: identity both ways, transformers, and an error for each refusal."""

import dataclasses
import importlib.util
import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from exports import WEIGHTS, assert_same, edit, fails, make_model, make_shards, rewrite
from safetensors.numpy import load_file

from convert import engine, qwen2, weights
from convert.cli import main
from paradec_jax import cli, store
from paradec_jax.config import TokenSpec
from paradec_jax.families import PRESETS

GOLDEN = Path(__file__).parents[1] / "golden" / "jacobi"
CONFIG = PRESETS["test-causal"]
CONFIGS = {
    "qwen2": CONFIG,
    "qwen2-untied-bfloat16": dataclasses.replace(
        CONFIG, tie_embeddings=False, dtype="bfloat16", param_dtype="bfloat16"
    ),
    "qwen3": dataclasses.replace(CONFIG, qkv_bias=False, qk_norm=True, head_channels=6, norm_eps=1e-5),
    "qwen3-biases": dataclasses.replace(CONFIG, qk_norm=True, tie_embeddings=False),
    "llama": dataclasses.replace(CONFIG, qkv_bias=False, tie_embeddings=False, rope_base=1234.5, kv_heads=4),
}
EMBEDDING, HEAD = qwen2.EMBEDDING, qwen2.HEAD
LAYER = "model.layers.1."
QUERY = LAYER + "self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Path]:
    """Hugging Face folders with random weights, one for each config."""
    folder = tmp_path_factory.mktemp("qwen2")
    for name, config in CONFIGS.items():
        store.save(folder / "model" / name, make_model(config))
        assert main(["export", str(folder / "model" / name), str(folder / name)]) == 0
    return {name: folder / name for name in CONFIGS}


@pytest.fixture
def source(exported, tmp_path) -> Path:
    """A copy of the Qwen2 to be spoilt."""
    return Path(shutil.copytree(exported["qwen2"], tmp_path / "source"))


@pytest.fixture
def llama(exported, tmp_path) -> Path:
    """A copy of the Llama, whose output matrix is its own."""
    return Path(shutil.copytree(exported["llama"], tmp_path / "source"))


class TestIdentity:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_export_then_import(self, name, exported, tmp_path):
        assert main(["import", str(exported[name]), str(tmp_path / "a")]) == 0
        assert_same(store.load(tmp_path / "a", host=True), make_model(CONFIGS[name]))
        assert json.loads((exported[name] / "config.json").read_text())["model_type"] == name.split("-")[0]

    @pytest.mark.parametrize("name", ["qwen2", "qwen2-untied-bfloat16"])
    def test_shards_and_back(self, name, exported, tmp_path):
        a, b, c = (str(tmp_path / x) for x in "abc")
        assert main(["import", str(exported[name]), a]) == 0
        assert main(["export", a, b, "--max-shard-gigabytes", "0.000002"]) == 0
        assert (tmp_path / "b" / weights.INDEX).is_file() and not (tmp_path / "b" / WEIGHTS).exists()
        assert main(["import", b, c]) == 0
        assert_same(store.load(c, host=True), make_model(CONFIGS[name]))

    @pytest.mark.parametrize("folder", [GOLDEN, GOLDEN / "overfit"], ids=["tied", "untied"])
    def test_recorded_models(self, folder, tmp_path):
        assert main(["import", str(folder), str(tmp_path / "a")]) == 0
        assert main(["export", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
        before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "b" / WEIGHTS)
        assert before.keys() == after.keys()
        for name in before:
            assert before[name].dtype == after[name].dtype
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
        old = json.loads((folder / "config.json").read_text())
        new = json.loads((tmp_path / "b" / "config.json").read_text())
        assert {n: new[n] for n in new.keys() & old.keys() - {"bos_token_id"}} == {
            n: old[n] for n in new.keys() & old.keys() - {"bos_token_id"}
        }
        assert old.keys() - new.keys() <= {
            "attention_dropout",
            "initializer_range",
            "max_window_layers",
            "rope_scaling",
            "sliding_window",
        }

    def test_layout(self, exported):
        """Entries of the parameters, picked by hand: torch keeps matrices as (out, in)."""
        tensors, c = load_file(exported["qwen2"] / WEIGHTS), CONFIG
        layer = make_model(CONFIG).params["layer_1"]
        attention, mlp = layer["attention"], layer["mlp"]
        head, row, channel = 1, 7, 3
        for name in "qkv":
            matrix = tensors[f"{LAYER}self_attn.{name}_proj.weight"]
            assert matrix[head * c.head_dim + channel, row] == attention[name][row, head, channel]
            vector = tensors[f"{LAYER}self_attn.{name}_proj.bias"]
            assert vector[head * c.head_dim + channel] == attention[f"{name}_bias"][head, channel]
        out = tensors[f"{LAYER}self_attn.o_proj.weight"]
        assert out[row, 2 * c.head_dim + channel] == attention["out"][2, channel, row]
        for name in ("gate", "up"):
            matrix = tensors[f"{LAYER}mlp.{name}_proj.weight"]
            assert matrix.shape == (c.feed_forward, c.width)
            assert matrix[5, row] == mlp[name][row, 5]
        assert tensors[f"{LAYER}mlp.down_proj.weight"][row, 5] == layer["mlp"]["down"][5, row]
        assert HEAD not in tensors

    def test_dtype_option_casts(self, source, tmp_path):
        assert main(["import", str(source), str(tmp_path / "a"), "--dtype", "bfloat16"]) == 0
        model = store.load(tmp_path / "a")
        assert (model.config.param_dtype, model.config.dtype) == ("bfloat16", "float32")
        want = make_model(CONFIG).params["layer_1"]["attention"]["q"].astype(ml_dtypes.bfloat16)
        assert np.asarray(model.params["layer_1"]["attention"]["q"]).tobytes() == want.tobytes()

    def test_what_newer_files_say_in_other_words(self, source, tmp_path):
        rope = {"rope_theta": CONFIG.rope_base, "rope_type": "default"}
        fields = {"torch_dtype": None, "dtype": "float32", "layer_types": ["full_attention"] * 2}
        edit(source / "config.json", rope_theta=None, rope_parameters=rope, head_dim=None, **fields)
        rewrite(source, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING]}))
        assert main(["import", str(source), str(tmp_path / "a")]) == 0
        assert_same(store.load(tmp_path / "a", host=True), make_model(CONFIG))

    def test_releases(self):
        """The presets give the numbers of the released files, and the other way round."""
        for name in ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "qwen2.5-coder-7b"):
            config = PRESETS[name]
            fields = qwen2.format_config(config, "qwen2")
            again = qwen2.CausalConfig(
                **qwen2.parse_config(fields), dtype=config.dtype, param_dtype=config.param_dtype
            )
            assert again == config
            assert (fields["max_position_embeddings"], fields["torch_dtype"]) == (32_768, "bfloat16")
        axes, rows = qwen2.table(config)
        assert sum(np.prod(s) for s in engine.table_shapes(rows, axes).values()) == 7_615_616_512

    def test_tensors_are_moved_one_at_a_time(self, exported, monkeypatch):
        """Import and export know the size of each tensor before they read any, and read one to make one."""
        seen = []
        read = weights.Checkpoint.read
        monkeypatch.setattr(
            weights.Checkpoint, "read", lambda self, n, *rows: seen.append(n) or read(self, n, *rows)
        )
        folder = exported["qwen3-biases"]
        tensors = load_file(folder / WEIGHTS)
        with qwen2.read(folder, engine.read_json(folder / "config.json")) as model:
            axes, rows = qwen2.table(model.config)
            lazies = engine.export_tree(model.params, rows, axes)
            zeros = [name for name in tensors if name.endswith("o_proj.bias")]
            assert sorted(seen) == sorted(zeros) and sorted([*lazies, *zeros]) == sorted(tensors)
            for name, lazy in lazies.items():
                assert lazy.nbytes == tensors[name].nbytes
                seen.clear()
                np.testing.assert_array_equal(lazy[...], tensors[name])
                assert seen == [name]


class TestTokens:
    @pytest.mark.parametrize(
        ("config", "generation", "want"),
        [
            ({}, None, TokenSpec()),
            ({"eos_token_id": 5, "pad_token_id": 7, "bos_token_id": 6}, None, TokenSpec(None, (5,), 7)),
            ({"eos_token_id": [5, 8]}, None, TokenSpec(None, (5, 8), 5)),
            ({"eos_token_id": 5}, {"eos_token_id": [8, 5], "pad_token_id": 9}, TokenSpec(None, (8, 5), 9)),
            ({"eos_token_id": None, "pad_token_id": 1}, {"eos_token_id": 2}, TokenSpec(None, (2,), 1)),
            ({"mask_token_id": 7}, None, TokenSpec(mask=7)),
        ],
    )
    def test_from_both_files(self, tmp_path, config, generation, want):
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        assert qwen2.parse_tokens(tmp_path, config, 32) == want

    def test_text_begins_with_what_the_tokenizer_puts_there(self, tmp_path):
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
        backend.save(str(tmp_path / "tokenizer.json"))
        assert qwen2.parse_tokens(tmp_path, {"bos_token_id": 0}, 32).bos is None
        template = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
        backend.post_processor = template
        backend.save(str(tmp_path / "tokenizer.json"))
        assert qwen2.parse_tokens(tmp_path, {"bos_token_id": 0}, 32).bos == 0
        assert qwen2.parse_tokens(tmp_path, {}, 32).bos == 0
        for other, config, file in ((1, "{}", "config"), (0, '{"add_bos_token": false}', "tokenizer_config")):
            (tmp_path / "tokenizer_config.json").write_text(config)
            with pytest.raises(
                engine.ConvertError, match=rf"tokenizer\.json.*{file}\.json|{file}\.json.*tokenizer"
            ):
                qwen2.parse_tokens(tmp_path, {"bos_token_id": other}, 32)
        (tmp_path / "tokenizer_config.json").unlink()
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(engine.ConvertError, match=r"tokenizer\.json"):
            qwen2.parse_tokens(tmp_path, {"bos_token_id": 0}, 32)

    @pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
    def test_ids_that_are_wrong(self, capsys, source, file):
        edit(source / file, eos_token_id="</s>")
        assert f"field eos_token_id of {file} must hold token ids" in fails(capsys, "import", source)
        edit(source / file, eos_token_id=32)
        assert "field eos_token_id holds 32" in fails(capsys, "import", source)


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"use_sliding_window": True}, "use_sliding_window .* must be False, not True"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .* each of 2 layers"),
            ({"layer_types": ["full_attention"]}, "layer_types .* each of 2 layers"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling .* scales .*yarn"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .* scales .*linear"),
            ({"rope_scaling": "dynamic"}, "rope_scaling .* scales .*dynamic"),
            ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters .* scales"),
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
                "rope_theta = 10000.0, rope_theta in rope_parameters = 5.0",
            ),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ({"hidden_act": "gelu"}, "hidden_act .* must be 'silu', not 'gelu'"),
            ({"mlp_bias": True}, "mlp_bias .* must be False"),
            ({"torch_dtype": "int8"}, "torch_dtype .*float32, bfloat16, float16, float64, not 'int8'"),
            ({"hidden_size": None}, "field hidden_size is missing"),
            ({"max_position_embeddings": None}, "field max_position_embeddings is missing"),
            ({"num_attention_heads": "4"}, "num_attention_heads .* type int, not '4'"),
            ({"num_key_value_heads": 3}, "no valid model: heads 4 must be a multiple of kv_heads 3"),
            ({"num_key_value_heads": 4}, r"k_proj\.bias has shape \(8,\), but .* \(16,\)"),
            ({"head_dim": 8}, r"k_proj\.bias has shape \(8,\), but .* \(16,\)"),
            ({"intermediate_size": 25}, r"mlp\.\S+ has shape"),
            ({"vocab_size": 64}, r"embed_tokens\.weight has shape \(32, 16\).*\(64, 16\)"),
            ({"num_hidden_layers": 3}, r"tensor model\.layers\.2\.\S+ is missing"),
            ({"num_hidden_layers": 1}, r"tensor model\.layers\.1\.\S+ .*is unknown"),
            ({"tie_word_embeddings": False}, r"lm_head\.weight is missing .*tie_word_embeddings"),
            ({"model_type": "llama"}, r"self_attn\.k_proj\.bias .*is unknown"),
            ({"model_type": "qwen3"}, r"self_attn\.k_norm\.weight is missing"),
            ({"model_type": "phi"}, "model_type must be one of .*qwen2, qwen3, llama, sdar, mdlm, not 'phi'"),
            ({"model_type": "qwen2_moe"}, "mixture of experts .model_type = 'qwen2_moe'., which is not"),
            ({"num_experts": 8}, "mixture of experts .num_experts = 8., which is not supported"),
        ],
    )
    def test_config_that_is_wrong(self, capsys, source, fields, message):
        edit(source / "config.json", **fields)
        assert re.search(message, fails(capsys, "import", source))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop(QUERY), f"tensor {QUERY} is missing"),
            (lambda t: t.update({LAYER + "extra": t[QUERY]}), f"tensor {LAYER}extra in .* is unknown"),
            (lambda t: t.update({QUERY: t[QUERY][1:]}), rf"tensor {QUERY} has shape \(15, 16\).*\(16, 16\)"),
            (lambda t: t.update({QUERY: t[QUERY].astype(np.float64)}), "is float64; choose .* --dtype"),
            (lambda t: t.update({QUERY: t[QUERY].astype(np.int8)}), "is I8"),
            (
                lambda t: t.update({HEAD: t[EMBEDDING] + 1}),
                r"lm_head\.weight differs from .*tie_word_embeddings",
            ),
            (lambda t: t.update({HEAD: t[EMBEDDING][1:]}), r"lm_head\.weight has shape"),
        ],
    )
    def test_tensors_that_are_wrong(self, capsys, source, change, message):
        rewrite(source, change)
        assert re.search(message, fails(capsys, "import", source))

    def test_output_matrix_of_its_own_is_missing(self, capsys, llama):
        rewrite(llama, lambda tensors: tensors.pop(HEAD))
        assert "lm_head.weight is missing" in fails(capsys, "import", llama)

    def test_bias_of_the_output_projection(self, capsys, exported, tmp_path):
        folder = Path(shutil.copytree(exported["qwen3-biases"], tmp_path / "source"))
        name = f"{LAYER}self_attn.o_proj.bias"
        rewrite(folder, lambda tensors: tensors.update({name: tensors[name] + 1}))
        assert f"tensor {name} is not zero" in fails(capsys, "import", folder)

    def test_missing_shard(self, capsys, source):
        make_shards(source)
        (source / "b.safetensors").unlink()
        assert "shard" in fails(capsys, "import", source)

    def test_export_to_the_layout_of_another_family(self, tmp_path):
        with pytest.raises(engine.ConvertError, match="recurrent_depth has no layout of qwen2"):
            qwen2.write(tmp_path, make_model(), 1000)
        with pytest.raises(engine.ConvertError, match="block_diffusion has no layout of qwen2"):
            qwen2.write(tmp_path, make_model(PRESETS["test-sdar"]), 1000)
        own = dataclasses.replace(make_model(CONFIG), token_spec=TokenSpec(alignment="own"))
        with pytest.raises(
            engine.ConvertError, match="only a model of alignment 'next' has a layout of qwen2"
        ):
            qwen2.write(tmp_path, own, 1000)


def test_commands_that_want_a_model_folder_name_the_converter(exported, capsys):
    folder = exported["llama"]
    sentence = f"convert it first: python -m convert import {folder} DST"
    with pytest.raises(store.StoreError, match=re.escape(sentence)):
        store.load(folder)
    for command in (["generate", "--model", str(folder), "a"], ["compare", str(folder)]):
        assert cli.main(command) == 1
        assert sentence in capsys.readouterr().err


class TestCheck:
    @pytest.mark.golden
    @pytest.mark.parametrize(("name", "tolerance"), [("random", "3e-4"), ("overfit", "1e-4")])
    def test_recorded_logits(self, name, tolerance, tmp_path, capsys):
        folder = GOLDEN / name if (GOLDEN / name).is_dir() else GOLDEN
        assert main(["import", str(folder), str(tmp_path / "model")]) == 0
        command = ["check", str(tmp_path / "model"), "--logits", str(GOLDEN / f"{name}_logits.npz")]
        assert main([*command, "--tolerance", tolerance]) == 0
        assert re.search(r"^logits: .* ok$", capsys.readouterr().out, re.MULTILINE)
        assert main([*command, "--tolerance", "1e-9"]) == 1

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"input_ids": np.array([[1, 2]])}, "there is no array logits"),
            ({"input_ids": np.array([[1, 2]]), "logits": np.zeros((1, 2, 9))}, r"\(1, 2, 9\).*\(1, 2, 32\)"),
            ({"input_ids": np.array([[1, 32]]), "logits": np.zeros((1, 2, 32))}, "beyond the vocabulary"),
        ],
    )
    def test_recordings_that_are_wrong(self, exported, tmp_path, capsys, arrays, message):
        np.savez(tmp_path / "logits.npz", **arrays)
        model = exported["qwen2"].parent / "model" / "qwen2"
        assert main(["check", str(model), "--logits", str(tmp_path / "logits.npz")]) == 1
        assert re.search(message, capsys.readouterr().err)


TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.skipif(not TORCH, reason="torch and transformers are not installed")
class TestTransformers:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_exported_files_load_with_equal_logits(self, name, exported):
        model = exported[name].parent / "model" / name
        assert main(["check", str(model), "--torch", str(exported[name]), "--tolerance", "2e-4"]) == 0

    @pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama"])
    def test_files_that_transformers_writes(self, kind, tmp_path):
        import torch
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.5,
            bos_token_id=1,
            eos_token_id=2,
            head_dim=6,
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
        assert main(["import", str(tmp_path / "source"), str(tmp_path / "model")]) == 0
        assert store.load(tmp_path / "model", host=True).token_spec == TokenSpec(None, (2,), 2)
        command = ["check", str(tmp_path / "model"), "--torch", str(tmp_path / "source")]
        assert main([*command, "--tolerance", "2e-4"]) == 0
