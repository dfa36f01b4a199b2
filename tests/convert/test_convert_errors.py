"""Files that are wrong: one clear error for each, and nothing is left behind or overwritten."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from exports import (
    QKV,
    WEIGHTS,
    WTE,
    assert_same,
    fails,
    make_model,
    make_shards,
    rewrite,
)

from convert import huginn, weights
from convert.cli import main
from paradec_jax import store
from paradec_jax.disk import writing


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop(QKV), f"tensor {QKV} is missing"),
            (lambda t: t.update({"transformer.extra": t[QKV]}), "tensor transformer.extra in .* is unknown"),
            (lambda t: t.update({QKV: t[QKV].T.copy()}), rf"tensor {QKV} has shape \(16, 48\).*\(48, 16\)"),
            (lambda t: t.update({QKV: t[QKV].astype(np.float64)}), "is float64; choose .* --dtype"),
            (lambda t: t.update({n: t[n].astype(np.float64) for n in t}), "is float64; choose .* --dtype"),
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

    @pytest.mark.parametrize("name", ["model.pt", "model.pth"])
    def test_pickles_are_never_opened(self, capsys, source, name):
        (source / WEIGHTS).rename(source / name)
        message = f"{name} is a pickle, which is never unpickled; convert it to safetensors"
        assert message in fails(capsys, "import", source)
        assert "give the folder that holds it" in fails(capsys, "import", source / name)

    def test_pickle_under_a_false_name(self, capsys, source):
        (source / WEIGHTS).write_bytes(b"\x80\x04\x95" + bytes(range(100, 200)))
        assert "is a pickle" in fails(capsys, "import", source)

    def test_no_weights(self, capsys, source):
        (source / WEIGHTS).unlink()
        assert "neither model.safetensors nor pytorch_model.bin" in fails(capsys, "import", source)
        shutil.rmtree(source)
        assert "there is no folder" in fails(capsys, "import", source)

    def test_shards(self, capsys, source):
        make_shards(source)
        assert main(["import", str(source), str(source.parent / "good")]) == 0
        assert_same(store.load(source.parent / "good", host=True), make_model())
        index = source / weights.INDEX
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
            patch.setattr(store, "write_tensors", full)
            assert "No space left" in fails(capsys, "import", source)
        model = source.parent / "model"
        assert main(["import", str(source), str(model)]) == 0
        with monkeypatch.context() as patch:
            patch.setattr(writing, "_header", full)
            assert "No space left" in fails(capsys, "export", model)

    def test_export_of_a_foreign_folder(self, capsys, source):
        assert f"python -m convert import {source} DST" in fails(capsys, "export", source)
        assert "positive" in fails(capsys, "export", source, "--max-shard-gigabytes", "0")

    def test_tokenizer(self, capsys, source, tmp_path):
        tokenizers = pytest.importorskip("tokenizers")
        vocabulary = {str(i): i for i in range(33)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
        backend.save(str(tmp_path / "large.json"))
        assert "the token id 32, but the model's vocabulary ends at 31" in fails(
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
        assert store.load(tmp_path / "model").tokenizer.encode("31") == [31]
        assert main(["export", str(tmp_path / "model"), str(tmp_path / "again")]) == 0
        assert (tmp_path / "again" / "tokenizer.json").is_file()
