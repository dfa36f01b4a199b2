"""Adaptive computation as the program released with Huginn-0125 runs it (arXiv 2502.05171)."""

import dataclasses
from typing import Any, ClassVar

from paradec_jax.config.bounds import check_words
from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.recurrent.adaptive import (
    AdaptiveInfo,
    AdaptiveKnobs,
    commit_exit,
    recur_until_exit,
)
from paradec_jax.decode.recurrent.criteria import CRITERIA
from paradec_jax.decode.recurrent.latents import Inputs, empty_state
from paradec_jax.decode.rules.windows import where_rows


@dataclasses.dataclass(frozen=True)
class ReleasedAdaptive(DecoderBase):
    """`Adaptive` with what the release does where a criterion that looks at logits never fires.

    It then samples from the logits of the last check, even where recurrences followed that check.
    Its top-p drops the token that crosses the threshold.

    Attributes:
      criterion: a name of `criteria.CRITERIA`.
      max_recurrence: recurrences at most; the network's default when None.
      exit_in_prefill: whether the criterion may end the prompt's recurrences.
      continuous: start each new position from the raw state of the one before it at its exit.
    """

    _: dataclasses.KW_ONLY
    criterion: str = "latent-diff"
    max_recurrence: int | None = None
    exit_in_prefill: bool = True
    continuous: bool = False
    top_p_rule: str = "drop"
    Knobs: ClassVar[type] = AdaptiveKnobs

    def __post_init__(self) -> None:
        check_words(self, criterion=CRITERIA)

    def init(self, params: Any, request: Request, knobs: AdaptiveKnobs) -> CachedState:
        """Reads the prompt and commits the first token."""
        return self.read_prompt(params, request, knobs)[0]

    def read_prompt(
        self, params: Any, request: Request, knobs: AdaptiveKnobs
    ) -> tuple[CachedState, AdaptiveInfo]:
        """As `init`, and what the prompt took."""
        state = empty_state(self, request, 1, knobs)
        return self._read(params, state, Inputs.prompt(request), knobs, self.exit_in_prefill)

    def step(
        self, params: Any, state: CachedState, knobs: AdaptiveKnobs
    ) -> tuple[CachedState, AdaptiveInfo]:
        """Runs recurrences on the newest token and commits the token it predicts."""
        return self._read(params, state, Inputs.newest(state), knobs, True)

    def _read(
        self, params: Any, state: CachedState, fed: Inputs, knobs: AdaptiveKnobs, may_exit: bool
    ) -> tuple[CachedState, AdaptiveInfo]:
        """One call on a window; commits what the release samples after its last position."""
        loop, out = recur_until_exit(self, params, state, fed, knobs, self.max_recurrence, may_exit)
        if loop.read is not None:
            hidden, coda = where_rows(loop.checks > 0, loop.read, (out.hidden, out.kv.coda))
            out = dataclasses.replace(out, hidden=hidden, kv=dataclasses.replace(out.kv, coda=coda))
        return commit_exit(self, params, state, fed, knobs, loop, out)
