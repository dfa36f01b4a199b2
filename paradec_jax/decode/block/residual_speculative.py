"""Multi-token residual prediction (MRP, arXiv 2605.18817), speculative: drafts, and a call on them.

::

    tokens      _ b _ _ | _ b c _ | a b c d | _ _ _ _      K = 3 states of B = 4, and the next block
    positions   4 . . . | 4 . . . | 4 . . . | 8 . . .
    sees        itself    itself    itself    itself, and the complete state

Each sees the prefix too. A complete canvas is read to be stored, a complete draft to *carry* the
next block: if it turns out right, its keys and values are those to be stored, and the next block's
first step is done.

This is the packed verification of the released program, which is lossless. The paper's text judges
one call on the final draft position by position, which is not.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.decode.block.drafts import Candidates, DraftedCanvas, merged
from paradec_jax.decode.block.head import HeadDecoder, HeadKnobs, ask_head, fresh_with_head
from paradec_jax.decode.block.reading import read_prompt
from paradec_jax.decode.canvas import BlockRead, Choice, read_states
from paradec_jax.decode.machine import Request, TreeCall
from paradec_jax.decode.rules import entry_of, select
from paradec_jax.records import choices, pytree


@pytree
class Verified:
    """What a call made of a block's candidates and of the block after it.

    Attributes:
      at, step: first position of the block and steps done in it before, [B].
      drafts: the candidates C_1 .. C_K.
      choices: the base decoder's step from each and, with `fuse_store`, in the next block.
      accepted: index of the last candidate that is a state of the base decoder, [B].
      stored: rows in which that candidate was stored, [B].
      follows: rows in which the next block's first step was done as well, [B].
    """

    at: Int[Array, "B"]
    step: Int[Array, "B"]
    drafts: Candidates
    choices: Choice
    accepted: Int[Array, "B"]
    stored: Bool[Array, "B"]
    follows: Bool[Array, "B"]


@choices
class ResidualSpeculative(HeadDecoder):
    """Writes what `BlockDenoising` of the same rule writes, in fewer calls where the head is right.

    ::

        canvas C_1   _ b _ _      a step of the base decoder, made from scores of the network
        draft C_2    _ b c _      the same step from these scores, corrected for b
        draft C_3    a b c _      and for c
        call         all three    C_2 is what the network makes of C_1, C_3 not what it makes of C_2
        canvas       _ b c d      a step from C_2, whose scores are fresh

    A step is a function pi of scores, state, step and keys (`RuledDecoder.choose`), its noise that
    of a base decoder's step, so a draft that equals it in positions and tokens is a state of the
    base decoder, whoever drafted it: greedy, with any number of steps, and sampled. In floating
    point as far as a state's scores are the same alone and among candidates.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      head: network of the head; "zero" runs none and drafts from scores as they are.
      candidates: K, states that a call verifies at most: the canvas, and K - 1 drafts of the head.
      length, rule, confidence, fuse_store, fuse_prompt, top_p_rule: choices of the base decoder,
        which `BlockDenoising` explains.
      ride: let a complete draft carry the next block's first step, which saves that call where it
        is accepted.
    """

    candidates: int = 3
    rule: str = "dynamic"
    ride: bool = True
    Knobs = HeadKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < 2:
            raise ValueError(
                f"candidates must be at least 2, the canvas and a draft, not {self.candidates}: "
                "without a draft it is BlockDenoising"
            )
        if self.ride and not self.fuse_store:
            raise ValueError(
                "a draft carries the next block as a store does: ride needs fuse_store"
            )

    def init(self, params: Any, request: Request, knobs: HeadKnobs) -> DraftedCanvas:
        """Network and head read the prompts' whole blocks, do a step and draft the next ones."""
        state = DraftedCanvas.empty(fresh_with_head(self, request), self.candidates - 1)
        state, call = read_prompt(self, params["network"], state, request, self.fuse_prompt)
        state, _, choice = self.denoise(params["network"], state, call, knobs)
        return self._draft(params, state.with_choice(choice), call, choice.where, knobs)

    def step(
        self, params: Any, state: DraftedCanvas, knobs: HeadKnobs
    ) -> tuple[DraftedCanvas, Verified]:
        """Verifies the drafts in a call, takes the right steps and the one after, drafts anew."""
        # One call on the states C_1 .. C_K of the block, and on the next block after a complete
        # one: pi(C_k), the base decoder's step from each, and n, how many drafts are such steps.
        states, at, step = state.candidates(self.ride), state.cached, state.step
        state, call, steps, n = verify_states(self, params, state, states, self.fuse_store, knobs)

        # C_1 .. C_{n + 1} are states of the base decoder, and pi of each is its next step.
        made = steps.where[:, : self.candidates]
        made &= (jnp.arange(self.candidates) <= n[:, None])[..., None]
        state = state.with_choice(merged(steps, made))

        # If C_{n + 1} is complete, its keys are final and the next block is open: its first step is
        # taken where the call has read it.
        stored, hidden = entry_of((states.complete, call.each), n)
        stored &= ~state.rows.done
        follows = stored & self.fuse_store
        first = jax.tree.map(lambda x: x[:, -1], steps).only(follows)
        state = state.after_block(stored, self.block, hidden[:, -1:]).with_choice(first)

        # Keys are stored, and the steps done in the open block are counted.
        count = jnp.where(stored, 1, jnp.sum(jnp.any(made, axis=2), axis=1, dtype=jnp.int32))
        newest = state.path(call, hidden, stored)
        state = state.store(self.network, newest, steps.tokens.reshape(len(at), -1), count)

        # The head drafts on, from the newest scores.
        state = self._draft(params, state, newest, entry_of(made, n) | first.where, knobs)
        return state, Verified(at, step, states, steps, n, stored, follows)

    def _draft(
        self,
        params: Any,
        state: DraftedCanvas,
        newest: BlockRead,
        revealed: Bool[Array, "B W"],
        knobs: HeadKnobs,
    ) -> DraftedCanvas:
        """The canvas with drafts of the K - 1 steps after it, in rows in which the network's newest
        step has revealed too little.
        """
        masked = state.masked(newest.reads & knobs.asks(revealed))
        text, drafts = state.text, []
        for k in range(self.candidates - 1):
            # d = MRP(C_k, a), a <- a + d: the newest scores, corrected for what was just revealed.
            asks, drafted = jnp.any(masked, axis=1), text if k > 0 else None
            residual, state = ask_head(self, params, state, newest, asks, drafted)
            newest = dataclasses.replace(newest, hidden=newest.hidden + residual)
            # D_{k+1} = pi(C_k, U a): same rule, same number of the step, same noise.
            logits = self.network.logits(params["network"], state.aligned(newest.hidden))
            draft = self.choose(logits, masked, state.cached, state.step + k, state.rows, knobs)
            draft = knobs.sure(draft)
            # C_{k+1} = C_k + D_{k+1}
            text = jnp.where(draft.where, draft.tokens, text)
            masked = masked & ~draft.where & jnp.any(draft.where, axis=1, keepdims=True)
            drafts.append(draft)
        return state.with_drafts(drafts)


def verify_states(
    decoder: Any, params: Any, state: DraftedCanvas, states: Candidates, fuse: bool, knobs: Any
) -> tuple[DraftedCanvas, TreeCall, Choice, Int[Array, "B"]]:
    """One call on each row's states, and with `fuse` on the block after a complete one.

    Returns:
      The canvas with counts; the call; pi of each state and, with `fuse`, of the next block; n, the
      number of leading drafts that are such steps.
    """
    count = states.tokens.shape[1]
    clean, complete = jnp.argmax(states.complete, axis=1), jnp.any(states.complete, axis=1)
    tokens, reads, follows = states.tokens, states.reads, complete if fuse else None
    state, call = read_states(decoder, params["network"], state, tokens, reads, clean, follows)
    # What the base decoder knows in each state: its scores and masks, where it begins, and the
    # steps done in it.
    step = state.step[:, None] + jnp.arange(count)
    at = jnp.broadcast_to(state.cached[:, None], step.shape)
    known = jax.vmap(state.aligned, 1, 1)(call.each[:, :count]), states.masked, at, step
    if fuse:
        after = state.after_block(complete, state.block, entry_of(call.each, clean)[:, -1:])
        opened = after.aligned(call.each[:, -1]), after.masked(complete), after.cached, after.step
        known = jax.tree.map(lambda x, y: jnp.append(x, y[:, None], axis=1), known, opened)
    hidden, *rest = known
    choose = jax.vmap(lambda *of_state: decoder.choose(*of_state, state.rows, knobs), 1, 1)
    choices = choose(decoder.network.logits(params["network"], hidden), *rest)

    # A draft is right if it is what pi makes of the state before it, and all drafts before it are.
    made, tokens = choices.where[:, : count - 1], choices.tokens[:, : count - 1]
    same = (made == state.where) & (~made | (tokens == state.tokens))
    right = select.leading_run(jnp.all(same, axis=2) & states.exists[:, 1:])
    return state, call, choices, right
