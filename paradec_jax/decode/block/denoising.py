"""Block diffusion (SDAR, arXiv 2510.06303): block after block, the positions of a block revealed over a few calls."""

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.canvas import (
    BlockCall,
    BlockCanvas,
    BlockDecoder,
    fresh,
    read_block,
    read_prompt,
)
from paradec_jax.decode.block.rules import RULES, Choice, DenoisingKnobs, choose
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.decode.rules.windows import window

AnyDenoised = TypeVar("AnyDenoised", bound="Denoised")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Denoised:
    """What a call did to a block of each row.

    Attributes:
      at: the block's first position, [B].
      step: steps done in it before, [B].
      where: positions that the call revealed, [B, W].
      tokens: what stands at every position, [B, W].
      scores: their confidences, [B, W].
      reads: whether it read a block with masks at all, [B].
      stored: whether it stored the block before, [B].
      hidden: head inputs about the block's positions, [B, W, D].
    """

    at: Int[Array, "B"]
    step: Int[Array, "B"]
    where: Bool[Array, "B W"]
    tokens: Int[Array, "B W"]
    scores: Float[Array, "B W"]
    reads: Bool[Array, "B"]
    stored: Bool[Array, "B"]
    hidden: Float[Array, "B W D"]

    @classmethod
    def of(cls: type[AnyDenoised], call: BlockCall, choice: Choice, **more: Any) -> AnyDenoised:
        """What a call and the rule's choice say of themselves; `more` are the fields of a subclass."""
        return cls(
            at=call.start,
            step=call.step,
            **vars(choice),
            reads=call.reads,
            stored=call.clean,
            hidden=call.hidden,
            **more,
        )


@dataclasses.dataclass(frozen=True)
class BlockDenoising(BlockDecoder):
    """Denoises one block of B positions after the other; a call reveals what the rule says (see `block.rules`).

    ::

        call      read                  B = 4, a prompt of 6, one position a step
        prompt    p p p p | p p _ _     the prompt's whole blocks, and the block that holds its end
        1                 | p p _ b
        2                 | p p a b | _ _ _ _       the block is clean: stored while the next one is read
        3                           | c _ _ _

    A row commits the leading run of what is revealed at once, so a stop token ends it before its block is complete.
    Blocks are read whole even where the budget ends inside one: a budget cuts a text and changes nothing before it.

    Without the fusions a call does one thing: a prompt's call reads whole blocks and reveals nothing, and a clean
    block is stored by a call of its own. They change no logits (but for rounding): each block sees what it sees in
    either case.

    One position a step at temperature 1 keeps the joint law that the scores are conditionals of, in any order that
    does not look at them ("sequential", "random"). Where scores are about the next position only "sequential" does: a
    block's first row is that of the block before, which sees nothing of what another order revealed.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      length: B where the checkpoint serves several lengths; its own when None.
      rule: "static", "dynamic", "sequential", "random", "entropy", "threshold" or "factor".
      fuse_store: a block's store rides with the first step of the next one, in a window of 2B.
      fuse_prompt: the first step of the first block rides with the prompt.
      top_p_rule: SDAR's, unless told otherwise.
    """

    _: dataclasses.KW_ONLY
    rule: str = "dynamic"
    Knobs: ClassVar[type] = DenoisingKnobs

    def __post_init__(self) -> None:
        check_words(self, rule=RULES)

    def init(self, params: Any, request: Request, knobs: DenoisingKnobs) -> BlockCanvas:
        """Reads the prompts' whole blocks, and does the first step along with them."""
        canvas = fresh(self, request)
        call = read_prompt(self, params, canvas, request.tokens.shape[1], self.fuse_prompt)
        if self.fuse_prompt:
            return self._advance(params, canvas, call, knobs)[0]
        canvas = canvas.spend(call.counts, call.width, call.calls)
        return canvas.stored(self.network, call, canvas.rows.tokens)

    def step(self, params: Any, state: BlockCanvas, knobs: DenoisingKnobs) -> tuple[BlockCanvas, Denoised]:
        """One call: a step in each row's open block, or a store, or both."""
        return self._advance(params, state, read_block(self, params, state, self.fuse_store), knobs)

    def _advance(
        self, params: Any, state: BlockCanvas, call: BlockCall, knobs: DenoisingKnobs
    ) -> tuple[BlockCanvas, Denoised]:
        """What follows a call: the rule's choice, the store, the reveal."""
        state = state.spend(call.counts, call.width, call.calls)
        logits = self.network.logits(params, call.hidden)
        masked = window(state.open, call.start, self.block) & call.reads[:, None]
        choice = choose(self, self.rule, logits, masked, call.positions, call.step, state.rows, knobs)
        state = state.stored(self.network, call, choice.tokens)
        log_probs = self.scores(without_mask(logits, self.mask), choice.tokens)
        state = state.reveal(choice.tokens, choice.where, call.start, log_probs)
        return state, Denoised.of(call, choice)
