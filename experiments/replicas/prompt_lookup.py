"""Prompt lookup as the original notebook runs it: where it finds nothing it drafts a token all the
same.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from paradec_jax.config.bounds import check_number
from paradec_jax.decode.causal.prompt_lookup import PromptLookupInfo, find_draft
from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.verify import accept, counted, verify


@dataclasses.dataclass(frozen=True)
class ReleasedPromptLookup(DecoderBase):
    """`PromptLookup` with a token that is drafted alone where nothing is found; now and then it is
    right.

    Attributes:
      max_ngram: tokens that are looked up; where they are not found, fewer.
      num_pred: K, tokens copied.
      dummy: the token.
    """

    _: dataclasses.KW_ONLY
    max_ngram: int = 3
    num_pred: int = 10
    dummy: int = 100

    def __post_init__(self) -> None:
        check_number("max_ngram", self.max_ngram)
        check_number("num_pred", self.num_pred)
        if self.dummy < 0:
            raise ValueError(f"dummy must be a token id, not {self.dummy}")

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> CachedState:
        """Reads the prompt with a draft after it and commits the first tokens."""
        draft, drafted = self.draft(request.tokens, request.lengths)
        rows, cache, out = self.prefill_ahead(params, request, draft, self.num_pred + 1)
        tokens, logits = self.predict(params, rows, knobs, out.hidden[:, None], draft[:, None])
        _, accepted, _ = accept(counted(draft, drafted)[:, None], tokens)
        tokens, scores = tokens[:, 0], self.scores(logits[:, 0], tokens[:, 0])
        rows = rows.spend(out.counts, request.lengths + drafted)
        return CachedState(rows.commit(tokens, accepted + 1, scores), cache)

    def step(
        self, params: Any, state: CachedState, knobs: SamplingKnobs
    ) -> tuple[CachedState, PromptLookupInfo]:
        """Finds a draft, verifies it, commits what is right and one token more."""
        draft, drafted = self.draft(state.rows.tokens, state.rows.length)
        right = verify(self, params, state, draft[:, None], drafted, knobs, (2,))
        rows = right.rows.commit(right.tokens, right.accepted + 1, right.log_probs)
        return CachedState(rows, right.cache), PromptLookupInfo(draft, drafted, right.accepted)

    def drafts(self, state: CachedState) -> Int[Array, "B K"]:
        """The draft that the next call verifies, the token alone where none is found."""
        return counted(*self.draft(state.rows.tokens, state.rows.length))

    def draft(
        self, tokens: Int[Array, "B S"], lengths: Int[Array, "B"]
    ) -> tuple[Int[Array, "B K"], Int[Array, "B"]]:
        """A draft and how many of its tokens count."""
        draft, found = find_draft(tokens, lengths, self.max_ngram, self.num_pred)
        return jnp.where(found[:, None], draft, self.dummy), jnp.where(found, self.num_pred, 1)
