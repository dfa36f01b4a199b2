"""`python -m convert check`: the golden model's logits against recorded ones, and recordings that are wrong."""

import re
from pathlib import Path

import numpy as np
import pytest
from exports import GOLDEN

from convert import torch_check
from convert.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The golden model, imported."""
    folder = tmp_path_factory.mktemp("check") / "model"
    assert main(["import", str(GOLDEN), str(folder)]) == 0
    return folder


class TestCheck:
    @pytest.mark.slow
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
