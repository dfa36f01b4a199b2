"""Multi-token residual prediction (MRP), speculative: a head drafts states of a block, a call verifies them.

::

    tokens      _ b _ _ | _ b c _ | a b c d | _ _ _ _        K = 3 candidates of B = 4, and the block after the last
    positions   4 . . . | 4 . . . | 4 . . . | 8 . . .
    sees        itself    itself    itself    itself, and the candidate that carries it

Each candidate sees the prefix too. A complete one has nothing to be verified. A complete canvas is read to be stored,
a complete draft where it *carries* the next block: if it turns out right, its keys and values are those to be stored,
and the next block's first step is done.

This is the packed verification of the released program, which is lossless. The paper's text judges one call on the
final draft position by position, which is not. K counts the states that are verified, the canvas among them, so the
head runs K - 1 times.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.canvas import BlockRead, read_prompt
from paradec_jax.decode.block.head import HeadCanvas, HeadDecoder, HeadKnobs, ask_head, fresh_with_head
from paradec_jax.decode.block.rules import Choice
from paradec_jax.decode.machine.candidates import Following, Sizes, forward_candidates, of_candidate
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.windows import put, shift, where_rows, window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """Drafted states of each row's open block, and which of them a call reads.

    Attributes:
      tokens: C_1 .. C_K, [B, K, W]; the first one is the canvas.
      masked: positions that each has still to reveal, [B, K, W].
      exists: candidates that are there, [B, K].
      count: number of candidates that the call reads of each row, [B].
      carrier: index of the complete one that is read, 0 where none is, [B].
      carries: rows of which a complete one is read, [B].
    """

    tokens: Int[Array, "B K W"]
    masked: Bool[Array, "B K W"]
    exists: Bool[Array, "B K"]
    count: Int[Array, "B"]
    carrier: Int[Array, "B"]
    carries: Bool[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftedCanvas(HeadCanvas):
    """A canvas of blocks, and guesses of the next steps in the open one.

    Attributes:
      where: positions that each draft reveals, none where there is no draft, [B, K - 1, W].
      tokens: tokens that it reveals there, [B, K - 1, W].
    """

    where: Bool[Array, "B drafts W"]
    tokens: Int[Array, "B drafts W"]

    @classmethod
    def empty(cls, canvas: HeadCanvas, count: int) -> "DraftedCanvas":
        """A canvas with room for so many drafts, and none in it."""
        nothing = jnp.zeros((len(canvas.cached), count, canvas.block), jnp.int32)
        return cls(**vars(canvas), where=nothing > 0, tokens=nothing)

    @property
    def drafts(self) -> Int[Array, "B S"]:
        """Tokens revealed after a gap, and those drafted for the next call, from `length` on; -1 elsewhere."""
        within = jnp.arange(self.final.shape[1]) < self.rows.limit[:, None]
        known = jnp.where(self.final, self.rows.tokens, -1)
        for draft in range(self.where.shape[1]):
            known = put(known, self.tokens[:, draft], self.cached, self.where[:, draft])
        return shift(jnp.where(within, known, -1) + 1, self.rows.length) - 1

    def candidates(self, ride: bool) -> Candidates:
        """The states that drafts make of the open block; with `ride` a complete draft may carry the next one."""
        at, block = self.cached, self.block
        states, masked = [window(self.rows.tokens, at, block)], [window(self.open, at, block)]
        for draft in range(self.where.shape[1]):
            states.append(jnp.where(self.where[:, draft], self.tokens[:, draft], states[-1]))
            masked.append(masked[-1] & ~self.where[:, draft])
        drafted = jnp.any(self.where, axis=2)
        exists = jnp.concatenate([jnp.ones((len(at), 1), bool), drafted], axis=1)
        left = jnp.stack(masked, axis=1) & exists[:, :, None]
        complete = exists & ~jnp.any(left, axis=2)
        # A complete canvas is read in any case, to be stored.
        goes_on = window(self.inside, at + block, block)[:, :1] & ride
        carries = complete & jnp.concatenate([exists[:, :1], drafted & goes_on], axis=1)
        return Candidates(
            tokens=jnp.stack(states, axis=1),
            masked=left,
            exists=exists,
            count=jnp.sum((exists & ~complete) | carries, axis=1, dtype=jnp.int32),
            carrier=jnp.argmax(carries, axis=1).astype(jnp.int32),
            carries=jnp.any(carries, axis=1),
        )

    def with_drafts(self, drafts: list[Choice]) -> "DraftedCanvas":
        """The canvas with new drafts."""
        where, tokens = (jnp.stack([getattr(x, name) for x in drafts], 1) for name in ("where", "tokens"))
        return dataclasses.replace(self, where=where, tokens=tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What a call found of a block's candidates and of the block after it.

    Attributes:
      at: first position of the block, [B].
      step: steps done in it before, [B].
      drafts: the candidates C_1 .. C_K.
      choices: the network's own step from each of them, and in the next block, [B, K + 1, W].
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


@dataclasses.dataclass(frozen=True)
class ResidualSpeculative(HeadDecoder):
    """Writes what `BlockDenoising` of the same rule writes, token for token, in fewer calls where the head is right.

    ::

        canvas C_1   _ b _ _      a step of the base decoder, made from scores of the network
        draft C_2    _ b c _      the same step from these scores, corrected for b
        draft C_3    a b c _      and for c
        call         all three    C_2 is what the network makes of C_1, C_3 is not what it makes of C_2:
        canvas       _ b c d      so that goes on from C_2, whose scores are fresh

    A step is a function of scores, state, step and keys (`RuledDecoder.choose`), its noise that of a base decoder's
    step, so a draft that equals it in positions and tokens is a state of the base decoder, whoever drafted it:
    greedy, with any number of steps, and sampled. In floating point as far as a state's scores are the same alone
    and among candidates.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      head: network of the head; "zero" runs none and drafts from scores as they are.
      candidates: K, states that a call verifies at most: the canvas and K - 1 drafts.
      length, rule, confidence, fuse_store, fuse_prompt, top_p_rule: as in `BlockDenoising`, which it repeats.
      ride: let a complete draft carry the next block's first step, which saves that call where it is accepted.
    """

    _: dataclasses.KW_ONLY
    candidates: int = 3
    rule: str = "dynamic"
    ride: bool = True
    Knobs: ClassVar[type] = HeadKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < 2:
            raise ValueError(
                f"candidates must be at least 2, the canvas and a draft, not {self.candidates}: "
                "without a draft it is BlockDenoising"
            )
        if self.ride and not self.fuse_store:
            raise ValueError("a draft carries the next block as a store does: ride needs fuse_store")

    def init(self, params: Any, request: Request, knobs: HeadKnobs) -> DraftedCanvas:
        """Network and head read the prompts' whole blocks; the first step is done and the next ones are drafted."""
        state = DraftedCanvas.empty(fresh_with_head(self, request), self.candidates - 1)
        given = request.tokens.shape[1]
        state, call = read_prompt(self, params["network"], state, given, self.fuse_prompt)
        logits = self.network.logits(params["network"], state.aligned(call.hidden))
        choice = self.choose(logits, state.masked(call.reads), state.cached, state.step, state.rows, knobs)
        state = state.store(self.network, call, choice.tokens).with_choice(choice)
        return self._draft(params, state, call, call.reads & knobs.asks(choice.where), knobs)

    def step(self, params: Any, state: DraftedCanvas, knobs: HeadKnobs) -> tuple[DraftedCanvas, Verified]:
        """Verifies the drafts in one call, commits what is right and the step after it, and drafts anew."""
        # One call reads the candidates C_1 .. C_K, and the next block where a complete one carries it.
        drafts, at, step = state.candidates(self.ride), state.cached, state.step
        state, choices, right, hidden, kv = verify(self, params, state, drafts, self.fuse_store, knobs)

        # C_1 .. C_{right + 1} are states of the base decoder: its steps from them are kept. No two reveal the same.
        reached = jnp.arange(self.candidates) <= right[:, None]
        kept = reached[..., None] & choices.where[:, :-1]
        steps = of_position(choices, jnp.argmax(kept, axis=1), jnp.any(kept, axis=1))
        state = state.with_choice(steps)
        # Steps of this call; `store` counts the last of them.
        done = jnp.sum(jnp.any(kept, axis=2), axis=1, dtype=jnp.int32)
        state = dataclasses.replace(state, step=state.step + jnp.maximum(done, 1) - 1)

        # The last of them is stored where it is complete: its keys are final. The next block has its first step.
        stored = drafts.carries & (drafts.carrier == right) & ~state.rows.done
        follows = stored & self.fuse_store
        last, next_step = of_candidate(hidden, right), jax.tree.map(lambda x: x[:, -1], choices).only(follows)
        state = state.after_block(stored, self.block, last[:, -1:]).with_choice(next_step)

        # What was read of the state that is reached, from which the head drafts.
        newest = where_rows(follows, hidden[:, -1], last)
        call = BlockRead(
            hidden=newest,
            window=jnp.concatenate([last, newest], axis=1) if self.fuse_store else last,
            at=at,
            kv=kv,
            reads=~state.rows.done & (follows | (~stored & (done > 0))),
            stored=stored,
        )
        state = state.store(self.network, call, choices.tokens.reshape(len(right), -1))
        revealed = where_rows(follows, next_step.where, of_candidate(kept, right))
        state = self._draft(params, state, call, call.reads & knobs.asks(revealed), knobs)
        return state, Verified(at, step, drafts, choices, right, stored, follows)

    def _draft(
        self, params: Any, state: DraftedCanvas, call: BlockRead, going: Bool[Array, "B"], knobs: HeadKnobs
    ) -> DraftedCanvas:
        """The canvas with drafts of the K - 1 steps after it, in rows that go on."""
        at, hidden, masked, drafts = state.cached, call.hidden, state.masked(going), []
        tokens = window(state.rows.tokens, at, self.block)
        for k in range(self.candidates - 1):
            # The head corrects the newest scores for what was just revealed or drafted.
            first = call if k == 0 else None
            residual, state = ask_head(self, params, state, hidden, jnp.any(masked, axis=1), tokens, first)
            hidden = hidden + residual
            # The base decoder's step with these scores: same rule, same number of the step, same noise.
            logits = self.network.logits(params["network"], state.aligned(hidden))
            draft = knobs.sure(self.choose(logits, masked, at, state.step + k, state.rows, knobs))
            tokens = jnp.where(draft.where, draft.tokens, tokens)
            masked = masked & ~draft.where & jnp.any(draft.where, axis=1, keepdims=True)
            drafts.append(draft)
        return state.with_drafts(drafts)


def verify(
    decoder: Any, params: Any, state: DraftedCanvas, drafts: Candidates, fuse: bool, knobs: Any
) -> tuple[DraftedCanvas, Choice, Int[Array, "B"], Float[Array, "B reads W D"], Any]:
    """One call of the network on each row's candidates, and with `fuse` on the block after the carrier.

    Returns:
      The canvas with counts; the base decoder's step from each candidate and in the next block, [B, K + 1, W]; the
      number of leading drafts that are such steps; hidden states, zeros where nothing was read; the carrier's keys
      and values.
    """
    network, at, block, most = decoder.network, state.cached, state.block, drafts.tokens.shape[1]
    follows = drafts.carries & ~state.rows.done & fuse
    after = Following(window(state.rows.tokens, at + block, block), drafts.carrier, follows) if fuse else None
    sizes = Sizes(drafts.count, jnp.full_like(at, block), ~state.rows.done, bounded=decoder.bounded)
    call = forward_candidates(
        network, params["network"], state.cache, drafts.tokens, at, sizes, following=after
    )
    state = state.spend(call.counts, block * (drafts.count + follows))
    read = jnp.arange(most) < drafts.count[:, None]
    hidden = jnp.where(read[..., None, None], call.outputs, 0)
    last = call.following if fuse else jnp.zeros_like(hidden[:, 0])
    hidden = jnp.concatenate([hidden, last[:, None]], axis=1)

    # What the base decoder knows in each state: masked positions, steps done, the hidden state before the block.
    next_open = window(state.open, at + block, block) & follows[:, None]
    masked = jnp.concatenate([drafts.masked, next_open[:, None]], axis=1)
    is_next = jnp.arange(most + 1) == most
    starts = at[:, None] + block * is_next
    steps = jnp.where(is_next, 0, state.step[:, None] + jnp.arange(most + 1))
    aligned = hidden
    if state.previous is not None:
        end_of_carrier = of_candidate(hidden, drafts.carrier)[:, None, -1:]
        before = jnp.where(is_next[:, None, None], end_of_carrier, state.previous[:, None])
        aligned = jnp.concatenate([before, hidden[:, :, :-1]], axis=2)
    logits = network.logits(params["network"], aligned)
    choose = jax.vmap(lambda *of_state: decoder.choose(*of_state, state.rows, knobs), 1, 1)
    choices = choose(logits, masked, starts, steps)

    # A draft is right if it is what the base decoder makes of the state before it, and all drafts before it are.
    made, tokens = choices.where[:, : most - 1], choices.tokens[:, : most - 1]
    same = (made == state.where) & (~made | (tokens == state.tokens))
    right = select.leading_run(jnp.all(same, axis=2) & drafts.exists[:, 1:])
    return state, choices, right, hidden, call.kv_of(network, drafts.carrier)


def of_position(choices: Choice, source: Int[Array, "B W"], where: Bool[Array, "B W"]) -> Choice:
    """One choice for several, [B, K, W]: at each position that of its source."""
    found = jax.tree.map(lambda x: jnp.take_along_axis(x, source[:, None], axis=1)[:, 0], choices)
    return dataclasses.replace(found, where=where)
