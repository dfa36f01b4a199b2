"""Self-speculative decoding: few recurrences draft, many verify."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import select, stop
from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.base import DecoderBase, after, newest
from paradec_jax.decode.protocol import Progress, Request
from paradec_jax.decode.sampling import log_probability


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculativeKnobs(AutoRegressiveKnobs):
    """Sampling, and how strict the verification is.

    Attributes:
      accept_threshold: at 1 or more, a drafted token must be the verifier's argmax; below, its probability must
        reach this share of the largest.
    """

    accept_threshold: Float[Array, "..."] | float = 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculativeState:
    """Rows, cache, the last latent where it is carried on, and tokens won in the newest round, [B]."""

    progress: Progress
    cache: Any
    latent: Float[Array, "B 1 D"]
    accepted: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class SelfSpeculative(DecoderBase):
    """Drafts `lookahead` tokens with few recurrences, verifies them in one call with many.

    A round commits the accepted drafts and, after a rejection, the verifier's own token; there is no bonus token
    where all drafts are accepted. With greedy sampling and a cache of one slot a recurrence the output is that of
    static decoding. When sampling, verification by argmax does not preserve the distribution.

    Attributes:
      recurrence: r of verification; the network's default when None.
      prefill_recurrence: r of the prompt; that of verification when None.
      draft_recurrence: r of a draft.
      lookahead: L, drafts a round.
      continuous: carry the latent on (lookahead 1 only).
    """

    _: dataclasses.KW_ONLY
    recurrence: int | None = None
    draft_recurrence: int = 4
    lookahead: int = 4
    continuous: bool = False
    prefill_recurrence: int | None = None
    Knobs: ClassVar[type] = SpeculativeKnobs

    def __post_init__(self) -> None:
        if self.lookahead < 1 or self.draft_recurrence < 1:
            raise ValueError(
                f"lookahead and draft_recurrence must be at least 1, not {self.lookahead}, {self.draft_recurrence}"
            )
        if self.continuous and self.lookahead != 1:
            raise ValueError(
                f"continuous needs lookahead 1, not {self.lookahead}: one latent starts one position"
            )

    @property
    def _r(self) -> int:
        return self.network.recurrence if self.recurrence is None else self.recurrence

    def init(self, params: Any, request: Request, knobs: SpeculativeKnobs) -> SpeculativeState:
        """Reads the prompt and commits the first token."""
        depth = self._r if self.prefill_recurrence is None else self.prefill_recurrence
        progress, cache, latent = self.prefill(params, request, knobs, depth, self.lookahead)
        return SpeculativeState(progress, cache, latent, jnp.zeros(request.batch, jnp.int32))

    def step(self, params: Any, state: SpeculativeState, knobs: SpeculativeKnobs) -> SpeculativeState:
        """Drafts L tokens, verifies them in one call, commits those accepted and the correction."""
        progress = state.progress
        cached = progress.length - 1
        drafts, cache, latent = self._draft(params, state, knobs)

        fed = jnp.concatenate([newest(progress)[0], drafts[:, :-1]], axis=1)
        positions = cached[:, None] + jnp.arange(self.lookahead)
        if not self.continuous:
            latent = stop.window(progress.initial, cached, self.lookahead)
        out = self.network.forward(params, fed, positions, cache, cached, latent, self._r)
        logits = self.network.logits(params, out.hidden)

        matches = select.prefix(self._accepts(logits, drafts, knobs.accept_threshold))
        rejected = matches < self.lookahead
        verified = self.sample(logits, positions + 1, progress, knobs)
        cache = self.network.write(cache, out.kv, after(cached, verified))
        kept = jnp.arange(self.lookahead) < matches[:, None]
        tokens = jnp.where(kept, drafts, verified)
        count = matches + rejected
        accepted = jnp.where(progress.done, 0, count)
        scores = log_probability(logits, tokens) if self.log_probs else None
        progress = progress.count(
            self.lookahead + 1, 2 * self.lookahead, self.lookahead * self.draft_recurrence + self._r
        )
        progress = stop.commit(progress, tokens, count, scores)
        return SpeculativeState(progress, cache, out.latent[:, -1:], accepted)

    def _draft(
        self, params: Any, state: SpeculativeState, knobs: SpeculativeKnobs
    ) -> tuple[Int[Array, "B L"], Any, Float[Array, "B 1 D"]]:
        """L tokens one after the other; their keys and values are scratch that verification overwrites."""
        progress = state.progress
        first, position = newest(progress)

        def body(carry: tuple[Any, Array, Array, Array], _: None) -> tuple[Any, Array]:
            cache, token, position, latent = carry
            if not self.continuous:
                latent = stop.window(progress.initial, position[:, 0], 1)
            at = position[:, 0]
            out = self.network.forward(params, token, position, cache, at, latent, self.draft_recurrence)
            token = self.sample(self.network.logits(params, out.hidden), position + 1, progress, knobs)
            cache = self.network.write(cache, out.kv, after(at, token))
            return (cache, token, position + 1, out.latent), token[:, 0]

        carry = (state.cache, first, position, state.latent)
        (cache, _, _, latent), drafts = lax.scan(body, carry, length=self.lookahead)
        return drafts.T, cache, latent

    def _accepts(
        self, logits: Float[Array, "B L V"], drafts: Int[Array, "B L"], threshold: Float[Array, "..."] | float
    ) -> Bool[Array, "B L"]:
        """Which drafts the verifier agrees with."""
        score = log_probability(logits, drafts)
        best = jnp.max(jax.nn.log_softmax(logits, axis=-1), axis=-1)
        exact = jnp.argmax(logits, axis=-1) == drafts
        return jnp.where(threshold >= 1, exact, score >= jnp.log(threshold) + best)
