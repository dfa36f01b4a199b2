"""Drafts by masks beside the text (`models.drafts`): the model's own texts, in fewer calls.

::

    fed          x  d1 d2 d3 | m1 m2 m3      x the newest committed token, d its drafts, m masks
    predictions  g0 g1 g2 g3                 d1 = g0, d2 != g1: 1 is accepted
    committed    g0 g1                       and the masks after d1 draft what follows g1

Rows of text pass no adapter, so every prediction is the model's own.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.config import MOST, check_number
from paradec_jax.decode.causal.guesses import Guesses, by_ratio, propose, windows_of
from paradec_jax.decode.machine import (
    SHARE,
    CachedState,
    DecoderBase,
    Number,
    Prefix,
    Reading,
    RepetitionKnobs,
    Request,
    Rows,
    TreeCall,
    accept,
    forward_tree,
    knob,
)
from paradec_jax.decode.rules import earlier, entry_of, write_after_read
from paradec_jax.records import choices, pytree


@pytree
class DraftedKnobs(RepetitionKnobs):
    """Sampling, and which drafts are fed.

    Attributes:
      draft_threshold: the largest share that a proposal must have, and all before it, for its draft
        to be fed; decided before the draft is drawn. None feeds all.
    """

    draft_threshold: Number | None = knob(None, SHARE, unset=0.0)


@pytree
class DraftedState(CachedState):
    """Rows, a cache of all committed tokens but the newest, and the drafts of those to come."""

    guesses: Guesses


@pytree
class DraftedInfo:
    """Drafts that a call was fed, those that it accepted, and tokens committed, [B] each."""

    fed: Int[Array, "B"]
    accepted: Int[Array, "B"]
    committed: Int[Array, "B"]


@choices
class Drafted(DecoderBase):
    """Verifies K drafts a call and commits those that are accepted, and one token more.

    Acceptance "equal" is that of `machine.verify.accept`: the text is that of `AutoRegressive`, token
    for token, at every temperature. "ratio" is exact speculative sampling, which accepts more drafts
    when sampling: the text has the law of `AutoRegressive`, and other tokens of it.

    A line of masks (places 1) costs 2 K + 1 positions a call; after a refusal where none stood the
    next call has no drafts, and commits one token. A comb has masks after every place: (K + 1)^2
    positions, and drafts in every call.

    Attributes:
      drafter: network of the masks; that of the model's adapter when None.
      masks: K, masks after a place; those of the drafter when None.
      places: P, places after which masks stand, those where the text most probably ends; all K + 1
        when None.
      acceptance: "equal" or "ratio".
      candidates: C, tokens that a draft is drawn from, those that its mask finds best before the
        sampler head knows the token before it.
    """

    drafter: Any = None
    masks: int | None = None
    places: int | None = None
    acceptance: str = "equal"
    candidates: int = 32
    Knobs = DraftedKnobs
    further_networks = ("drafter",)
    WORDS = {**DecoderBase.WORDS, "acceptance": ("equal", "ratio")}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        most = getattr(self.drafter, "count", MOST - 1)
        check_number("masks", self.masks or 1, most=most)
        check_number("places", self.places or 1, most=1 + (self.masks or most))

    @property
    def count(self) -> int:
        """K."""
        return self.masks or self.drafter.count

    def check(self, request: Request) -> None:
        """As of every decoder; recorded numbers, which "ratio" has no use for, are refused too."""
        super().check(request)
        if self.acceptance == "ratio" and request.recorded is not None:
            raise ValueError("acceptance 'ratio' draws its own numbers and takes no recorded ones")

    def init(self, params: Any, request: Request, knobs: DraftedKnobs) -> DraftedState:
        """Reads each prompt and masks after it in one call: the first token, and drafts after it."""
        # Masks are the ids after the vocabulary to the drafter's network.
        masks = self.network.vocab_size + jnp.arange(self.count)
        masks = jnp.broadcast_to(masks, (request.batch, self.count))
        rows, cache, out = self.prefill_ahead(params, request, masks, 1 + self.count, self.drafter)
        rows = rows.spend(out.counts, request.lengths + self.count)
        rows, _ = self.commit_next(params["network"], rows, out.hidden[:, :1], knobs)
        hidden = out.hidden[:, 1:]
        ids = self.best(self.network.logits(params["network"], hidden))
        guesses = propose(self, params, rows, hidden, ids, True, knobs)
        return DraftedState(rows, cache, guesses)

    def step(
        self, params: Any, state: DraftedState, knobs: DraftedKnobs
    ) -> tuple[DraftedState, DraftedInfo]:
        """One call: verifies the drafts, and makes those of the next one."""
        before, guesses = state.rows, state.guesses
        # Feed the newest token, its drafts, and masks after the places where the text may end.
        # Accept drafts from left to right; the token after them is the model's own.
        call = self.verified(params, state, knobs)
        (tokens, log_probs), (accepted, hidden, ids, ready) = call.one, call.rest

        # Commit them. Keys and values of masks are never stored.
        rows = before.spend(call.counts, call.positions)
        rows = rows.commit(tokens, accepted + 1, log_probs)
        at = write_after_read(state.cached, tokens)
        cache = self.network.write(state.cache, call.kv, at)

        # Draft: the masks that stand where the text now ends propose what comes after its newest
        # token, each knowing the draft before its own.
        drafts = propose(self, params, rows, hidden, ids, ready, knobs)
        info = DraftedInfo(guesses.count, accepted, rows.length - before.length)
        return DraftedState(rows, cache, drafts), info

    def drafts(self, state: DraftedState) -> Int[Array, "B K"]:
        """The drafts that the next call verifies."""
        return state.guesses.counted

    def verified(self, params: Any, state: DraftedState, knobs: DraftedKnobs) -> TreeCall:
        """One call on the newest token, its drafts and masks, of which one path is kept.

        Its `one`: tokens to commit and their log-probabilities; its `rest`: how many drafts are
        accepted, states of the masks after them [B, K, D], tokens that each may draft [B, K, C], and
        rows that have masks there.
        """
        rows, guesses, network = state.rows, state.guesses, self.network
        places, stand = guesses.likely(self.places or 1 + self.count)
        newest, running = rows.newest[0], ~rows.done
        mask = network.vocab_size
        windows = windows_of(newest, state.cached, guesses, places, stand, mask, running)

        def read(hidden: Float[Array, "B r K D"]) -> Reading:
            fed = hidden.shape[1] > 2  # or else masks stand after the newest token, without drafts
            text = jnp.concatenate([hidden[:, 0, :1], *[hidden[:, 1]] * fed], axis=1)
            masks, width = hidden[:, 1 + fed :], text.shape[1]
            (batch, count, size, _), here = masks.shape, places[:, : masks.shape[1]]
            # One product with the output matrix, which is large.
            each = jnp.concatenate([text, masks.reshape(batch, count * size, -1)], axis=1)
            logits = network.logits(params["network"], each)
            accepted, tokens = self.judge(logits[:, :width], rows, guesses, knobs)
            here = (here == accepted[:, None]) & stand[:, :count]
            of_masks = logits[:, width:].reshape(batch, count, size, -1)
            states, of_masks = entry_of((masks, of_masks), jnp.argmax(here, axis=1))
            rest = accepted, states, self.best(of_masks), jnp.any(here, axis=1)
            one = tokens, self.scores(logits[:, :width], tokens)
            return Reading(one=one, rest=rest, kept=int(fed))

        return forward_tree(
            self.drafter,
            params,
            Prefix(state.cache, state.cached),
            windows,
            read,
            smaller=((0, 2),),
            bounded=self.bounded,
        )

    def judge(
        self, logits: Float[Array, "B W V"], rows: Rows, guesses: Guesses, knobs: DraftedKnobs
    ) -> tuple[Int[Array, "B"], Int[Array, "B W"]]:
        """How many drafts are accepted, and what the text goes on with, that many tokens and one."""
        if self.acceptance == "ratio":
            return by_ratio(self, logits, rows, guesses, knobs)
        drafts, places = guesses.counted[:, None], jnp.arange(logits.shape[1])
        before = earlier(guesses.tokens[:, : len(places) - 1])
        own = self.sample(logits, rows.length[:, None] + places, rows, knobs, before=before)
        return accept(drafts[..., : len(places) - 1], own[:, None])[1], own

    def best(self, logits: Float[Array, "B K V"]) -> Int[Array, "B K C"]:
        """The tokens that a draft may be."""
        return lax.top_k(logits, min(self.candidates, logits.shape[-1]))[1].astype(jnp.int32)
