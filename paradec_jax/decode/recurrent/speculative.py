"""Self-speculative decoding: few recurrences draft, many verify (arXiv 2502.05171)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode.machine import (
    NOT_NEGATIVE,
    CachedState,
    Counts,
    DecoderBase,
    Number,
    Prefix,
    Request,
    knob,
)
from paradec_jax.decode.recurrent.latents import Inputs, LatentKnobs, empty_state
from paradec_jax.decode.recurrent.static import read
from paradec_jax.decode.rules import log_probability, select, write_after_read
from paradec_jax.records import choices, pytree


@pytree
class SpeculativeKnobs(LatentKnobs):
    """Sampling, and how strict the verification is.

    Attributes:
      accept_threshold: at 1 or more, a drafted token must be the verifier's argmax; below, its
        probability must reach this share of the largest.
    """

    accept_threshold: Number = knob(1.0, NOT_NEGATIVE)


@pytree
class SpeculativeInfo:
    """Tokens won in the newest round, the correction included, [B]; 0 in rows that had stopped."""

    accepted: Int[Array, "B"]


@choices
class SelfSpeculative(DecoderBase):
    """Drafts `lookahead` tokens with few recurrences, verifies them in one call with many.

    A round commits the accepted drafts and, after a rejection, the verifier's own token; there is
    no bonus token where all drafts are accepted. With greedy sampling and a cache of one slot a
    recurrence the output is that of static decoding. When sampling, verification by argmax does not
    preserve the distribution.

    A row of n new tokens ends within 1 + (n - 1) (L + 1) network calls.

    Attributes:
      recurrence: r of verification; the network's default when None.
      prefill_recurrence: r of the prompt; that of verification when None.
      draft_recurrence: r of a draft.
      lookahead: L, drafts a round.
      continuous: start each call from the latent (after the final norm) of the call before it
        (lookahead 1 only).
    """

    recurrence: int | None = None
    draft_recurrence: int = 4
    lookahead: int = 4
    continuous: bool = False
    prefill_recurrence: int | None = None
    Knobs = SpeculativeKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.continuous and self.lookahead != 1:
            raise ValueError(
                f"continuous needs lookahead 1, not {self.lookahead}: one latent starts one position"
            )

    def init(self, params: Any, request: Request, knobs: SpeculativeKnobs) -> CachedState:
        """Reads the prompt and commits the first token."""
        depth = self.prefill_recurrence or self.recurrence
        state = empty_state(self, request, self.lookahead, knobs)
        fed = Inputs.prompt(request)
        return read(self, params, state, fed, knobs, depth, self.continuous)

    def step(
        self, params: Any, state: CachedState, knobs: SpeculativeKnobs
    ) -> tuple[CachedState, SpeculativeInfo]:
        """Drafts L tokens, verifies them in one call, commits those accepted and the correction."""
        rows, cached, network = state.rows, state.cached, self.network.at(self.recurrence)

        # Few recurrences a token: L drafts, one after the other.
        drafts, cache, spent = self._draft(params, state, knobs)

        # Many recurrences, all drafts at once: what the deep network predicts after each token but
        # the last draft.
        fed = jnp.concatenate([rows.newest[0], drafts[:, :-1]], axis=1)
        positions = cached[:, None] + jnp.arange(self.lookahead)
        start = network.latents(cache, positions)
        out, latents = network.forward_from(params, fed, positions, start, Prefix(cache, cached))
        logits = network.logits(params, out.hidden)
        verified = self.sample(logits, positions + 1, rows, knobs)
        cache = network.write(cache, out.kv, write_after_read(cached, verified))
        cache = self._carry(params, cache, latents[:, -1:], cached + 1)

        # A draft is accepted that is its most probable token or, below a threshold of 1, nearly as
        # probable.
        near = jnp.log(knobs.accept_threshold) + jnp.max(
            jax.nn.log_softmax(logits, axis=-1), axis=-1
        )
        exact = jnp.argmax(logits, axis=-1) == drafts
        accepted = jnp.where(
            knobs.accept_threshold >= 1, exact, log_probability(logits, drafts) >= near
        )

        # The drafts that it accepts are committed, and after a rejection its own token.
        matches = select.leading_run(accepted)
        tokens = jnp.where(jnp.arange(self.lookahead) < matches[:, None], drafts, verified)
        count = matches + (matches < self.lookahead)
        spent = {name: spent[name] + amount for name, amount in out.counts.items()}
        rows = rows.spend(spent, 2 * self.lookahead, calls=self.lookahead + 1)
        rows = rows.commit(tokens, count, self.scores(logits, tokens))
        return CachedState(rows, cache), SpeculativeInfo(jnp.where(state.rows.done, 0, count))

    def _draft(
        self, params: Any, state: CachedState, knobs: SpeculativeKnobs
    ) -> tuple[Int[Array, "B L"], Any, Counts]:
        """L tokens one after the other, and what they cost; verification overwrites their keys and
        values.
        """
        rows, network = state.rows, self.network.at(self.draft_recurrence)
        first, position = rows.newest

        def body(carry: tuple[Any, Array, Array], _: None) -> tuple[Any, tuple[Array, Counts]]:
            cache, token, position = carry
            at = position[:, 0]
            start = network.latents(cache, position)
            out, latent = network.forward_from(params, token, position, start, Prefix(cache, at))
            token = self.sample(network.logits(params, out.hidden), position + 1, rows, knobs)
            cache = network.write(cache, out.kv, write_after_read(at, token))
            cache = self._carry(params, cache, latent, at)
            return (cache, token, position + 1), (token[:, 0], out.counts)

        (cache, _, _), (drafts, spent) = lax.scan(
            body, (state.cache, first, position), length=self.lookahead
        )
        return drafts.T, cache, {name: jnp.sum(amount, axis=0) for name, amount in spent.items()}

    def _carry(
        self, params: Any, cache: Any, latent: Float[Array, "B 1 D"], at: Int[Array, "B"]
    ) -> Any:
        """The cache in which the next call at position `at` starts from this latent, where it is
        carried on.
        """
        if not self.continuous:
            return cache
        return self.network.start_from(cache, self.network.normalise(params, latent), at)
