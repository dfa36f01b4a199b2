"""Training in rounds: what becomes the teacher, what begins anew, and that a stop at an edge changes no bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from noisy_regression import STEPS, Batches, initial_params, train

from paradec_jax.train import NonFiniteLoss, Rounds, TrainState, adamw, fit, make_train_step
from paradec_jax.train.rounds import next_round

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

UPDATES = 4
TRACES = []


def loss(params, frozen, batch, key):
    """The student's matrix is drawn to twice the teacher's and to noise, more so in later rounds."""
    TRACES.append(batch["step"])
    noise = jax.random.normal(key, ()) * batch["inputs"].mean()
    wanted = 2 * frozen["teacher"]["embedding"] + noise * (1 + frozen["round"])
    terms = {"round": frozen["round"].astype(jnp.float32), "teacher": frozen["teacher"]["embedding"].mean()}
    return jnp.mean((params["embedding"] - wanted) ** 2), terms


def run(folder, rounds=None, data=None, **changes) -> TrainState:
    """Three rounds of four updates."""
    options = {
        "teacher": initial_params(),
        "rounds": Rounds(UPDATES) if rounds is None else rounds,
        "optimizer": adamw(1e-1, STEPS, warmup=3, weight_decay=0.0),
        "steps": STEPS,
        "key": jax.random.key(1),
        "checkpoint_every": 2,
        "log_every": 1,
        "ema_decay": 0.9,
        "progress": False,
    }
    return fit(loss, initial_params(), data or Batches(), folder=folder, **options | changes)


def assert_same(a: TrainState, b: TrainState) -> None:
    states = (vars(s) | {"key": jax.random.key_data(s.key)} for s in (a, b))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_the_student_becomes_the_teacher(tmp_path):
    seen = []

    def look(state):
        seen.append(jax.device_get((state.params, state.round)))
        return {}

    state = run(tmp_path, evaluate=look, evaluate_every=UPDATES)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert [line["round"] for line in lines] == [0] * 4 + [1] * 4 + [2] * 4
    students = [initial_params(), *(params for params, _ in seen)]
    want = np.repeat([s["embedding"].mean() for s in students[:3]], UPDATES)
    np.testing.assert_allclose([line["teacher"] for line in lines], want, rtol=1e-5)
    assert [int(which) for _, which in seen] == [0, 1, 2] and state.round == 2
    jax.tree.map(np.testing.assert_array_equal, state.teacher, seen[1][0])
    assert state.ema_count == STEPS


def test_a_new_round_compiles_nothing(tmp_path):
    TRACES.clear()
    run(tmp_path)
    assert len(TRACES) == 1


def counts_in(state) -> set[int]:
    """What the optimizer has counted."""
    found = optax.tree.get_all_with_path(state.opt_state, "count")
    return {int(count) for _, count in found}


@pytest.mark.parametrize(
    ("rounds", "optimizer", "average"),
    [
        (Rounds(UPDATES), 8, 8),
        (Rounds(UPDATES, reset_optimizer=True), 0, 8),
        (Rounds(UPDATES, reset_ema=True), 8, 0),
        (Rounds(UPDATES, "ema"), 8, 8),
        (Rounds(UPDATES, "ema", reset_ema=True, reset_optimizer=True), 0, 0),
    ],
    ids=["raw", "optimizer", "average", "ema", "ema-all"],
)
def test_what_a_round_begins_with(rounds, optimizer, average):
    state = run(None, rounds, steps=2 * UPDATES)
    after = next_round(state, rounds, 2, adamw(1e-1, STEPS, warmup=3, weight_decay=0.0))
    source = state.ema if rounds.weights == "ema" else state.params
    for tree in (after.params, after.teacher):
        jax.tree.map(np.testing.assert_array_equal, tree, source)
    jax.tree.map(np.testing.assert_array_equal, after.ema, source if rounds.reset_ema else state.ema)
    assert (after.round, after.step, after.ema_count) == (2, 8, average if rounds.reset_ema else 8)
    assert counts_in(after) == {optimizer} and counts_in(state) == {4 if rounds.reset_optimizer else 8}
    jax.block_until_ready(
        make_step()(after, None, next(Batches()))
    )  # donates all of it: no two arrays are one


def make_step():
    return make_train_step(loss, adamw(1e-1, STEPS, warmup=3, weight_decay=0.0), ema_decay=0.9)


def test_the_first_update_after_a_reset_has_a_rate():
    """Adam's first update has the size of its rate, a third of the peak in a warm-up of three, and never zero."""
    state = run(None, Rounds(UPDATES, reset_optimizer=True), steps=UPDATES)
    rounds = Rounds(UPDATES, reset_optimizer=True)
    begun = next_round(state, rounds, 1, adamw(1e-1, STEPS, warmup=3, weight_decay=0.0))
    before = np.asarray(begun.params["embedding"])
    after, _ = make_step()(begun, None, next(Batches()))
    np.testing.assert_allclose(np.abs(after.params["embedding"] - before).max(), 0.1 / 3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_run_that_was_stopped_after_any_update_goes_on(tmp_path, stop):
    """Edges of rounds among them, and one update before and after each."""
    rounds = Rounds(UPDATES, "ema", reset_ema=True, reset_optimizer=stop % 2 == 0)
    with pytest.raises(NonFiniteLoss):
        run(tmp_path, rounds, Batches(bad=stop))
    assert_same(run(tmp_path, rounds), run(None, rounds))


def test_a_limit_of_time_ends_a_call_and_not_the_run(tmp_path):
    state, calls = run(tmp_path, data=Batches(delay=0.15), limit_s=1.0), 1
    assert 0 < state.step < STEPS
    while state.step < STEPS:
        state, calls = run(tmp_path, data=Batches(delay=0.15), limit_s=1.0), calls + 1
    assert calls > 1
    assert_same(state, run(None))


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rounds need a teacher to begin with"):
        train(tmp_path, rounds=Rounds(2))
    with pytest.raises(ValueError, match="need a moving average"):
        run(None, Rounds(UPDATES, "ema"), ema_decay=None)
    with pytest.raises(ValueError, match="updates of a round must be at least 1, not 0"):
        Rounds(0)
    run(tmp_path)
    with pytest.raises(ValueError, match="was begun with other rounds"):
        train(tmp_path)
