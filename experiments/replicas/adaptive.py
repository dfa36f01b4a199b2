"""Adaptive computation as the program released with Huginn-0125 runs it (arXiv 2502.05171)."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.recurrent.adaptive import AdaptiveInfo
from paradec_jax.decode.recurrent.criteria import CRITERIA
from paradec_jax.decode.recurrent.exit import AdaptiveKnobs, Fed, as_last_checked, recur_until_exit
from paradec_jax.decode.recurrent.latents import initial_latents
from paradec_jax.decode.rules.windows import last_of, write_after_read


@dataclasses.dataclass(frozen=True)
class ReleasedAdaptive(DecoderBase):
    """`Adaptive` with what the release does where a criterion that looks at logits never fires.

    It then samples from the logits of the last check, even where recurrences followed that check.

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
    Knobs: ClassVar[type] = AdaptiveKnobs

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, not {self.criterion!r}")

    def init(self, params: Any, request: Request, knobs: AdaptiveKnobs) -> CachedState:
        """Reads the prompt and commits the first token."""
        return self.read_prompt(params, request, knobs)[0]

    def read_prompt(
        self, params: Any, request: Request, knobs: AdaptiveKnobs
    ) -> tuple[CachedState, AdaptiveInfo]:
        """As `init`, and what the prompt took."""
        rows = self.begin(request, 1)
        cache = self.empty_cache(request, rows.tokens.shape[1], **initial_latents(request, knobs))
        fed = Fed(request.tokens, request.positions, request.lengths, None)
        return self._read(params, rows, cache, fed, knobs, self.exit_in_prefill)

    def step(self, params: Any, state: CachedState, knobs: AdaptiveKnobs) -> tuple[CachedState, AdaptiveInfo]:
        """Runs recurrences on the newest token and commits the token it predicts."""
        token, position = state.rows.newest
        fed = Fed(token, position, jnp.ones_like(state.cached), state.cached)
        return self._read(params, state.rows, state.cache, fed, knobs, True)

    def _read(
        self, params: Any, rows: Rows, cache: Any, fed: Fed, knobs: AdaptiveKnobs, may_exit: bool
    ) -> tuple[CachedState, AdaptiveInfo]:
        """One call on a window; commits what the release samples after its last position."""
        network, criterion = self.network, CRITERIA[self.criterion]
        loop, out = recur_until_exit(
            network,
            params,
            cache,
            fed,
            ~rows.done,
            criterion,
            knobs,
            steps=network.at(self.max_recurrence).recurrence,
            may_exit=may_exit,
            bounded=self.bounded,
        )
        if criterion.looks_at == "logits":
            out = as_last_checked(loop, out, loop.checks > 0)
        rows = rows.spend(out.counts, fed.widths)
        rows, token = self.commit_next(params, rows, out.hidden, knobs)
        cache = network.write(cache, out.kv, write_after_read(fed.at, token))
        if self.continuous:
            cache = network.start_from(cache, last_of(loop.states, fed.widths), fed.at + fed.widths)
        return CachedState(rows, cache), AdaptiveInfo(loop.kv.depth, loop.exit_values)
