"""Block denoising: what a call did, what a block sees, holes, and what released programs do.

Recorded decodes have who is revealed when, in how many calls, by each rule.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from reading import read
from stubs import StubDenoiser, infilling, tiny_blocks, tiny_blocks_params, tiny_request

from experiments.replicas import ReleasedDenoising
from paradec_jax import decode
from paradec_jax.config import TokenSpec

SIZE, NEW = 24, 11
STUB = StubDenoiser(block=4, sharpness=6.0)
SPEC = TokenSpec(mask=STUB.mask, alignment="own", pad=9)


FUSIONS = [(True, True), slow(False, False), slow(True, False), slow(False, True)]


@pytest.mark.parametrize("alignment", ["own", slow("next")])
def test_infos_say_what_a_call_did(alignment):
    """Blocks from position 0, the first with the end of the prompt; steps counted in each; stores
    of their own.
    """
    stub = dataclasses.replace(STUB, alignment=alignment)
    spec = dataclasses.replace(SPEC, alignment=alignment)
    decoder = decode.BlockDenoising(
        stub, SIZE, spec, rule="static", fuse_store=False, fuse_prompt=False
    )
    request = tiny_request(5, prompts=((3, 1, 4, 1, 5, 9), (2, 7)))
    _, info = decode.trace(decoder, None, request, decoder.Knobs(steps=2), n=6)
    info = jax.tree.map(np.asarray, info)
    assert info.at[:4, 0].tolist() == [4, 8, 8, 8] and info.at[:4, 1].tolist() == [0, 4, 4, 4]
    assert info.stored[:4, 0].tolist() == [False, True, False, False]
    assert info.reads[:4, 0].tolist() == [True, False, True, True]
    assert info.step[[0, 2, 3], 0].tolist() == [0, 0, 1]
    shown = [info.where[i, 0].nonzero()[0].tolist() for i in range(6)]
    assert shown == [[2, 3], [], [0, 1], [2, 3], [], []] and info.where[0, 1].nonzero()[
        0
    ].tolist() == [2, 3]
    hidden = jnp.asarray(info.hidden[0])
    np.testing.assert_array_equal(
        stub.logits(None, hidden).argmax(-1)[0, 2:], info.tokens[0, 0, 2:]
    )


@pytest.mark.slow
def test_a_cached_block_is_one_read_in_a_whole_text():
    """What a step reads of its block behind the cache is what a call on the whole text reads there."""
    network, params = tiny_blocks(), tiny_blocks_params(1)
    decoder = decode.BlockDenoising(
        network, SIZE, TokenSpec(mask=31, alignment="own"), rule="static"
    )
    request = tiny_request(14, prompts=((3, 1, 4, 1, 5),))
    _, (tokens, info) = decode.trace(
        decoder, params, request, decoder.Knobs(steps=2), n=7, record=canvas_and_info
    )
    for step in range(1, 6):
        start = int(info.at[step, 0])
        seen = jnp.asarray(tokens[step - 1])[:, : start + 4]
        _, whole, _ = read(network, params, seen)
        np.testing.assert_allclose(whole[:, start:], info.hidden[step], atol=2e-5)
    assert len(np.unique(np.asarray(info.at)[1:6])) > 2


def canvas_and_info(state, info):
    return state.rows.tokens, info


@pytest.mark.parametrize(("rides", "opens"), FUSIONS)
def test_holes_are_filled_block_by_block(rides, opens):
    """Given tokens of a later block are not seen before it; a block without a hole is stored as it
    is.
    """
    texts = ([3, None, None, 4, None, None, None, 2, 5, 6, 7, 8, None, None], [None, None, 1])
    request, want = infilling(texts), []
    for text in texts:
        known: list[int | None] = list(text)
        for start in range(0, len(text), 4):
            known[: start + 4] = STUB.expected(known[: start + 4])
        want.append(known)
    decoder = decode.BlockDenoising(
        STUB, SIZE, SPEC, rule="static", fuse_store=rides, fuse_prompt=opens
    )
    result = decode.run(decoder, None, request)
    found = [
        row[:n] for row, n in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)
    ]
    assert found == want
    assert result.generated.tolist() == [text.count(None) for text in texts]


# What released programs do otherwise


def test_jetengine_falls_back_to_the_left():
    """With a token given in the middle of a block, its neighbours are the surest."""
    request = infilling([[None, None, 3, None]])
    shown = {}
    for program in ("evaluation", "jetengine"):
        decoder = ReleasedDenoising(STUB, 8, SPEC, program=program, rule="dynamic")
        _, info = decode.trace(decoder, None, request, decoder.Knobs(threshold=0.99), n=3)
        shown[program] = np.asarray(info.where[:, 0]).nonzero()[1].tolist()
    assert shown == {"evaluation": [1, 0, 3], "jetengine": [0, 1, 3]}


def test_confidence_after_truncation_is_one_with_top_k_one():
    """So that a dynamic step of `generate.py` reveals the whole block."""
    request = tiny_request(8, prompts=((3, 1, 4, 1),))
    calls = {}
    for program in ("generate", "evaluation"):
        decoder = ReleasedDenoising(STUB, SIZE, SPEC, program=program, rule="dynamic")
        knobs = decoder.Knobs(temperature=1.0, top_k=1, threshold=0.9)
        result = decode.run(decoder, None, request, knobs)
        assert result.completions() == [STUB.expected([3, 1, 4, 1, *[None] * 8])[4:]]
        calls[program] = int(result.network_calls[0])
    assert calls == {"generate": 1 + 2 * 2, "evaluation": 1 + 2 * 5}
