"""Settings that are chosen, speculation beside its base, and seconds, at toy size."""

import dataclasses

import jax
import pytest
from experiment import read

from experiments.block_diffusion import train, tuned
from experiments.block_diffusion.chosen import Options, Shop
from experiments.block_diffusion.problems import Asked
from paradec_jax.config import ResidualHeadConfig
from paradec_jax.models import residual_head
from paradec_jax.store import ResidualHead, save

CHAIN = train.Recipe(name="chain", ground="chains", init=None, preset="test-sdar", layers=1, blocks=(4,))
ASKED = Asked(ground="chains", count=3, blocks=1, block=4, rows=2)


def with_head(recipe):
    """A backbone and its head, both of random weights."""
    model = train.untrained(recipe, recipe.source())
    model = dataclasses.replace(model, params=jax.tree.map(lambda x: 2 * x, dict(model.params)))
    shape = ResidualHeadConfig.of(model.config, 1)
    head = ResidualHead(shape, residual_head.init_params(shape, jax.random.key(1), "normal_0.2"))
    return model, dataclasses.replace(model, head=head)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a backbone of the chain and its head."""
    folder = tmp_path_factory.mktemp("runs")
    for name, model in zip(("chains", "chains-head"), with_head(CHAIN), strict=True):
        save(folder / name / "model", model)
    return folder


def options_of(runs, tmp_path, **changes):
    small = {"steps_ahead": (1,), "thresholds": (0.3, 0.9), "runs": runs, "folder": tmp_path / "results"}
    return Options((), **{"asked": ASKED, **small, **changes})


# Settings that are chosen


def row_of(exact, calls):
    return {"exact": exact, "problems": 100, "network_calls_per_token": calls}


def test_the_fewest_calls_that_are_right_enough():
    base, rows = row_of(90, 1.0), [row_of(89, 0.5), row_of(91, 0.6), row_of(88, 0.2)]
    assert tuned.best_of(rows, base, 1.0) == 0
    assert tuned.best_of(rows, base, 2.0) == 2
    assert tuned.best_of(rows, base, 0.0) == 1
    assert tuned.best_of(rows[:1] + rows[2:], base, 0.0) == 0, "none is: the one that is right most often"
    blocks = [row | {"block_share": share} for row, share in zip(rows, (0.1, 0.2, 0.9), strict=True)]
    assert tuned.best_of(blocks, base | {"block_share": 0.9}, 0.0) == 2


def test_groups_have_a_rival_without_a_head(runs, tmp_path, capsys):
    options = options_of(runs, tmp_path, steps_ahead=(1, 2))
    groups = dict(tuned.groups_of(Shop(options, 1.0, 4), (0.5, 0.7, 0.9)))
    sizes = {name: len(lines) for name, lines in groups.items()}
    direct = {f"direct {k}, {head}": 2 for k in (1, 2) for head in ("no head", "head")}
    assert sizes == {"dynamic": 2, **direct, "adaptive, no head": 6, "adaptive, head": 6}
    labels = [line.label for lines in groups.values() for line in lines]
    assert len(set(labels)) == len(labels)
    assert all(line.setting.knobs.enough == tuned.ENOUGH for line in groups["adaptive, head"])
    missing = dataclasses.replace(options, heads=(f"head={tmp_path / 'none'}",))
    assert {name for name, _ in tuned.groups_of(Shop(missing, 1.0, 4), (0.5,))} == {
        name for name in groups if not name.endswith(", head")
    }
    assert "left out: head" in capsys.readouterr().err


def test_tuning_problems_are_others(runs, tmp_path):
    choice = tuned.Choice(tuning=7)
    asked = tuned.tuning_of(options_of(runs, tmp_path), choice).asked
    assert (asked.count, asked.seed, asked.split) == (7, ASKED.seed + 1, "test")
    asked = tuned.tuning_of(options_of(runs, tmp_path, asked=Asked()), choice).asked
    assert (asked.count, asked.split) == (7, "tune")
    with pytest.raises(ValueError, match="here they come from both"):
        tuned.tuning_of(options_of(runs, tmp_path, asked=Asked(split="tune")), choice)
    with pytest.raises(ValueError, match="points -1 at least 0"):
        tuned.Choice(points=-1)
    with pytest.raises(ValueError, match="table2 is a study"):
        tuned.main(dataclasses.replace(options_of(runs, tmp_path), study=("table2",)))


@pytest.mark.slow
def test_what_is_chosen_is_measured(runs, tmp_path, capsys):
    options = options_of(runs, tmp_path)
    tuned.main(options, tuned.Choice(tuning=2, head_thresholds=(0.5,)))
    table, flat = read(options.folder / "tuned-chains.json")
    labels = [row["label"] for row in table["rows"]]
    groups = ("dynamic", "direct 1, no head", "adaptive, no head", "direct 1, head", "adaptive, head")
    assert sorted(table["chosen"]) == sorted(groups) and set(table["chosen"].values()) <= set(labels)
    assert len(flat) == len(labels) == 2 + len(set(table["chosen"].values()))
    assert table["options"]["tuning"] == 2 and table["options"]["count"] == 3
    assert "points" in capsys.readouterr().out


# Speculation beside its base


# Seconds
