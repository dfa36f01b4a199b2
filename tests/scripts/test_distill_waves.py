"""Distillation of a tiny recurrent model on the trajectories of a tiny causal one."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.recurrent_depth import distill_waves
from experiments.tasks import build_tokenizer, token_spec
from paradec_jax import load, store
from paradec_jax.families import PRESETS, init_params
from paradec_jax.store import Model
from paradec_jax.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
# The command, with a collection of four problems in place of thousands.
COMMAND = """
import sys
from experiments.common.command import run
from experiments.jacobi import distill
from experiments.recurrent_depth import distill_waves

rounds = (distill.Round(block=4, problems=4),)
distill.RECIPES["tiny-jacobi"] = distill.Recipe(
    start=sys.argv.pop(1), rounds=rounds, steps=(2, 2), max_new_tokens=8, matmul_precision="highest"
)
distill.ROWS = 3
if __name__ == "__main__":
    run(distill_waves.main)
"""


def random_model(folder, preset, tokenizer=None):
    """A folder with a model of random weights."""
    config = dataclasses.replace(PRESETS[preset], vocab_size=384, max_length=256)
    tokenizer = build_tokenizer() if tokenizer is None else tokenizer
    model = Model(config, init_params(config, jax.random.key(0)), token_spec(), tokenizer)
    store.save(folder, model)
    return str(folder)


@pytest.fixture(scope="module")
def waves():
    """What the script defines."""
    return vars(distill_waves)


@pytest.fixture(scope="module")
def recipe(waves, tmp_path_factory):
    """Two updates on what a causal model of random weights says of seven problems."""
    folder, names = tmp_path_factory.mktemp("models"), waves["main"].__globals__
    distill = names["distill"]
    collected = distill.Recipe(
        start=random_model(folder / "causal", "test-causal"),
        rounds=(distill.Round(block=4, problems=4),),
        steps=(2, 2),
        max_new_tokens=8,
        batch_tokens=512,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(distill.RECIPES, "tiny-jacobi", collected)
        patch.setattr(distill, "ROWS", 3)
        yield waves["Recipe"](
            start=random_model(folder / "recurrent", "test-recurrent"),
            updates=2,
            warmup=0,
            cooldown=1,
            batch_tokens=512,
            replay_tokens=512,
        )


@pytest.mark.slow
def test_a_deeper_model_is_distilled_and_a_stopped_run_goes_on(waves, recipe, tmp_path, monkeypatch):
    waves["main"](recipe, tmp_path / "whole")
    before, after = load(recipe.start), load(tmp_path / "whole" / "model")
    assert after.config.core_layers == 2 * before.config.core_layers
    moved = jax.tree.map(
        lambda new, old: np.abs(new - old).max(), after.params["core_0"], before.params["core_0"]
    )
    assert min(jax.tree.leaves(moved)) > 0
    assert np.abs(after.params["core_1"]["mlp"]["down"]).max() > 0

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            waves["main"](recipe, tmp_path / "again", tmp_path / "whole" / "trajectories")
    waves["main"](recipe, tmp_path / "again", tmp_path / "whole" / "trajectories")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "again" / "model").params, after.params)
    with pytest.raises(SystemExit, match="was begun with other mean"):
        waves["main"](dataclasses.replace(recipe, mean=2.0), tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_distill_what_one_does(tmp_path):
    causal = random_model(tmp_path / "causal", "test-causal")
    recurrent = random_model(tmp_path / "recurrent", "test-recurrent")
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    options = ["--start", recurrent, "--matmul-precision", "highest", "--batch-tokens", "512"]
    options += ["--replay-tokens", "512", "--updates", "3", "--warmup", "1", "--cooldown", "1"]
    whole = ["--data", "-1", "--fsdp", "1"]  # split parameters meet the known fault of docs/meshes.md
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    def distilled(folder, *launcher, seed="0", lie=whole):
        words = [sys.executable, *launcher, str(script), causal, *options, *lie]
        words += ["--folder", str(folder), "--seed", seed]
        return subprocess.run(words, cwd=ROOT, env=environment, check=False, text=True, capture_output=True)

    several = ("-m", "experiments.launch.local", "--processes", "2", "--devices", "1", "--", sys.executable)
    one, two = tmp_path / "one", tmp_path / "two"
    split = distilled(two, *several, lie=[])
    assert split.returncode == 1 and split.stderr.count("add --data -1 --fsdp 1") == 2, split.stderr
    for folder, launcher in ((one, ()), (two, several)):
        ended = distilled(folder, *launcher)
        assert ended.returncode == 0, ended.stderr
    mine, other = (load(folder / "model").params for folder in (one, two))
    # Weights are exported in 16 significant bits: what lies between two of them may go to either.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2**-15, atol=1e-4), mine, other)
    changed = distilled(two, *several, seed="9")
    assert changed.returncode == 1 and changed.stderr.count("was begun with other seed") == 2


def test_copies_of_zero_keep_the_shape(waves, recipe):
    model = load(recipe.start)
    assert waves["deepened"](model, dataclasses.replace(recipe, copies=0)) is model


def test_models_that_do_not_fit_are_refused(waves, recipe, tmp_path):
    causal = waves["main"].__globals__["distill"].RECIPES["tiny-jacobi"].start
    with pytest.raises(SystemExit, match="is of family causal; waves need a recurrent-depth model"):
        waves["main"](dataclasses.replace(recipe, start=causal), tmp_path)
    file = tmp_path / "tokenizer.json"
    build_tokenizer().save(file)
    spelled = json.loads(file.read_text())
    vocabulary = spelled["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(spelled))
    other = random_model(tmp_path / "other", "test-recurrent", tokenizer=Tokenizer.from_file(file))
    with pytest.raises(SystemExit, match="have different tokenizers"):
        waves["main"](dataclasses.replace(recipe, start=other), tmp_path)
