"""What a decoder does step by step: serial recurrences, positions in flight, committed tokens."""

import dataclasses
from typing import Any

import numpy as np

from paradec_jax.decode import Request, stream


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Steps of one row after its prompt.

    Attributes:
      recurrences: passes of the core that each step made one after the other.
      positions: positions in flight, which each of these passes computed.
      tokens: tokens that each step committed.
      calls: network calls of each step; every call passes prelude and coda once.
    """

    recurrences: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    calls: tuple[int, ...]

    @property
    def depths(self) -> list[int]:
        """Recurrences that each committed token's position did, for windows that begin at the
        newest token.

        Position k after the prompt is in flight at step t where `c_t <= k < c_t + w_t`, with c_t
        the tokens that steps before t committed and w_t the positions of the step.
        """
        start = np.cumsum((0, *self.tokens[:-1]))
        position = np.arange(sum(self.tokens))[:, None]
        inside = (start <= position) & (position < start + np.array(self.positions))
        return (inside @ np.array(self.recurrences)).tolist()

    def until(self, tokens: int) -> int:
        """Steps until `tokens` tokens are committed.

        Raises:
          ValueError: fewer were committed in all.
        """
        if not 1 <= tokens <= sum(self.tokens):
            raise ValueError(
                f"tokens must be from 1 to the {sum(self.tokens)} committed ones, not {tokens}"
            )
        return int(np.argmax(np.cumsum(self.tokens) >= tokens)) + 1


def schedule(decoder: Any, params: Any, request: Request, knobs: Any = None) -> Schedule:
    """Runs a bound decoder and keeps what its counters say of each step of the first row.

    The token that the prompt predicts comes with the prompt and is in no step.
    """
    counts = []
    for state, _ in stream(decoder, params, request, knobs):
        spent = state.rows.counts
        fields = (
            spent["recurrences"],
            spent["positions"],
            state.rows.length,
            spent["network_calls"],
        )
        counts.append([int(x[0]) for x in fields])
    return Schedule(
        *(tuple(int(x) for x in column) for column in np.diff(np.array(counts), axis=0).T)
    )
