"""Blocks of several lengths: one checkpoint read at each, and a length chosen by entropy, block by
block.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import read
from results import listed
from stubs import tiny_blocks, tiny_blocks_params, tiny_request

from experiments.decoders.elastic import ElasticDenoising
from paradec_jax import decode
from paradec_jax.config import TokenSpec

pytestmark = pytest.mark.slow
SIZE, NEW = 32, 13
LENGTHS = (2, 4, 8)
MODEL = {"blocks": LENGTHS}
SPEC = TokenSpec(mask=31, alignment="own")


def request() -> decode.Request:
    return tiny_request((NEW, 4, 14), seed=2)


@pytest.mark.parametrize("alignment", ["own", "next"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_is_that_of_a_checkpoint_of_it(length, alignment):
    """The same parameters under a config whose own block has this length; also as the one choice,
    or the longest.
    """
    params, spec = tiny_blocks_params(1, 3.0), dataclasses.replace(SPEC, alignment=alignment)
    knobs = {"temperature": 1.0, "steps": 2, "threshold": 0.5}

    def decoded(kind: type, network, **options):
        decoder = kind(network, SIZE, spec, **options)
        return listed(decode.run(decoder, params, request(), decoder.Knobs(**knobs)))

    want = decoded(decode.BlockDenoising, tiny_blocks(block=length))
    assert decoded(decode.BlockDenoising, tiny_blocks(**MODEL), length=length) == want
    assert decoded(ElasticDenoising, tiny_blocks(**MODEL), lengths=(length,)) == want
    if length == LENGTHS[-1]:
        assert decoded(ElasticDenoising, tiny_blocks(**MODEL)) == want
    other = decoded(decode.BlockDenoising, tiny_blocks(block=4 if length != 4 else 8))
    assert other["tokens"] != want["tokens"], "the length changes nothing"


def test_lengths_are_chosen_row_by_row_and_each_call_reads_what_a_whole_text_shows():
    """Rows go on in phases of their own; a step reads its block after the blocks that were chosen
    before it.

    In float64: numbers go to 9 and sums of a cached and of a whole text are ordered otherwise,
    which leaves 6e-5 in float32 and 2e-14 here.
    """
    model = {**MODEL, "dtype": "float64", "param_dtype": "float64"}
    # no block is begun by them
    prompts = (
        (3, 1, 4, 1, 5, 9, 2, 6),
        (2, 7, 1, 8, 2, 8, 1, 8),
        (5, 3) * 8,
    )
    with jax.enable_x64(True):
        network, params = tiny_blocks(**model), tiny_blocks_params(1, 3.0, **model)
        decoder = ElasticDenoising(network, SIZE, SPEC, rule="static")
        given = tiny_request(14, prompts=prompts)
        # one program; what random entropies are, who knows
        for bound in (
            0.5,
            1.0,
            1.5,
            2.0,
            2.5,
            3.0,
        ):
            knobs = decoder.Knobs(length_entropy=bound)
            _, (tokens, info) = decode.trace(
                decoder, params, given, knobs, n=16, record=canvas_and_info
            )
            at, span, reads = (np.asarray(x) for x in (info.at, info.span, info.reads))
            if found := set(span[reads].tolist()) == set(LENGTHS):
                break
        assert found, "no bound chooses every length"
        for row in range(3):
            ends = np.full(SIZE, SIZE)  # where the block of each position ends
            ends[: at[0, row]] = (np.arange(at[0, row]) // LENGTHS[-1] + 1) * LENGTHS[-1]
            for step in range(16):
                start, end = at[step, row], at[step, row] + span[step, row]
                assert start % span[step, row] == 0
                ends[start:end] = end
                if step == 0 or not reads[step, row] or info.step[step, row] == 0:
                    continue
                mask = jnp.asarray(np.arange(SIZE) < ends[:, None])
                text = tokens[step - 1][row : row + 1, :SIZE]
                _, whole, _ = read(network, params, text, None, None, mask)
                found = info.hidden[step, row, : end - start]
                np.testing.assert_allclose(whole[0, start:end], found, rtol=0, atol=1e-12)
                ends[end:] = SIZE


def canvas_and_info(state, info):
    return state.rows.tokens, info
