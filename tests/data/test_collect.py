"""Trajectories of blocks: against plain Python, and plain Python against what the original program
recorded.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_jacobi import predictor, trajectory
from recorded_jacobi import arrays, model, models, recorded_rows
from stubs import PROMPTS, StubCausal, tiny_request

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.data.collect import collect

PAD = 40
STUB = StubCausal(vocab_size=41, weights=(1, 0, 1, 0), slope=0)
BLOCK = 4


def collected(request, *, ids=(7, 8, 9), **options):
    decoder = decode.Jacobi(block=BLOCK, **options).bind(STUB, 40, TokenSpec(pad=PAD))
    return collect(decoder, None, request, ids)


def without_repetitions(iterates: list[list[int]]) -> list[list[int]]:
    """Points that differ from the one before them."""
    return [iterate for i, iterate in enumerate(iterates) if i == 0 or iterate != iterates[i - 1]]


def plain_iterates(start: list[int], context: list[int], end: int) -> list[list[int]]:
    """Iterates of a block from its first one, `PAD` from the end of the answer on, without
    repetitions.
    """
    iterates, _ = trajectory(predictor(STUB), context, start)
    return without_repetitions(
        [(iterate[: end - len(context)] + [PAD] * BLOCK)[:BLOCK] for iterate in iterates]
    )


def test_points_are_the_iterates_of_each_block():
    """Rows that end at a stop token within a block, at one that ends a block, and at the budget."""
    texts = [STUB.expected(prompt, 30) for prompt in PROMPTS]
    stops = [texts[0][9], texts[1][7], -1]
    assert texts[0].index(stops[0]) == 9 and texts[1].index(stops[1]) == 7, texts
    request = dataclasses.replace(
        tiny_request((30, 30, 14)), stop=jnp.array(stops, jnp.int32)[:, None]
    )
    found = collected(request)
    assert [generation.id for generation in found] == [7, 8, 9]
    # the budget cuts the fourth
    assert [len(generation.iterates) for generation in found] == [
        3,
        2,
        3,
    ]
    longest = 0
    for i, generation in enumerate(found):
        assert generation.prompt.tolist() == list(PROMPTS[i])
        answer = texts[i][: (10, 8, 14)[i]]
        padded = answer + [PAD] * (-len(answer) % BLOCK) if i < 2 else answer[:12]
        assert generation.fixed.ravel().tolist() == padded
        assert generation.length == (10, 8, 12)[i]
        end = len(PROMPTS[i]) + (len(answer) if i < 2 else 30)
        for place in range(len(generation.iterates)):
            alone = generation.alone(place)
            iterates = alone.iterates[0].tolist()
            assert iterates == plain_iterates(iterates[0], alone.prompt.tolist(), end)
            longest = max(longest, len(iterates))
    assert longest > 2


def test_a_block_starts_from_tokens_of_its_row():
    """Later ones: the right first token, then tokens that the row has; the first one: an iterate."""
    found = collected(tiny_request(20))
    for generation, prompt in zip(found, PROMPTS, strict=True):
        assert generation.iterates[0][0, 0] == STUB.expected(prompt, 1)[0]
        for place in range(1, len(generation.iterates)):
            alone = generation.alone(place)
            first, fixed = alone.iterates[0][0].tolist(), int(alone.fixed[0, 0])
            assert first[0] == fixed and {*first} <= {*alone.prompt.tolist(), fixed}


@pytest.mark.slow
def test_points_of_winning_candidates():
    """With candidates the accepted prefix grows in every iterate, and the texts are the same."""
    request = tiny_request(20)
    alone, found = collected(request), collected(request, pool=2, candidates=4)
    assert sum(map(calls, found)) < sum(map(calls, alone))
    for generation, other, prompt in zip(found, alone, PROMPTS, strict=True):
        assert (
            generation.fixed.ravel().tolist()
            == other.fixed.ravel().tolist()
            == STUB.expected(prompt, 20)
        )
        for iterates in generation.iterates:
            wrong = iterates != iterates[-1]
            right = np.where(wrong.any(1), wrong.argmax(1), BLOCK)
            assert right[0] >= 1 and (np.diff(right) > 0).all()


def calls(generation) -> int:
    """Points of all blocks."""
    return sum(map(len, generation.iterates))


def test_rows_without_a_whole_block_have_none():
    first = STUB.expected(PROMPTS[2], 1)[0]
    request = dataclasses.replace(
        tiny_request((BLOCK - 1, 2 * BLOCK + 1, 9)),
        stop=jnp.array([[-1], [-1], [first]], jnp.int32),
    )
    found = collected(request)
    assert [(len(generation.iterates), generation.length) for generation in found] == [
        (0, 0),
        (2, 8),
        (1, 1),
    ]
    assert [iterates.tolist() for iterates in found[2].iterates] == [[[first, PAD, PAD, PAD]]]


def network_predictor(name: str):
    """Next tokens of a recorded model, from one pass over everything, cut out of one program."""
    network, params, _ = model(name)
    size = 160

    @jax.jit
    def best(tokens):
        out = network.forward(params, tokens, jnp.arange(size)[None])
        return jnp.argmax(network.logits(params, out.hidden[0]), axis=-1)

    def predict(context, draft):
        text = [*context, *draft]
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(best(tokens))[len(context) - 1 : len(text)].tolist()

    return predict


@pytest.mark.golden
@pytest.mark.parametrize("name", models("trajectories"))
def test_plain_trajectories_are_the_recorded_ones(name):
    """The program that the collected iterates are compared with does what the original program did."""
    want, predict = arrays(name, "trajectories"), network_predictor(name)
    prompts, _ = recorded_rows(name)
    for run in want["names"].tolist()[-4:]:
        of = functools.partial(lambda run, array: want[f"{run}/{array}"], run)
        context = list(prompts[int(run.split("/p")[1])])
        for block, draft in enumerate(of("init_draft").tolist()):
            iterates, after = trajectory(predict, context, draft)
            recorded = of("points")[of("point_block") == block].tolist()
            # The original program stores a draft that turns out to be right, then the fixed point.
            assert (
                iterates == without_repetitions(recorded) and after == of("first_tokens")[block + 1]
            )
            context += iterates[-1]
