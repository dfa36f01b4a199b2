"""Training in rounds: what becomes the teacher, what begins anew, and that a stop at an edge
changes no bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from noisy_regression import STEPS, Batches, assert_same, hooks, initial_params, lines_of
from noisy_regression import train as trained

from paradec_jax.train import Evaluate, NonFiniteLoss, Rounds, TrainState, adamw, make_train_step

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

UPDATES = 4
TRACES = []


def loss(params, frozen, batch, key):
    """The student's matrix is drawn to twice the teacher's and to noise, more so in later rounds."""
    TRACES.append(batch["step"])
    noise = jax.random.normal(key, ()) * batch["inputs"].mean()
    wanted = 2 * frozen["teacher"]["embedding"] + noise * (1 + frozen["round"])
    terms = {
        "round": frozen["round"].astype(jnp.float32),
        "teacher": frozen["teacher"]["embedding"].mean(),
    }
    return jnp.mean((params["embedding"] - wanted) ** 2), terms


def optimizer():
    return adamw(1e-1, STEPS, warmup=3, weight_decay=0.0)


def run(folder, rounds=None, data=None, **changes) -> TrainState:
    """Three rounds of four updates."""
    options = {
        "rounds": rounds or Rounds(UPDATES),
        "teacher": initial_params(),
        "optimizer": optimizer(),
    }
    return trained(
        folder, data, objective=loss, **options | {"of_hooks": {"save": 2, "log": 1}} | changes
    )


def test_the_student_becomes_the_teacher_and_a_new_round_compiles_nothing(tmp_path):
    seen = []

    def look(state):
        seen.append(jax.device_get((state.params, state.round)))
        return {}

    TRACES.clear()
    state = run(None, use=[*hooks(tmp_path, log=1), Evaluate(look, every=UPDATES)])
    assert len(TRACES) == 1
    lines = [line for line in lines_of(tmp_path) if "loss" in line]
    assert [line["round"] for line in lines] == [0] * 4 + [1] * 4 + [2] * 4
    students = [initial_params(), *(params for params, _ in seen)]
    want = np.repeat([s["embedding"].mean() for s in students[:3]], UPDATES)
    np.testing.assert_allclose([line["teacher"] for line in lines], want, rtol=1e-5)
    assert [int(which) for _, which in seen] == [0, 1, 2] and state.round == 2
    jax.tree.map(np.testing.assert_array_equal, state.teacher, seen[1][0])
    assert state.ema_count == STEPS


@pytest.mark.parametrize(
    ("rounds", "count", "average"),
    [
        (Rounds(UPDATES), 8, 8),
        (Rounds(UPDATES, reset_optimizer=True), 0, 8),
        (Rounds(UPDATES, reset_ema=True), 8, 0),
        (Rounds(UPDATES, "ema"), 8, 8),
        (Rounds(UPDATES, "ema", reset_ema=True, reset_optimizer=True), 0, 0),
    ],
    ids=["raw", "optimizer", "average", "ema", "ema-all"],
)
def test_what_a_round_begins_with(rounds, count, average):
    state = run(None, rounds, steps=2 * UPDATES)
    after = rounds.begin(state, optimizer())
    source = state.ema if rounds.weights == "ema" else state.params
    for tree in (after.params, after.teacher):
        jax.tree.map(np.testing.assert_array_equal, tree, source)
    jax.tree.map(
        np.testing.assert_array_equal, after.ema, source if rounds.reset_ema else state.ema
    )
    assert (after.round, after.step, after.ema_count) == (2, 8, average if rounds.reset_ema else 8)
    counts = {int(n) for _, n in optax.tree.get_all_with_path(after.opt_state, "count")}
    assert counts == {count}


def test_the_first_update_after_a_reset_has_a_rate():
    """Adam's first update has the size of its rate, a third of the peak in a warm-up of three, and
    never zero.
    """
    rounds = Rounds(UPDATES, reset_optimizer=True)
    begun = run(None, rounds, steps=UPDATES)
    before = np.asarray(begun.params["embedding"])
    step = make_train_step(loss, optimizer(), rounds=rounds, ema_decay=0.9)
    after, _ = step(begun, next(Batches()))
    np.testing.assert_allclose(np.abs(after.params["embedding"] - before).max(), 0.1 / 3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_run_that_was_stopped_after_any_update_goes_on(tmp_path, stop):
    """Edges of rounds among them, and one update before and after each."""
    rounds = Rounds(UPDATES, "ema", reset_ema=True, reset_optimizer=stop % 2 == 0)
    with pytest.raises(NonFiniteLoss):
        run(tmp_path, rounds, Batches(bad=stop))
    assert_same(run(tmp_path, rounds), run(None, rounds))


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rounds need a teacher to begin with"):
        trained(None, rounds=Rounds(2))
    with pytest.raises(ValueError, match="need a moving average"):
        run(None, Rounds(UPDATES, "ema"), ema_decay=None)
    with pytest.raises(ValueError, match="updates must be above 0 and weights raw or ema"):
        Rounds(0)
    run(tmp_path, steps=2)
    with pytest.raises(ValueError, match=r"other rounds \(updates\) \[4 there, 5 here\]"):
        run(tmp_path, Rounds(5), steps=2)
