"""A residual head as a veto: it judges what an aggressive threshold would reveal, before it is
revealed.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.denoising import Denoised
from paradec_jax.decode.block.head import HeadCanvas, HeadDecoder, ask_head, fresh_with_head
from paradec_jax.decode.block.reading import read_block, read_prompt
from paradec_jax.decode.canvas.blocks import BlockRead
from paradec_jax.decode.canvas.choose import DenoisingKnobs, threshold_at
from paradec_jax.decode.machine.knobs import NOT_NEGATIVE, knob
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules import score, select

JUDGES = ("change", "confidence")
DELTA = 1.0  # where the knob is not set


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VetoKnobs(DenoisingKnobs):
    """Denoising, and how far the head may move a token's logit.

    Attributes:
      delta: the most, where `judge` is "change"; None is 1.
    """

    delta: Float[Array, ""] | float | None = knob(
        None, NOT_NEGATIVE, unset=DELTA, needs=("judge", ("change",))
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Vetoed(Denoised):
    """What a call proposed in a block of each row, and what was left of it; scores are those before
    the head's call.

    Attributes:
      proposed: positions that the rule chose, [B, W].
      gate: what the head's judgement went by, [B, W]; it counts where `asked`.
      asked: rows of which the head judged a proposal, [B].
    """

    proposed: Bool[Array, "B W"]
    gate: Float[Array, "B W"]
    asked: Bool[Array, "B"]


@dataclasses.dataclass(frozen=True)
class ResidualVeto(HeadDecoder):
    """Denoises by the dynamic rule and leaves masked what the head doubts; the head itself reveals
    nothing.

    With z the network's logits of a block, r the head's residual, x the proposed token of a
    position and tau the threshold, a proposal falls where::

        change       |(U r)_x| > delta         the head reads the block as the network did (the released form)
        confidence   softmax(z + U r)_x <= tau     it reads it with all proposals revealed (the authors' later form)

    If all of a step fall, the one that moved least, or is surest, stays. So a step with one
    proposal needs no head, and none is asked. By confidence only those fall that were above tau
    before: what a schedule of fewer steps adds was not proposed for being sure, and stays.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      head: network of the head; "zero" runs none, and nothing falls.
      judge: "change" or "confidence".
      length, confidence, fuse_store, fuse_prompt, top_p_rule: as in `BlockDenoising`.
    """

    _: dataclasses.KW_ONLY
    judge: str = "change"
    Knobs: ClassVar[type] = VetoKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(self, judge=JUDGES)

    @property
    def rule(self) -> str:
        """What proposes."""
        return "dynamic"

    def init(self, params: Any, request: Request, knobs: VetoKnobs) -> HeadCanvas:
        """Network and head read the prompts' whole blocks, and the first step is done along with
        them.
        """
        state = fresh_with_head(self, request)
        state, call = read_prompt(self, params["network"], state, request, self.fuse_prompt)
        return judged(self, params, state, call, knobs)[0]

    def step(self, params: Any, state: HeadCanvas, knobs: VetoKnobs) -> tuple[HeadCanvas, Vetoed]:
        """One call of the network and one of the head: a step in each row's open block, or a store,
        or both.
        """
        state, call = read_block(self, params["network"], state, self.fuse_store)
        return judged(self, params, state, call, knobs)


def judged(
    decoder: Any, params: Any, state: HeadCanvas, call: BlockRead, knobs: VetoKnobs
) -> tuple[HeadCanvas, Vetoed]:
    """The rule's proposals after a call of the network, the store, the head's judgement, the
    reveals.
    """
    network, before, step, judge = decoder.network, state, state.step, decoder.judge
    state, logits, choice = decoder.denoise(params["network"], before, call, knobs)
    info = Denoised.of(before, call, choice)

    asked, rows = jnp.sum(choice.where, axis=1) > 1, state.rows
    sure = choice.where & (choice.scores > threshold_at(step, knobs))
    if judge == "confidence":  # of those that were not above tau before, none falls
        asked &= jnp.any(sure, axis=1)
        state = dataclasses.replace(
            state, rows=rows.write(choice.tokens, choice.where, state.cached)
        )
    residual, state = ask_head(decoder, params, state, call, asked)
    state = dataclasses.replace(state, rows=dataclasses.replace(rows, counts=state.rows.counts))
    corrected = network.logits(params["network"], state.aligned(call.hidden + residual))
    if judge == "confidence":
        gate = score.probability(decoder.shaped(corrected, knobs), choice.tokens)
        kept = sure & (gate > threshold_at(step, knobs))
        stays, best = kept | (choice.where & ~sure), gate
    else:
        moved = jnp.take_along_axis(corrected - logits, choice.tokens[..., None], axis=-1)[..., 0]
        gate = jnp.abs(moved)
        stays, best = (
            choice.where & (gate <= (DELTA if knobs.delta is None else knobs.delta)),
            -gate,
        )
    one = select.top(best, choice.where, 1) & ~jnp.any(stays, axis=1, keepdims=True)
    where = jnp.where(asked[:, None], stays | one, choice.where)
    new = {"where": where, "proposed": choice.where, "gate": gate, "asked": asked}
    return state.with_choice(dataclasses.replace(choice, where=where)), Vetoed(**(vars(info) | new))
