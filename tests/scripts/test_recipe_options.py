"""What recipes have in common: traces, writers, utilisation, processes; and that of word problems at toy size."""

import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.block_diffusion import train as block_train
from experiments.block_diffusion import train_head
from experiments.common import train
from experiments.common.cluster import Cluster
from experiments.common.command import claim
from experiments.common.processes import alone, by_first, claim_together, on_this
from experiments.common.watch import Watch
from experiments.masked_diffusion import train as masked_train
from paradec_jax import load
from paradec_jax.families import network_of
from paradec_jax.models import update_flops
from paradec_jax.train.launch import VARIABLES

ROOT = Path(__file__).parents[2]
ALONE = (
    "recurrent_depth.pointers",
    "masked_diffusion.markov_train",
    "masked_diffusion.markov_variants",
)


@pytest.fixture(scope="module")
def toy():
    """A recipe of two shapes of batches, two updates of each, drawn one after the other."""
    train.PRESETS["toy"] = dataclasses.replace(
        train.PRESETS["test-recurrent"], vocab_size=384, max_length=512
    )
    yield train.Recipe(
        name="toy",
        preset="toy",
        steps=4,
        cooldown=1,
        batch_tokens=320,
        mixture=((0, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)), (2, (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0))),
        growth=(1, 2),
        matmul_precision="highest",
    )
    del train.PRESETS["toy"]


def test_word_problems(toy, tmp_path, monkeypatch):
    told, muon = [], train.muon
    events = types.SimpleNamespace(add_scalar=lambda *scalar: told.append(scalar), flush=lambda: None)
    folders = []
    fake = types.SimpleNamespace(SummaryWriter=lambda folder: folders.append(folder) or events)
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    monkeypatch.setattr(train, "muon", lambda *given, warmup, **options: muon(*given, warmup=1, **options))
    monkeypatch.setitem(train.DRAWS, toy.draw, lambda mean: lambda key, step: jax.numpy.int32(5))
    before = jax.config.jax_default_matmul_precision
    watch = Watch(profile="2:3", writers=("tensorboard",))
    try:
        train.main(toy, tmp_path, peak_flops=1e9, watch=watch)
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert load(tmp_path / "model").config == train.PRESETS["toy"]
    assert list((tmp_path / "profile").rglob("*.xplane.pb")) and folders == [str(tmp_path / "events")]
    line, last = (json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert ("loss", line["loss"], 4) in told and ("wall_s", last["wall_s"], 4) in told
    # The first update of each shape is in no rate: of four updates, the second and the fourth are.
    rows = {102: 320 // 102, 161: 320 // 161}
    tokens = sum(length * count for length, count in rows.items())
    assert line["tokens_per_s"] * line["step_s"] * 2 == pytest.approx(tokens)
    network = network_of(train.PRESETS["toy"])
    flops = sum(update_flops(network, count, length, 5, 4) for length, count in rows.items())
    assert line["flops_per_s"] * line["step_s"] * 2 == pytest.approx(flops)
    assert line["utilisation"] == pytest.approx(line["flops_per_s"] / 1e9)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"profile": "3"}, "profile must be FIRST:LAST with 1 <= FIRST <= LAST, such as 10:13, not '3'"),
        ({"profile": "3:2"}, "profile must be FIRST:LAST"),
        ({"profile": "0:2"}, "profile must be FIRST:LAST"),
        ({"writers": ("wandb",)}, r"writers wandb needs wandb: pip install 'paradec-jax\[wandb\]'"),
    ],
)
def test_what_is_no_watch_is_refused(given, sentence, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=sentence):
        Watch(**given)


def test_a_trace_of_updates_that_a_run_has_not_is_refused(toy, tmp_path):
    for main, recipe in (
        (train.main, toy),
        (block_train.main, block_train.Recipe()),
        (train_head.main, train_head.Recipe()),
        (masked_train.main, masked_train.Recipe()),
    ):
        given = {"text": tmp_path / "none"} if main is masked_train.main else {}
        beyond = f"2:{recipe.steps + 1}"
        with pytest.raises(ValueError, match=f"profile asks for updates {beyond} of a run of {recipe.steps}"):
            main(recipe, folder=tmp_path / "run", watch=Watch(profile=beyond), **given)
    assert not list(tmp_path.iterdir())


def test_weights_and_biases_goes_on_in_its_run(tmp_path, monkeypatch):
    begun = []

    def init(**options):
        begun.append(options)
        return types.SimpleNamespace(log=lambda values, step: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for before in range(2):
        (write,) = Watch(writers=("wandb",)).options(tmp_path, 4)["writers"]
        assert len(begun) == before
        write(1, {"loss": 1.0})
        write(2, {"loss": 1.0})
    assert begun[0] == begun[1] and begun[0]["id"] == (tmp_path / "wandb-id").read_text().strip()
    assert (begun[0]["project"], begun[0]["resume"]) == ("paradec", "allow")


@pytest.mark.parametrize("name", ALONE)
def test_other_trainings_refuse_several_processes(name, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLES[1], "2")
    monkeypatch.chdir(tmp_path)
    main, sentence = importlib.import_module(f"experiments.{name}").main, "trains in one process, but was"
    with pytest.raises(SystemExit, match=sentence):
        main(*[None] * (main.__code__.co_argcount - len(main.__defaults__ or ())))
    assert not list(tmp_path.iterdir())


def test_one_process_is_not_refused(monkeypatch):
    monkeypatch.delenv(VARIABLES[1], raising=False)
    alone()
    monkeypatch.setenv(VARIABLES[1], "1")
    alone()


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


def test_one_process_has_all_and_is_the_first():
    tree, done = {"a": np.ones(2), "b": jax.numpy.ones(2)}, []
    assert on_this(tree)["a"] is tree["a"] and on_this(tree)["b"] is tree["b"]
    by_first("once", lambda: done.append(1))
    assert done == [1]


TOY = "--steps 3 --warmup 1 --matmul-precision highest"
CHAIN = f"--law.symbols 5 --law.length 12 --prompt 4 --batch-tokens 48 {TOY}"
ROUND = "--rounds.0.problems 8 --rounds.0.updates 3 --rounds.0.warmup 1 --rounds.0.cooldown 1"
COMMANDS = {
    "masked_diffusion.train": f"--text TEXT tiny-mdlm --preset test-mdlm --length 32 --rows 4 {TOY}",
    "masked_diffusion.distill": "--text TEXT --start START halves --rounds 2 --first-steps 8 --updates 2 --rows 4 "
    "--warmup 1 --matmul-precision highest",
    "jacobi.distill": f"mask-nc {ROUND} --max-new-tokens 64 --batch-tokens 2048 --matmul-precision highest",
    "block_diffusion.train": f"chains --preset test-sdar --layers 1 --blocks 4 {CHAIN}",
    "block_diffusion.train_head": f"--start START chains-head --layers 1 {CHAIN}",
}
BEFORE = {  # what those begin with that are given a START
    "masked_diffusion.distill": "masked_diffusion.train",
    "block_diffusion.train_head": "block_diffusion.train",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_two_processes_train_what_one_does(name, tmp_path):
    text, start = tmp_path / "text", tmp_path / "start"
    text.write_text("To be, or not to be:\nthat is the question.\n" * 40)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    def run(name, options, *launcher):
        told = [
            {"TEXT": str(text), "START": str(start / "model")}.get(word, word) for word in options.split()
        ]
        command = [sys.executable, *launcher, "-m", f"experiments.{name}", *told]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False, text=True, capture_output=True)

    if first := BEFORE.get(name):
        options = COMMANDS[first].replace("--steps 3 --warmup 1", "--steps 1 --warmup 0")
        assert run(first, f"{options} --folder {start}").returncode == 0
    several = ("-m", "experiments.launch.local", "--processes", "2", "--devices", "1", "--", sys.executable)
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder, launcher in ((one, ()), (two, several)):
        ended = run(name, f"{COMMANDS[name]} --folder {folder}", *launcher)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("held out:") == (name != "jacobi.distill")
    made = "round-0/model" if name == "jacobi.distill" else "model"
    mine, other = ([load(folder / made).params, load(folder / made).head] for folder in (one, two))
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    jax.tree.map(same, mine[0], other[0])
    if mine[1] is not None:
        jax.tree.map(same, mine[1].params, other[1].params)
    if name != "jacobi.distill":
        found, wanted = (json.loads((folder / "held_out.json").read_text()) for folder in (two, one))
        for key in {"nats", "kl"} & wanted.keys():
            assert found[key] == pytest.approx(wanted[key], abs=1e-3)
    changed = run(name, f"{COMMANDS[name]} --folder {two} --seed 9", *several)
    assert changed.returncode == 1 and changed.stderr.count("was begun with other seed") == 2
