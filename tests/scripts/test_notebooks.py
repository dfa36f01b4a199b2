"""Every notebook runs as a plain script on tiny models, and its figures obey the rule that it
explains.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
pytestmark = pytest.mark.slow


def wavefront(run: dict[str, Any]):
    """Committed tokens never change and had stopped moving; random tokens are revised and the text
    stays the same.
    """
    for wave in (run["wave"], run["hasty"]):
        assert wave.boundary[0] == 1 and wave.boundary[-1] == len(wave.final) <= 14
        for t, boundary in enumerate(wave.boundary):
            assert wave.seen[t, :boundary].tolist() == wave.final[:boundary].tolist()
        for t in range(1, len(wave.boundary)):
            # states that predict the tokens
            committed = np.arange(wave.boundary[t - 1], wave.boundary[t]) - 1
            assert (wave.distance[t][committed] < run["EPSILON"]).all()
    assert len(run["revised"](run["hasty"])) > 0 and run["same"]


def jacobi(run: dict[str, Any]):
    """What is in line is committed next, and the text is that of one-by-one decoding."""
    for one in run["runs"].values():
        assert one.same and [len(row.boundary) for row in one.rows] == one.calls.tolist()
        for row in one.rows:
            for t, count in enumerate(row.counts):
                assert count == min(int(row.in_line[t].sum()) + 1, len(row.final) - row.boundary[t])


def masked_diffusion(run: dict[str, Any]):
    """What is revealed never changes, and every call reveals something."""
    for one in run["runs"].values():
        assert (one.before <= one.final).all() and one.final[-1].all() and not one.before[0].any()
        for tokens, shown in zip(one.tokens, one.final, strict=True):
            assert (tokens[shown] == one.text[shown]).all()
        new = (one.final & ~one.before).sum(axis=2)
        assert one.calls.tolist() == (new > 0).sum(axis=0).tolist() and one.calls.max() <= 4


def residual_prediction(run: dict[str, Any]):
    """Every position is revealed once: one a call alone, two more after each call with a head."""
    for one in run["runs"].values():
        assert sorted(event.position for event in one.events) == list(range(4))
    assert run["runs"]["alone"].calls == 4
    for name in ("no head", "with its head"):
        assert [event.turn for event in run["runs"][name].events] == [0, 1, 2, 0]


NOTEBOOK = {
    "wavefront": (wavefront, {"TOKENS": 14, "WIDTH": 4, "SHOWN": 6}),
    "jacobi": (
        jacobi,
        {
            "BEFORE": "TOYS/causal",
            "AFTER": "TOYS/other",
            "BLOCK": 4,
            "TOKENS": 14,
            "PROBLEMS": 3,
            "SHOWN": 6,
        },
    ),
    "masked_diffusion": (
        masked_diffusion,
        {"TEACHER": "TOYS/tiny-mdlm/model", "STUDENT": "TOYS/halves/round-0/model"}
        | {"STEPS": 4, "LENGTH": 14, "TEXTS": 3, "SHOWN": 6},
    ),
    "residual_prediction": (
        residual_prediction,
        {"MODEL": "TOYS/chains-head/model", "GROUND": "chains", "STEPS": 2},
    ),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.py")))
def test_a_notebook_runs_and_shows_what_it_says(name, toys, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    obeys, values = NOTEBOOK[name]
    for key, value in (values | {"FIGURES": str(tmp_path)}).items():
        prefix = name.partition("_")[0].upper()
        monkeypatch.setenv(f"{prefix}_{key}", str(value).replace("TOYS", str(toys)))
    run = runpy.run_path(os.fspath(NOTEBOOKS / f"{name}.py"))
    pyplot.close("all")
    obeys(run)
    assert len(list(tmp_path.glob("*.png"))) >= 2
