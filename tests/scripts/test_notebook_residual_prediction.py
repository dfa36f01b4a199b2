"""The notebook on residual prediction runs as a plain script, and what it shows obeys the rule that it explains."""

import dataclasses
import runpy
from pathlib import Path

import jax
import matplotlib.pyplot as pyplot
import pytest

from experiments.block_diffusion import train
from paradec_jax.config import BLOCK_DIFFUSION_PRESETS, ResidualHeadConfig
from paradec_jax.models import residual_head
from paradec_jax.store import ResidualHead, save

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "residual_prediction.py"
RECIPE = train.Recipe(name="chain", ground="chains", init=None, preset="test-sdar", layers=1, blocks=(4,))
STEPS, WIDTH = 2, 4


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Everything that the notebook defines, after a run on a tiny model and head of random weights."""
    folder = tmp_path_factory.mktemp("residual")
    model = train.untrained(RECIPE, RECIPE.source())
    shape = ResidualHeadConfig.of(model.config, 1)
    head = ResidualHead(shape, residual_head.init_params(shape, jax.random.key(1), "normal_0.2"))
    save(folder / "model", dataclasses.replace(model, head=head))
    values = {"MODEL": folder / "model", "GROUND": "chains", "STEPS": STEPS, "FIGURES": folder / "figures"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(f"RESIDUAL_{name}", str(value))
        pyplot.switch_backend("Agg")
        yield runpy.run_path(str(NOTEBOOK))
        pyplot.close("all")


def test_every_position_is_revealed_once(notebook):
    for run in notebook["runs"].values():
        assert sorted(event.position for event in run.events) == list(range(WIDTH))
        assert all(0 < event.confidence <= 1 for event in run.events)
        order = [(event.call, event.turn) for event in run.events]
        assert order == sorted(order)


def test_calls_and_who_revealed(notebook):
    """One position a call alone; K more after each call with a head, trained or zero."""
    runs = notebook["runs"]
    assert runs["alone"].calls == WIDTH and {event.turn for event in runs["alone"].events} == {0}
    for name in ("no head", "with its head"):
        assert runs[name].calls == -(-WIDTH // (1 + STEPS)) and runs[name].rounds == 1 + STEPS
        assert [event.turn for event in runs[name].events] == [0, 1, 2, 0]
    assert notebook["agreeing"]["alone"] == WIDTH


def test_without_a_head_scores_stay_as_they_are(notebook):
    """The first call reveals the surest positions one after the other."""
    first = [event.confidence for event in notebook["runs"]["no head"].events if event.call == 0]
    assert first == sorted(first, reverse=True)


def test_a_model_that_is_missing_is_told(notebook, capsys, monkeypatch):
    small = dataclasses.replace(BLOCK_DIFFUSION_PRESETS["test-sdar"], layers=1)
    monkeypatch.setitem(notebook["pd"].PRESETS, "tiny-sdar", small)
    model, ground = notebook["load"]("no-such-model")
    said = capsys.readouterr().out
    assert said.startswith("no-such-model could not be loaded") and "Random weights take its place" in said
    assert ground == "chains" and model.head is not None and model.config.layers == 1
    with pytest.raises(SystemExit, match="has no residual head"):
        notebook["load"]("tiny-causal")


def test_figures_are_written(notebook):
    written = sorted(path.name for path in Path(notebook["FIGURES"]).iterdir())
    assert written == ["residual_confidence.png", "residual_map.png"]
