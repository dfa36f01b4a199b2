"""The command on causal models: several models side by side, decoders by name, timings of random weights."""

import dataclasses
import json

import jax
import pytest
from stub_table import KEYS, put_settings

import paradec_jax as pd
from paradec_jax import cli
from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.data import build_tokenizer, token_spec
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.families import FAMILIES, init_params
from paradec_jax.store import Model, save

CONFIG = dataclasses.replace(CAUSAL_PRESETS["test-causal"], vocab_size=384, max_length=256)
TABLE = (
    Setting("autoregressive", pd.AutoRegressive(), baseline=True),
    Setting("jacobi", pd.Jacobi(block=4, running=True, candidates=2)),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for seed, name in enumerate(("before", "after")):
        made[name] = tmp_path_factory.mktemp("models") / name / "round-0" / "model"
        params = init_params(CONFIG, jax.random.key(seed))
        save(made[name], Model(CONFIG, params, token_spec(), build_tokenizer()))
    return made


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    put_settings(monkeypatch, "causal", TABLE)


@pytest.mark.slow
def test_models_side_by_side(folders, capsys, tmp_path):
    path = tmp_path / "rows.json"
    models = [word for folder in folders.values() for word in ("--model", str(folder))]
    arguments = ["compare", "--family", "causal", *models, "--problems", "2", "--steps", "2", "2"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [row["model"] for row in rows] == [
        f"{name}/round-0" for name in ("before", "before", "after", "after")
    ]
    wanted = {key for key in KEYS if key != "core_pass_microseconds"}
    assert all(wanted <= row.keys() and row["family"] == "causal" for row in rows)
    assert all(row["equals_greedy"] == 1 and row["network_calls_per_token"] <= 1 for row in rows)
    out = capsys.readouterr().out
    pair = "after/round-0 against before/round-0, static decoding"
    for piece in ("before/round-0: 2 unseen", "after/round-0: 2 unseen", "block 4", pair):
        assert piece in out


def test_the_bundled_models_of_the_family_are_the_default(monkeypatch, capsys):
    asked = []

    def load(name):
        asked.append(name)
        raise ValueError("enough")

    monkeypatch.setattr(cli.compare.store, "load", load)
    assert cli.main(["compare", "--family", "causal"]) == 1
    assert asked == [FAMILIES["causal"].bundled[0]]


@pytest.mark.slow
def test_generate_with_every_decoder_of_the_family(folders, capsys):
    texts = {}
    for decoder in (None, "autoregressive", "jacobi"):
        named = [] if decoder is None else [decoder]
        arguments = ["generate", *named, "Ana", "--model", str(folders["before"]), "--max-new-tokens", "6"]
        assert cli.main(arguments) == 0
        texts[decoder], counts = capsys.readouterr()
        assert "tokens a call" in counts and "recurrences" not in counts
    assert len(set(texts.values())) == 1
    assert cli.main([*arguments, "--stream", "--block", "3", "--candidates", "1"]) == 0
    assert capsys.readouterr().out == texts["jacobi"]


def test_what_does_not_suit_the_family(folders, capsys):
    common = ["Ana", "--model", str(folders["before"])]
    for decoder, more, message in (
        ("wavefront", [], "wavefront does not suit a model of family causal; it takes one of autoregressive"),
        ("autoregressive", ["--recurrence", "3"], "--recurrence is no option of autoregressive"),
        ("jacobi", ["--blocks", "2"], "a running window has no blocks, so blocks must be 1"),
        ("jacobi", ["--block", "1"], "block must be at least 2"),
        ("jacobi", ["--spawn", "0.5"], "spawn needs blocks of at least 2, not 1"),
    ):
        assert cli.main(["generate", decoder, *common, *more]) == 1
        assert message in capsys.readouterr().err
    assert cli.main(["compare", "--model", str(folders["before"])]) == 1
    assert "is of family causal, but --family is recurrent_depth" in capsys.readouterr().err
