"""The released programs of multi-token residual prediction: their speculative loop, and the head as
a veto.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from experiments.decoders.residual_veto import JUDGES, Vetoed, VetoKnobs, judged
from experiments.replicas.block_diffusion import revealed_late, whole_blocks
from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.drafts import DraftedCanvas, merged
from paradec_jax.decode.block.head import HeadCanvas, ask_head, check_head, fresh_with_head
from paradec_jax.decode.block.reading import read_block, read_prompt
from paradec_jax.decode.block.residual_speculative import Verified, verify_states
from paradec_jax.decode.canvas.blocks import BlockRead
from paradec_jax.decode.canvas.choose import DenoisingKnobs, RuledDecoder
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.machine.network import CachedNetwork
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules.windows import entry_of, window


def drafted(
    decoder: RuledDecoder,
    params: Any,
    state: DraftedCanvas,
    before: DraftedCanvas,
    call: BlockRead,
    knobs: DenoisingKnobs,
) -> DraftedCanvas:
    """The canvas with K drafts of one position each, the first one from the scores that the last
    call left.

    `before` is the canvas of that call: rows whose block it stored have no drafts.
    """
    start, drafts = before.cached, []
    masked = window(state.open, start, state.block) & ~call.stored[:, None]
    tokens = window(state.rows.tokens, start, state.block)
    for draft in range(state.where.shape[1]):
        if draft:
            residual, state = ask_head(
                decoder, params, state, call, jnp.any(masked, axis=1), tokens
            )
            call = dataclasses.replace(call, hidden=call.hidden + residual)
        logits = decoder.network.logits(params["network"], state.aligned(call.hidden))
        choice = decoder.choose(logits, masked, start, state.step + draft, state.rows, knobs)
        tokens = jnp.where(choice.where, choice.tokens, tokens)
        masked &= ~choice.where
        drafts.append(choice)
    return state.with_drafts(drafts)


@dataclasses.dataclass(frozen=True)
class ReleasedSpeculative(RuledDecoder):
    """Drafts K states of a block and verifies them together with the state that they begin from.

    ::

        C_0   _ b _ _        drafts from scores of the state before b: stale by one
        C_1   _ b c _        ..
        call  C_0 .. C_K     n drafts agree, and the network's own step at C_n comes after them

    It writes what one position a step writes, with what the released loop does otherwise than
    `ResidualSpeculative`:

    - The next round's scores are those of C_n, which lacks the last step: first draft and head are
      a reveal behind.
    - All K + 1 states are read, complete ones too. The rows of a batch advance by the least that
      any of them accepts.
    - The rule is one position a step, whatever is asked for; a block begins with a call of its own
      and ends with one.
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
    further_networks: ClassVar[tuple[str, ...]] = ("head",)

    def __post_init__(self) -> None:
        check_head(self.head)
        if self.candidates < 1:
            raise ValueError(f"candidates must be at least 1, not {self.candidates}")
        if self.log_probs:
            raise ValueError("ReleasedSpeculative keeps no log-probabilities")

    @property
    def rule(self) -> str:
        """One position a step."""
        return "static"

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> DraftedCanvas:
        """Reads the prompts' whole blocks."""
        del knobs
        state = whole_blocks(fresh_with_head(self, request, overrun=self.block))
        state = state if self.context else dataclasses.replace(state, head_cache=None)
        state, call = read_prompt(self, params["network"], state, request, opens=False)
        state = state.store(self.network, call, state.rows.tokens)
        _, state = ask_head(self, params, state, call, jnp.zeros_like(call.reads))
        return DraftedCanvas.empty(state, self.candidates)

    def step(
        self, params: Any, state: DraftedCanvas, knobs: SamplingKnobs
    ) -> tuple[DraftedCanvas, Verified]:
        """A block's first call, or a round, or a store."""
        alone = DenoisingKnobs(**vars(knobs))
        before, drafts = state, state.candidates(ride=False)
        verifies, stored = drafts.exists[:, 1] & ~state.rows.done, state.clean
        reads = (jnp.arange(1 + self.candidates) == 0) | verifies[:, None]
        drafts = dataclasses.replace(drafts, reads=reads & ~state.rows.done[:, None])
        state, call, choices, right = verify_states(self, params, state, drafts, False, alone)
        # The rows of a batch advance by the least that any of them accepts.
        least = jnp.min(jnp.where(verifies, right, self.candidates))
        accepted = jnp.where(verifies, least, 0)

        reached = (jnp.arange(1 + self.candidates) <= accepted[:, None]) & verifies[:, None]
        made = reached[..., None] & choices.where
        done = jnp.sum(jnp.any(made, axis=2), axis=1, dtype=jnp.int32)
        hidden = entry_of(call.each, accepted)
        state = state.after_block(stored, self.block, hidden[:, -1:])
        read = state.path(call, hidden, stored)
        read = dataclasses.replace(read, reads=read.reads & (done > 0))
        state = state.store(self.network, read, choices.tokens.reshape(len(accepted), -1), done)
        late = merged(choices, made)
        state = revealed_late(state, late.tokens, late.where, before.cached, stored)
        _, state = ask_head(self, params, state, read, jnp.zeros_like(stored))
        never = jnp.zeros_like(stored)
        info = Verified(
            before.cached, before.step, drafts, choices, accepted, stored, follows=never
        )
        return drafted(self, params, state, before, read, alone), info


@dataclasses.dataclass(frozen=True)
class ReleasedVeto(RuledDecoder):
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
    further_networks: ClassVar[tuple[str, ...]] = ("head",)

    def __post_init__(self) -> None:
        check_head(self.head)
        check_words(self, judge=JUDGES)

    @property
    def rule(self) -> str:
        """What proposes."""
        return "dynamic"

    def init(self, params: Any, request: Request, knobs: VetoKnobs) -> HeadCanvas:
        """Reads the prompts' whole blocks."""
        state = dataclasses.replace(fresh_with_head(self, request), head_cache=None)
        state, call = read_prompt(self, params["network"], state, request, opens=False)
        return judged(self, params, state, call, knobs)[0]

    def step(self, params: Any, state: HeadCanvas, knobs: VetoKnobs) -> tuple[HeadCanvas, Vetoed]:
        """A step in each row's open block, or its store."""
        state, call = read_block(self, params["network"], state, fuse=False)
        return judged(self, params, state, call, knobs)
