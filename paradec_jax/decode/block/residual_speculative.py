"""Multi-token residual prediction (MRP), speculative: a head drafts states of a block, a call verifies them."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.candidates import CandidateCall, Candidates, candidates_of, read_candidates
from paradec_jax.decode.block.canvas import BlockCall, BlockCanvas, BlockDecoder, read_prompt
from paradec_jax.decode.block.head import (
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
from paradec_jax.decode.block.rules import RULES, Choice, DenoisingKnobs, choose
from paradec_jax.decode.machine.network import CachedNetwork
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.alignment import aligned
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.decode.rules.windows import put, shift, where_rows, window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftedCanvas(HeadCanvas):
    """A canvas of blocks, and what is guessed of the next steps of the open one.

    Attributes:
      where: positions that each draft reveals, none where there is no draft, [B, K - 1, W].
      tokens: what it reveals there, [B, K - 1, W].
    """

    where: Bool[Array, "B drafts W"]
    tokens: Int[Array, "B drafts W"]

    @property
    def drafts(self) -> Int[Array, "B S"]:
        """What is revealed after a gap, and what is drafted for the next call, from `length` on; -1 elsewhere."""
        within = jnp.arange(self.final.shape[1]) < self.rows.limit[:, None]
        known = jnp.where(self.final, self.rows.tokens, -1)
        for draft in range(self.where.shape[1]):
            known = put(known, self.tokens[:, draft], self.cached, self.where[:, draft])
        return shift(jnp.where(within, known, -1) + 1, self.rows.length) - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What a call found of a block's candidates and of the block after it.

    Attributes:
      at: the first block's first position, [B].
      step: steps done in it before, [B].
      candidates: C_1 .. C_K, [B, K, W].
      exists: which were there, [B, K].
      where: positions that the network reveals in each, and in the next block, [B, K + 1, W].
      tokens: what stands at every position then, [B, K + 1, W].
      scores: their confidences, [B, K + 1, W].
      accepted: number of the last candidate that is a state of the base decoder, from 0, [B].
      stored: whether it was stored, [B].
      follows: whether the next block's first step was done as well, [B].
    """

    at: Int[Array, "B"]
    step: Int[Array, "B"]
    candidates: Int[Array, "B K W"]
    exists: Bool[Array, "B K"]
    where: Bool[Array, "B reads W"]
    tokens: Int[Array, "B reads W"]
    scores: Float[Array, "B reads W"]
    accepted: Int[Array, "B"]
    stored: Bool[Array, "B"]
    follows: Bool[Array, "B"]


@dataclasses.dataclass(frozen=True)
class ResidualSpeculative(BlockDecoder):
    """Writes what `BlockDenoising` of the same rule writes, token for token, in fewer calls where the head is right.

    ::

        canvas C_1   _ b _ _      a step of the base decoder, made from scores of the network
        draft C_2    _ b c _      the same step from these scores, corrected for b
        draft C_3    a b c _      and for c
        call         all three    C_2 is what the network makes of C_1, C_3 is not what it makes of C_2:
        canvas       _ b c d      so that goes on from C_2, whose scores are fresh

    A step is a function of scores, state, step and keys (`block.rules.choose`), its noise that of a base decoder's
    step, so a draft that equals it in positions and tokens is a state of the base decoder, whoever drafted it:
    greedy, with any number of steps, and sampled. In floating point as far as a state's scores are the same alone
    and among candidates. A draft may be complete; such a candidate carries the next block (see `block.candidates`).

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      head: the head's network, that of the model's folder where it is not given; "zero" runs none and drafts from
        scores as they are.
      candidates: K, states that a call verifies at most: the canvas and K - 1 drafts.
      length, rule, fuse_store, fuse_prompt, top_p_rule: as in `BlockDenoising`; a head that runs has one length.
      ride: a complete draft carries the next block's first step, which saves that call where it is accepted.
    """

    _: dataclasses.KW_ONLY
    head: CachedNetwork | str | None = None
    candidates: int = 3
    rule: str = "dynamic"
    ride: bool = True
    Knobs: ClassVar[type] = HeadKnobs
    further_networks: ClassVar[tuple[str, ...]] = ("head",)

    def __post_init__(self) -> None:
        check_words(self, rule=RULES)
        check_head(self.head)
        if self.candidates < 2:
            raise ValueError(
                f"candidates must be at least 2, the canvas and a draft, not {self.candidates}: "
                "without a draft it is BlockDenoising"
            )
        if self.ride and not self.fuse_store:
            raise ValueError("a draft carries the next block as a store does: ride needs fuse_store")

    def init(self, params: Any, request: Request, knobs: HeadKnobs) -> DraftedCanvas:
        """Network and head read the prompts' whole blocks; the first step is done and the next ones are drafted."""
        state = fresh_with_head(self, request)
        nothing = jnp.zeros((request.batch, self.candidates - 1, self.block), jnp.int32)
        state = DraftedCanvas(**vars(state), where=nothing > 0, tokens=nothing)
        call = read_prompt(self, params["network"], state, request.tokens.shape[1], self.fuse_prompt)
        state = state.spend(call.counts, call.width, call.calls)
        logits = self.network.logits(params["network"], call.hidden)
        masked = window(state.open, call.start, self.block) & call.reads[:, None]
        choice = choose(self, self.rule, logits, masked, call.positions, call.step, state.rows, knobs)
        state = state.stored(self.network, call, choice.tokens)
        log_probs = self.scores(without_mask(logits, self.mask), choice.tokens)
        state = state.reveal(choice.tokens, choice.where, call.start, log_probs)
        return self._draft(params, state, call, few(choice.where, knobs), knobs, prompt=True)

    def step(self, params: Any, state: DraftedCanvas, knobs: HeadKnobs) -> tuple[DraftedCanvas, Verified]:
        """Verifies the drafts in one call, commits what is right and the step after it, and drafts anew."""
        drafts = candidates_of(state, state.where, state.tokens, self.ride)
        follows = drafts.carries & ~state.rows.done if self.fuse_store else None
        call = read_candidates(self, params["network"], state, drafts, follows)
        follows = jnp.zeros_like(drafts.carries) if follows is None else follows
        state = state.spend(call.counts, self.block * (drafts.count + follows))
        choices, log_probs = steps_from(self, params, state, drafts, call, follows, self.rule, knobs)
        accepted = agreement(choices, state.where, state.tokens, drafts.exists)

        at, step = state.cached, state.step
        kept = (jnp.arange(self.candidates) <= accepted[:, None])[..., None] & choices.where[:, :-1]
        where, some = jnp.any(kept, axis=1), jnp.argmax(kept, axis=1)[:, None]
        tokens, scores = jnp.take_along_axis(choices.tokens[:, :-1], some, axis=1)[:, 0], None
        if log_probs is not None:
            scores = jnp.take_along_axis(log_probs[:, :-1], some, axis=1)[:, 0]
        state = state.reveal(tokens, where, at, scores)
        stored = drafts.carries & (drafts.carrier == accepted) & ~state.rows.done
        follows &= stored
        where = choices.where[:, -1] & follows[:, None]
        state = state.reveal(
            choices.tokens[:, -1], where, at + self.block, None if log_probs is None else log_probs[:, -1]
        )
        done = jnp.sum(jnp.any(kept, axis=2), axis=1, dtype=jnp.int32)
        as_block = self._as_block(state, call, drafts, accepted, stored, follows, done)
        newest = where_rows(follows, where, jnp.take_along_axis(kept, accepted[:, None, None], axis=1)[:, 0])
        state = state.stored(self.network, as_block, choices.tokens.reshape(len(at), -1))
        state = self._draft(params, state, as_block, few(newest, knobs), knobs, prompt=False)
        info = Verified(
            at=at,
            step=step,
            candidates=drafts.tokens,
            exists=drafts.exists,
            **vars(choices),
            accepted=accepted,
            stored=stored,
            follows=follows,
        )
        return state, info

    def _as_block(
        self,
        state: DraftedCanvas,
        call: CandidateCall,
        drafts: Candidates,
        accepted: Int[Array, "B"],
        stored: Bool[Array, "B"],
        follows: Bool[Array, "B"],
        done: Int[Array, "B"],
    ) -> BlockCall:
        """The call as if it had read the accepted candidate and what followed it alone; `done` steps came of it."""
        at, block = state.cached, self.block
        first = jnp.take_along_axis(call.hidden, accepted[:, None, None, None], axis=1)[:, 0]
        own = where_rows(follows, call.following, first)
        previous = state.previous
        if previous is not None:
            previous = where_rows(stored, first[:, -1:], previous)
        return BlockCall(
            clean=stored,
            reads=~state.rows.done & (follows | (~stored & (done > 0))),
            start=at + block * stored,
            step=jnp.where(stored, 0, state.step + jnp.maximum(done, 1) - 1),
            hidden=own,
            own=own,
            window=jnp.concatenate([first, own], axis=1) if self.fuse_store else first,
            previous=previous,
            kv=call.kv,
            at=at,
            calls=jnp.ones_like(at),
            width=block * drafts.count,
            counts=call.counts,
        )

    def _draft(
        self,
        params: Any,
        state: DraftedCanvas,
        call: BlockCall,
        wanted: Bool[Array, "B"],
        knobs: HeadKnobs,
        prompt: bool,
    ) -> DraftedCanvas:
        """The canvas with drafts of the K - 1 steps after it; `wanted` where any are."""
        start = call.start
        masked = window(state.open, start, self.block) & (call.reads & wanted)[:, None]
        state, residual = first_call(self, params, state, call, jnp.any(masked, axis=1), prompt)
        tokens, hidden = window(state.rows.tokens, start, self.block), call.own + residual
        rows, now = state.rows, light(state)
        tokens, masked, choice = self._guess(params, rows, call, tokens, hidden, masked, state.step, knobs)
        found = jax.tree.map(lambda x: x[None], choice)
        if self.candidates > 2:

            def again(carry: tuple[Any, ...], index: Array) -> tuple[tuple[Any, ...], Choice]:
                now, tokens, hidden, masked = carry
                wants = jnp.any(masked, axis=1)
                residual, now = next_call(self, params, now, state, hidden, start, wants, tokens)
                hidden += residual
                tokens, masked, choice = self._guess(
                    params, rows, call, tokens, hidden, masked, state.step + index, knobs
                )
                return (now, tokens, hidden, masked), choice

            carry: tuple[Any, ...] = (now, tokens, hidden, masked)
            carry, more = lax.scan(again, carry, jnp.arange(1, self.candidates - 1))
            now = carry[0]
            found = jax.tree.map(lambda *x: jnp.concatenate(x), found, more)
        return dataclasses.replace(
            state,
            rows=now.rows,
            where=jnp.swapaxes(found.where, 0, 1),
            tokens=jnp.swapaxes(found.tokens, 0, 1),
        )

    def _guess(
        self,
        params: Any,
        rows: Rows,
        call: BlockCall,
        tokens: Int[Array, "B W"],
        hidden: Float[Array, "B W D"],
        masked: Bool[Array, "B W"],
        step: Int[Array, "B"],
        knobs: HeadKnobs,
    ) -> tuple[Int[Array, "B W"], Bool[Array, "B W"], Choice]:
        """A draft from corrected head inputs: the block after it, what is masked then, and the draft."""
        logits = self.network.logits(params["network"], aligned(hidden, self.spec.alignment, call.previous))
        positions = call.start[:, None] + jnp.arange(self.block)
        choice = choose(self, self.rule, logits, masked, positions, step, rows, knobs)
        where = choice.where & sure(choice, knobs)[:, None]
        choice = dataclasses.replace(choice, where=where)
        going = jnp.any(where, axis=1)[:, None]
        return jnp.where(where, choice.tokens, tokens), masked & ~where & going, choice


def steps_from(
    decoder: Any,
    params: Any,
    canvas: BlockCanvas,
    drafts: Candidates,
    call: CandidateCall,
    follows: Bool[Array, "B"],
    rule: str,
    knobs: DenoisingKnobs,
) -> tuple[Choice, Float[Array, "B reads W"] | None]:
    """What the base decoder does in each candidate, and in the next block of rows that `follows` marks.

    Returns:
      Its choices, [B, K + 1, W], and log-probabilities of their tokens where they are kept.
    """
    at, block, count = canvas.cached, canvas.block, drafts.tokens.shape[1]
    hidden = jnp.concatenate([call.hidden, call.following[:, None]], axis=1)
    if canvas.previous is not None:
        carrier = jnp.take_along_axis(call.hidden, drafts.carrier[:, None, None, None], axis=1)
        before = jnp.repeat(canvas.previous[:, None], count, axis=1)
        before = jnp.concatenate([before, carrier[:, :, -1:]], axis=1)
        hidden = jax.vmap(lambda x, previous: aligned(x, "next", previous), 1, 1)(hidden, before)
    logits = decoder.network.logits(params["network"], hidden)
    next_open = window(canvas.open, at + block, block) & follows[:, None]
    masked = jnp.concatenate([drafts.masked, next_open[:, None]], axis=1)
    steps = jnp.concatenate([canvas.step[:, None] + jnp.arange(count), 0 * at[:, None]], axis=1)
    starts = at[:, None] + block * (jnp.arange(count + 1) == count)

    def of_state(
        logits: Float[Array, "B W V"], masked: Bool[Array, "B W"], start: Array, step: Array
    ) -> tuple[Choice, Any]:
        positions = start[:, None] + jnp.arange(block)
        choice = choose(decoder, rule, logits, masked, positions, step, canvas.rows, knobs)
        return choice, decoder.scores(without_mask(logits, decoder.mask), choice.tokens)

    return jax.vmap(of_state, 1, 1)(logits, masked, starts, steps)


def agreement(
    choices: Choice, where: Bool[Array, "B drafts W"], tokens: Int[Array, "B drafts W"], exists: Any
) -> Int[Array, "B"]:
    """How many drafts in a row are the base decoder's steps, positions and tokens; `exists` says which are there."""
    made, said = choices.where[:, :-2], choices.tokens[:, :-2]
    same = (made == where) & (~made | (said == tokens))
    return select.leading_run(jnp.all(same, axis=2) & exists[:, 1:])
