"""Rows: revealing in any order, what is committed, and how a row ends; `tests/laws` for each decoder."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from stubs import PROMPTS

from paradec_jax.decode import Reason, make_request
from paradec_jax.decode.machine import rows as machine

STOP, SIZE, SCRATCH = 9, 12, 4
# Row 0 has a hole at its end, row 1 begins with one, row 2 has none and a budget alone.
CANVAS = [[3, 0, STOP, 0], [0, 5, 0, 6], [7, 8, 1, 2]]
GIVEN = [[True, False, True, False], [False, True, False, True], [True] * 4]


def prompts(budget=5, **options):
    request = make_request(
        [list(prompt) for prompt in PROMPTS], max_new_tokens=budget, stop=(STOP,)
    )
    return machine.begin(request, SIZE, SCRATCH, ("recurrences",), **options)


def canvases(budgets=(0, 2, 3), **options):
    request = make_request(CANVAS, given=GIVEN, max_new_tokens=list(budgets), stop=(STOP,))
    return machine.begin(request, SIZE, SCRATCH, **options)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def filled(rows, value):
    """The rows with one token everywhere but where it is given."""
    room = rows.tokens.shape[1]
    window = jnp.full((len(rows.length), room), value, jnp.int32)
    return rows.write(window, jnp.ones(window.shape, bool), jnp.zeros_like(rows.length))


class TestBegin:
    def test_canvases(self):
        rows = canvases()
        assert rows.prompt_lengths.tolist() == rows.length.tolist() == [1, 0, 4]
        assert rows.limit.tolist() == [4, 6, 7] and not rows.done.any()
        assert rows.fixed.shape == rows.tokens.shape and not rows.fixed[:, 4:].any()
        assert rows.fixed[:, :4].tolist() == GIVEN

    def test_nothing_left_to_write_is_an_end(self):
        request = make_request(
            [[3, 0], [3, 1]], given=[[True, False], [True, True]], max_new_tokens=[0, 1]
        )
        whole = dataclasses.replace(request, given=jnp.ones((2, 2), bool))
        assert machine.begin(whole, SIZE, 0).reason.tolist() == [Reason.BUDGET, Reason.RUNNING]


class TestCommit:
    def test_a_stop_token_on_the_last_place_is_a_stop(self):
        rows = prompts(budget=2).commit(jnp.array([[4, STOP]] * 3), ints(2, 2, 2))
        assert rows.reason.tolist() == [Reason.STOP] * 3

    def test_log_probs_go_with_their_tokens(self):
        rows = prompts(log_probs=True)
        rows = rows.commit(jnp.full((3, 2), 4), ints(1, 2, 2), jnp.array([[-0.5, -1.0]] * 3))
        found = rows.finish(0).generated_log_probs()
        assert [row.tolist() for row in found] == [[-0.5], [-0.5, -1.0], [-0.5, -1.0]]
        with pytest.raises(ValueError, match="no log-probabilities were kept"):
            prompts().finish(0).generated_log_probs()


class TestWrite:
    def test_any_order_and_given_tokens_stay(self):
        rows = canvases()
        new = rows.write(
            jnp.array([[4, 5, 6]] * 3), jnp.array([[True, False, True]] * 3), ints(1, 2, 4)
        )
        assert new.tokens[0, :4].tolist() == [3, 4, STOP, 6]
        assert new.tokens[1, :5].tolist() == [0, 5, 4, 6, 6]  # position 3 is not asked for
        assert new.tokens[2, :7].tolist() == [*CANVAS[2], 4, 0, 6]
        np.testing.assert_array_equal(new.length, rows.length)
        everywhere = filled(rows, 4).tokens[:, :4]
        np.testing.assert_array_equal(everywhere, np.where(GIVEN, CANVAS, 4))

    def test_rows_that_have_stopped_stay(self):
        rows = canvases().interrupt(jnp.array([True, False, False]))
        written = filled(rows, 4)
        np.testing.assert_array_equal(written.tokens[0], rows.tokens[0])
        assert (written.tokens[1:] == 4).sum() > 0


class TestSettle:
    def test_the_leading_run_is_committed(self):
        rows = filled(canvases(), 4)
        final = np.array(rows.fixed)
        settled = rows.settle(jnp.asarray(final))
        # a given token after a hole waits for it
        np.testing.assert_array_equal(settled.length, rows.length)
        final[0, 1] = final[1, :3] = final[2, 4] = True
        settled = rows.settle(jnp.asarray(final))
        assert settled.length.tolist() == [3, 4, 5]
        assert settled.finish(0).generated.tolist() == [1, 2, 1] and not settled.done.any()
        assert settled.completions() == [[4], [4, 4], [4]]

    def test_a_generated_stop_token_cuts_it_and_a_given_one_does_not(self):
        rows = filled(canvases(), 4)
        tokens = rows.tokens.at[1, 2].set(STOP).at[2, 4].set(STOP)
        rows = dataclasses.replace(rows, tokens=tokens).settle(jnp.ones(tokens.shape, bool))
        assert rows.length.tolist() == [4, 3, 5]  # row 0 goes on beyond the one that it was given
        assert rows.reason.tolist() == [Reason.BUDGET, Reason.STOP, Reason.STOP]
        assert rows.completions() == [[4, 4], [4, STOP], [STOP]]

    def test_what_is_committed_never_shrinks(self):
        rows = filled(canvases(), 4)
        final = jnp.arange(SIZE + SCRATCH) < 3
        once = rows.settle(jnp.broadcast_to(final, rows.tokens.shape))
        again = once.settle(jnp.zeros(rows.tokens.shape, bool))
        np.testing.assert_array_equal(again.length, once.length)
        ended = once.interrupt(jnp.array([True, True, True])).settle(
            jnp.ones(rows.tokens.shape, bool)
        )
        np.testing.assert_array_equal(ended.length, once.length)
        assert ended.reason.tolist() == [Reason.CALLER] * 3

    def test_left_to_right_it_is_commit(self):
        """Revealed in order, a canvas ends as if its tokens had been appended."""
        tokens = jnp.array([[4, 5, STOP, 6], [4, 5, 6, 7], [STOP, 4, 5, 6]])
        appended = prompts(budget=3).commit(tokens, ints(4, 4, 4))
        rows = prompts(budget=3)
        rows = rows.write(tokens, jnp.ones(tokens.shape, bool), rows.length)
        settled = rows.settle(jnp.ones(rows.tokens.shape, bool))
        np.testing.assert_array_equal(settled.length, appended.length)
        np.testing.assert_array_equal(settled.reason, appended.reason)
        assert settled.completions() == appended.completions()


def test_a_result_pads_after_each_row_and_cuts_the_scratch_off():
    decoded = filled(canvases(), 4).settle(jnp.ones((3, SIZE + SCRATCH), bool)).finish(-1)
    assert decoded.tokens.shape == (3, SIZE) and decoded.fixed.shape == (3, SIZE)
    assert decoded.tokens[0].tolist() == [3, 4, STOP, 4] + [-1] * (SIZE - 4)
    assert decoded.generated.tolist() == [2, 4, 3]
    assert decoded.completions() == [[4] * 2, [4] * 4, [4] * 3]
