"""Recipes at toy size: a stopped run ends with the weights of one that was not, two processes train
what one does.
"""

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from toys import POINTERS

from experiments.masked_diffusion.markov import Chain
from experiments.tasks.pointers import Stage
from paradec_jax import load, store
from paradec_jax.losses.self_distillation import DistillationRules
from paradec_jax.objectives.sdtt import Sdtt

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Training(NamedTuple):
    """A kind of run: its recipe, made from its module and the folder of toy models, and the models
    that it leaves.
    """

    recipe: Callable[[Any, Path], Any]
    models: tuple[str, ...] = ("model",)
    patches: dict[str, Any] = {}  # noqa: RUF012


LAW = Chain((0.7, 0.2, 0.1), 8, 1)
STUDENTS = Sdtt(rounds=2, rules=DistillationRules(first_steps=8))


TRAININGS = {
    "masked_diffusion.markov_train": Training(
        lambda module, toys: module.Recipe(LAW, 500, 16, 1, 3, STUDENTS, 2),
        models=("teacher/model", "students/round-0/model", "students/round-1/model"),
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
    other = (
        {"chain": dataclasses.replace(LAW, seed=2)}
        if name.endswith("markov_train")
        else {"seed": 9}
    )
    with pytest.raises((SystemExit, ValueError), match="was begun with other"):
        module.main(dataclasses.replace(recipe, **other), folder=whole)
