"""Multi-token residual prediction (MRP), direct: a small head corrects a call's scores, so that more is revealed."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.canvas import BlockCall, BlockDecoder, read_block, read_prompt
from paradec_jax.decode.block.head import (
    ZERO,
    HeadCanvas,
    HeadKnobs,
    check_head,
    few,
    first_call,
    fresh_with_head,
    light,
    next_call,
    sure,
)
from paradec_jax.decode.block.rules import RULES, Choice, choose
from paradec_jax.decode.machine.knobs import check_range, knob
from paradec_jax.decode.machine.network import CachedNetwork
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules.alignment import aligned
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.decode.rules.windows import window

HEAD_RULES = ("static", "dynamic")
MIXES = ("sum", "none")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidualKnobs(HeadKnobs):
    """Denoising, when the head is asked, and how much it says.

    Attributes:
      scale: factor of the residual; None is 1.
    """

    scale: Float[Array, ""] | float | None = knob(None, unset=1.0, needs=("heads", 1))

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        HeadKnobs.check(self)
        check_range(self.scale, "scale", lambda x: x >= 0, "at least 0")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Corrected:
    """What a call and the head's steps after it did to a block of each row, R = 1 + K rounds.

    Attributes:
      at: the block's first position, [B].
      step: calls done in it before, [B].
      where: positions that each round revealed, [B, R, W].
      tokens: what stands at every position, [B, R, W].
      scores: their confidences, [B, R, W].
      reads: whether the call read a block with masks at all, [B].
      stored: whether it stored the block before, [B].
      hidden: head inputs about the block's positions before corrections, [B, W, D].
    """

    at: Int[Array, "B"]
    step: Int[Array, "B"]
    where: Bool[Array, "B R W"]
    tokens: Int[Array, "B R W"]
    scores: Float[Array, "B R W"]
    reads: Bool[Array, "B"]
    stored: Bool[Array, "B"]
    hidden: Float[Array, "B W D"]


@dataclasses.dataclass(frozen=True)
class Residual(BlockDecoder):
    """Denoises block after block; after each call a head corrects its scores K times, and more is revealed each time.

    ::

        call      z of   _ _ _ _        reveal b        the network's scores, by `rule`
        head      z + r1 _ b _ _        reveal c        corrected for b, by `head_rule`
        head      z + r2 _ b c _        reveal a        corrected for b and c
        call      z of   a b c _        ..

    A call reveals up to K positions more than that of `BlockDenoising`, whose fusions it shares; but what the head
    reveals no call has seen (Algorithm 2). The steps of `rule` are those of calls: S quotas that the head's reveals
    do not count for. Draws of the head's steps have noise of their own.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      head: the head's network, that of the model's folder where it is not given; "zero" runs none, so that the
        network's own scores are taken K times more.
      head_steps: K, steps of the head after a call.
      length, rule, fuse_store, fuse_prompt, top_p_rule: as in `BlockDenoising`; a head that runs has one length.
      head_rule: "static", one position a step, as the released programs; or "dynamic", all above the threshold of
        `rule`, at least one.
      mix: "sum" adds residuals up; "none" takes the head's answer for the scores, as heads without a base were
        trained (direct modelling).
    """

    _: dataclasses.KW_ONLY
    head: CachedNetwork | str | None = None
    head_steps: int = 1
    rule: str = "dynamic"
    head_rule: str = "static"
    mix: str = "sum"
    Knobs: ClassVar[type] = ResidualKnobs
    further_networks: ClassVar[tuple[str, ...]] = ("head",)

    def __post_init__(self) -> None:
        check_words(self, rule=RULES)
        check_head(self.head)
        if self.head_steps < 1:
            raise ValueError(f"head_steps must be at least 1, not {self.head_steps}: BlockDenoising has none")
        check_words(self, head_rule=HEAD_RULES, mix=MIXES)
        if self.head_rule == "dynamic" and self.rule not in ("dynamic", "threshold"):
            raise ValueError(
                "head_rule 'dynamic' has the threshold of rule, which must be dynamic or threshold, "
                f"not {self.rule!r}"
            )
        if self.mix == "none" and not self.heads:
            raise ValueError("mix 'none' takes the head's answer for the scores, so head must not be 'zero'")

    @property
    def heads(self) -> int:
        """Heads that run."""
        return int(self.head != ZERO)

    def init(self, params: Any, request: Request, knobs: ResidualKnobs) -> HeadCanvas:
        """Network and head read the prompts' whole blocks, and the first step is done along with them."""
        state = fresh_with_head(self, request)
        call = read_prompt(self, params["network"], state, request.tokens.shape[1], self.fuse_prompt)
        return self._advance(params, state, call, knobs, prompt=True)[0]

    def step(self, params: Any, state: HeadCanvas, knobs: ResidualKnobs) -> tuple[HeadCanvas, Corrected]:
        """One call of the network and K of the head: steps in each row's open block, or a store, or both."""
        call = read_block(self, params["network"], state, self.fuse_store)
        return self._advance(params, state, call, knobs, prompt=False)

    def _advance(
        self, params: Any, state: HeadCanvas, call: BlockCall, knobs: ResidualKnobs, prompt: bool
    ) -> tuple[HeadCanvas, Corrected]:
        """What follows a call of the network: its reveals, the store, the head's steps."""
        state = state.spend(call.counts, call.width, call.calls)
        masked = window(state.open, call.start, self.block) & call.reads[:, None]
        state, choice = self._reveal(params, state, call, call.hidden, masked, self.rule, call.step, knobs)
        state = state.stored(self.network, call, choice.tokens)
        going = call.reads & few(choice.where, knobs)

        masked = self._masked(state, call, going)
        state, residual = first_call(self, params, state, call, jnp.any(masked, axis=1), prompt)
        mixed = self._mixed(call.own, residual, knobs)
        now, going, corrected = self._correct(params, light(state), call, mixed, masked, jnp.int32(1), knobs)
        rounds = jax.tree.map(lambda *x: jnp.stack(x), choice, corrected)
        if self.head_steps > 1:

            def again(carry: tuple[Any, ...], index: Array) -> tuple[tuple[Any, ...], Choice]:
                now, going, mixed = carry
                masked = self._masked(now, call, going)
                wants = jnp.any(masked, axis=1)
                residual, now = next_call(self, params, now, state, mixed, call.start, wants)
                mixed = self._mixed(mixed, residual, knobs)
                now, going, choice = self._correct(params, now, call, mixed, masked, index, knobs)
                return (now, going, mixed), choice

            indices = jnp.arange(2, 1 + self.head_steps)
            (now, _, _), more = lax.scan(again, (now, going, mixed), indices)
            rounds = jax.tree.map(lambda *x: jnp.concatenate(x), rounds, more)
        info = Corrected(
            at=call.start,
            step=call.step,
            **{name: jnp.swapaxes(x, 0, 1) for name, x in vars(rounds).items()},
            reads=call.reads,
            stored=call.clean,
            hidden=call.hidden,
        )
        return dataclasses.replace(now, cache=state.cache, head_cache=state.head_cache), info

    def _masked(self, state: HeadCanvas, call: BlockCall, going: Bool[Array, "B"]) -> Bool[Array, "B W"]:
        """What a step of the head may reveal."""
        return window(state.open, call.start, self.block) & going[:, None]

    def _mixed(
        self, hidden: Float[Array, "B W D"], residual: Float[Array, "B W D"], knobs: ResidualKnobs
    ) -> Float[Array, "B W D"]:
        scaled = residual if knobs.scale is None else (knobs.scale * residual).astype(residual.dtype)
        return hidden + scaled if self.mix == "sum" else scaled

    def _correct(
        self,
        params: Any,
        state: HeadCanvas,
        call: BlockCall,
        mixed: Float[Array, "B W D"],
        masked: Bool[Array, "B W"],
        index: Int[Array, ""],
        knobs: ResidualKnobs,
    ) -> tuple[HeadCanvas, Bool[Array, "B"], Choice]:
        """The canvas after a step of the head, the rows that may have another one, and what it revealed."""
        hidden = aligned(mixed, self.spec.alignment, call.previous)
        alone = dataclasses.replace(knobs, steps=None)  # the head's quota is 1, whatever the network's
        noise = call.step + index * self.block  # as if of later steps, which no call has
        state, choice = self._reveal(params, state, call, hidden, masked, self.head_rule, noise, alone, True)
        return state, jnp.any(choice.where, axis=1), choice

    def _reveal(
        self,
        params: Any,
        state: HeadCanvas,
        call: BlockCall,
        hidden: Float[Array, "B W D"],
        masked: Bool[Array, "B W"],
        rule: str,
        step: Int[Array, "B"],
        knobs: ResidualKnobs,
        must_be_sure: bool = False,
    ) -> tuple[HeadCanvas, Choice]:
        """The canvas after a reveal, and what was revealed."""
        logits = self.network.logits(params["network"], hidden)
        choice = choose(self, rule, logits, masked, call.positions, step, state.rows, knobs)
        if must_be_sure:
            where = choice.where & sure(choice, knobs)[:, None]
            choice = dataclasses.replace(choice, where=where)
        log_probs = self.scores(without_mask(logits, self.mask), choice.tokens)
        return state.reveal(choice.tokens, choice.where, call.start, log_probs), choice
