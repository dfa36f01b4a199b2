"""The notebook on Jacobi decoding runs as a plain script, and its figures obey the rule that it explains."""

import dataclasses
import runpy
from pathlib import Path

import jax
import matplotlib.pyplot as pyplot
import numpy as np
import pytest

from experiments.tasks import build_tokenizer, token_spec
from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.families import init_params
from paradec_jax.store import Model, save

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "jacobi.py"
CONFIG = dataclasses.replace(CAUSAL_PRESETS["test-causal"], vocab_size=384, max_length=256)
BLOCK, TOKENS, PROBLEMS = 4, 14, 3


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Everything that the notebook defines, after a run on random weights and on a model that says one thing only."""
    folder = tmp_path_factory.mktemp("jacobi")
    values = {
        "BLOCK": BLOCK,
        "TOKENS": TOKENS,
        "PROBLEMS": PROBLEMS,
        "SHOWN": 6,
        "FIGURES": folder / "figures",
    }
    for gain, name in enumerate(("AFTER", "BEFORE")):
        values[name] = folder / name.lower()
        params = jax.tree.map(lambda x, gain=gain: gain * x, init_params(CONFIG, jax.random.key(0)))
        save(values[name], Model(CONFIG, params, token_spec(), build_tokenizer()))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(f"JACOBI_{name}", str(value))
        pyplot.switch_backend("Agg")
        yield runpy.run_path(str(NOTEBOOK))
        pyplot.close("all")


def rows(notebook):
    return [row for run in notebook["runs"].values() for row in run.rows]


def test_committed_tokens_never_change(notebook):
    assert len(rows(notebook)) == 2 * PROBLEMS
    for row in rows(notebook):
        assert row.boundary[0] == 1 and row.boundary[-1] == len(row.final) <= TOKENS
        assert (row.counts >= 1).all() and (row.counts <= BLOCK).all()
        for t, boundary in enumerate(row.boundary):
            assert row.seen[t, :boundary].tolist() == row.final[:boundary].tolist()
            block = -(-int(boundary) // BLOCK) * BLOCK
            if t < len(row.boundary) - 1:  # guesses fill the block of the newest token and no other
                assert (row.seen[t, boundary:block] >= 0).all() and (row.seen[t, block:] == -1).all()


def test_what_is_in_line_is_committed_next(notebook):
    for row in rows(notebook):
        for t, count in enumerate(row.counts):
            assert count == min(int(row.in_line[t].sum()) + 1, len(row.final) - row.boundary[t])
    whole = notebook["runs"]["after"].rows[
        0
    ]  # every guess is right but the random ones of a block's first call
    assert whole.counts.max() == BLOCK


def test_texts_are_those_of_one_by_one_decoding(notebook):
    for run in notebook["runs"].values():
        assert run.same
        assert [len(row.boundary) for row in run.rows] == run.calls.tolist()


def test_stationary_guesses():
    #               x committed, then what is guessed; the text is 1 2 3 4 5 6
    scope = {"np": np, "SimpleNamespace": __import__("types").SimpleNamespace}
    source = NOTEBOOK.read_text()
    start = source.index("def iterates")
    exec(source[start : source.index("\n\n\n", start)], scope)
    length = np.asarray([11, 12, 13, 16])
    draft = np.asarray([[9, 3, 9, 5, 6], [9, 4, 9, 6, 0], [4, 5, 6, 0, 0], [0, 0, 0, 0, 0]])
    row = scope["iterates"]([1, 2, 3, 4, 5, 6], 10, length, draft, np.full(4, 16))
    assert row.seen.tolist() == [
        [1, 9, 3, 9, 5, 6],
        [1, 2, 9, 4, 9, 6],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6],
    ]
    assert [np.flatnonzero(line).tolist() for line in row.in_line] == [[], [], [3, 4, 5], []]
    # 3 is right in iteration 0, lost in iteration 1; 5 likewise; 6 stays from the start.
    assert [np.flatnonzero(line).tolist() for line in row.stationary] == [[5], [3, 5], [], []]
    assert row.counts.tolist() == [1, 1, 3]


def test_counts_and_runs(notebook):
    for name, run in notebook["runs"].items():
        assert notebook["counts"][name].sum() == sum(len(row.final) - 1 for row in run.rows)
    flags = np.asarray([[1, 1, 0, 1], [1, 0, 1, 1]], bool)
    assert notebook["longest"](flags) == 2 and notebook["longest"](flags[:, :0]) == 0


def test_a_model_that_is_missing_is_told(notebook, capsys):
    model = notebook["load"]("no-such-model")
    said = capsys.readouterr().out
    assert said.startswith("no-such-model could not be loaded") and "Random weights take its place" in said
    assert model.config == CAUSAL_PRESETS["tiny-causal"]
    with pytest.raises(SystemExit, match="needs a causal model"):
        notebook["load"]("tiny-recurrent")


def test_figures_are_written(notebook):
    written = sorted(path.name for path in Path(notebook["FIGURES"]).iterdir())
    assert written == ["jacobi_counts.png", "jacobi_map.png"]
