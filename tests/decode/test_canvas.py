"""The canvas: what is shown, hidden and sealed; where blocks count from; which span a call reads."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import read
from stubs import PROMPTS, StubDenoiser, tiny_blocks, tiny_blocks_params, tiny_request

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.canvas.canvas import Canvas
from paradec_jax.models import TransformerNetwork

STUB = StubDenoiser(sharpness=12.0)
SPEC = TokenSpec(mask=STUB.mask, alignment="own", pad=9)
MASK, SIZE, LONGEST = STUB.mask, 12, 20


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


@dataclasses.dataclass(frozen=True)
class FromPrompt(TransformerNetwork):
    """A network whose blocks count from the prompt's end."""

    origin: str = "prompt"


def plain(network: Any, params: Any, prompt: list[int], new: int, threshold: float) -> tuple:
    """Texts and calls of blocks from the prompt's end, everything read anew in each call; before it
    there is one group, or blocks as well.
    """
    block, limit, calls = network.block, len(prompt) + new, 0
    text = list(prompt)
    while len(text) < limit:
        start, text = len(text), text + [31] * block
        # of one shape for all texts: no block sees a later one
        group = (np.arange(LONGEST) - len(prompt)) // block
        group = np.maximum(group, -1) if network.origin == "prompt" else group
        mask = jnp.asarray(group[:, None] >= group)[None]
        while 31 in text[start:limit]:
            padded = jnp.asarray([text + [0] * (LONGEST - len(text))])
            logits = np.array(read(network, params, padded, mask=mask)[0][0])
            probs = np.asarray(jax.nn.softmax(logits, axis=-1))
            tokens = logits[:, :31].argmax(-1)
            scores = {p: probs[p, tokens[p]] for p in range(start, len(text)) if text[p] == 31}
            best = max(scores, key=lambda p: scores[p])
            for p, score in scores.items():
                text[p] = int(tokens[p]) if score >= threshold or p == best else 31
            calls += 1
    return text[len(prompt) : limit], calls


@pytest.mark.parametrize("origin", ["prompt", "padded"])
def test_blocks_from_the_prompts_end_write_what_a_plain_program_writes(origin):
    network, params = FromPrompt(tiny_blocks().config, origin), tiny_blocks_params(1)
    spec = TokenSpec(mask=31, alignment="own")
    decoder = decode.BlockDenoising(network, 24, spec, rule="threshold")
    request, news = tiny_request((9, 6, 7)), (9, 6, 7)
    result = decode.run(decoder, params, request, decoder.Knobs(threshold=0.06))
    want = [
        plain(network, params, list(prompt), new, 0.06)
        for prompt, new in zip(PROMPTS, news, strict=True)
    ]
    assert result.completions() == [text for text, _ in want]
    assert result.network_calls.tolist() == [calls for _, calls in want], "stores ride along"
    assert any(calls < new for (_, calls), new in zip(want, news, strict=True))
