"""Several blocks in flight on a model of random weights: what a call sees, one block at a time, edits."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from reading import read
from results import listed
from stubs import tiny_blocks, tiny_blocks_params, tiny_request

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.nn import masks

MASK, SIZE, NEWS = 31, 24, (11, 4, 14)


def bound(kind: type, alignment: str = "own", **options: Any) -> Any:
    spec = TokenSpec(mask=MASK, alignment=alignment)
    return kind(tiny_blocks(), SIZE, spec, log_probs=True, **options)


@functools.cache
def params() -> Any:
    return tiny_blocks_params(1, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("alignment", ["own", "next"])
def test_a_call_is_a_forward_of_the_whole_canvas(alignment):
    """With the trusted cache as without one, and nothing that is sealed changes."""
    decoder = bound(decode.MultiBlock, alignment, flight=3)
    knobs = decoder.Knobs(temperature=0.9, threshold=0.6)
    request = tiny_request(NEWS, seed=2)
    _, (states, infos) = decode.trace(
        decoder, params(), request, knobs, n=14, record=lambda state, info: (state, info)
    )
    tokens, lengths = np.asarray(states.rows.tokens), np.asarray(states.rows.length)
    sees, several = masks.block_causal(jnp.arange(tokens.shape[2])[None], decoder.block), 0
    for before, now in zip(range(13), range(1, 14), strict=True):
        hidden = read(decoder.network, params(), jnp.asarray(tokens[before]), None, None, sees)[1]
        hidden = np.roll(hidden, alignment == "next", axis=1)
        for row in range(len(NEWS)):
            sealed = lengths[before, row]
            assert (tokens[now, row, :sealed] == tokens[before, row, :sealed]).all()
            count = int(infos.reads[now, row].sum())
            at, several = int(infos.at[now, row]), several + (count > 1)
            span = slice(max(at, 1), at + count * decoder.block)
            found = infos.hidden[now, row, span.start - at : span.stop - at]
            np.testing.assert_allclose(found, hidden[row, span], atol=2e-4)
    assert several > 6


@pytest.mark.parametrize(("flight", "share", "alignment"), [(1, 0.1, "own"), slow(3, 1.0, "next")])
def test_one_block_at_a_time_is_the_decoder_of_blocks(flight, share, alignment):
    """Token for token, drawn ones too, in as many calls on as many positions."""
    one, several = (
        bound(decode.BlockDenoising, alignment),
        bound(decode.MultiBlock, alignment, flight=flight),
    )
    request, knobs = tiny_request(NEWS, seed=2, stop=(3,)), {"temperature": 0.9, "threshold": 0.2}
    shares = {"admit": share, "activate": share}
    want = listed(decode.run(one, params(), request, one.Knobs(**knobs)))
    found = listed(decode.run(several, params(), request, several.Knobs(**knobs, **shares)))
    np.testing.assert_allclose(found.pop("log_probs"), want.pop("log_probs"), atol=1e-4)
    assert found == want
