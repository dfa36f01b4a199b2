"""Trajectories as a Jacobi decoder leaves them: every iterate of every block of a prompt's answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from paradec_jax.data.trajectories import Generation
from paradec_jax.decode import Jacobi, Reason, Request, stream


def collect(decoder: Jacobi, params: Any, request: Request, ids: Sequence[int]) -> list[Generation]:
    """Decodes a request and keeps the iterates of each block: accepted tokens, then the draft of
    the rest.

    A block's first iterate is the draft it starts from (of the first block: the iterate that the
    prompt's call gives, of later ones random tokens after the known first one), its last the fixed
    point. After a row's stop token all iterates hold the decoder's `pad`. Blocks that the budget
    cuts are left out.

    Args:
      decoder: a bound decoder of one block at a time, without a running window. Candidates are
        welcome: an iterate's draft is what the winning row predicts.
      params, request: as for `run`.
      ids: number of each row's prompt.
    """
    steps = []
    for state, _ in stream(decoder, params, request):
        steps.append((np.asarray(state.rows.length), np.asarray(decoder.drafts(state))))
        last = state
    tokens, stopped = np.asarray(last.rows.tokens), np.asarray(last.rows.reason) == Reason.STOP
    generations = []
    for row, (name, start) in enumerate(
        zip(ids, np.asarray(request.lengths).tolist(), strict=True)
    ):
        history = [(int(length[row]), draft[row]) for length, draft in steps]
        iterates = _blocks(
            tokens[row], start, history, decoder.block, decoder.spec.pad, bool(stopped[row])
        )
        length = min(history[-1][0] - start, len(iterates) * decoder.block)
        generations.append(Generation(name, tokens[row, :start], iterates, length))
    return generations


def _blocks(
    tokens: Int[np.ndarray, " S"],
    start: int,
    history: list[tuple[int, Int[np.ndarray, " drafts"]]],
    size: int,
    pad: int,
    stopped: bool,
) -> list[Int[np.ndarray, "X n"]]:
    """Iterates of each block of one row, from its length and draft after every step."""
    end = history[-1][0]
    blocks = -(-(end - start) // size) if stopped else (end - start) // size
    text = np.full(start + blocks * size, pad, np.int32)
    used = min(end, len(text))
    text[:used] = tokens[:used]
    fixed = text[start:].reshape(blocks, size)
    iterates: list[list[np.ndarray]] = [[] for _ in range(blocks)]
    for length, draft in history:
        place = (length - 1 - start) // size  # the block of the newest token
        if place < blocks:
            begin = start + place * size
            guess = fixed[place].copy()
            guess[length - begin :] = draft[: begin + size - length]
            if stopped:
                guess[end - begin :] = pad
            iterates[place].append(guess)
    points = [[*of, point] for of, point in zip(iterates, fixed, strict=True)]
    return [
        np.stack([x for i, x in enumerate(of) if i == 0 or not np.array_equal(x, of[i - 1])])
        for of in points
    ]
