"""The parts of recurrent decoders by themselves: the exit loop, the window of a wave, noise."""

import dataclasses
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from stubs import StubNetwork

from experiments import replicas
from paradec_jax import decode
from paradec_jax.decode.recurrent import wave as waves
from paradec_jax.decode.recurrent.wave import Wave

# The newest tokens, at positions 3, 4, 5 and 6, need 1, 2, 4 and 9 recurrences; the fourth row
# stops at once.
PROMPTS = ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
NEEDED = (9, 9, 9, 1, 2, 4, 9)


def first_step(kind: type, options: dict, **knobs) -> tuple:
    """Recurrences and exit values of the first step after the prompts, and the state before the
    step's token.
    """
    options = {"max_recurrence": 6, **options}
    decoder = kind(StubNetwork(needed=NEEDED, recurrence=9), 12, **options)
    request = decode.make_request(PROMPTS, max_new_tokens=[3, 3, 3, 1])
    info = decode.trace(decoder, None, request, decoder.Knobs(**knobs), n=1)[1]
    return np.asarray(info.recurrences)[0], np.asarray(info.exit_values)[0]


@pytest.mark.parametrize("bounded", [False, True])
def test_rows_leave_the_loop_one_by_one(bounded):
    recurrences, values = first_step(decode.Adaptive, {"bounded": bounded}, exit_threshold=0.01)
    assert recurrences.tolist() == [2, 3, 5, 0]  # one more than needed shows that nothing moves
    exits = [[1, 0], [1, 1 / 2, 0], [1, 1 / 2, 1 / 3, 1 / 4, 0], []]
    want = [[*row, *[np.nan] * (6 - len(row))] for row in exits]
    np.testing.assert_allclose(values, want, rtol=1e-6)


def test_checks_begin_and_recur_when_they_are_due():
    knobs = {"exit_threshold": 0.01, "min_recurrence": 1, "check_every": 2}
    recurrences, values = first_step(decode.Adaptive, {}, **knobs)
    assert recurrences.tolist() == [4, 4, 6, 0]  # checks after 2, 4 and 6 recurrences
    assert (~np.isnan(values)).sum(axis=1).tolist() == [2, 2, 3, 0]


@pytest.mark.slow
def test_the_release_samples_from_the_last_check():
    """Checks follow recurrences 1 and 3; the newest position needs 4 and gets them."""
    stub, prompt = StubNetwork(needed=NEEDED), PROMPTS[2]
    right = stub.expected(prompt, 2)
    for kind, early in ((decode.Adaptive, 0), (replicas.ReleasedAdaptive, 1)):
        decoder = kind(stub, 12, criterion="argmax-stability", max_recurrence=4)
        request = decode.make_request([prompt], max_new_tokens=2)
        result = decode.run(decoder, None, request, decoder.Knobs(check_every=2))
        assert result.completions() == [[right[0], (right[1] + early) % stub.vocab_size]]


@dataclasses.dataclass(frozen=True)
class Stands:
    """What a wave moves in: rows, and the wave itself."""

    rows: types.SimpleNamespace
    wave: Wave
    cache: None = None
    steps: Any = 0
    fill: Any = None


def wave() -> Wave:
    """Five slots of two rows, three and four of them in use."""
    slots = jnp.arange(10).reshape(2, 5)
    states = 1.0 + slots[..., None]
    return Wave(
        10 + slots,
        states,
        100 + states,
        jnp.array([[6, 4, 2, 0, 0], [8, 6, 4, 2, 0]]),
        jnp.array([3, 4]),
    )


def network() -> Any:
    """Initial latents of -1, and keys and values that are one array."""
    return types.SimpleNamespace(
        latents=lambda cache, positions: jnp.full((*positions.shape, 1), -1.0),
        widen=lambda kv, width: jnp.pad(kv, ((0, 0), (0, width - kv.shape[1]))),
    )


@pytest.mark.parametrize("warm", [True, False])
def test_a_wave_moves_on_and_opens(warm):
    decoder = types.SimpleNamespace(window=5, headway=2, network=network())
    rows = types.SimpleNamespace(done=jnp.array([False, False]), length=jnp.array([7, 6]))
    predicted = jnp.array([[11, 12, 22, 0, 0], [16, 31, 32, 33, 0]])
    state = Stands(rows, wave(), fill=jnp.full((2, 12), 40))
    knobs = types.SimpleNamespace(max_wavefront=4)
    moved = waves.WaveDecoder.move(decoder, state, jnp.array([2, 1]), predicted, knobs, warm)
    assert moved.wave.active.tolist() == [3, 4] and moved.steps.tolist() == [1, 1]
    # The first new slot has a prediction, the ones after it do not.
    assert moved.wave.tokens.tolist() == [[12, 22, 40, 40, 40], [16, 31, 32, 33, 40]]
    # Without warm starts a slot starts again where its token has changed, or one before it.
    want = [[3, -1, -1, -1, -1], [7, 8, 9, -1, -1] if warm else [7, -1, -1, -1, -1]]
    assert moved.wave.states[..., 0].tolist() == want
    assert moved.wave.recurrences.tolist() == [
        [2, 0, 0, 0, 0],
        [6, 4, 2, 0, 0] if warm else [6, 0, 0, 0, 0],
    ]


def test_a_wave_says_which_slots_were_computed_from_what_is_predicted():
    agrees = wave().agrees(jnp.array([[11, 12, 0, 14, 0], [16, 0, 18, 19, 0]]))
    assert agrees.tolist() == [[True, True, True, False, True], [True, True, False, True, True]]


@pytest.mark.parametrize(
    ("running", "options", "width"),
    [
        ((True, True), {}, 5),
        ((True, False), {}, 3),
        ((False, False), {}, 2),
        ((False, False), {"headway": 2}, 3),
        ((False, False), {"bounded": True}, 5),
    ],
)
def test_the_narrowest_width_that_holds_the_running_waves(running, options, width):
    choices = {"window": 5, "headway": 1, "buckets": (3, 2, 9), "bounded": False, **options}
    widths = waves.widths_of(**choices)
    state = Stands(types.SimpleNamespace(done=~jnp.array(running)), wave())

    def predict(narrow):
        return (narrow.wave.tokens, None), narrow.wave.tokens, {"n": jnp.zeros(2)}

    (tokens, nothing), kv, _ = waves.on_narrowest(network(), widths, state, predict)
    want = np.where(np.arange(5) < width, wave().tokens, 0)
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_array_equal(kv, want)
    assert nothing is None


@pytest.mark.parametrize("schedule", ["dampened", "constant"])
@pytest.mark.parametrize("mixing", ["linear", "sqrt"])
def test_schedule_and_mixing_of_noise_are_independent(schedule, mixing):
    recurrences = jnp.array([[0, 3]])
    share = np.array([0.5, 0.125 if schedule == "dampened" else 0.5])
    z, g = jnp.full((1, 2, 1), 2.0), jnp.full((1, 2, 1), -1.0)
    keep, added = (1 - share, share) if mixing == "linear" else (np.sqrt(1 - share), np.sqrt(share))
    mixed = waves.mix_noise(z, g, 0.5, recurrences, schedule, mixing)
    np.testing.assert_allclose(mixed[0, :, 0], 2 * keep - added, rtol=1e-6)


def test_below_infinity_every_state_stands_still():
    distance = jnp.array([[0.1, 0.5, jnp.inf, jnp.nan]])

    def still(*schedule):
        knobs = waves.WavefrontKnobs(exit_threshold=jnp.array(schedule))
        return knobs.still(distance, jnp.arange(4)[None])

    assert still(0.2).tolist() == [[True, False, False, False]]
    assert still(jnp.inf).tolist() == [[True] * 4]
    assert still(0.2, jnp.inf, 9.0, jnp.inf).tolist() == [[True, True, False, True]]
