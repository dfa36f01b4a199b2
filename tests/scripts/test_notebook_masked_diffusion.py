"""The notebook on masked diffusion runs as a plain script, and its figures obey the rule that it explains."""

import dataclasses
import runpy
from pathlib import Path

import jax
import matplotlib.pyplot as pyplot
import numpy as np
import pytest

from paradec_jax.config import MASKED_DIFFUSION_PRESETS
from paradec_jax.data.text import character_spec, character_tokenizer
from paradec_jax.families import parameter_shapes
from paradec_jax.store import Model, save

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "masked_diffusion.py"
STEPS, LENGTH, TEXTS = 4, 30, 3
SMALL = dataclasses.replace(MASKED_DIFFUSION_PRESETS["test-mdlm"], layers=1, vocab_size=66, max_length=32)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Everything that the notebook defines, after a run on two tiny models of random weights."""
    folder = tmp_path_factory.mktemp("masked")
    tokenizer = character_tokenizer("To be, question.\n")
    config = dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size)
    spec = character_spec(tokenizer, "own")
    values = {"STEPS": STEPS, "LENGTH": LENGTH, "TEXTS": TEXTS, "SHOWN": 6, "FIGURES": folder / "figures"}
    for seed, name in enumerate(("TEACHER", "STUDENT")):
        values[name] = folder / name.lower()
        draw = np.random.default_rng(seed)
        params = jax.tree.map(
            lambda x, draw=draw: draw.normal(0, 0.3, x.shape).astype(np.float32), parameter_shapes(config)
        )
        save(values[name], Model(config, params, spec, tokenizer))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(f"MASKED_{name}", str(value))
        pyplot.switch_backend("Agg")
        yield runpy.run_path(str(NOTEBOOK))
        pyplot.close("all")


def test_what_is_revealed_never_changes(notebook):
    assert len(notebook["runs"]) == 2
    for run in notebook["runs"].values():
        assert run.final.shape == run.tokens.shape == (STEPS, TEXTS, LENGTH)
        assert (run.before <= run.final).all() and run.final[-1].all() and not run.before[0].any()
        for call in range(STEPS):
            shown = run.final[call]
            assert (run.tokens[call][shown] == run.text[shown]).all()
            assert (run.tokens[call][~shown] == notebook["models"]["teacher"].token_spec.mask).all()


def test_every_call_reveals_something(notebook):
    for run in notebook["runs"].values():
        new = (run.final & ~run.before).sum(axis=2)
        assert new.sum(axis=0).tolist() == [LENGTH] * TEXTS
        assert run.calls.tolist() == (new > 0).sum(axis=0).tolist() and run.calls.max() <= STEPS


def test_both_models_reveal_the_same_positions(notebook):
    one, other = notebook["runs"].values()
    assert (one.when == other.when).all() and (one.text != other.text).any()


def test_how_sure_each_model_was(notebook):
    for name, run in notebook["runs"].items():
        first = -run.log_probs[run.when == 0]
        assert notebook["surprises"][name][0] == pytest.approx(first.mean(), rel=1e-5)
        assert (run.log_probs <= 0).all() and (run.log_probs < 0).any()


def test_steps_and_gaps(notebook):
    for (_, steps), (text, calls) in notebook["table"].items():
        assert len(text) == LENGTH and 1 <= calls <= min(steps, LENGTH)
    filled = notebook["filled"]
    assert filled.startswith("To be, ") and filled.endswith(" question.") and len(filled) == 7 + 12 + 10


def test_a_model_that_is_missing_is_told(notebook, capsys, monkeypatch):
    monkeypatch.setitem(notebook["pd"].PRESETS, "tiny-mdlm", SMALL)
    model = notebook["load"]("no-such-model")
    said = capsys.readouterr().out
    assert said.startswith("no-such-model could not be loaded") and "Random weights take its place" in said
    assert model.config == SMALL and model.tokenizer.vocab_size == 66
    with pytest.raises(SystemExit, match="revealed by a denoiser"):
        notebook["load"]("tiny-causal")


def test_figures_are_written(notebook):
    written = sorted(path.name for path in Path(notebook["FIGURES"]).iterdir())
    assert written == ["masked_map.png", "masked_surprise.png"]
