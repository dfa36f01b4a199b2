"""What studies of block diffusion compute: magnitudes, acceptance, choices, rivals, judged divergences, weights."""

import numpy as np
import pytest
from toys import CHAIN, of_blocks

from experiments.block_diffusion import acceptance, lines, problems, tuned
from experiments.block_diffusion.grounds import Chains
from experiments.block_diffusion.magnitudes import magnitudes, read_states, visited
from paradec_jax import BlockDenoising, make_request, trace

pytestmark = pytest.mark.slow
BLOCK = 4


def test_magnitudes_by_hand():
    """Two blocks of two positions and one channel; every state of the second is twice that of the first."""
    first = np.asarray([[[3.0], [4.0]], [[3.0], [0.0]], [[0.0], [0.0]]])
    found = magnitudes(np.stack([first, 2 * first]))
    one = (np.sqrt(8) + np.sqrt(4.5)) / 2
    np.testing.assert_allclose(found.residual, 1.5 * np.asarray([one, np.sqrt(12.5)]))
    assert found.reference == pytest.approx(1.5 * (np.sqrt(12.5) + np.sqrt(4.5)) / 2)
    np.testing.assert_allclose(found.ratios, found.residual / found.reference)


def test_states_are_those_that_the_decoder_read():
    """Block by block, and what it then said of each is what is read again."""
    model = of_blocks(CHAIN)
    decoder = BlockDenoising(rule="static", fuse_store=False, fuse_prompt=False)
    decoder = decoder.bind(model.network, 16, model.token_spec)
    request = make_request([[1, 2, 3, 0], [2, 3, 4, 1, 0]], max_new_tokens=11)
    result, steps = trace(decoder, decoder.prepare(model.params), request, n=18)
    visits = list(visited(steps, np.asarray([4, 5]), decoder.mask))
    assert [(visit.row, visit.start) for visit in visits][:2] == [(0, 4), (0, 8)]
    assert (1, 4) not in [(visit.row, visit.start) for visit in visits]  # it holds the end of the prompt
    hidden, at = np.asarray(steps.hidden), np.asarray(steps.at)
    for visit in visits:
        np.testing.assert_array_equal((visit.states == decoder.mask).sum(axis=1), [4, 3, 2, 1, 0])
        context = np.asarray(result.tokens)[visit.row][: visit.start]
        found = read_states(model.network, model.params, context, visit.states[None], 16)
        mine = (at[:, visit.row] == visit.start) & np.asarray(steps.reads)[:, visit.row]
        np.testing.assert_allclose(found[0, :-1], hidden[mine, visit.row], atol=1e-4)


def test_acceptance_is_counted():
    """One row, three calls: two drafts of which one is right; none; two, both right. Then it has stopped."""
    exists = np.asarray([[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 1]], bool)[:, None]
    accepted, calls = np.asarray([[1], [0], [2], [2]]), np.asarray([[2], [3], [4], [4]])
    drafts, right = acceptance.counted({"exists": exists, "accepted": accepted, "calls": calls})
    assert drafts.tolist() == [[2, 2]] and right.tolist() == [[2, 1]]
    first, second = acceptance.rows_of(np.repeat(drafts, 2, 0), np.repeat(right, 2, 0))
    assert (first["share"], first["given"], second["share"], second["given"]) == (1, 1, 0.5, 0.5)


def test_lawful_blocks():
    """A text of the law is right; one with a wrong symbol is wrong in that block, one that ends early at its end."""
    ground = Chains()
    judge = problems.Lawful(ground, 2, 2, 4, [0])
    whole = ground.law.draw(2, [0])
    texts = [ground.tokenizer().decode(row) for row in whole[:, 8:16].tolist()]
    assert judge.lawful(texts).all() and judge.score([], texts).tolist() == [True, True]
    follows = set(ground.law.followers[whole[0, 9]].tolist())
    wrong = next(symbol for symbol in range(16) if symbol not in follows)
    broken = ground.tokenizer().decode([*whole[0, 8:10].tolist(), wrong, *whole[0, 11:16].tolist()])
    assert judge.lawful([broken, texts[1][:4]])[:, 0].tolist() == [False, True]
    assert judge.score([], [broken, texts[1][:4]]).tolist() == [False, False]


def test_rivals_by_hand():
    """Two problems: calls 4 and 6 against 8 and 12, of which one more is right."""
    common = {"backbone": "b", "block": 4, "texts": "0" * 16}
    zero = common | {"label": "zero", "decoder": "residual", "right": "10", "calls": "8 12"}
    zero["settings"] = {"head": "zero", "mix": "sum", "head_steps": 2}
    own = common | {"label": "own", "decoder": "residual", "right": "11", "calls": "4 6"}
    own["settings"] = {"head": None, "mix": "none", "head_steps": 2}
    other = zero | {"settings": zero["settings"] | {"head_steps": 1}, "label": "other"}
    found = lines.beside([other, zero, own])
    assert found[2]["zero_label"] == "zero" and found[2]["zero_difference"] == 0.5
    assert found[2]["zero_fewer_calls"] == 2.0 and found[2]["zero_equal_texts"] == 1.0
    assert found[2]["first_label"] == "other" and "first_label" not in found[0]


def test_the_fewest_calls_that_are_right_enough():
    pairs = ((90, 1.0), (89, 0.5), (91, 0.6), (88, 0.2))
    base, *rows = ({"exact": n, "problems": 100, "network_calls_per_token": calls} for n, calls in pairs)
    assert [tuned.best_of(rows, base, points) for points in (1.0, 2.0, 0.0)] == [0, 2, 1]
    assert tuned.best_of(rows[:1] + rows[2:], base, 0.0) == 0, "none is: the one that is right most often"
