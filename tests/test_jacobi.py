"""Jacobi decoding: against plain Python on a stub, and what it saves on a recorded model that accepts drafts.

The folder of the recorded model is `PARADEC_GOLDEN/jacobi`, or `tests/golden/jacobi`.
"""

import functools

import numpy as np
import pytest
from plain_jacobi import plain_row

from paradec_jax import decode
from paradec_jax.testing import PROMPTS, StubCausal, tiny_request

COUNTING = StubCausal(weights=(1, 0), slope=0)  # the next token is one more
REPEATING = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0)  # the text has period 3
LONG = 32


# Every step is that of plain Python


def steps_of(state):
    """Records lengths and the rows of the next call."""
    return state.progress.length, state.drafts


@pytest.mark.parametrize(
    ("stub", "kind", "options", "knobs"),
    [
        (REPEATING, decode.Jacobi, {"block": 5}, {}),
        (COUNTING, decode.Jacobi, {"block": 6, "running": True, "pool": 3}, {}),
        (REPEATING, decode.Jacobi, {"block": 4, "pool": 1, "rows": 5}, {}),
        (REPEATING, decode.MultiBlock, {"block": 4, "blocks": 3, "pool": 2}, {"spawn": 0.5}),
        (COUNTING, decode.MultiBlock, {"block": 5, "blocks": 2, "pool": 1, "rows": 3}, {"spawn": 0.6}),
        (COUNTING, decode.MultiBlock, {"block": 3, "blocks": 3, "rows": 2}, {"spawn": 0.0}),
    ],
)
def test_steps_are_those_of_plain_python(stub, kind, options, knobs):
    decoder = kind(stub, LONG + 5, **options)
    request = tiny_request(LONG, seed=3)
    result, (lengths, drafts) = decode.trace(
        decoder, None, request, kind.Knobs(**knobs), n=LONG, record=steps_of
    )
    lengths, drafts = np.asarray(lengths), np.asarray(drafts)
    saved = 0
    for i, prompt in enumerate(PROMPTS):
        plain = plain_row({**options, **knobs}, stub, i, seed=3)
        for step in range(LONG):
            plain.step()
            if len(plain.text) >= len(prompt) + LONG:
                break
            assert lengths[step, i] == len(plain.text)
            some = len(plain.drafts)
            assert drafts[step, i, :some].tolist() == plain.drafts
            assert (drafts[step, i, some:] == drafts[step, i, 0]).all()
        assert (lengths[step:, i] == len(prompt) + LONG).all()
        assert (plain.calls, plain.positions) == (result.network_calls[i], result.positions[i])
        assert result.completions()[i] == plain.text[len(prompt) :][:LONG] == stub.expected(prompt, LONG)
        saved += LONG - plain.calls
    assert saved > 0
