"""Trajectories as a Jacobi decoder leaves them: every iterate of every block of a prompt's answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from paradec_jax.data.trajectories import Generation
from paradec_jax.decode import Jacobi, Reason, Request, stream


def collect(
    decoder: Jacobi,
    params: Any,
    request: Request,
    data_ids: Sequence[int],
    knobs: Any = None,
) -> list[Generation]:
    """Decodes a request and keeps the iterates of each block: accepted tokens, then the draft of the rest.

    A block's first iterate is the draft it starts from (of the first block: the iterate that the prompt's call gives,
    of later ones random tokens after the known first one), its last the fixed point. After a row's stop token all
    iterates hold the decoder's `pad`. Blocks that the budget cuts are left out, and rows without a whole one.

    Args:
      decoder: a bound decoder of blocks. Candidates are welcome: an iterate's draft is what the winning row predicts.
      params, request, knobs: as for `run`.
      data_ids: id of each row's problem.

    Raises:
      ValueError: a running window, several blocks in flight, or not one id for each row.
    """
    if decoder.running or decoder.blocks != 1:
        raise ValueError("collect needs a decoder of single blocks: Jacobi(block=n) without a running window")
    if len(data_ids) != request.batch:
        raise ValueError(f"data_ids must name {request.batch} rows, not {len(data_ids)}")
    lengths, drafts = [], []
    for state, _ in stream(decoder, params, request, knobs):
        lengths.append(np.asarray(state.rows.length))
        drafts.append(np.asarray(decoder.drafts(state)))
        last = state
    tokens, reasons = np.asarray(last.rows.tokens), np.asarray(last.rows.reason)
    starts = np.asarray(request.lengths)
    generations = []
    for row, data_id in enumerate(data_ids):
        stopped = reasons[row] == Reason.STOP
        history = [(int(length[row]), draft[row]) for length, draft in zip(lengths, drafts, strict=True)]
        iterates = _blocks(tokens[row], int(starts[row]), history, decoder.block, decoder.spec.pad, stopped)
        if iterates:
            start, blocks = int(starts[row]), len(iterates) * decoder.block
            length = min(int(lengths[-1][row]) - start, blocks)
            generations.append(Generation(int(data_id), tokens[row, :start], iterates, length))
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
    whole = (end - start) // size
    blocks = -(-(end - start) // size) if stopped else whole
    text = np.full(start + blocks * size, pad, np.int32)
    used = min(end, len(text))
    text[:used] = tokens[:used]
    iterates: list[list[np.ndarray]] = [[] for _ in range(blocks)]
    for length, draft in history:
        place = (length - 1 - start) // size  # the block of the newest token
        if place >= blocks:
            continue
        begin = start + place * size
        guess = text[begin : begin + size].copy()
        guess[length - begin :] = draft[: begin + size - length]
        if stopped:
            guess[end - begin :] = pad
        if not iterates[place] or not np.array_equal(iterates[place][-1], guess):
            iterates[place].append(guess)
    for place in range(blocks):
        fixed = text[start + place * size : start + (place + 1) * size]
        if not iterates[place] or not np.array_equal(iterates[place][-1], fixed):
            iterates[place].append(fixed)
    return [np.stack(block) for block in iterates]
