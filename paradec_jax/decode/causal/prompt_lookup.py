"""Prompt lookup: drafts are copied from where the row's newest tokens stood before."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import select, stop
from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.base import DecoderBase, after, newest
from paradec_jax.decode.protocol import Progress, Request
from paradec_jax.decode.sampling import log_probability


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookupState:
    """Rows, cache (one entry less than committed tokens), and what the newest call did.

    Attributes:
      progress: the rows.
      cache: keys and values of the positions before the newest token.
      draft: tokens that the newest call verified, [B, K].
      found: whether they were copied from the row, [B].
      accepted: tokens of them that were right, [B].
    """

    progress: Progress
    cache: Any
    draft: Int[Array, "B K"]
    found: Bool[Array, "B"]
    accepted: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class PromptLookup(DecoderBase):
    """Looks the newest tokens up in the row itself and verifies, in one call, what followed them there.

    Each call, that of the prompt included, feeds the newest token and K drafted ones and commits the drafts that
    equal the network's own choices, and one choice more. Where the row holds no earlier occurrence the call is a
    step of static decoding; the compiled window keeps its 1 + K positions, of which one counts.

    The network's choice at a position is drawn with that position's noise, so a draft x is right with probability
    p(x), and the token in its place is else drawn from p without x: speculative sampling with a draft that has
    all of the proposal's mass. The output is that of `AutoRegressive`, token for token, at every temperature.
    (Prompt lookup decoding, Saxena 2023; verification as in arXiv 2211.17192.)

    Attributes:
      max_ngram: tokens that are looked up; where they are not found, fewer.
      num_pred: K, tokens copied.
      dummy: token drafted alone where nothing is found. The original notebook drafts token 100, which is now and
        then right; None drafts nothing.
    """

    _: dataclasses.KW_ONLY
    max_ngram: int = 3
    num_pred: int = 10
    dummy: int | None = None
    Knobs: ClassVar[type] = AutoRegressiveKnobs

    def __post_init__(self) -> None:
        for name in ("max_ngram", "num_pred"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dummy is not None and self.dummy < 0:
            raise ValueError(f"dummy must be a token id or None, not {self.dummy}")

    def init(self, params: Any, request: Request, knobs: AutoRegressiveKnobs) -> PromptLookupState:
        """Reads the prompt with a draft behind it and commits the first tokens."""
        draft, found = self._draft(request.tokens, request.lengths)
        progress, cache, hidden = self.prefill_ahead(params, request, knobs, draft, self.num_pred + 1)
        progress = progress.count(1, request.lengths + self._drafted(found), self.network.recurrence)
        progress, _, accepted = self._verify(params, progress, hidden, draft, found, knobs)
        return PromptLookupState(progress, cache, draft, found, accepted)

    def step(self, params: Any, state: PromptLookupState, knobs: AutoRegressiveKnobs) -> PromptLookupState:
        """Finds a draft, verifies it, commits what is right and one token more."""
        progress = state.progress
        draft, found = self._draft(progress.tokens, progress.length)

        cached = progress.length - 1
        fed = jnp.concatenate([newest(progress)[0], draft], axis=1)
        positions = cached[:, None] + jnp.arange(1 + self.num_pred)
        latent = stop.window(progress.initial, cached, 1 + self.num_pred)
        r = self.network.recurrence
        out = self.network.forward(params, fed, positions, state.cache, cached, latent, r)

        progress = progress.count(1, 1 + self._drafted(found), r)
        progress, verified, accepted = self._verify(params, progress, out.hidden, draft, found, knobs)
        cache = self.network.write(state.cache, out.kv, after(cached, verified))
        return PromptLookupState(progress, cache, draft, found, accepted)

    def _draft(
        self, tokens: Int[Array, "B S"], lengths: Int[Array, "B"]
    ) -> tuple[Int[Array, "B K"], Bool[Array, "B"]]:
        draft, found = find_draft(tokens, lengths, self.max_ngram, self.num_pred)
        return draft if self.dummy is None else jnp.where(found[:, None], draft, self.dummy), found

    def _drafted(self, found: Bool[Array, "B"]) -> Int[Array, "B"]:
        """How many tokens of the draft count."""
        return jnp.where(found, self.num_pred, int(self.dummy is not None))

    def _verify(
        self,
        params: Any,
        progress: Progress,
        hidden: Float[Array, "B W D"],
        draft: Int[Array, "B K"],
        found: Bool[Array, "B"],
        knobs: AutoRegressiveKnobs,
    ) -> tuple[Progress, Int[Array, "B W"], Int[Array, "B"]]:
        """Commits the network's choices up to the first that differs from the draft, that one included."""
        logits = self.network.logits(params, hidden)
        positions = progress.length[:, None] + jnp.arange(hidden.shape[1])
        verified = self.sample(logits, positions, progress, knobs)
        drafted = jnp.arange(self.num_pred) < self._drafted(found)[:, None]
        accepted = select.prefix((draft == verified[:, :-1]) & drafted)
        scores = log_probability(logits, verified) if self.log_probs else None
        return stop.commit(progress, verified, accepted + 1, scores), verified, accepted


def find_draft(
    tokens: Int[Array, "B S"], lengths: Int[Array, "B"], max_ngram: int, num_pred: int
) -> tuple[Int[Array, "B K"], Bool[Array, "B"]]:
    """The tokens behind the first earlier occurrence of each row's newest ones.

    The longest n-gram, n = max_ngram .. 1, that has an occurrence counts. An occurrence ends before the tail
    itself begins and has `num_pred` tokens behind it.

    Args:
      tokens, lengths: rows, and how many of their tokens count.
      max_ngram: n to begin with.
      num_pred: K.

    Returns:
      K tokens a row, and whether there are any.
    """
    slot = jnp.arange(tokens.shape[1])
    start = slot + 1  # of the continuation of an n-gram that ends at a slot
    fits = start + num_pred <= lengths[:, None]
    same, first = jnp.ones_like(fits), jnp.zeros_like(lengths)
    found = jnp.zeros_like(lengths, dtype=bool)
    for n in range(1, max_ngram + 1):  # a longer n-gram overrules the shorter ones
        tail = jnp.take_along_axis(tokens, jnp.maximum(lengths - n, 0)[:, None], axis=1)
        same &= (jnp.roll(tokens, n - 1, axis=1) == tail) & (slot >= n - 1)
        occurs = same & fits & (start < lengths[:, None] - n)
        first = jnp.where(jnp.any(occurs, axis=1), jnp.argmax(occurs, axis=1) + 1, first)
        found |= jnp.any(occurs, axis=1)
    room = jnp.pad(tokens, ((0, 0), (0, num_pred)))
    return stop.window(room, first, num_pred), found
