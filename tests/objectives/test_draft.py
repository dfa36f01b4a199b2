"""`paradec train draft`: a folder beside a model that stays as it is, and what decoding gains by it."""

import json

import jax
import numpy as np
import pytest
from commands import ran, words

import paradec_jax as pd
from experiments.real import drafts
from paradec_jax.cli import main
from paradec_jax.convert import peft
from paradec_jax.disk.folders import StoreError
from paradec_jax.nn.adapters import LORA_B


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    """The folder of a run, and what its log ends with."""
    folder = tmp_path_factory.mktemp("draft") / "run"
    return folder, ran(source, folder, objective="draft")


def test_the_model_is_not_written_and_its_texts_are_its_own(source, run, capsys):
    folder, last = run
    assert (folder / "adapter").is_dir() and not (folder / "model").exists()
    assert last["after"]["equal to one by one"] == last["before"]["tokens a call"] == 1
    assert last["before"].keys() == last["after"].keys() > {"seconds a token"}
    alone = pd.load(source / "llama")
    model = pd.load(source / "llama", adapter=folder / "adapter")
    jax.tree.map(np.testing.assert_array_equal, dict(model.params), dict(alone.params))
    prompts = ["x 1 ", "a b", "y"]
    with_drafts, without = (pd.generate(m, prompts, max_new_tokens=12) for m in (model, alone))
    assert with_drafts.tokens == without.tokens
    assert with_drafts.counts["positions"].sum() > without.counts["positions"].sum()
    command = ["generate", "--model", str(source / "llama"), "--max-new-tokens", "12", "x 1 "]
    capsys.readouterr()
    assert main([*command, "--adapter", str(folder / "adapter")]) == 0
    assert without.text[0] in capsys.readouterr().out


@pytest.mark.slow
def test_calls_that_are_counted_are_those_of_the_decoder(source, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places, path = (str(source / "llama"), run[0] / "adapter"), tmp_path / "drafts.json"
    few = {"prompts": 5, "new_tokens": 12, "rows": 4, "check": 5, "out": path}
    drafts.main(drafts.Options(*places, source / "prompts.jsonl", **few))
    record = json.loads(path.read_text())
    comb, line = record["decoded"].values()
    assert comb["other"] == line["other"] == []
    assert comb["tokens a call"] == record["rows"]["comb of 2"]["tokens a call"]


def test_peft_has_the_adapters_matrices(source, run):
    model = pd.load(source / "llama", adapter=run[0] / "adapter")
    read = peft.read(run[0] / "adapter", model.config)
    drafter = model.drafter
    jax.tree.map(np.testing.assert_array_equal, read, {name: drafter.params[name] for name in read})
    assert np.asarray(read["layer_1"]["mlp"]["down"][LORA_B]).any()
    assert json.loads((run[0] / "adapter" / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"base": "0" * 64}, "drafts for another model than"),
        ({"count": 3}, "masks of .* has shape"),
        ({"format_version": 2}, "has format_version 2, not 1"),
        ({"weights": {}}, "differs from its digest"),
    ],
)
def test_a_folder_of_another_model_is_refused(source, run, change, sentence, tmp_path):
    place = tmp_path / "adapter"
    place.mkdir()
    for path in (run[0] / "adapter").iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    fields = json.loads((place / "drafts.json").read_text()) | change
    (place / "drafts.json").write_text(json.dumps(fields))
    with pytest.raises(StoreError, match=sentence):
        pd.load(source / "llama", adapter=place)


@pytest.mark.parametrize(
    "option", [("--lora", 2), ("--blend", 0.5), ("--layers", 0.5), ("--packed",)]
)
def test_options_without_a_use(source, option, tmp_path, capsys):
    assert main(words(source, tmp_path / "run", *option, objective="draft")) == 1
    name = option[0].removeprefix("--")
    assert f"{name} is no option of draft" in capsys.readouterr().err


def test_drafts_without_masks(source):
    with pytest.raises(ValueError, match="Drafted asks masks that draft, and the model has none"):
        pd.generate(pd.load(source / "llama"), ["x"], pd.decode.Drafted(), max_new_tokens=4)
