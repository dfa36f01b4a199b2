"""The studies of block diffusion at toy size: lines, rows that are kept, rivals beside them, curves, acceptance."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from experiment import read

from experiments.block_diffusion import acceptance, lines, problems, study, train, train_head
from experiments.block_diffusion.chosen import Options, Shop
from experiments.block_diffusion.grounds import Chains
from experiments.block_diffusion.problems import Asked
from paradec_jax import store
from paradec_jax.config import ResidualHeadConfig
from paradec_jax.models import residual_head
from paradec_jax.store import ResidualHead, save

RECIPE = train.Recipe(name="chain", ground="chains", init=None, preset="test-sdar", layers=1, blocks=(4,))
ASKED = Asked(ground="chains", count=3, blocks=2, block=4, rows=2)
BLOCK = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a backbone and its head, both of random weights."""
    folder = tmp_path_factory.mktemp("runs")
    model = train.untrained(RECIPE, RECIPE.source())
    model = dataclasses.replace(model, params=jax.tree.map(lambda x: 2 * x, dict(model.params)))
    save(folder / "chains" / "model", model)
    shape = ResidualHeadConfig.of(model.config, 1)
    head = ResidualHead(shape, residual_head.init_params(shape, jax.random.key(1), "normal_0.2"))
    save(folder / "chains-head" / "model", dataclasses.replace(model, head=head))
    return folder


def options_of(runs, tmp_path, *names, **changes):
    small = {"steps_ahead": (1, 2), "thresholds": (0.9,), "depths": (3,), "lengths": (4,)}
    return Options(names, asked=ASKED, runs=runs, folder=tmp_path / "results", **small | changes)


class Everywhere(Options):
    """Options that find every head and backbone."""

    def there(self, name, command):
        return f"runs/{name}/model"


@pytest.mark.parametrize("ground", ["words", "chains"])
def test_lines_of_every_study_differ(ground):
    """Each has a head's rows beside those of none, and a baseline of one token a step."""
    shop = Shop(Everywhere(("all",), asked=Asked(ground=ground)), 1.0, 8)
    for name, (title, one) in study.STUDIES.items():
        found = study.lines_of(one, shop)
        labels = [line.label for line in found]
        assert len(set(labels)) == len(labels) > 2 and title, name
        heads = {line.setting.settings().get("head", "-") for line in found}
        assert "zero" in heads and (None in heads) == (name != "alignment"), name
        assert any(line.setting.label() == lines.baseline_of(1.0).label() for line in found), name
    places = {line.place for _, one in study.STUDIES.values() for line in study.lines_of(one, shop)}
    recipes = train.RECIPES.keys() | train_head.RECIPES.keys()
    assert {Path(place).parent.name for place in places} <= recipes


@pytest.mark.slow
def test_a_study_goes_on_where_it_stood(runs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    decoded, honest = [], lines.compare

    def counting(model, prompts, settings, **options):
        decoded.append(len(settings))
        return honest(model, prompts, settings, **options)

    monkeypatch.setattr(lines, "compare", counting)
    options = options_of(runs, tmp_path, "speculation")
    study.main(options)
    table, flat = read(options.folder / "speculation-chains.json")
    rows = {row["label"]: row for row in table["rows"]}
    assert len(rows) == len(flat) == 2 + 2 * 2 * 2 and sum(decoded) >= len(rows)
    assert table["options"]["backbone_sha256"] == store.fingerprint(runs / "chains" / "model")
    spec = [row for row in rows.values() if row["decoder"] == "residual_speculative"]
    assert all(row["base_equal_texts"] == 1.0 and row["base_fewer_calls"] >= 1 for row in spec)
    trained = [row for row in spec if row["settings"]["head"] is None]
    assert len(trained) == 4 and all({"zero_difference", "zero_fewer_calls"} <= row.keys() for row in trained)
    assert all("zero_difference" not in row for row in spec if row not in trained)
    for row in rows.values():
        assert row["blocks"] == 6 and row["positions_per_token"] >= 1 and row["flops_per_token"] > 0
        assert (row["head_calls_per_token"] > 0) == (row in trained)
    assert (tmp_path / "figures" / "speculation-chains.png").stat().st_size > 1000
    assert "against no head" in capsys.readouterr().out

    decoded.clear()
    study.main(options)
    assert decoded == []
    with pytest.raises(ValueError, match="was made with other seed"):
        study.main(dataclasses.replace(options, asked=dataclasses.replace(ASKED, seed=3)))


def test_missing_heads_are_left_out_and_said(runs, tmp_path, capsys):
    options = options_of(runs, tmp_path, "initialisations")
    shop = Shop(options, 1.0, BLOCK)
    found = study.lines_of(study.STUDIES["initialisations"][1], shop)
    assert {line.name for line in found} == {"backbone", "no head", "head"}
    said = capsys.readouterr().err
    assert "left out: chains-init-released" in said and "train_head chains-init-released --start" in said
    given = dataclasses.replace(options, heads=("depth-1=elsewhere",))
    assert given.place("depth-1") == "elsewhere" and given.there("depth-1", "train") is None
    bundled = dataclasses.replace(options, heads=("depth-1=tiny-sdar",))
    assert bundled.there("depth-1", "train") == "tiny-sdar"


def test_what_is_no_study_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match="no study tables: choose of table1"):
        study.main(options_of(runs, tmp_path, "tables"))
    with pytest.raises(ValueError, match="is of family causal"):
        study.main(options_of(runs, tmp_path, "table2", backbone="tiny-causal"))
    with pytest.raises(ValueError, match="must be NAME=DIR"):
        options_of(runs, tmp_path, "table1", heads=("depth-1",))
    for wrong, message in (
        ({"count": 0}, "must be at least 1"),
        ({"ground": "chains", "split": "tune"}, "is a matter of word problems"),
    ):
        with pytest.raises(ValueError, match=message):
            Asked(**wrong)


def test_lawful_blocks():
    """A text of the law is right; one with a wrong symbol is wrong in that block, one that ends early at its end."""
    ground = Chains()
    judge = problems.Lawful(ground, 2, 2, 4, [0])
    whole = ground.law.draw(2, [0])
    texts = [ground.tokenizer().decode(row) for row in whole[:, 8:16].tolist()]
    assert judge.lawful(texts).all() and judge.score([], texts).tolist() == [True, True]
    follows = set(ground.law.followers[whole[0, 9]].tolist())
    wrong = next(symbol for symbol in range(16) if symbol not in follows)
    broken = ground.tokenizer().decode([*whole[0, 8:10].tolist(), wrong, *whole[0, 11:16].tolist()])
    assert judge.lawful([broken, texts[1][:4]])[:, 0].tolist() == [False, True]
    assert judge.score([], [broken, texts[1][:4]]).tolist() == [False, False]


def test_rivals_by_hand():
    """Two problems: calls 4 and 6 against 8 and 12, of which one more is right."""
    common = {"backbone": "b", "block": 4, "texts": "0" * 16}
    zero = common | {"label": "zero", "decoder": "residual", "right": "10", "calls": "8 12"}
    zero["settings"] = {"head": "zero", "mix": "sum", "head_steps": 2}
    own = common | {"label": "own", "decoder": "residual", "right": "11", "calls": "4 6"}
    own["settings"] = {"head": None, "mix": "none", "head_steps": 2}
    other = zero | {"settings": zero["settings"] | {"head_steps": 1}, "label": "other"}
    found = lines.beside([other, zero, own])
    assert found[2]["zero_label"] == "zero" and found[2]["zero_difference"] == 0.5
    assert found[2]["zero_fewer_calls"] == 2.0 and found[2]["zero_equal_texts"] == 1.0
    assert found[2]["first_label"] == "other" and "first_label" not in found[0]


def test_acceptance_is_counted():
    """One row, three calls: two drafts of which one is right; none; two, both right. Then it has stopped."""
    exists = np.asarray([[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 1]], bool)[:, None]
    steps = {
        "exists": exists,
        "accepted": np.asarray([[1], [0], [2], [2]]),
        "calls": np.asarray([[2], [3], [4], [4]]),
    }
    drafts, right = acceptance.counted(steps)
    assert drafts.tolist() == [[2, 2]] and right.tolist() == [[2, 1]]
    first, second = acceptance.rows_of(np.repeat(drafts, 2, 0), np.repeat(right, 2, 0))
    assert (first["share"], first["given"], second["share"], second["given"]) == (1, 1, 0.5, 0.5)


@pytest.mark.slow
def test_acceptance_of_a_model(runs, tmp_path, capsys):
    options = acceptance.Options(
        str(runs / "chains-head" / "model"),
        asked=ASKED,
        candidates=3,
        out=tmp_path / "results" / "acceptance.json",
    )
    acceptance.main(options)
    table, flat = read(options.out)
    kinds = {(row["rule"], row["head"]) for row in table["rows"]}
    assert kinds == {(rule, head) for rule in ("static", "dynamic") for head in ("none", "trained")}
    assert len(flat) == len(table["rows"]) and all(0 <= row["share"] <= 1 for row in table["rows"])
    assert "draft 1 right in" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has no residual head"):
        acceptance.main(dataclasses.replace(options, model=str(runs / "chains" / "model")))
