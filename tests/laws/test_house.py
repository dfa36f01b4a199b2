"""What the test decoders show of the machine, beside the laws that they share with every decoder."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from decoder_rows import BUDGET
from decoders import ROWS
from marks import over
from results import listed, rows_of
from small_tokenizers import letters
from stubs import PROMPTS, StubDenoiser, infilling, tiny_request

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.canvas.canvas import Canvas
from paradec_jax.decode.machine.rows import Reason
from paradec_jax.text.stop_strings import StopStrings

STUB = StubDenoiser(sharpness=12.0)
SPEC = TokenSpec(mask=STUB.mask, alignment="own", pad=9)
SIZE = 16
# Given tokens around a hole, nothing at all, a prompt, and a hole without a budget after it.
TEXTS = (
    [3, None, None, 4, None, None, None],
    [None] * 9,
    [1, 2, None, None, None],
    [None, 5, None, 6],
)
LENGTHS, BUDGETS = (4, 0, 2, 4), (3, 9, 3, 0)


def begun(**options):
    """The texts as far as their lengths; what follows is for the budgets."""
    texts = [text[:length] for text, length in zip(TEXTS, LENGTHS, strict=True)]
    return infilling(texts, BUDGETS, **options)


def whole(decoded) -> list[list[int]]:
    return [
        row[:n] for row, n in zip(decoded.tokens.tolist(), decoded.lengths.tolist(), strict=True)
    ]


CANVASES = {
    "whole": decode.SemiAutoregressive(length=None),
    "dual": decode.SemiAutoregressive(length=4, cache="dual"),
    "prefix": decode.SemiAutoregressive(length=3, cache="prefix"),
    "wino": decode.Wino(length=4),
    "prophet": decode.Prophet(length=3),
    "planned": decode.Planned(),
    "speculative": decode.SpeculativeDenoising(length=4),
}
CANVASES = {name: decoder.bind(STUB, SIZE, SPEC) for name, decoder in CANVASES.items()}


@over(CANVASES, CANVASES.keys() - {"dual"})
def test_holes_are_filled_by_the_known_law(name):
    decoder, knobs = CANVASES[name], CANVASES[name].Knobs()
    result = decode.run(decoder, None, begun(), knobs)
    assert whole(result) == [STUB.expected(text) for text in TEXTS]
    assert result.generated.tolist() == [sum(token is None for token in text) for text in TEXTS]
    assert (
        result.prompt_lengths.tolist() == [1, 0, 2, 0] and (result.reasons == Reason.BUDGET).all()
    )
    assert result.completions()[0] == [STUB.expected(TEXTS[0])[i] for i in (1, 2, 4, 5, 6)]
    for i in range(len(TEXTS)):
        assert listed(decode.run(decoder, None, begun().take([i]), knobs)) == rows_of(result, i)
    if name == "dual":
        traced, infos = decode.trace(decoder, None, begun(), knobs, n=12)
        assert listed(traced) == listed(result)
        assert np.asarray(infos.where).sum(axis=(0, 2)).tolist() == result.generated.tolist()
        served = decode.serve(decoder, None, begun(), knobs, rows=2, every=1)
        assert listed(served.decoded) == listed(result)


def test_given_tokens_are_never_stops():
    result = decode.run(CANVASES["dual"], None, begun(stop=(4,)))
    want = [STUB.expected(text) for text in TEXTS]
    cut = [want[0], want[1][: want[1].index(4) + 1] if 4 in want[1] else want[1]]
    assert whole(result)[0] == want[0], "the 4 that was given ended its row"
    assert whole(result)[1] == cut[1]


def test_a_canvas_reveals_what_is_open_alone():
    decoder = CANVASES["whole"]
    rows = decoder.begin(begun(), 0)
    canvas = Canvas.of(rows, SPEC.mask)
    assert canvas.open.sum(axis=1).tolist() == [5, 9, 3, 2]
    nines = jnp.full(rows.tokens.shape, 9)
    every = canvas.show(nines, jnp.ones(nines.shape, bool), jnp.zeros(4, jnp.int32)).seal()
    assert every.rows.tokens[0].tolist() == [3, 9, 9, 4, 9, 9, 9] + [SPEC.mask] * (SIZE - 7)
    assert (
        every.rows.length.tolist() == [7, 9, 5, 4]
        and every.rows.done.all()
        and not every.open.any()
    )
    third = canvas.show(
        nines, jnp.arange(SIZE) == jnp.full((4, 1), 2), jnp.zeros(4, jnp.int32)
    ).seal()
    assert third.rows.length.tolist() == [1, 0, 3, 0], "a position after a gap is not committed"
    assert decoder.drafts(third)[:, :4].tolist() == [
        [-1, 9, 4, -1],
        [-1, -1, 9, -1],
        [-1, -1, -1, -1],
        [-1, 5, 9, 6],
    ], "a mask is no guess"


def test_one_block_of_the_whole_length_is_a_decoder_of_canvases():
    """Fast-dLLM's threshold on one block, in a network of blocks and in one that sees all."""
    whole = StubDenoiser(sharpness=6.0)
    one = decode.BlockDenoising(
        dataclasses.replace(whole, block=SIZE), SIZE, SPEC, rule="threshold"
    )
    other = CANVASES["whole"].bind(whole, SIZE)
    request = tiny_request([SIZE - len(prompt) for prompt in PROMPTS], stop=(7,))
    blocks = decode.run(one, None, request, one.Knobs(threshold=0.4))
    canvas = decode.run(other, None, request, other.Knobs(threshold=0.4))
    assert listed(blocks) == listed(canvas)
    assert (np.asarray(blocks.network_calls) < SIZE - 5).all()


@over(["semi", "wino", "jacobi"], ["wino"])
def test_stop_strings_end_rows(name):
    """The row ends where its committed text holds the string, whatever is revealed after it."""
    row, request, tokenizer = ROWS[name], tiny_request(BUDGET), letters(*"abcdefghijk")
    decoder = row.decoder()
    free = [tokenizer.decode(row.expected(prompt, BUDGET)) for prompt in PROMPTS]
    watch = StopStrings(tokenizer, decoder.spec, (free[0][3:5],), [()] * len(PROMPTS))
    *_, (last, _) = decode.stream(decoder, row.params, request, row.values(), interrupt=watch)
    result = decoder.finish(last)
    found = watch.finish(result.completions())
    assert result.reasons[0] == Reason.CALLER and result.generated[0] < BUDGET
    assert found[0][1] == free[0][: free[0].index(free[0][3:5])]
    for i, text in enumerate(free):
        cut = text[: text.index(free[0][3:5])] if i in found else text
        assert cut == (found[i][1] if i in found else watch.visible(i, done=True))
