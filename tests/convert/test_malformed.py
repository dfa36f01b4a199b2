"""Input that is wrong, inside this process: some of the cases that `make cluster` runs as commands, sure ones."""

import io
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from malformed_cases import cases
from malformed_changes import Case, fault, listed
from malformed_models import write_models

from convert import cli as converters
from paradec_jax import cli, store
from paradec_jax.store import StoreError

LONG = "a bomb"  # it takes seconds to write
CASES = [case for case in cases() if case.sure and not case.name.endswith(LONG)]
FEW = CASES[:: len(CASES) // 60]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """All models, whole."""
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    return root


def test_there_are_enough_cases():
    kinds = {(case.command, case.base) for case in FEW}
    assert len(CASES) >= 300 and len(FEW) >= 55 and len(kinds) >= 8


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name[:60])
def test_one_sentence_and_nothing_left(case: Case, models, tmp_path, monkeypatch, capfd):
    shutil.copytree(models / case.base, tmp_path / "source")
    case.change(tmp_path / "source")
    (tmp_path / "out").mkdir()
    before = listed(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(case.stdin), "utf-8"))
    words = case.words(tmp_path / "source", tmp_path / "out" / "model", models / "recording" / "logits.npz")
    capfd.readouterr()
    try:
        code: object = (cli if case.command == "generate" else converters).main(words)
    except SystemExit as error:
        code = error.code
    assert fault(case, code, capfd.readouterr().err, before, listed(tmp_path)) is None


@pytest.mark.parametrize("base", ["qwen2", "huginn", "sdar", "ckpt/last.ckpt"])
def test_models_that_are_whole_are_taken(base, models, tmp_path):
    assert converters.main(["import", str(models / base), str(tmp_path / "model")]) == 0
    found = store.load(tmp_path / "model", host=True)
    assert (found.tokenizer is not None) == (base != "ckpt/last.ckpt")


def test_a_flag_takes_weights_that_are_no_numbers(models, tmp_path, capsys):
    (case,) = [case for case in CASES if case.name == "tensors: a number that is nan"]
    source, target = tmp_path / "source", tmp_path / "model"
    shutil.copytree(models / "qwen2", source)
    case.change(source)
    assert converters.main(["import", str(source), str(target)]) == 1 and not target.exists()
    sentence = "parameter embedding holds numbers that are NaN or infinite; --allow-nonfinite takes them"
    assert capsys.readouterr().err == f"error: {sentence}\n"
    assert converters.main(["import", str(source), str(target), "--allow-nonfinite"]) == 0
    assert converters.main(["export", str(target), str(tmp_path / "again")]) == 1
    assert capsys.readouterr().err == f"error: {target}: {sentence}\n"
    with pytest.raises(StoreError, match="embedding holds numbers that are NaN or infinite"):
        store.load(target)
    assert np.isnan(store.load(target, host=True, allow_nonfinite=True).params["embedding"]).sum() == 1


def test_sigterm_leaves_nothing(models, tmp_path, monkeypatch, capfd):
    def killed(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # which the signal ends

    words = ["import", str(models / "qwen2"), str(tmp_path / "model")]
    before, handler = listed(tmp_path), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_tensors", killed)
        assert converters.main(words) == converters.STOPPED == 143
    assert capfd.readouterr().err == "error: stopped by SIGTERM\n"
    assert listed(tmp_path) == before and signal.getsignal(signal.SIGTERM) is handler
    assert converters.main(words) == 0


def test_leftovers_of_killed_writers_go_with_the_next(models, tmp_path):
    target = tmp_path / "model"
    words = ["import", str(models / "qwen2"), str(target)]
    assert converters.main(words) == 0
    for name in (".model.0123abcd.tmp", ".model.0123abcd.old", ".model.4567cdef.tmp"):
        shutil.copytree(target, tmp_path / name)
    for name in (".model.mine", ".models.0123abcd.tmp"):
        (tmp_path / name).mkdir()
    with store.staged(target, overwrite=True) as living:
        shutil.copytree(target, living, dirs_exist_ok=True)
        assert converters.main([*words, "--overwrite"]) == 0
        assert living.is_dir()
    assert sorted(os.listdir(tmp_path)) == [".model.mine", ".models.0123abcd.tmp", "model"]
    store.load(target)


def test_a_model_that_a_killed_writer_put_aside_comes_back(models, tmp_path):
    shutil.copytree(models / "model", tmp_path / ".model.0123abcd.old")
    (tmp_path / ".model.0123abcd.tmp").mkdir()
    with pytest.raises(StoreError, match="exists"), store.staged(tmp_path / "model"):
        pass
    assert os.listdir(tmp_path) == ["model"]
    json.loads((tmp_path / "model" / "config.json").read_text())
