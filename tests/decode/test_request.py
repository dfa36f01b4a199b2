"""Requests: what is prescribed, where the holes are, and what is refused before anything is
compiled.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stubs import StubCausal

from paradec_jax.decode import (
    AutoRegressive,
    RecordedDraws,
    make_request,
    rollout,
    run,
    serve,
    stream,
    trace,
)
from paradec_jax.generate import row_keys


def test_lists_are_padded_on_the_right():
    request = make_request([[3, 1, 4], [1], []], max_new_tokens=2)
    assert request.tokens.tolist() == [[3, 1, 4], [1, 0, 0], [0, 0, 0]]
    assert request.lengths.tolist() == [3, 1, 0] and request.budgets.tolist() == [2, 2, 2]
    assert request.given is None and request.stop.shape == (3, 0)


def test_holes_are_kept_and_their_absence_is_none():
    holes = make_request(
        [[3, 0, 4], [1, 5]], given=[[True, False, True], [True, True]], max_new_tokens=1
    )
    assert holes.given.tolist() == [[True, False, True], [True, True, False]]
    whole = np.ones((2, 3), bool)
    assert make_request(np.ones((2, 3), int), given=whole, max_new_tokens=1).given is None
    # What is not given after a row's length is no hole: nothing is prescribed there.
    whole[0, 2] = False
    assert make_request(np.ones((2, 3), int), [2, 3], given=whole, max_new_tokens=1).given is None


def test_a_budget_of_nothing_needs_a_hole():
    tokens, given = [[3, 0, 4], [1, 5, 9]], [[True, False, True], [True, True, True]]
    assert make_request(tokens, given=given, max_new_tokens=[0, 1]).budgets.tolist() == [0, 1]
    for budgets in (0, [1, 0], [0, -1]):
        with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
            make_request(tokens, given=given, max_new_tokens=budgets)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        make_request(tokens, max_new_tokens=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": np.zeros((0, 3), int)}, "tokens must be .* with at least one row"),
        ({"tokens": np.zeros(3, int)}, "tokens must be .* not of shape"),
        ({"lengths": [4, 1]}, "lengths must be 2 numbers from 0 to 3, not"),
        ({"lengths": [-1, 1]}, "lengths must be 2 numbers from 0 to 3, not"),
        ({"lengths": [1]}, "lengths must be 2 numbers from 0 to 3, not"),
        ({"given": np.ones((2, 2), bool)}, "given must be of the shape of tokens"),
    ],
)
def test_what_fits_nothing_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_request(**{"tokens": np.zeros((2, 3), int), "max_new_tokens": 1} | arguments)


@pytest.mark.parametrize("value", [2.0, "8", True, 2**40, 2**70, None, [1, [2]], [1.5]])
@pytest.mark.parametrize("name", ["max_new_tokens", "lengths", "stop", "seed"])
def test_what_is_no_whole_number_is_refused(name, value):
    given = (value,) if name in ("stop", "lengths") and not isinstance(value, list) else value
    if (name, value) == ("seed", 2**40):
        given = -(2**64)
    bits = 64 if name == "seed" else 32
    with pytest.raises(ValueError, match=f"^{name} must be whole numbers of {bits} bits, not "):
        make_request(**{"tokens": [[3, 1, 4]], "max_new_tokens": 1, name: given})


def test_whole_numbers_of_any_type_are_taken():
    for kind in (int, np.int64, np.uint8, np.asarray, jnp.asarray, jnp.int32):
        request = make_request([[3, 1]], max_new_tokens=kind(4), stop=(kind(7),), seed=kind(2))
        assert request.budgets.tolist() == [4] and request.stop.tolist() == [[7]]
        keys = jax.random.key_data(request.keys), jax.random.fold_in(jax.random.key(2), 0)
        np.testing.assert_array_equal(keys[0][0], jax.random.key_data(keys[1]))
    with pytest.raises(ValueError, match=r"stop must be a list of token ids, not 7"):
        make_request([[3, 1]], max_new_tokens=4, stop=7)


def test_a_budget_of_all_numbers_is_the_room():
    decoder = AutoRegressive(StubCausal(), 8)
    request = make_request([[3, 1]], max_new_tokens=2**31 - 1)
    assert decoder.begin(request, 1).limit.tolist() == [8]


NO_IDS = """None 3 'ab' [None] [3,1] [[3],1] ['ab'] [[1,2.5]] [[1,True]] [[1.,2.]] [[2**31]] [[-7,1]] [] [[np.nan]]
np.ones((1,2)) jnp.ones((1,2)) np.ones((1,2),bool) np.asarray([[2**40]]) [np.ones((1,2),int)]"""


@pytest.mark.parametrize("text", NO_IDS.split())
def test_token_ids_are_whole_numbers(text):
    with pytest.raises(ValueError, match=r"^tokens "):
        make_request(eval(text), max_new_tokens=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [[3, 1], [1, 11]]}, "token 1 of row 1 must be an id below 11, not 11"),
        ({"stop": (7, 11)}, "stop token 1 of row 0 must be an id below 11, not 11"),
    ],
)
def test_token_ids_are_of_the_vocabulary(change, message):
    request = make_request(**{"tokens": [[3, 1]], "max_new_tokens": 2} | change)
    drivers = (
        run,
        serve,
        partial(trace, n=2),
        partial(rollout, n=2),
        lambda *given: next(stream(*given)),
    )
    for drive in drivers:
        with pytest.raises(ValueError, match=message):
            drive(AutoRegressive(StubCausal(), 8), None, request)


def test_what_stands_beyond_a_prompt_and_traced_ids_are_passed_over():
    decoder = AutoRegressive(StubCausal(), 8)
    decoder.check(make_request([[3, 99]], [1], max_new_tokens=2, stop=(-1,)))
    jax.eval_shape(decoder.check, make_request([[99]], max_new_tokens=2))


@pytest.mark.parametrize("seed", [2**32 + 1, -(2**31) - 1, -(2**63)])
def test_a_seed_of_64_bits_draws_unlike_its_lower_word(seed):
    def data(seed):
        keys = make_request([[1]], max_new_tokens=1, seed=seed).keys, row_keys([[1]], seed)
        return jax.random.key_data(jnp.stack(keys)).tolist()

    assert len({str(data(of)) for of in (seed, seed % 2**32, seed ^ (1 << 40))}) == 3


def test_some_rows_of_a_request():
    recorded = RecordedDraws(uniforms=jnp.arange(4.0))
    given = [[True, False], [True, True], [False, True]]
    request = make_request(
        [[1, 2], [3, 4], [5, 6]],
        given=given,
        max_new_tokens=[0, 1, 2],
        stop=(7,),
        recorded=recorded,
    )
    taken = request.take([2, 0])
    assert taken.batch == 2
    assert taken.tokens.tolist() == [[5, 6], [1, 2]] and taken.budgets.tolist() == [2, 0]
    assert taken.given.tolist() == [given[2], given[0]]
    assert (
        jax.random.key_data(taken.keys) == jax.random.key_data(request.keys)[np.array([2, 0])]
    ).all()
    assert taken.recorded.uniforms is recorded.uniforms  # one record for all rows


def test_keys_are_of_seed_and_row():
    def data(**options):
        return jax.random.key_data(
            make_request([[1]] * 3, max_new_tokens=1, **options).keys
        ).tolist()

    keys = data(seed=4)
    assert len({tuple(key) for key in keys}) == 3 and keys != data() and keys == data(seed=4)
    own = jax.random.split(jax.random.key(9), 3)
    assert data(keys=own) == jax.random.key_data(own).tolist()
