"""The notebooks run as plain scripts, and what their figures show obeys the rule that they explain."""

import runpy
from pathlib import Path

import matplotlib.pyplot as pyplot
import numpy as np
import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "wavefront.py"
TOKENS, WIDTH, SHOWN = 14, 4, 6


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Everything that the notebook defines, after a run with few tokens."""
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TOKENS", TOKENS), ("WIDTH", WIDTH), ("SHOWN", SHOWN), ("FIGURES", folder)):
            patch.setenv(f"WAVEFRONT_{name}", str(value))
        pyplot.switch_backend("Agg")
        yield runpy.run_path(str(NOTEBOOK))
        pyplot.close("all")


@pytest.fixture(params=["wave", "hasty"])
def wave(notebook, request):
    return notebook[request.param]


def test_the_boundary_moves_on_and_the_front_stays_ahead(notebook, wave):
    headway = 2 if wave is notebook["hasty"] else 1
    assert wave.boundary[0] == 1 and wave.boundary[-1] == len(wave.final) <= TOKENS
    assert (np.diff(wave.boundary) >= 0).all() and (np.diff(wave.front) <= headway).all()
    assert (wave.front >= wave.boundary).all() and (wave.front - wave.boundary < WIDTH).all()


def test_committed_tokens_never_change(wave):
    for t, boundary in enumerate(wave.boundary):
        assert wave.seen[t, :boundary].tolist() == wave.final[:boundary].tolist()
        assert (wave.seen[t, boundary : wave.front[t]] >= 0).all()
        assert (wave.seen[t, wave.front[t] :] == -1).all()


def test_what_is_committed_has_stopped_moving(notebook, wave):
    for t in range(1, len(wave.boundary)):
        window = wave.distance[t]
        committed = (
            np.arange(wave.boundary[t - 1], wave.boundary[t]) - 1
        )  # the states that predict the tokens
        assert (window[committed] < notebook["EPSILON"]).all()
        # Every state of the window was measured, and no other.
        assert np.flatnonzero(np.isfinite(window)).tolist() == list(
            range(wave.boundary[t - 1] - 1, min(wave.front[t - 1], len(wave.final)))
        )


def test_tokens_settle_before_they_are_committed(notebook):
    waits, wave = notebook["waits"], notebook["wave"]
    assert (waits >= 0).all() and waits[0] == 0
    for p, (arrived, committed) in enumerate(zip(notebook["arrived"], notebook["committed"], strict=True)):
        assert wave.seen[arrived, p] == wave.final[p] and (wave.seen[:arrived, p] != wave.final[p]).all()
        assert wave.boundary[committed] > p and (wave.boundary[:committed] <= p).all()


def test_random_tokens_are_revised_and_the_text_stays_the_same(notebook):
    assert len(notebook["revised"](notebook["hasty"])) > 0
    assert notebook["hasty"].final.tolist() == notebook["wave"].final.tolist()
    assert notebook["same"]


def test_figures_are_written(notebook):
    written = sorted(path.name for path in Path(notebook["FIGURES"]).iterdir())
    assert written == [f"wavefront_{name}.png" for name in ("front", "headway", "stability", "tokens")]
