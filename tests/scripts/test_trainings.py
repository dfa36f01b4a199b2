"""Recipes at toy size: a stopped run ends with the weights of one that was not, two processes train what one does."""

import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import POINTERS, TEXT

from experiments.block_diffusion import train as block_train
from experiments.block_diffusion import train_head
from experiments.common import train
from experiments.common.cluster import Cluster
from experiments.common.command import claim
from experiments.common.processes import alone, by_first, claim_together, on_this
from experiments.common.watch import Watch
from experiments.jacobi import distill as jacobi_distill
from experiments.masked_diffusion import distill as masked_distill
from experiments.masked_diffusion import markov_train
from experiments.masked_diffusion import train as masked_train
from experiments.masked_diffusion.markov import Chain
from experiments.recurrent_depth import distill_waves
from paradec_jax import load, store
from paradec_jax.data import Followers
from paradec_jax.data.pointers import Stage
from paradec_jax.families import network_of
from paradec_jax.models import update_flops
from paradec_jax.train.launch import VARIABLES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Training:
    """One kind of run.

    Attributes:
      recipe: a toy; paths in it are of the folder of toy models.
      judged: the file that tells of held-out data, and keys that it must have.
      given: further arguments of `main`; TOYS is the folder of toy models.
      models: folders of models that it leaves.
      patches: names of the module, and what takes their place here.
      stopped: a name of a module whose first use ends the first call; the limit of minutes when None.
    """

    recipe: Callable[[Path], Any]
    judged: tuple[str, str] | None
    given: dict[str, str] = dataclasses.field(default_factory=dict)
    models: tuple[str, ...] = ("model",)
    patches: dict[str, Any] = dataclasses.field(default_factory=dict)
    stopped: tuple[Any, str] | None = None


SMALL: dict[str, Any] = {"steps": 3, "warmup": 1, "matmul_precision": "highest"}
LAW = Followers(symbols=5, length=12)
CHAIN: dict[str, Any] = {"ground": "chains", "law": LAW, "prompt": 4, "batch_tokens": 24, "ema_decay": 0.9}
ROUNDS: dict[str, Any] = {"first_steps": 8, "rows": 2, "warmup": 1, "matmul_precision": "highest"}
CHARACTERS: dict[str, Any] = {"preset": "test-mdlm", "rows": 2, **SMALL}
PAIRS: dict[str, Any] = {"batch_tokens": 512, "replay_tokens": 512, "matmul_precision": "highest"}


def collected(toys: Path) -> jacobi_distill.Recipe:
    """Trajectories of seven problems, and two updates."""
    stage = jacobi_distill.Round(block=4, problems=7, updates=2, warmup=0, cooldown=1, window=2)
    rounds = (stage, dataclasses.replace(stage, block=8))
    return jacobi_distill.Recipe(
        start=str(toys / "causal"), rounds=rounds, steps=(2, 2), max_new_tokens=8, **PAIRS
    )


TRAININGS = {
    "block_diffusion.train": Training(
        lambda toys: block_train.Recipe(
            name="chains", init=None, preset="test-sdar", layers=1, blocks=(4,), **CHAIN, **SMALL
        ),
        ("held_out.json", "nats floor accuracy block matmul_precision"),
    ),
    "block_diffusion.train_head": Training(
        lambda toys: train_head.Recipe(
            name="head", layers=1, init="inherited", **CHAIN | {"law": Followers()}, **SMALL
        ),
        ("held_out.json", "kl uncorrected_kl kl_ratio agreement rules"),
        {"start": "TOYS/chains/model"},
    ),
    "masked_diffusion.train": Training(
        lambda toys: masked_train.Recipe(length=32, cooldown=0.4, **CHARACTERS),
        ("held_out.json", "nats kind matmul_precision"),
        {"text": "TOYS/text.txt"},
    ),
    "masked_diffusion.distill": Training(
        lambda toys: masked_distill.Recipe(rounds=2, updates=2, ema_decay=0.9, **ROUNDS),
        ("held_out.json", "nats kind"),
        {"text": "TOYS/text.txt", "start": "TOYS/tiny-mdlm/model"},
        ("round-0/model", "round-1/model"),
    ),
    "masked_diffusion.markov_train": Training(
        lambda toys: markov_train.Recipe(
            Chain((0.7, 0.2, 0.1), 8, 1),
            500,
            masked_train.Recipe(name="teacher", layers=1, length=8, **CHARACTERS | {"steps": 2}),
            masked_distill.Recipe(name="students", rounds=2, updates=2, **ROUNDS),
        ),
        ("students/held_out.json", "nats kind"),
        models=("teacher/model", "students/round-0/model", "students/round-1/model"),
        patches={"HELD_OUT": 4},
    ),
    "jacobi.distill": Training(
        collected,
        None,
        models=("round-0/model", "round-1/model"),
        patches={"ROWS": 3, "CHECKPOINT_EVERY": 1},
        stopped=(jacobi_distill.Together, "__next__"),
    ),
    "recurrent_depth.distill_waves": Training(
        lambda toys: distill_waves.Recipe(
            start=str(toys / "recurrent"), updates=2, warmup=0, cooldown=1, **PAIRS
        ),
        None,
        stopped=(store, "save"),
    ),
    "recurrent_depth.pointers": Training(
        lambda toys: dataclasses.replace(
            POINTERS,
            curriculum=(Stage(0, 4, 1, queries=2, rows=2), Stage(1, 8, 2, queries=3, rows=1)),
            **{"updates": 2, "warmup": 1, "cooldown": 1},
        ),
        None,
        stopped=(store, "save"),
    ),
}


class Killed(Exception):
    """Stands for the end of the process."""


def killed_at(calls: int, honest: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose call of that number is the last."""
    made: list[None] = []

    def call(*arguments: Any, **options: Any) -> Any:
        made.append(None)
        if len(made) >= calls:
            raise Killed
        return honest(*arguments, **options)

    return call


@pytest.mark.parametrize("name", TRAININGS)
def test_a_run_that_was_stopped_goes_on(name, toys, tmp_path, monkeypatch):
    one, module = TRAININGS[name], importlib.import_module(f"experiments.{name}")
    monkeypatch.setitem(
        jacobi_distill.RECIPES,
        "tiny-jacobi",
        dataclasses.replace(collected(toys), rounds=collected(toys).rounds[:1]),
    )
    for patched, value in one.patches.items():
        monkeypatch.setattr(module, patched, value)
    given = {key: value.replace("TOYS", str(toys)) for key, value in one.given.items()}
    given |= {"text": Path(given["text"])} if "text" in given else {}
    recipe = one.recipe(toys)
    whole, again = tmp_path / "whole", tmp_path / "again"
    module.main(recipe, folder=whole, **given)
    if one.stopped is None:
        module.main(recipe, folder=again, minutes=0.0, **given)
    else:
        owner, attribute = one.stopped
        calls = 3 if attribute == "__next__" else 1
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, killed_at(calls, getattr(owner, attribute)))
            with pytest.raises(Killed):
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
    if name != "recurrent_depth.pointers":
        other = {"chain": Chain((0.7, 0.2, 0.1), 8, 2)} if name.endswith("markov_train") else {"seed": 9}
        with pytest.raises(SystemExit, match="was begun with other"):
            module.main(dataclasses.replace(recipe, **other), folder=whole, **given)


def test_word_problems(tmp_path, monkeypatch):
    """Four updates of two shapes: a trace, writers, and rates without the first update of each shape."""
    told, folders, muon = [], [], train.muon
    events = types.SimpleNamespace(add_scalar=lambda *scalar: told.append(scalar), flush=lambda: None)
    fake = types.SimpleNamespace(SummaryWriter=lambda folder: folders.append(folder) or events)
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    shape = dataclasses.replace(train.PRESETS["test-recurrent"], vocab_size=384, max_length=512)
    monkeypatch.setitem(train.PRESETS, "toy", shape)
    monkeypatch.setattr(train, "muon", lambda *given, warmup, **options: muon(*given, warmup=1, **options))
    mixture = ((0, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)), (2, (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
    toy = train.Recipe(
        name="toy", preset="toy", steps=4, cooldown=1, batch_tokens=320, mixture=mixture, growth=(1, 2)
    )
    monkeypatch.setitem(train.DRAWS, toy.draw, lambda mean: lambda key, step: jax.numpy.int32(5))
    before = jax.config.jax_default_matmul_precision
    try:
        watch = Watch(profile="2:3", writers=("tensorboard",))
        train.main(
            dataclasses.replace(toy, matmul_precision="highest"), tmp_path, peak_flops=1e9, watch=watch
        )
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert load(tmp_path / "model").config == shape
    assert list((tmp_path / "profile").rglob("*.xplane.pb")) and folders == [str(tmp_path / "events")]
    line, last = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert ("loss", line["loss"], 4) in told and ("wall_s", last["wall_s"], 4) in told
    rows = {102: 320 // 102, 161: 320 // 161}
    tokens = sum(length * count for length, count in rows.items())
    assert line["tokens_per_s"] * line["step_s"] * 2 == pytest.approx(tokens)
    flops = sum(update_flops(network_of(shape), count, length, 5, 4) for length, count in rows.items())
    assert line["flops_per_s"] * line["step_s"] * 2 == pytest.approx(flops)
    assert line["utilisation"] == pytest.approx(line["flops_per_s"] / 1e9)


def test_what_is_no_watch_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"writers wandb needs wandb: pip install"):
        Watch(writers=("wandb",))
    recipe = block_train.Recipe()
    with pytest.raises(ValueError, match="profile asks for updates"):
        block_train.main(recipe, folder=tmp_path / "run", watch=Watch(profile=f"2:{recipe.steps + 1}"))
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_recipe(tmp_path, monkeypatch):
    begun, other = Cluster(data=1), Cluster(data=2)
    claim_together(tmp_path, begun)
    with pytest.raises(SystemExit, match="was begun with other data"):
        claim_together(tmp_path, other, ("optimizer",))
    claim(tmp_path, other, ("recipe",))
    assert json.loads((tmp_path / "recipe.json").read_text())["data"] == 1, "what it was begun with"
    # Of several processes each hears the sentence of the first; what they say to each other is left out here.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("paradec_jax.train.agree.texts_of_all", lambda text: [text, ""])
    with pytest.raises(ValueError, match="was begun with other data"):
        claim_together(tmp_path, other)


def test_one_process_has_all_and_is_the_first(monkeypatch):
    tree, done = {"a": np.ones(2), "b": jax.numpy.ones(2)}, []
    assert on_this(tree)["a"] is tree["a"] and on_this(tree)["b"] is tree["b"]
    by_first("once", lambda: done.append(1))
    assert done == [1]
    alone()
    monkeypatch.setenv(VARIABLES[1], "2")
    with pytest.raises(SystemExit, match="trains in one process, but was"):
        alone()


TOY = "--steps 3 --warmup 1 --matmul-precision highest"
LAWFUL = f"--law.symbols 5 --law.length 12 --prompt 4 --batch-tokens 48 {TOY}"
ROUND = "--rounds.0.problems 8 --rounds.0.updates 3 --rounds.0.warmup 1 --rounds.0.cooldown 1"
COMMANDS = {
    "masked_diffusion.train": f"--text TEXT tiny-mdlm --preset test-mdlm --length 32 --rows 4 {TOY}",
    "masked_diffusion.distill": "--text TEXT --start START halves --rounds 2 --first-steps 8 --updates 2 --rows 4 "
    "--warmup 1 --matmul-precision highest",
    "jacobi.distill": f"mask-nc {ROUND} --max-new-tokens 64 --batch-tokens 2048 --matmul-precision highest",
    "block_diffusion.train": f"chains --preset test-sdar --layers 1 --blocks 4 {LAWFUL}",
    "block_diffusion.train_head": f"--start START chains-head --layers 1 {LAWFUL}",
}
BEFORE = {  # what those begin with that are given a START
    "masked_diffusion.distill": "masked_diffusion.train",
    "block_diffusion.train_head": "block_diffusion.train",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_two_processes_train_what_one_does(name, tmp_path):
    text, start = tmp_path / "text", tmp_path / "start"
    text.write_text(TEXT)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    def run(name, options, *launcher):
        options = options.replace("TEXT", str(text)).replace("START", str(start / "model"))
        command = [sys.executable, *launcher, "-m", f"experiments.{name}", *options.split()]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False, text=True, capture_output=True)

    if first := BEFORE.get(name):
        options = COMMANDS[first].replace("--steps 3 --warmup 1", "--steps 1 --warmup 0")
        assert run(first, f"{options} --folder {start}").returncode == 0
    several = ("-m", "experiments.launch.local", "--processes", "2", "--devices", "1", "--", sys.executable)
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder, launcher in ((one, ()), (two, several)):
        ended = run(name, f"{COMMANDS[name]} --folder {folder}", *launcher)
        assert ended.returncode == 0, ended.stderr
    made = "round-0/model" if name == "jacobi.distill" else "model"
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    mine, other = (load(folder / made) for folder in (one, two))
    jax.tree.map(same, mine.params, other.params)
    if mine.head is not None:
        jax.tree.map(same, mine.head.params, other.head.params)
    if name != "jacobi.distill":
        found, wanted = (json.loads((folder / "held_out.json").read_text()) for folder in (two, one))
        for key in {"nats", "kl"} & wanted.keys():
            assert found[key] == pytest.approx(wanted[key], abs=1e-3)
    changed = run(name, f"{COMMANDS[name]} --folder {two} --seed 9", *several)
    assert changed.returncode == 1 and changed.stderr.count("was begun with other seed") == 2
