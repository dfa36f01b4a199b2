"""The parts of recurrent decoders by themselves: the exit loop, the window of a wave, noise."""

import dataclasses
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paradec_jax.decode.machine.network import Forward
from paradec_jax.decode.recurrent.buckets import SHARE, compiled_widths, cost, on_narrowest, widths_by
from paradec_jax.decode.recurrent.criteria import CRITERIA
from paradec_jax.decode.recurrent.exit import ExitLoop, as_last_checked, exit_loop
from paradec_jax.decode.recurrent.noise import mix_noise
from paradec_jax.decode.recurrent.wave import Prediction, Wave, stands_still

NEEDED = np.array([1, 2, 4, 9])  # recurrences after which the state of each row stands still


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Notes:
    """In place of keys and values: recurrences of each row, and the state that was read out last."""

    depth: Any
    coda: Any


def counted(
    criterion: str, *, threshold: float, first: int = 0, every: int = 1, bounded: bool = False, steps=6
):
    """The loop on counters: after n recurrences the state of row i is `min(n, NEEDED[i])`, and so is its token."""

    def recur_once(states, notes, index, active):
        states = jnp.where(active[:, None, None], jnp.minimum(states + 1, NEEDED[:, None, None]), states)
        return states, dataclasses.replace(notes, depth=jnp.where(active, index + 1, notes.depth))

    def look(states, notes):
        token = states[:, 0, 0].astype(jnp.int32)
        return Forward(states, dataclasses.replace(notes, coda=states), {}), jax.nn.one_hot(token, 12) * 9

    def run() -> ExitLoop:
        states = jnp.zeros((4, 1, 1))
        return exit_loop(
            recur_once,
            look,
            CRITERIA[criterion],
            states,
            Notes(jnp.zeros(4, jnp.int32), states),
            jnp.array([True, True, True, False]),
            valid=jnp.ones((4, 1), bool),
            threshold=threshold,
            due=lambda index: (index >= first) & ((index - first) % every == 0),
            steps=steps,
            bounded=bounded,
        )

    return jax.jit(run)(), look


@pytest.mark.parametrize("bounded", [False, True])
def test_rows_leave_the_loop_one_by_one(bounded):
    loop, _ = counted("latent-diff", threshold=0.01, bounded=bounded)
    assert loop.kv.depth.tolist() == [
        2,
        3,
        5,
        0,
    ]  # one more than needed shows that nothing moves; row 3 took no part
    assert not loop.active.any()
    nan = np.nan
    want = [
        [1, 0, nan, nan, nan, nan],
        [1, 1 / 2, 0, nan, nan, nan],
        [1, 1 / 2, 1 / 3, 1 / 4, 0, nan],
        [nan] * 6,
    ]
    np.testing.assert_allclose(loop.exit_values, want, rtol=1e-6)


def test_checks_begin_and_recur_when_they_are_due():
    loop, _ = counted("latent-diff", threshold=0.01, first=1, every=2)
    assert loop.kv.depth.tolist() == [4, 4, 6, 0]  # checks after 2, 4 and 6 recurrences
    assert loop.checks.tolist() == [2, 2, 3, 0]


def test_a_check_that_reads_logits_keeps_what_it_read():
    loop, look = counted("argmax-stability", threshold=1.0, every=2, steps=4)
    assert loop.kv.depth.tolist() == [3, 4, 4, 0]  # checks after 1 and 3
    assert loop.active.tolist() == [False, True, True, False]
    assert loop.hidden[:, 0, 0].tolist() == [1, 2, 3, 0]
    assert loop.kv.coda[:, 0, 0].tolist() == [1, 2, 3, 0]
    end = look(loop.states, loop.kv)[0]
    fresh = as_last_checked(loop, end, ~loop.active)
    assert fresh.hidden[:, 0, 0].tolist() == [1, 2, 4, 0] == fresh.kv.coda[:, 0, 0].tolist()
    stale = as_last_checked(loop, end, loop.checks > 0)
    assert stale.hidden[:3, 0, 0].tolist() == [1, 2, 3] == stale.kv.coda[:3, 0, 0].tolist()


def wave() -> Wave:
    """Five slots of two rows, three and four of them in use."""
    slots = jnp.arange(10).reshape(2, 5)
    states = 1.0 + slots[..., None]
    return Wave(
        10 + slots, states, 100 + states, jnp.array([[6, 4, 2, 0, 0], [8, 6, 4, 2, 0]]), jnp.array([3, 4])
    )


def test_a_wave_advances_and_opens():
    predicted = jnp.array([[20, 21, 22, 0, 0], [30, 31, 32, 33, 0]])
    moved = jax.jit(Wave.advance)(wave(), jnp.array([2, 1]), predicted)
    assert moved.active.tolist() == [1, 3]
    assert moved.tokens[:, :4].tolist() == [[21, 22, 0, 0], [30, 31, 32, 33]]
    assert moved.recurrences.tolist() == [[2, 0, 0, 0, 0], [6, 4, 2, 0, 0]]
    fresh, fill = jnp.full((2, 5, 1), -1.0), jnp.full((2, 5), 40)
    opened = jax.jit(Wave.open)(moved, jnp.array([2, 2]), jnp.int32(4), fresh, fill)
    assert opened.active.tolist() == [3, 4]
    assert opened.states[..., 0].tolist() == [[3, -1, -1, -1, -1], [7, 8, 9, -1, -1]]
    # The first new slot has a prediction, the ones after it do not.
    assert opened.tokens.tolist() == [[21, 22, 40, 40, 40], [30, 31, 32, 33, 40]]
    assert opened.recurrences.tolist() == [[2, 0, 0, 0, 0], [6, 4, 2, 0, 0]]


def test_a_wave_says_which_slots_were_computed_from_what_is_predicted():
    agrees = wave().agrees(jnp.array([[11, 12, 0, 14, 0], [16, 0, 18, 19, 0]]))
    assert agrees.tolist() == [[True, True, True, False, True], [True, True, False, True, True]]


def test_momentum_needs_an_old_value():
    e = wave().with_momentum(jnp.zeros((2, 5, 1)), jnp.float32(0.5))
    assert e[..., 0].tolist() == [[50.5, 51, 51.5, 0, 0], [53, 53.5, 54, 54.5, 0]]


class Widens:
    """A network whose keys and values are one array."""

    @staticmethod
    def widen(kv, width):
        return jnp.pad(kv, ((0, 0), (0, width - kv.shape[1])))


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """A decoder that sees tokens, and a state with a wave."""

    window: int = 5
    headway: int = 1
    buckets: tuple[int, ...] | None = (2, 3)
    bounded: bool = False
    network: type = Widens

    @on_narrowest
    def predict(self, params, state, knobs):
        some = state.wave
        return Prediction(some.states, some.conditioning, some.tokens, {"n": jnp.zeros(2)}, some.tokens, None)


@dataclasses.dataclass(frozen=True)
class Stands:
    """Rows and the wave they have."""

    rows: types.SimpleNamespace
    wave: Wave


@pytest.mark.parametrize(("running", "width"), [((True, True), 5), ((True, False), 3), ((False, False), 2)])
def test_the_narrowest_bucket_that_holds_the_running_waves(running, width):
    rows = types.SimpleNamespace(done=~jnp.array(running), length=jnp.zeros(2))
    new = Narrowed().predict(None, Stands(rows, wave()), None)
    want = np.where(np.arange(5) < width, wave().tokens, 0)
    np.testing.assert_array_equal(new.tokens, want)
    np.testing.assert_array_equal(new.kv, want)


def test_widths_follow_from_the_cost_curve():
    """Each program is worth its compilation, and none is narrower than an opened wave."""

    def widths(window: int, batch: int = 1, **options: Any) -> tuple[int, ...]:
        return compiled_widths(Narrowed(window, buckets=None, **options), batch)

    assert widths(128) == (2, 8, 32, 128) and widths(32) == (2, 8, 32) and widths(16) == (4, 16)
    assert [widths(window) for window in (1, 2, 3, 4)] == [(1,), (2,), (3,), (4,)]
    assert widths(8, headway=8) == (8,) and widths(32, headway=4) == (8, 32)
    assert widths(128, bounded=True) == (128,)
    assert compiled_widths(Narrowed(128, buckets=()), 1) == (128,)
    flat, steep = {1: 1.0, 128: 1.0}, {1: 1.0, 2: 4.0, 4: 16.0}
    assert widths_by(flat, 128) == (128,) and widths_by(steep, 4, headway=0) == (1, 2, 4)
    assert cost(3, steep) == 10 and cost(8, steep) == 32
    for batch in (1, 4, 16):
        for narrow, wide in itertools.pairwise(widths(96, batch)):
            assert cost(batch * narrow) <= SHARE * cost(batch * wide)


@pytest.mark.parametrize("schedule", ["dampened", "constant"])
@pytest.mark.parametrize("mixing", ["linear", "sqrt"])
def test_schedule_and_mixing_of_noise_are_independent(schedule, mixing):
    recurrences = jnp.array([[0, 3]])
    share = np.array([0.5, 0.125 if schedule == "dampened" else 0.5])
    z, g = jnp.full((1, 2, 1), 2.0), jnp.full((1, 2, 1), -1.0)
    keep, added = (1 - share, share) if mixing == "linear" else (np.sqrt(1 - share), np.sqrt(share))
    mixed = mix_noise(z, g, 0.5, recurrences, schedule, mixing)
    np.testing.assert_allclose(mixed[0, :, 0], 2 * keep - added, rtol=1e-6)


def test_below_infinity_every_state_stands_still():
    distance = jnp.array([[0.1, 0.5, jnp.inf, jnp.nan]])
    assert stands_still(distance, jnp.float32(0.2)).tolist() == [[True, False, False, False]]
    assert stands_still(distance, jnp.float32(jnp.inf)).all()
    assert stands_still(distance, jnp.array([[0.2, jnp.inf, 9.0, jnp.inf]])).tolist() == [
        [True, True, False, True]
    ]
