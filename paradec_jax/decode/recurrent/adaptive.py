"""Adaptive computation: each token gets as many recurrences as an exit criterion asks for (arXiv 2502.05171)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.config.bounds import check_words
from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.recurrent.criteria import CRITERIA
from paradec_jax.decode.recurrent.exit import AdaptiveKnobs, Fed, as_last_checked, recur_until_exit
from paradec_jax.decode.recurrent.latents import initial_latents
from paradec_jax.decode.rules.windows import last_of, write_after_read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptiveInfo:
    """What the newest token took.

    Attributes:
      recurrences: recurrences done, [B].
      exit_values: what the criterion measured at each check, NaN where it was not asked, [B, steps].
    """

    recurrences: Int[Array, "B"]
    exit_values: Float[Array, "B steps"]


@dataclasses.dataclass(frozen=True)
class Adaptive(DecoderBase):
    """Runs recurrences on the newest token until the criterion fires, then samples the next one.

    Attributes:
      criterion: a name of `criteria.CRITERIA`.
      max_recurrence: recurrences at most; the network's default when None.
      prefill_recurrence: recurrences of the prompt at most; `max_recurrence` when None.
      exit_in_prefill: whether the criterion may end the prompt's recurrences.
      continuous: start each new position from the raw state of the one before it at its exit.
    """

    _: dataclasses.KW_ONLY
    criterion: str = "latent-diff"
    max_recurrence: int | None = None
    prefill_recurrence: int | None = None
    exit_in_prefill: bool = True
    continuous: bool = False
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
        rows = self.begin(request, 1)
        cache = self.empty_cache(request, rows.tokens.shape[1], **initial_latents(request, knobs))
        fed = Fed(request.tokens, request.positions, request.lengths, None)
        depth = self.max_recurrence if self.prefill_recurrence is None else self.prefill_recurrence
        return self._read(params, rows, cache, fed, knobs, depth, self.exit_in_prefill)

    def step(self, params: Any, state: CachedState, knobs: AdaptiveKnobs) -> tuple[CachedState, AdaptiveInfo]:
        """Runs recurrences on the newest token and commits the token it predicts."""
        token, position = state.rows.newest
        fed = Fed(token, position, jnp.ones_like(state.cached), state.cached)
        return self._read(params, state.rows, state.cache, fed, knobs, self.max_recurrence, True)

    def _read(
        self,
        params: Any,
        rows: Rows,
        cache: Any,
        fed: Fed,
        knobs: AdaptiveKnobs,
        depth: int | None,
        may_exit: bool,
    ) -> tuple[CachedState, AdaptiveInfo]:
        """One call on a window of `depth` recurrences at most; commits what its last position predicts."""
        network, criterion = self.network, CRITERIA[self.criterion]
        loop, out = recur_until_exit(
            network,
            params,
            cache,
            fed,
            ~rows.done,
            criterion,
            knobs,
            steps=network.at(depth).recurrence,
            may_exit=may_exit,
            bounded=self.bounded,
        )
        if criterion.looks_at == "logits":  # rows that have left were read by the check that let them
            out = as_last_checked(loop, out, ~loop.active)
        rows = rows.spend(out.counts, fed.widths)
        rows, token = self.commit_next(params, rows, out.hidden, knobs)
        cache = network.write(cache, out.kv, write_after_read(fed.at, token))
        if self.continuous:
            cache = network.start_from(cache, last_of(loop.states, fed.widths), fed.at + fed.widths)
        return CachedState(rows, cache), AdaptiveInfo(loop.kv.depth, loop.exit_values)
