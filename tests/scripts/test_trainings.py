"""Recipes at toy size: a stopped run ends with the weights of one that was not, two processes train what one does."""

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

from experiments.masked_diffusion.markov import Chain
from experiments.tasks.pointers import Stage
from paradec_jax import load, store
from paradec_jax.families import PRESETS
from paradec_jax.train import muon

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Training(NamedTuple):
    """A kind of run: its recipe, made from its module and the folder of toy models, and further arguments of `main`.

    It leaves `models`. `judged` is the file of held-out data and keys that it must have.
    """

    recipe: Callable[[Any, Path], Any]
    judged: tuple[str, str] | None = None
    given: dict[str, str] = {}  # noqa: RUF012
    models: tuple[str, ...] = ("model",)
    patches: dict[str, Any] = {}  # noqa: RUF012


SMALL: dict[str, Any] = {"steps": 3, "warmup": 1, "matmul_precision": "highest"}
CHAIN: dict[str, Any] = {"ground": "chains", "batch_tokens": 128, "layers": 1, "ema_decay": 0.9, **SMALL}
ROUNDS: dict[str, Any] = {"rounds": 2, "first_steps": 8, "updates": 2, "rows": 2, "warmup": 1}
ROUNDS |= {"matmul_precision": "highest"}
CHARACTERS: dict[str, Any] = {"preset": "test-mdlm", "rows": 2, **SMALL}
LAW = Chain((0.7, 0.2, 0.1), 8, 1)
FOUR: dict[str, Any] = {"steps": 4, "cooldown": 1, "matmul_precision": "highest"}
WORDS = dataclasses.replace(PRESETS["test-recurrent"], vocab_size=384, max_length=512)
SIZES = (
    (0, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
    (2, (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
)  # two, one after the other


TRAININGS = {
    "common.train": Training(
        lambda module, toys: module.Recipe(
            name="toy", preset="toy", mixture=SIZES, growth=(1, 2), batch_tokens=320, **FOUR
        ),
        patches={
            "PRESETS": {"toy": WORDS},
            "muon": lambda *given, warmup, **options: muon(*given, warmup=1, **options),
        },
    ),
    "block_diffusion.train": Training(
        lambda module, toys: module.Recipe(init=None, preset="test-sdar", blocks=(4,), **CHAIN),
        ("held_out.json", "nats floor accuracy block matmul_precision"),
    ),
    "block_diffusion.train_head": Training(
        lambda module, toys: module.Recipe(init="inherited", **CHAIN),
        ("held_out.json", "kl uncorrected_kl kl_ratio agreement rules"),
        {"start": "TOYS/chains/model"},
    ),
    "masked_diffusion.train": Training(
        lambda module, toys: module.Recipe(length=32, cooldown=0.4, **CHARACTERS),
        ("held_out.json", "nats kind matmul_precision"),
        {"text": "TOYS/text.txt"},
    ),
    "masked_diffusion.distill": Training(
        lambda module, toys: module.Recipe(ema_decay=0.9, **ROUNDS),
        ("held_out.json", "nats kind"),
        {"text": "TOYS/text.txt", "start": "TOYS/tiny-mdlm/model"},
        ("round-0/model", "round-1/model"),
    ),
    "masked_diffusion.markov_train": Training(
        lambda module, toys: module.Recipe(
            LAW,
            500,
            module.train.Recipe(name="teacher", layers=1, length=8, **CHARACTERS),
            module.distill.Recipe(name="students", **ROUNDS),
        ),
        ("students/held_out.json", "nats kind"),
        models=("teacher/model", "students/round-0/model", "students/round-1/model"),
        patches={"HELD_OUT": 4},
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
    given = {key: value.replace("TOYS", str(toys)) for key, value in one.given.items()}
    given |= {"text": Path(given["text"])} if "text" in given else {}
    recipe = one.recipe(module, toys)
    whole, again = tmp_path / "whole", tmp_path / "again"
    module.main(recipe, folder=whole, **given)
    if "minutes" in inspect.signature(module.main).parameters:
        module.main(recipe, folder=again, minutes=0.0, **given)
    else:  # killed before a model is written
        with monkeypatch.context() as patch:
            patch.setattr(store, "save", killed)
            with pytest.raises(KeyboardInterrupt):
                module.main(recipe, folder=again, **given)
    assert not (again / one.models[-1]).exists() and any(again.rglob("checkpoints"))
    module.main(recipe, folder=again, **given)
    for place in one.models:
        mine, wanted = (load(folder / place) for folder in (again, whole))
        jax.tree.map(np.testing.assert_array_equal, mine.params, wanted.params)
        if wanted.head is not None:
            jax.tree.map(np.testing.assert_array_equal, mine.head.params, wanted.head.params)
    if one.judged is not None:
        file, keys = one.judged
        found = [json.loads((folder / file).read_text()) for folder in (again, whole)]
        assert found[0] == found[1] and found[0].keys() >= set(keys.split())
    other = {"chain": dataclasses.replace(LAW, seed=2)} if name.endswith("markov_train") else {"seed": 9}
    with pytest.raises((SystemExit, ValueError), match="was begun with other"):
        module.main(dataclasses.replace(recipe, **other), folder=whole, **given)


SHORT = "--steps 3 --warmup 1 --matmul-precision highest"
LAWFUL = f"--law.symbols 5 --law.length 12 --prompt 4 --batch-tokens 48 {SHORT}"
COMMANDS = {
    "masked_diffusion.train": f"--text TOYS/text.txt tiny-mdlm --preset test-mdlm --length 32 --rows 4 {SHORT}",
    "masked_diffusion.distill": "--text TOYS/text.txt --start TOYS/tiny-mdlm/model halves --rounds 2 "
    "--first-steps 8 --updates 2 --rows 4 --warmup 1 --matmul-precision highest",
    "block_diffusion.train": f"chains --preset test-sdar --layers 1 --blocks 4 {LAWFUL}",
    "block_diffusion.train_head": f"--start TOYS/chains/model chains-head --layers 1 --batch-tokens 256 {SHORT}",
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
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    mine, other = (load(folder / "model") for folder in (one, two))
    jax.tree.map(same, mine.params, other.params)
    if mine.head is not None:
        jax.tree.map(same, mine.head.params, other.head.params)
    found, wanted = (json.loads((folder / "held_out.json").read_text()) for folder in (two, one))
    for key in {"nats", "kl"} & wanted.keys():
        assert found[key] == pytest.approx(wanted[key], abs=1e-3)
    changed = run(name, f"{COMMANDS[name]} --folder {two} --seed 9", *several)
    assert changed.returncode == 1 and changed.stderr.count("was begun with other seed") == 2
