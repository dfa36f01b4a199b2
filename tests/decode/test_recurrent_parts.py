"""The parts of recurrent decoders by themselves: the exit loop, noise, thresholds."""

import jax.numpy as jnp
import numpy as np
import pytest
from stubs import StubNetwork

from experiments import replicas
from paradec_jax import decode
from paradec_jax.decode.recurrent import wave as waves

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
