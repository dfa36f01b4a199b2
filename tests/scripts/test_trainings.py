"""Recipes at toy size: a stopped run ends with the weights of one that was not, two processes train what one does."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from toys import POINTERS

from experiments.jacobi import distill
from experiments.masked_diffusion.markov import Chain
from experiments.tasks.pointers import Stage
from paradec_jax import load, store
from paradec_jax.losses.self_distillation import DistillationRules
from paradec_jax.recipes.sdtt import Sdtt

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Training(NamedTuple):
    """A kind of run: its recipe, made from its module and the folder of toy models, and the models that it leaves."""

    recipe: Callable[[Any, Path], Any]
    models: tuple[str, ...] = ("model",)
    patches: dict[str, Any] = {}  # noqa: RUF012


PAIRS: dict[str, Any] = {"batch_tokens": 512, "replay_tokens": 512, "matmul_precision": "highest"}
LAW = Chain((0.7, 0.2, 0.1), 8, 1)
STUDENTS = Sdtt(rounds=2, rules=DistillationRules(first_steps=8))


def collected(module: Any, toys: Path) -> Any:
    """Two rounds of two updates on trajectories of seven problems."""
    stage = module.Round(block=4, problems=7, updates=2, warmup=0, cooldown=1, window=2)
    rounds, start = (stage, dataclasses.replace(stage, block=8)), str(toys / "causal")
    return module.Recipe(start=start, rounds=rounds, steps=(2, 2), max_new_tokens=8, **PAIRS)


TRAININGS = {
    "masked_diffusion.markov_train": Training(
        lambda module, toys: module.Recipe(LAW, 500, 16, 1, 3, STUDENTS, 2),
        models=("teacher/model", "students/round-0/model", "students/round-1/model"),
    ),
    "jacobi.distill": Training(collected, models=("round-0/model", "round-1/model"), patches={"ROWS": 3}),
    "recurrent_depth.distill_waves": Training(
        lambda module, toys: module.Recipe(
            start=str(toys / "recurrent"), updates=2, warmup=0, cooldown=1, **PAIRS
        )
    ),
    "recurrent_depth.pointers": Training(
        lambda module, toys: dataclasses.replace(
            POINTERS,
            curriculum=(Stage(0, 4, 1, queries=2, rows=2), Stage(1, 8, 2, queries=3, rows=1)),
            **{"updates": 2, "warmup": 1, "cooldown": 1},
        )
    ),
}


def killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", TRAININGS)
def test_a_run_that_was_stopped_goes_on(name, toys, tmp_path, monkeypatch):
    one, module = TRAININGS[name], importlib.import_module(f"experiments.{name}")
    monkeypatch.setitem(distill.RECIPES, "tiny-jacobi", collected(distill, toys))
    for patched, value in one.patches.items():
        monkeypatch.setattr(module, patched, value)
    recipe = one.recipe(module, toys)
    whole, again = tmp_path / "whole", tmp_path / "again"
    module.main(recipe, folder=whole)
    if "minutes" in inspect.signature(module.main).parameters:
        with contextlib.suppress(SystemExit):
            module.main(recipe, folder=again, minutes=0.0)
    else:  # killed before a model is written
        with monkeypatch.context() as patch:
            patch.setattr(store, "save", killed)
            with pytest.raises(KeyboardInterrupt):
                module.main(recipe, folder=again)
    assert not (again / one.models[-1]).exists() and any(again.rglob("checkpoints"))
    module.main(recipe, folder=again)
    for place in one.models:
        mine, wanted = (load(folder / place) for folder in (again, whole))
        jax.tree.map(np.testing.assert_array_equal, mine.params, wanted.params)
    other = {"chain": dataclasses.replace(LAW, seed=2)} if name.endswith("markov_train") else {"seed": 9}
    with pytest.raises((SystemExit, ValueError), match="was begun with other"):
        module.main(dataclasses.replace(recipe, **other), folder=whole)


SHORT = "--steps 3 --warmup 1 --matmul-precision highest"
ROUND = "--rounds.0.problems 8 --rounds.0.updates 3 --rounds.0.warmup 1 --rounds.0.cooldown 1"
COMMANDS = {
    "jacobi.distill": f"mask-nc {ROUND} --max-new-tokens 64 --batch-tokens 2048 --matmul-precision highest",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_two_processes_train_what_one_does(name, toys, tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    def run(name, options, *launcher):
        options = options.replace("TOYS", str(toys))
        command = [sys.executable, *launcher, "-m", f"experiments.{name}", *options.split()]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False, text=True, capture_output=True)

    several = ("-m", "experiments.launch.local", "--processes", "2", "--devices", "1", "--", sys.executable)
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder, launcher in ((one, ()), (two, several)):
        ended = run(name, f"{COMMANDS[name]} --folder {folder}", *launcher)
        assert ended.returncode == 0, ended.stderr
    made = "round-0/model" if name == "jacobi.distill" else "model"
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    mine, other = (load(folder / made) for folder in (one, two))
    jax.tree.map(same, mine.params, other.params)
    if name != "jacobi.distill":
        found, wanted = (json.loads((folder / "held_out.json").read_text()) for folder in (two, one))
        for key in {"nats", "kl"} & wanted.keys():
            assert found[key] == pytest.approx(wanted[key], abs=1e-3)
    changed = run(name, f"{COMMANDS[name]} --folder {two} --seed 9", *several)
    assert changed.returncode == 1 and changed.stderr.count("was begun with other seed") == 2
