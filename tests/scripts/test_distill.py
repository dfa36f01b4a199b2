"""Distillation of a tiny model, in one go and in pieces: the same trajectories, the same weights."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from experiment import script

from experiments.tasks import build_tokenizer, token_spec
from paradec_jax import load, store
from paradec_jax.data.trajectories import Trajectories
from paradec_jax.families import PRESETS, init_params
from paradec_jax.objective import Objective, drawn
from paradec_jax.store import Model

ROWS, PROBLEMS = 3, 7


class Killed(Exception):
    """Stands for the end of the process."""


class Counting:
    """Data whose batches are 1, 2, ..."""

    count = 0

    def __next__(self):
        self.count += 1
        return {"count": np.asarray(self.count)}

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


@pytest.fixture(scope="module")
def distill():
    found = script("jacobi/distill")
    found["main"].__globals__["ROWS"] = ROWS
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with a model of random weights."""
    folder = tmp_path_factory.mktemp("start") / "model"
    config = dataclasses.replace(PRESETS["test-causal"], vocab_size=384, max_length=256, layers=1)
    model = Model(config, init_params(config, jax.random.key(0)), token_spec(), build_tokenizer())
    store.save(folder, model)
    return folder


@pytest.fixture(scope="module")
def recipe(distill, start):
    kind = distill["Round"]
    rounds = (
        kind(block=4, problems=PROBLEMS, updates=3, warmup=0, cooldown=2, window=2),
        kind(block=8, problems=PROBLEMS, updates=2, warmup=1, cooldown=1, window=1),
    )
    return distill["Recipe"](
        start=str(start), rounds=rounds, max_new_tokens=8, batch_tokens=512, replay_tokens=512
    )


@pytest.fixture(scope="module")
def whole(distill, recipe, tmp_path_factory):
    """The folder of a run that was not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    distill["main"](recipe, folder)
    return folder


def arrays_of(folder):
    """Everything that a folder of trajectories holds."""
    return {path.relative_to(folder): np.load(path) for path in sorted(folder.glob("shard-*/*.npy"))}


def assert_same(folder, other) -> None:
    """Two runs left the same trajectories and models."""
    for place in ("round-0", "round-1"):
        mine, theirs = (arrays_of(run / place / "trajectories") for run in (folder, other))
        assert mine.keys() == theirs.keys() and len(mine) > 0
        models = [load(run / place / "model").params for run in (folder, other)]
        for some, more in ((mine, theirs), models):
            jax.tree.map(np.testing.assert_array_equal, some, more)


def test_rounds_collect_and_train(whole, recipe, start):
    begun = load(start)
    for which, stage in enumerate(recipe.rounds):
        folder = whole / f"round-{which}"
        trajectories, trained = Trajectories(folder / "trajectories"), load(folder / "model")
        assert trajectories.block_size == stage.block
        assert trajectories.ids.tolist() == list(range(PROBLEMS))
        assert (trajectories.block_counts == 8 // stage.block).all()
        assert trained.config == begun.config and trained.token_spec == begun.token_spec
        moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), trained.params, begun.params)
        assert min(jax.tree.leaves(moved)) > 0
        begun = trained


def test_fresh_problems_are_replayed(distill, recipe, start):
    """Their loss is added, and the state of the data says where both parts of a batch stand."""
    model, key = load(start), jax.random.key(0)
    fresh = distill["fresh_problems"](model, recipe, 0)

    pairs = Objective(lambda params, frozen, batch, key: {"loss": drawn(len(batch))})
    loss, data = distill["with_replay"](model, recipe, pairs, Counting(), fresh)
    first, state, second = next(data), data.get_state(), next(data)
    assert first["fresh"]["tokens"].shape in ((2, 252), (1, 328))
    value, terms = jax.jit(loss)(dict(model.params), None, first, key)
    assert (
        value == pytest.approx(1 + recipe.rules.ar_weight * float(terms["rehearsal"]))
        and terms["rehearsal"] > 1
    )
    data.set_state(json.loads(json.dumps(state)))
    jax.tree.map(np.testing.assert_array_equal, next(data), second)


def test_a_run_that_was_killed_goes_on(distill, recipe, whole, tmp_path, monkeypatch):
    """In the middle of a collection and of a training, before it is exported, and between the rounds."""
    names = distill["main"].__globals__
    monkeypatch.setitem(names, "CHECKPOINT_EVERY", 200)
    collect, calls = distill["main"].__globals__["collect"], []

    def die(*_, **__):
        raise Killed

    def collect_once(*arguments):
        calls.append(arguments)
        return collect(*arguments) if len(calls) == 1 else die()

    def run(names=distill["main"].__globals__, **changes) -> None:
        with monkeypatch.context() as patch:
            for name, change in changes.items():
                patch.setitem(names, name, change)
            distill["main"](recipe, tmp_path)

    first = tmp_path / "round-0"
    with pytest.raises(Killed):
        run(collect=collect_once)
    assert len(Trajectories(first / "trajectories")) == ROWS
    step, steps = names["Together"].__next__, []

    def die_later(data):
        steps.append(data)
        return step(data) if len(steps) < 4 else die()  # the first tells the run's identity

    names["CHECKPOINT_EVERY"] = 1
    with monkeypatch.context() as patch:
        patch.setattr(names["Together"], "__next__", die_later)
        with pytest.raises(Killed):
            run()
    assert (first / "training" / "checkpoints" / "2").exists() and len(steps) == 4
    with pytest.raises(Killed):
        run(vars(store), save=die)
    assert (first / "training" / "checkpoints").exists() and not (first / "model").exists()
    with pytest.raises(Killed):
        run(collect=die)
    assert (first / "model").exists()
    run()
    assert_same(tmp_path, whole)
    run(collect=die, fit=die)  # nothing is left to do


def test_a_batch_without_blocks_is_not_collected_twice(distill, recipe, tmp_path, monkeypatch, start):
    """It leaves no shard, so the number of shards is not that of batches."""
    names, asked = distill["main"].__globals__, []
    collect = names["collect"]

    def collect_some(decoder, params, request, data_ids):
        asked.append(data_ids[0])
        if len(asked) == 3:
            raise Killed
        found = collect(decoder, params, request, data_ids)
        return found if data_ids[0] else []

    monkeypatch.setitem(names, "collect", collect_some)
    model = load(start)
    with pytest.raises(Killed):
        distill["gather"](model, start, recipe, 0, tmp_path)
    trajectories = distill["gather"](model, start, recipe, 0, tmp_path)
    assert asked == [0, ROWS, 2 * ROWS, 2 * ROWS]
    assert trajectories.ids.tolist() == list(range(ROWS, PROBLEMS))


def test_what_cannot_be_distilled_is_refused(distill, recipe, tmp_path, start):
    distill["claim_together"](tmp_path, recipe)
    distill["claim_together"](tmp_path, recipe)
    with pytest.raises(SystemExit, match="was begun with other seed: choose another folder"):
        distill["main"](dataclasses.replace(recipe, seed=1), tmp_path)
    assert json.loads((tmp_path / "recipe.json").read_text())["seed"] == recipe.seed
    with pytest.raises(SystemExit, match="is of family recurrent_depth; distillation needs a causal model"):
        distill["main"](dataclasses.replace(recipe, start="tiny-recurrent"), tmp_path)
    mute = dataclasses.replace(load(start), tokenizer=None)
    with pytest.raises(SystemExit, match="has no tokenizer"):
        distill["gather"](mute, start, recipe, 0, tmp_path)
    for steps, tokens, message in (((2, 2), 200, "200 cannot hold a row of 252"), ((2, 8), 64, "of 252")):
        wrong = dataclasses.replace(recipe, steps=steps, replay_tokens=tokens)
        with pytest.raises(ValueError, match=message):
            distill["main"](wrong, tmp_path / str(tokens))
        assert not (tmp_path / str(tokens) / "round-0").exists()  # refused before anything is collected


def test_answers_without_a_block_are_an_error(distill, recipe, tmp_path, monkeypatch, start):
    monkeypatch.setitem(distill["main"].__globals__, "collect", lambda *_: [])
    with pytest.raises(SystemExit, match="round 0: no answer fills a block of 4 tokens"):
        distill["gather"](load(start), start, recipe, 0, tmp_path)


def test_trajectories_of_other_weights_are_refused(distill, recipe, whole, start):
    """Whatever the name of their folder is."""
    trained = whole / "round-0" / "model"
    with pytest.raises(ValueError, match="model_sha256"):
        distill["gather"](load(trained), trained, recipe, 0, whole / "round-0" / "trajectories")


@pytest.mark.parametrize(("steps", "lengths"), [((2, 2), {252}), ((7, 8), {328}), ((5, 6), {252, 328})])
def test_replay_knows_the_steps_and_the_special_tokens(distill, recipe, start, steps, lengths):
    model = load(start)
    spec = dataclasses.replace(model.token_spec, bos=7, stop=(9,), pad=11)
    other = dataclasses.replace(recipe, steps=steps)
    fresh = distill["fresh_problems"](dataclasses.replace(model, token_spec=spec), other, 0)
    seen = [next(fresh) for _ in range(12)]
    assert {batch["tokens"].shape[1] for batch in seen} == lengths
    for batch in seen:
        assert (batch["tokens"][:, 0] == 7).all() and (batch["targets"] == 9).any(axis=1).all()
        assert (batch["targets"] != 0).all()  # the padding of the bundled tokenizer


def test_answers_that_repeat_one_token_are_an_error(distill, recipe, whole, monkeypatch, start):
    monkeypatch.setitem(distill["main"].__globals__, "kept", lambda *_, **__: np.zeros(0, int))
    trajectories = Trajectories(whole / "round-0" / "trajectories")
    with pytest.raises(SystemExit, match="round 0: every answer repeats one token too often"):
        distill["train"](load(start), recipe, 0, trajectories, None, whole)
