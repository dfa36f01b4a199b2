"""Forms of checkpoints: those that are recorded, and beside transformers a table of all."""

import shutil
from pathlib import Path

import forms
import numpy as np
import pytest
from exports import GOLDEN, assert_same, exported, imported
from marks import over, peers

import paradec_jax as pd
from paradec_jax import store
from paradec_jax.convert import check
from paradec_jax.text import chat

TOLERANCE = 1e-5  # of logits, as a share of the largest one
ROWS: dict[str, str] = {}


def compared(model: store.Model, folder: Path, made: dict[str, np.ndarray]) -> float:
    """The error of a model's logits, as a share of the largest one; the rest of what is recorded is
    equal.
    """
    ((_, error),) = check.errors(pd.load(str(folder), dtype="float32"), made)
    assert sorted(model.token_spec.stop) == sorted(made["stops"])
    if "ids" in made:
        words, spec, given = model.tokenizer, model.token_spec, forms.TABLE["words"]
        assert words.begun(words.encode(given["text"]), spec.bos) == made["ids"].tolist()
        assert (
            chat.conversation(model, given["messages"], add_generation_prompt=False) == made["chat"]
        )
    return error / float(np.abs(made["logits"]).max())


@pytest.mark.golden
@over(forms.TABLE["recorded"])
def test_recorded(name, tmp_path):
    source = shutil.copytree(GOLDEN / "forms" / name.replace(" ", "_"), tmp_path / "source")
    with np.load(source / "recorded.npz") as arrays:
        made = dict(arrays)
    model = imported(source)
    assert compared(model, source, made) <= TOLERANCE
    assert_same(imported(exported(model, tmp_path)), model)


@peers("torch", "transformers")
class TestTransformers:
    @over(forms.TABLE["accepted"])
    def test_reads_and_is_read(self, name, tmp_path):
        ROWS[name] = "failed"
        source = tmp_path / "source"
        made = forms.make(name, source)
        model = imported(source)
        error = compared(model, source, made)
        back = forms.read(name, exported(model, tmp_path))
        apart = float(np.abs(back["logits"] - made["logits"]).max())
        ROWS[name] = (
            f"{error:8.1e} of {np.abs(made['logits']).max():4.1f}; exported: {apart:.1e} apart"
        )
        assert error <= TOLERANCE and apart == 0
        for key in made:
            np.testing.assert_array_equal(back[key], made[key])

    @over(forms.TABLE["refused"])
    def test_is_told_what_is_refused(self, name, tmp_path, refused):
        forms.make(name, tmp_path / "source")
        sentence = refused(tmp_path / "source")
        ROWS[name] = sentence.strip().replace(str(tmp_path), "")
        assert forms.TABLE["refused"][name] in sentence

    def test_table(self):
        for name, row in ROWS.items():
            print(f"{name:<42} {row}")
        assert len(forms.TABLE["accepted"]) >= 40
