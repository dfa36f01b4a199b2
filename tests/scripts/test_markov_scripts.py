"""The training on a law that is known and its study, at toy size: in pieces, and what they write."""

import dataclasses
import json

import numpy as np
import pytest
from experiment import read

from experiments.masked_diffusion import distill, markov_study, markov_train, markov_variants, train
from experiments.masked_diffusion.markov import Chain
from paradec_jax import load

CHAIN = Chain((0.7, 0.2, 0.1), 8, 1)
RECIPE = markov_train.Recipe(
    CHAIN,
    500,
    train.Recipe(
        name="teacher",
        preset="test-mdlm",
        layers=1,
        length=8,
        rows=2,
        steps=1,
        warmup=1,
        matmul_precision="highest",
    ),
    distill.Recipe(
        name="students", rounds=2, first_steps=8, updates=2, rows=2, warmup=1, matmul_precision="highest"
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run that its limit of minutes has ended once, after the first update of its students."""
    place = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markov_train, "HELD_OUT", 4)
        markov_train.main(RECIPE, place, minutes=0.0)
        assert (place / "teacher" / "model").exists() and not (place / "students" / "round-0").exists()
        markov_train.main(RECIPE, place)
        written = {path: path.stat().st_mtime_ns for path in place.rglob("*.safetensors")}
        markov_train.main(RECIPE, place)  # nothing is left to do
        assert written == {path: path.stat().st_mtime_ns for path in place.rglob("*.safetensors")}
    return place


def test_a_teacher_and_all_rounds(folder):
    places = [folder / "teacher", *(folder / "students" / f"round-{i}" for i in range(2))]
    models = [load(place / "model") for place in places]
    assert all(model.token_spec.mask == CHAIN.symbols and model.config.max_length == 8 for model in models)
    assert models[0].tokenizer.decode([0, 1, 2]) == "abc"
    heads = [np.asarray(model.params["head"]) for model in models]
    assert (heads[0] != heads[1]).any() and (heads[1] != heads[2]).any()
    assert markov_train.law_of(folder) == CHAIN
    assert json.loads((folder / "students" / "held_out.json").read_text())["kind"] == "bound"


def test_the_text_is_of_the_law(folder):
    source, tokenizer = markov_train.source_of(RECIPE)
    assert len(source.train[0]) == 500 and len(source.held_out[0]) % 8 == 0
    assert tokenizer.vocab_size == CHAIN.symbols + 1
    other = dataclasses.replace(RECIPE, chain=dataclasses.replace(CHAIN, seed=2))
    assert markov_train.source_of(other)[0].digest != source.digest
    with pytest.raises(SystemExit, match="was begun with other chain"):
        markov_train.main(other, folder)


def test_what_does_not_fit_the_law_is_refused(tmp_path):
    with pytest.raises(ValueError, match="windows of the chain's length 8"):
        dataclasses.replace(RECIPE, teacher=train.Recipe(length=16))
    with pytest.raises(ValueError, match="symbols must be at least the length 8"):
        dataclasses.replace(RECIPE, symbols=7)
    with pytest.raises(ValueError, match="no run in"):
        markov_train.law_of(tmp_path)


def options_of(folder, tmp_path, **changes):
    small = {
        "samples": 12,
        "draws": 2,
        "steps": (2, 4),
        "swept": (2,),
        "temperatures": (0.5,),
        "texts": 3,
        "masks": 2,
    }
    paths = {"out": tmp_path / "markov.json", "figure": tmp_path / "markov.png"}
    return markov_study.Options(folder, **{**small, **paths, **changes})


def test_a_study_goes_on_with_the_rows_that_are_done(folder, tmp_path, monkeypatch):
    options = options_of(folder, tmp_path)
    markov_study.main(options)
    table, lines = read(options.out)
    rows = {(row["model"], row["steps"], row["temperature"]): row for row in table["rows"]}
    sweeps = {(name, *rest) for name in ("perfect", "teacher") for rest in ((2, 1.0), (4, 1.0), (2, 0.5))}
    assert rows.keys() == sweeps | {("student-4", 2, 1.0), ("student-2", 2, 1.0)}
    assert len(lines) == len(rows) and lines[0]["kl_interval"][0] < lines[0]["kl_interval"][1]
    for (name, steps, _), row in rows.items():
        assert row["kl"] == pytest.approx(row["cross_entropy"] - row["entropy"])
        assert row["kl_interval"][0] < row["kl"] < row["kl_interval"][1]
        assert 1 <= row["network_calls"] <= steps and row["samples"] == 12
        assert (row["estimates_apart"] == 0) == (name == "perfect")
    assert rows["perfect", 2, 0.5]["entropy"] < rows["perfect", 2, 1.0]["entropy"]
    assert table["law"]["floor"] == pytest.approx(CHAIN.floor)
    costs = {row["model"]: row for row in table["bounds"]}
    assert costs.keys() == {name for name, *_ in rows} and costs["perfect"]["over_the_floor"] == 0
    assert len(table["bars"]) == 2 + 3 and options.figure.stat().st_size > 1000

    def drawn_again(*_):
        raise AssertionError("a row that is done")

    monkeypatch.setattr(markov_study, "sampled", drawn_again)
    markov_study.main(options)
    again = read(options.out)[0]
    assert all(again[name] == table[name] for name in ("rows", "bounds", "bars"))


def test_variants_are_called_as_on_the_other_ground():
    own = dataclasses.replace(markov_train.STUDENTS, seed=5)
    of = {name: markov_variants.variant(name, own) for name in markov_variants.NAMES}
    assert of["halves"] == dataclasses.replace(own, name="halves") and of.keys() == distill.RECIPES.keys()
    assert [of[name].updates for name in markov_variants.STUDIES["round_lengths"]] == [400, 200, 100]
    assert {of[name].rounds * of[name].updates for name in of.keys() - {"halves", "short-rounds"}} == {800}
    assert {markov_study.aim_of(recipe, recipe.rounds - 1) for recipe in of.values()} == {2}
    assert (of["eighths"].jump, of["eighths"].rounds, of["fourths"].first_steps) == (8, 1, 32)
    for name, recipe in of.items():
        for field in ("divergence", "released", "grid", "weights", "reset_optimizer", "reset_ema", "jump"):
            assert getattr(recipe, field) == getattr(distill.RECIPES[name], field)


def test_variants_are_trained_once_and_measured(folder, tmp_path, monkeypatch):
    options = markov_variants.Options(
        folder,
        ("halves", "half-rounds"),
        samples=12,
        draws=2,
        steps=(2,),
        temperatures=(0.5,),
        texts=3,
        masks=2,
        each_round=True,
        minutes=0.0,
        out=tmp_path / "variants.json",
        figures=tmp_path,
    )
    markov_variants.main(options)  # a single update, then its minutes are over
    assert not options.out.exists() and (folder / "variants" / "half-rounds" / "checkpoints").exists()
    options = dataclasses.replace(options, minutes=5.0)
    markov_variants.main(options)
    table, lines = read(options.out)
    rows = {(row["model"], row["steps"]): row for row in table["rows"]}
    students = {"halves-1": 4, "halves-2": 2, "half-rounds-1": 4, "half-rounds-2": 2}
    others = {"teacher": None, "teacher-bfloat16": None, "half-rounds-2-bfloat16": 2}
    assert rows.keys() == {(name, 2) for name in students | others}
    assert all(row["aims_at"] == (students | others)[name] for (name, _), row in rows.items())
    assert len(lines) == len(rows) and [row["temperature"] for row in table["perfect"]] == [1, 0.5]
    kls = {name: row["kl"] for name, row in rows.items()}
    for (_, steps), row in rows.items():
        assert row["over_the_other"] == pytest.approx(row["kl"] - kls[row["other"], steps])
        assert row["over_the_other_interval"][0] <= row["over_the_other"] <= row["over_the_other_interval"][1]
        assert row["bound"] > 0 and row["over_the_floor_interval"][0] < row["over_the_floor"]
    assert abs(rows["teacher-bfloat16", 2]["over_the_other"]) < 0.1
    pictures = {path.name: path.stat().st_size > 1000 for path in tmp_path.glob("*.png")}
    assert pictures == {"markov-round_lengths.png": True}  # of the other studies there is one variant alone

    def again(*_):
        raise AssertionError("what is done")

    monkeypatch.setattr(distill, "go_on", again)
    monkeypatch.setattr(markov_study, "sampled", again)
    markov_variants.main(options)
    assert read(options.out)[0]["rows"] == table["rows"]


def test_variants_refuse(folder, tmp_path):
    with pytest.raises(ValueError, match="half-rounds and others of"):
        markov_variants.Options(variants=("mse",))
    with pytest.raises(ValueError, match="half-rounds and others of"):
        markov_variants.Options(variants=("half-rounds", "thirds"))
    with pytest.raises(ValueError, match="between 0 and 1"):
        markov_variants.Options(temperatures=(2.0,))
    (tmp_path / "recipe.json").write_text((folder / "recipe.json").read_text())
    with pytest.raises(ValueError, match="teacher is not done"):
        markov_variants.main(markov_variants.Options(tmp_path))


def test_bars_say_what_is_met():
    rng = np.random.default_rng(0)

    def measured(cross, entropy, count=4_000):
        spread = rng.normal(size=(2, count)) * 0.01
        low = -(entropy + spread[1] - spread[1].mean())
        return markov_study.Measured(cross + spread[0] - spread[0].mean(), low, low, np.ones(count))

    # Cross-entropies of the sweep over its entropy: 0.5, 0.9, 1.5 at 0.5, 0.8, 1.0.
    sweep = [measured(1.5, 1.0), measured(0.9, 0.8), measured(0.5, 0.5)]
    found, ends = markov_study.at_equal_entropy(measured(1.3, 0.9), sweep)
    assert found == pytest.approx(1.3 - 1.2) and ends[0] < found < ends[1] < found + 0.01
    assert markov_study.at_equal_entropy(measured(1.3, 0.4), sweep) is None
    assert markov_study.at_equal_entropy(measured(1.3, 1.1), sweep) is None
    assert markov_study.apart(sweep[0], sweep[1])[0] == pytest.approx(0.5 - 0.1)

    rows = {(name, 4, 1.0): row for name, row in zip(("teacher", "perfect", "student"), sweep, strict=True)}
    cost = {"model": "teacher", "over_the_floor": 0.29, "over_the_floor_interval": [0.27, 0.31]}
    options = markov_study.Options(steps=(4,), swept=(4,), temperatures=())
    bars = markov_study.bars_of(rows, [cost], "student", options)
    assert [(bar["met"], bar["surely"]) for bar in bars] == [(True, False), (False, False), (True, True)] + [
        (False, False)
    ] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"samples": 1}, "at least 2"),
        ({"swept": (3,)}, "swept some of them"),
        ({"steps": (0,), "swept": ()}, "at least 1"),
        ({"temperatures": (1.0,)}, "between 0 and 1"),
    ],
)
def test_a_study_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        markov_study.Options(**wrong)
