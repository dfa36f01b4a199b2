"""Decoders of full attention beside recorded runs: every call, what it fed, said and revealed."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from recorded import equal, near
from recorded_full import LOGITS

from experiments.replicas import RecordedCanvas
from paradec_jax import decode
from paradec_jax.decode.machine.rows import NETWORK_CALLS, POSITIONS

CONFIDENCE = {"atol": 5e-4, "rtol": 1e-4}  # negative entropies; probabilities are nearer


class Settings:
    """Settings of a run; one that nobody reads fails."""

    def __init__(self, given: dict[str, Any], told: set[str]) -> None:
        self.left = {name: value for name, value in given.items() if name not in told}

    def take(self, name: str, default: Any = None) -> Any:
        """A setting, read once."""
        return self.left.pop(name, default)

    def all_read(self) -> None:
        """Fails for what is left."""
        assert not self.left, f"settings that no replay reads: {self.left}"


@dataclasses.dataclass
class Run:
    """What was recorded of a run.

    Attributes:
      tokens: the canvas before each call and after the last, [T + 1, B, L].
      pads: columns of padding before each row's prompt, [B].
      prompts: ids of each row.
      new: masks after each prompt.
      every: whether a call that revealed nothing is made here, too.
      argmax, scores: token and confidence of each position, [T, B, L]; those at masks count.
      logits_steps, logits: calls with logits, and those, [k, B, span, V].
      starts, sizes: first column that a call was fed, and how many.
      draws: recorded numbers, [T, B, ..].
    """

    tokens: np.ndarray
    pads: np.ndarray
    prompts: list[list[int]]
    new: int
    every: bool = False
    argmax: np.ndarray | None = None
    scores: np.ndarray | None = None
    logits_steps: Any = ()
    logits: Any = ()
    starts: np.ndarray | None = None
    sizes: np.ndarray | None = None
    draws: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def calls(self) -> list[int]:
        """Calls that are made here: those that changed the canvas, or all."""
        changed = (self.tokens[1:] != self.tokens[:-1]).any(axis=(1, 2))
        return [t for t, some in enumerate(changed) if some or self.every]

    def request(self) -> decode.Request:
        """The prompts, with the draws in the place of keys."""
        draws = {
            name: np.stack([row[self.calls] for row in x.swapaxes(0, 1)]).astype(np.float32)
            for name, x in self.draws.items()
        }
        for name, x in draws.items():  # a row's positions begin with its prompt
            draws[name] = np.stack(
                [np.roll(row, -pad, axis=1) for row, pad in zip(x, self.pads, strict=True)]
            )
        return decode.make_request(
            self.prompts,
            max_new_tokens=self.new,
            recorded=RecordedCanvas(**draws) if draws else None,
        )


@functools.partial(jax.jit, static_argnums=0)
def begun(decoder: Any, params: Any, request: decode.Request, knobs: Any) -> Any:
    return decoder.init(params, request, knobs)


@functools.partial(jax.jit, static_argnums=0)
def stepped(decoder: Any, params: Any, state: Any, knobs: Any) -> Any:
    new, info = decoder.step(params, state, knobs)
    return new, info, decoder.network.logits(params, info.hidden)


def replay(decoder: Any, params: Any, run: Run, knobs: Any, request: Any = None) -> Any:
    """Every call beside the recorded one; the last state, and each call's info."""
    rows, mask, infos = len(run.prompts), decoder.mask, []
    with jax.default_matmul_precision("highest"):
        knobs = decoder.knobs(knobs)
        state = begun(decoder, params, run.request() if request is None else request, knobs)
        check_tokens(state, run, run.calls[0], mask)
        for call in run.calls:
            new, info, logits = stepped(decoder, params, state, knobs)
            infos.append(info)
            for row in range(rows):
                check_row(row, call, run, state, info, logits, mask)
            check_tokens(new, run, call + 1, mask)
            if run.sizes is not None:
                spent = new.rows.counts[POSITIONS] - state.rows.counts[POSITIONS]
                equal(spent[0], decoder.readings * run.sizes[call], err_msg=f"call {call}")
            state = new
    assert state.rows.counts[NETWORK_CALLS][0] == len(run.calls)
    return state, infos


def check_tokens(state: Any, run: Run, call: int, mask: int) -> None:
    for row, (pad, prompt) in enumerate(zip(run.pads, run.prompts, strict=True)):
        length = len(prompt) + run.new
        want = run.tokens[call, row, pad : pad + length]
        equal(state.rows.tokens[row, :length], want, err_msg=f"before call {call}, row {row}")


def check_row(row: int, call: int, run: Run, state: Any, info: Any, logits: Any, mask: int) -> None:
    """What a call said of the masks of its window, and the logits of all of it."""
    at, pad = int(info.at[row]), int(run.pads[row])
    width = min(info.where.shape[1], len(run.prompts[row]) + run.new - at)
    place = slice(pad + at, pad + at + width)
    masked = run.tokens[call, row, place] == mask
    if run.argmax is not None:
        masked &= run.argmax[call, row, place] >= 0
        equal(info.tokens[row, :width][masked], run.argmax[call, row, place][masked])
    if run.scores is not None:
        near(info.scores[row, :width][masked], run.scores[call, row, place][masked], **CONFIDENCE)
    for k in np.flatnonzero(np.asarray(run.logits_steps) == call):
        first = 0 if run.starts is None else int(run.starts[call])
        want = run.logits[k][row, place.start - first :][:width]
        got = np.asarray(logits[row, : len(want)])
        some = np.isfinite(want).all(axis=1) & masked[: len(want)]
        near(got[some], want[some], **LOGITS)
