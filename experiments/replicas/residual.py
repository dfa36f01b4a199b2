"""The released programs of multi-token residual prediction: their speculative loop, and the head as a veto."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from experiments.replicas.block_diffusion import revealed_late, whole_blocks
from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.candidates import candidates_of, read_candidates
from paradec_jax.decode.block.canvas import BlockCall, block_of, read_block, read_prompt
from paradec_jax.decode.block.head import (
    HeadCanvas,
    check_head,
    first_call,
    fresh_with_head,
    light,
    next_call,
)
from paradec_jax.decode.block.residual_speculative import DraftedCanvas, Verified, agreement, steps_from
from paradec_jax.decode.block.residual_veto import JUDGES, Vetoed, VetoKnobs, judged
from paradec_jax.decode.block.rules import Choice, DenoisingKnobs, choose
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.machine.network import CachedNetwork
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules.alignment import aligned
from paradec_jax.decode.rules.windows import where_rows, window


def drafted(
    decoder: Any, params: Any, state: DraftedCanvas, call: BlockCall, knobs: DenoisingKnobs
) -> DraftedCanvas:
    """The canvas with K drafts of one position each, the first one from the scores that the last call left."""
    start, hidden, count = call.at, call.own, state.where.shape[1]
    positions = start[:, None] + jnp.arange(state.block)
    masked = window(state.open, start, state.block) & ~call.clean[:, None]
    tokens, now, found = window(state.rows.tokens, start, state.block), light(state), []
    for draft in range(count):
        if draft:
            wants = jnp.any(masked, axis=1)
            residual, now = next_call(decoder, params, now, state, hidden, start, wants, tokens)
            hidden += residual
        scores = aligned(hidden, decoder.spec.alignment, call.previous)
        logits = decoder.network.logits(params["network"], scores)
        choice = choose(decoder, "static", logits, masked, positions, state.step + draft, state.rows, knobs)
        tokens = jnp.where(choice.where, choice.tokens, tokens)
        masked &= ~choice.where
        found.append(choice)
    together: Choice = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *found)
    return dataclasses.replace(state, rows=now.rows, where=together.where, tokens=together.tokens)


@dataclasses.dataclass(frozen=True)
class ReleasedSpeculative(DecoderBase):
    """Drafts K states of a block and verifies them together with the state that they begin from.

    ::

        C_0   _ b _ _        drafts from scores of the state before b: stale by one
        C_1   _ b c _        ..
        call  C_0 .. C_K     n drafts agree, and the network's own step at C_n comes after them

    It writes what one position a step writes, with what the released loop does otherwise than `ResidualSpeculative`:

    - The next round's scores are those of C_n, which lacks the last step: first draft and head are a reveal behind.
    - All K + 1 states are read, complete ones too. The rows of a batch advance by the least that any of them accepts.
    - The rule is one position a step, whatever is asked for; a block begins with a call of its own and ends with one.
    - The head's cache is never filled, so it sees the open block alone. `context` fills it.
    - Rows end where a block is stored, and fill the block that holds the end of their budget.

    A row of n new positions ends within 1 + 3 (n + B) network calls.

    Attributes:
      head: the head's network, or "zero".
      candidates: K, drafts of a round, the first one from the network's scores.
      context: the head sees the blocks before the open one.
    """

    _: dataclasses.KW_ONLY
    head: CachedNetwork | str | None = None
    candidates: int = 3
    context: bool = False
    top_p_rule: str = "keep-renormalised"
    Knobs: ClassVar[type] = SamplingKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("block",)
    alignments: ClassVar[tuple[str, ...]] = ("own", "next")
    any_order: ClassVar[bool] = True
    further_networks: ClassVar[tuple[str, ...]] = ("head",)

    def __post_init__(self) -> None:
        check_head(self.head)
        if self.candidates < 1:
            raise ValueError(f"candidates must be at least 1, not {self.candidates}")
        if self.log_probs:
            raise ValueError("ReleasedSpeculative keeps no log-probabilities")

    @property
    def block(self) -> int:
        """B, a fact of the checkpoint."""
        return block_of(self)

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> DraftedCanvas:
        """Reads the prompts' whole blocks."""
        del knobs
        state = whole_blocks(fresh_with_head(self, request, context=self.context, overrun=self.block))
        call = read_prompt(self, params["network"], state, request.tokens.shape[1], opens=False)
        state = state.spend(call.counts, call.width, call.calls)
        state = state.stored(self.network, call, state.rows.tokens)
        state, _ = first_call(self, params, state, call, jnp.zeros_like(call.reads), prompt=True)
        nothing = jnp.zeros((request.batch, self.candidates, self.block), jnp.int32)
        return DraftedCanvas(**vars(state), where=nothing > 0, tokens=nothing)

    def step(self, params: Any, state: DraftedCanvas, knobs: SamplingKnobs) -> tuple[DraftedCanvas, Verified]:
        """A block's first call, or a round, or a store."""
        alone = DenoisingKnobs(**vars(knobs))
        drafts = candidates_of(state, state.where, state.tokens, rides=False)
        verifies = drafts.exists[:, 1] & ~state.rows.done
        count = jnp.where(verifies, 1 + self.candidates, 1)
        drafts = dataclasses.replace(drafts, count=count)
        call = read_candidates(self, params["network"], state, drafts, None)
        state = state.spend(call.counts, self.block * count)
        never = jnp.zeros_like(verifies)
        choices, _ = steps_from(self, params, state, drafts, call, never, "static", alone)
        agreed = agreement(choices, state.where, state.tokens, drafts.exists)
        accepted = jnp.where(verifies, jnp.min(jnp.where(verifies, agreed, self.candidates)), 0)

        at, step, stored = state.cached, state.step, state.clean
        reached = (jnp.arange(1 + self.candidates) <= accepted[:, None]) & verifies[:, None]
        kept = reached[..., None] & choices.where[:, :-1]
        some = jnp.argmax(kept, axis=1)[:, None]
        tokens = jnp.take_along_axis(choices.tokens[:, :-1], some, axis=1)[:, 0]
        done = jnp.sum(jnp.any(kept, axis=2), axis=1, dtype=jnp.int32)
        first = jnp.take_along_axis(call.hidden, accepted[:, None, None, None], axis=1)[:, 0]
        previous = state.previous
        if previous is not None:
            previous = where_rows(stored, first[:, -1:], previous)
        read = BlockCall(
            clean=stored,
            reads=~state.rows.done & ~stored & (done > 0),
            start=at + self.block * stored,
            step=jnp.where(stored, 0, step + jnp.maximum(done, 1) - 1),
            hidden=first,
            own=first,
            window=first,
            previous=previous,
            kv=call.kv,
            at=at,
            calls=jnp.ones_like(at),
            width=self.block * count,
            counts=call.counts,
        )
        state = state.stored(self.network, read, choices.tokens.reshape(len(at), -1))
        state = revealed_late(state, tokens, jnp.any(kept, axis=1), at, stored)
        state, _ = first_call(self, params, state, read, never, prompt=False)
        info = Verified(
            at=at,
            step=step,
            candidates=drafts.tokens,
            exists=drafts.exists,
            **vars(choices),
            accepted=accepted,
            stored=stored,
            follows=never,
        )
        return drafted(self, params, state, read, alone), info


@dataclasses.dataclass(frozen=True)
class ReleasedVeto(DecoderBase):
    """As `ResidualVeto`, but the head's cache is never filled: it sees the open block alone.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      head: the head's network, or "zero".
      judge: "change", or the later "confidence".
    """

    _: dataclasses.KW_ONLY
    head: CachedNetwork | str | None = None
    judge: str = "change"
    top_p_rule: str = "keep-renormalised"
    Knobs: ClassVar[type] = VetoKnobs
    visibilities: ClassVar[tuple[str, ...]] = ("block",)
    alignments: ClassVar[tuple[str, ...]] = ("own", "next")
    any_order: ClassVar[bool] = True
    further_networks: ClassVar[tuple[str, ...]] = ("head",)

    def __post_init__(self) -> None:
        check_head(self.head)
        check_words(self, judge=JUDGES)

    @property
    def rule(self) -> str:
        """What proposes."""
        return "dynamic"

    @property
    def block(self) -> int:
        """B, a fact of the checkpoint."""
        return block_of(self)

    def init(self, params: Any, request: Request, knobs: VetoKnobs) -> HeadCanvas:
        """Reads the prompts' whole blocks."""
        state = fresh_with_head(self, request, context=False)
        call = read_prompt(self, params["network"], state, request.tokens.shape[1], opens=False)
        return judged(self, params, state, call, knobs, prompt=True)[0]

    def step(self, params: Any, state: HeadCanvas, knobs: VetoKnobs) -> tuple[HeadCanvas, Vetoed]:
        """A step in each row's open block, or its store."""
        call = read_block(self, params["network"], state, rides=False)
        return judged(self, params, state, call, knobs, prompt=False)
