"""The canvas: what is shown, hidden and sealed, and where blocks count from."""

import jax
import jax.numpy as jnp
import numpy as np
from stubs import StubDenoiser, tiny_request

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.canvas.canvas import Canvas

STUB = StubDenoiser(sharpness=12.0)
SPEC = TokenSpec(mask=STUB.mask, alignment="own", pad=9)
MASK, SIZE = STUB.mask, 12


def shown(canvas: Canvas, tokens: list[int], places: list[int]) -> Canvas:
    """The canvas with these tokens shown in its one row."""
    row, where = np.zeros((1, SIZE), np.int32), np.zeros((1, SIZE), bool)
    row[0, places], where[0, places] = tokens, True
    return jax.jit(Canvas.show)(canvas, row, where, np.zeros(1, np.int32))


def hidden(canvas: Canvas, places: list[int]) -> Canvas:
    where = np.zeros((1, SIZE), bool)
    where[0, places] = True
    return jax.jit(Canvas.hide)(canvas, where, np.zeros(1, np.int32), MASK)


def text(canvas: Canvas) -> str:
    tokens = canvas.rows.tokens[0].tolist()
    return "".join("_" if token == MASK else str(token) for token in tokens)


def test_what_is_shown_may_be_hidden_until_it_is_sealed():
    request = decode.make_request(
        [[3, 0, 5]], given=[[True, False, True]], max_new_tokens=5, stop=(9,)
    )
    rows = decode.Masked(STUB, SIZE, SPEC).begin(request, 0)
    canvas = shown(Canvas.of(rows, MASK), [1, 2, 4, 6], [1, 2, 3, 5])
    assert text(canvas) == "3154_6______", "a given token stays"
    assert canvas.rows.length.tolist() == [1], "what is shown is not committed yet"
    assert text(hidden(canvas, [0, 1, 2, 5])) == "3_54________", "given tokens stay"
    sealed = canvas.seal(jnp.asarray([3]))
    assert sealed.rows.length.tolist() == [3]
    changed = hidden(sealed, [1, 3, 5])
    assert text(changed) == "315_________" and changed.shown[0, :3].all()
    assert not changed.shown[0, 3:].any() and changed.open[0].tolist() == [
        3 <= p < 8 for p in range(SIZE)
    ]
    whole = shown(changed, [7, 9, 8], [3, 4, 5]).seal()
    assert text(whole)[:6] == "315798"
    assert whole.rows.length.tolist() == [5] and whole.rows.done.all(), "9 ends the row"
    assert text(hidden(whole, [4, 5])) == text(whole), "a row that has stopped stays as it is"


def test_blocks_count_from_the_start_or_from_the_prompts_end():
    rows = decode.Masked(STUB, SIZE, SPEC).begin(tiny_request((4, 2, 5)), 4)
    at = jnp.asarray([3, 6, 6])
    for origin, whole, starts, ends in (
        ("start", True, [0, 4, 4], [8, 8, 8]),
        ("prompt", True, [3, 5, 6], [7, 9, 10]),
        ("padded", True, [3, 5, 6], [7, 9, 10]),
        ("prompt", False, [3, 5, 6], [7, 7, 7]),
    ):
        canvas = Canvas.of(rows, MASK, 4, origin, whole)
        assert canvas.block_at(at).tolist() == starts
        assert canvas.inside.sum(axis=1).tolist() == ends
