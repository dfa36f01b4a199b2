"""Converters: identity both ways, the golden model, and one clear error for each way of being wrong."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from convert import engine, huginn, torch_check
from convert.cli import main
from paradec_jax import store
from paradec_jax.config import PRESETS, RecurrentDepthConfig, TokenSpec

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "recurrent_depth"
CONFIG = PRESETS["test-recurrent"]
WEIGHTS = "model.safetensors"
WTE = "transformer.wte.weight"
QKV = "transformer.core_block.1.attn.Wqkv.weight"


def make_model(config: RecurrentDepthConfig = CONFIG) -> store.Model:
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), store.expected_shapes(config))
    return store.Model(config, params, TokenSpec(bos=3, stop=(1, 2), pad=4))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A Hugging Face folder with random weights."""
    folder = tmp_path_factory.mktemp("convert")
    store.save(folder / "model", make_model())
    assert main(["export", str(folder / "model"), str(folder / "exported")]) == 0
    return folder / "exported"


@pytest.fixture
def source(exported, tmp_path) -> Path:
    """A copy of it to be spoilt."""
    return Path(shutil.copytree(exported, tmp_path / "source"))


def edit(path: Path, **fields) -> None:
    """Sets fields of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def rewrite(folder: Path, change) -> None:
    """Applies `change` to the dict of tensors in model.safetensors."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def assert_same(a: store.Model, b: store.Model) -> None:
    assert (a.config, a.token_spec) == (b.config, b.token_spec)
    left, right = flatten_dict(a.params, sep="/"), flatten_dict(b.params, sep="/")
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].dtype == right[path].dtype, path
        assert np.asarray(left[path]).tobytes() == np.asarray(right[path]).tobytes(), path


def fails(capsys, command: str, source: Path, *options: str) -> str:
    """Runs a command that must exit 1 with one sentence and leave nothing behind; returns the sentence."""
    target = source.parent / "target"
    before = sorted(source.parent.iterdir())
    capsys.readouterr()
    assert main([command, str(source), str(target), *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert sorted(source.parent.iterdir()) == before
    return err


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
        assert (b / engine.INDEX).is_file() == (not (b / WEIGHTS).is_file()) == (shard != "5")

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
        for which in range(3):
            assert tensors[QKV][which * d + channels + row, 5] == core["attention"]["qkv"][5, which, 1, row]
        name = "transformer.core_block.1."
        assert tensors[name + "attn.proj.weight"][7, channels + row] == core["attention"]["out"][1, row, 7]
        assert tensors[name + "attn.qk_bias"][1, 0, 1, row] == core["attention"]["qk_bias"][1, 1, row]
        fc = tensors[name + "mlp.fc.weight"]
        assert fc[row, 7] == core["mlp"]["gate_up"][7, 0, row]
        assert fc[c.feed_forward + row, 7] == core["mlp"]["gate_up"][7, 1, row]
        assert tensors["transformer.adapter.weight"][2, d + 1] == params["adapter"][d + 1, 2]

    def test_stacked_layers(self, tmp_path):
        row = engine.Row("part/w", "part.{i}.w", "a b -> b a", layers=2)
        axes = {"a": 2, "b": 3}
        params = {"part": {"w": np.arange(12, dtype=np.float32).reshape(2, 3, 2)}}
        engine.write_tensors(tmp_path, engine.export_tree(params, [row], axes), 1000)
        with engine.Checkpoint(tmp_path) as checkpoint:
            assert checkpoint.shape("part.1.w") == row.shapes(axes)["part.1.w"] == (2, 3)
            again = engine.import_tree(checkpoint, [row], axes, "float32")
        np.testing.assert_array_equal(again["part"]["w"], params["part"]["w"])


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
            ({"torch_dtype": "float16"}, "field torch_dtype .*float32, bfloat16, not 'float16'"),
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


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


def make_shards(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / engine.INDEX).write_text(json.dumps({"weight_map": weight_map}))


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop(QKV), f"tensor {QKV} is missing"),
            (lambda t: t.update({"transformer.extra": t[QKV]}), "tensor transformer.extra in .* is unknown"),
            (lambda t: t.update({QKV: t[QKV].T.copy()}), rf"tensor {QKV} has shape \(16, 48\).*\(48, 16\)"),
            (lambda t: t.update({QKV: t[QKV].astype(np.float16)}), "is float32, but|is float16, but"),
            (lambda t: t.update({n: t[n].astype(np.float16) for n in t}), "is float16; choose .* --dtype"),
            (lambda t: t.update({n: t[n].astype(np.int8) for n in t if n != "freqs_cis"}), "is I8"),
            (
                lambda t: t.update({"lm_head.weight": t[WTE] + 1}),
                r"lm_head.weight differs from .*tie_embeddings",
            ),
            (lambda t: t.update({huginn.PREFIX + QKV: t[QKV]}), f"tensor {QKV} occurs twice"),
        ],
    )
    def test_tensors_that_are_wrong(self, capsys, source, change, message):
        rewrite(source, change)
        assert re.search(message, fails(capsys, "import", source))

    def test_integers_are_refused_even_with_a_dtype(self, capsys, source):
        rewrite(source, lambda t: t.update({QKV: t[QKV].astype(np.int32)}))
        assert f"tensor {QKV} is I32" in fails(capsys, "import", source, "--dtype", "float32")

    def test_damaged_files(self, capsys, source):
        truncate(source)
        assert f"{WEIGHTS} is truncated" in fails(capsys, "import", source)
        (source / WEIGHTS).write_bytes(b"")
        assert f"{WEIGHTS} is truncated" in fails(capsys, "import", source)
        (source / "config.json").write_text("{")
        assert "config.json is not valid JSON" in fails(capsys, "import", source)
        (source / "config.json").unlink()
        assert "config.json is missing" in fails(capsys, "import", source)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
    def test_pickles_are_never_opened(self, capsys, source, name):
        (source / WEIGHTS).rename(source / name)
        message = f"{name} is a pickle, which is never unpickled; convert it to safetensors"
        assert message in fails(capsys, "import", source)
        assert main(["import", str(source / name), str(source / "target")]) == 1
        assert message in capsys.readouterr().err

    def test_pickle_under_a_false_name(self, capsys, source):
        (source / WEIGHTS).write_bytes(b"\x80\x04\x95" + bytes(range(100, 200)))
        assert "is a pickle" in fails(capsys, "import", source)

    def test_no_weights(self, capsys, source):
        (source / WEIGHTS).unlink()
        assert "neither model.safetensors nor" in fails(capsys, "import", source)
        shutil.rmtree(source)
        assert "there is no folder" in fails(capsys, "import", source)

    def test_shards(self, capsys, source):
        make_shards(source)
        assert main(["import", str(source), str(source.parent / "good")]) == 0
        assert_same(store.load(source.parent / "good", host=True), make_model())
        index = source / engine.INDEX
        content = json.loads(index.read_text())["weight_map"]
        for weight_map, message in (
            (content | {"transformer.extra": "b.safetensors"}, "tensor transformer.extra is listed"),
            (content | {QKV: "../b.safetensors"}, "which is no file name"),
            (content | {QKV: "c.safetensors"}, "shard .*c.safetensors is missing"),
            ({}, "no weight_map"),
        ):
            index.write_text(json.dumps({"weight_map": weight_map}))
            assert re.search(message, fails(capsys, "import", source))
        index.write_text(json.dumps({"weight_map": content}))
        (source / "a.safetensors").unlink()
        assert "shard" in fails(capsys, "import", source)

    def test_existing_target_is_kept(self, capsys, source):
        target = source.parent / "target"
        target.mkdir()
        (target / "note").write_text("mine")
        assert "exists" in fails(capsys, "import", source)
        assert "exists" in fails(capsys, "import", source, "--overwrite")
        assert "exists" in fails(capsys, "export", source)
        assert (target / "note").read_text() == "mine"

    def test_failure_while_writing_leaves_nothing(self, capsys, source, monkeypatch):
        def full(*_, **__):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(store.ocp.Checkpointer, "save", full)
            assert "No space left" in fails(capsys, "import", source)
        model = source.parent / "model"
        assert main(["import", str(source), str(model)]) == 0
        with monkeypatch.context() as patch:
            patch.setattr(engine, "save_file", full)
            assert "No space left" in fails(capsys, "export", model)

    def test_export_of_a_foreign_folder(self, capsys, source):
        assert f"python -m convert import {source} DST" in fails(capsys, "export", source)
        assert "positive" in fails(capsys, "export", source, "--max-shard-gigabytes", "0")

    def test_tokenizer(self, capsys, source, tmp_path):
        tokenizers = pytest.importorskip("tokenizers")
        vocabulary = {str(i): i for i in range(33)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
        backend.save(str(tmp_path / "large.json"))
        assert "33 tokens, but the model has 32" in fails(
            capsys, "import", source, "--tokenizer", str(tmp_path / "large.json")
        )
        assert "no tokenizer" in fails(capsys, "import", source, "--tokenizer", str(tmp_path / "none.json"))
        (source / "tokenizer.json").write_text("{}")
        assert "not a tokenizer" in fails(capsys, "import", source)
        del vocabulary["32"]
        tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0")).save(
            str(source / "tokenizer.json")
        )
        assert main(["import", str(source), str(tmp_path / "model")]) == 0
        assert store.load(tmp_path / "model").tokenizer.token_id("31") == 31
        assert main(["export", str(tmp_path / "model"), str(tmp_path / "again")]) == 0
        assert (tmp_path / "again" / "tokenizer.json").is_file()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The golden model, imported."""
    folder = tmp_path_factory.mktemp("check") / "model"
    assert main(["import", str(GOLDEN), str(folder)]) == 0
    return folder


class TestCheck:
    @pytest.mark.golden
    def test_golden(self, model, capsys):
        recorded = GOLDEN / "forward.npz"
        if not recorded.is_file():
            pytest.skip("no recorded logits")
        assert main(["check", str(model), "--logits", str(recorded)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in lines] == ["logits_r1", "logits_r2", "logits_r4", "logits_r8"]
        assert all(line.endswith("ok") for line in lines)

    def test_tolerance_decides(self, model, tmp_path, capsys):
        tokens = np.array([[1, 2, 3]])
        path = tmp_path / "logits.npz"
        np.savez(path, input_ids=tokens, logits=np.zeros((1, 3, 128), np.float32), num_steps=1)
        assert main(["check", str(model), "--logits", str(path)]) == 1
        assert "above 5e-05" in capsys.readouterr().out
        assert main(["check", str(model), "--logits", str(path), "--tolerance", "1e3"]) == 0
        np.savez(path, input_ids=tokens, logits=np.full((1, 3, 128), np.nan), num_steps=1)
        assert main(["check", str(model), "--logits", str(path), "--tolerance", "1e3"]) == 1

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({}, "logits_r<n>"),
            ({"logits_r1": np.zeros((1, 2, 128))}, "input_ids"),
            (
                {"logits_r1": np.zeros((1, 2, 128)), "input_ids": np.array([[1, 128]])},
                "beyond the vocabulary",
            ),
            (
                {"logits_r1": np.zeros((1, 2, 99)), "input_ids": np.array([[1, 2]])},
                r"\(1, 2, 99\).*\(1, 2, 128\)",
            ),
            ({"logits": np.zeros((1, 2, 128)), "input_ids": np.array([[1, 2]])}, "num_steps"),
            ({"input_ids": np.array([[None]])}, "not an .npz file of plain arrays"),
        ],
    )
    def test_recordings_that_are_wrong(self, model, tmp_path, capsys, arrays, message):
        np.savez(tmp_path / "logits.npz", **arrays)
        assert main(["check", str(model), "--logits", str(tmp_path / "logits.npz")]) == 1
        assert re.search(message, capsys.readouterr().err)

    def test_source_of_logits(self, model, tmp_path, capsys, monkeypatch):
        assert main(["check", str(model)]) == 1
        assert "exactly one of --logits and --torch" in capsys.readouterr().err
        assert main(["check", str(model), "--logits", str(tmp_path / "none.npz")]) == 1
        assert "there is no file" in capsys.readouterr().err
        monkeypatch.setattr(torch_check.importlib.util, "find_spec", lambda name: None)
        assert main(["check", str(model), "--torch", str(GOLDEN)]) == 1
        assert "--torch needs torch and transformers" in capsys.readouterr().err
        monkeypatch.setattr(torch_check.importlib.util, "find_spec", lambda name: name)
        assert main(["check", str(model), "--torch", str(GOLDEN)]) == 1
        assert "holds no model code" in capsys.readouterr().err


def test_command_line(tmp_path):
    """The module runs as a program and its exit code reaches the shell."""
    command = [sys.executable, "-m", "convert", "import", str(tmp_path / "none"), str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: there is no folder {tmp_path / 'none'}\n"
    assert not list(tmp_path.iterdir())
