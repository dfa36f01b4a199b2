"""Prompt lookup: drafts are copied from where the row's newest tokens stood before."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.config import check_number
from paradec_jax.decode.machine import CachedState, DecoderBase, RepetitionKnobs, Request
from paradec_jax.decode.machine.verify import counted, verify
from paradec_jax.decode.rules import window
from paradec_jax.records import choices, pytree


@pytree
class PromptLookupInfo:
    """What one call did.

    Attributes:
      draft: tokens that the call verified, [B, K]; the first `drafted` of them count.
      drafted: how many, [B]: none in rows whose newest tokens do not occur earlier.
      accepted: tokens of the draft that were right, [B].
    """

    draft: Int[Array, "B K"]
    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]


@choices
class PromptLookup(DecoderBase):
    """Looks the newest tokens up in the row itself and verifies, in one call, what followed them
    there.

    Each call feeds the newest token and drafted ones and commits the drafts that equal the
    network's own choices, and one choice more. (In the original the prompt's call too, whose
    template seldom foretells what follows.) Where no running row holds an earlier occurrence the
    call is a step of autoregressive decoding, of one position. Few tokens that stood before
    foretell little, and on a processor a wide call must earn its price: so what is looked up has a
    least length, and after fewer than `max_ngram` tokens only one is copied. (The original:
    `max_ngram` 3 and `min_ngram` 1, and always `num_pred` tokens.)

    The output is that of `AutoRegressive`, token for token, at every temperature: see
    `machine.verify.accept`. (Prompt lookup decoding, Saxena 2023.)

    Attributes:
      max_ngram: tokens that are looked up; where they are not found, fewer.
      num_pred: K, tokens copied.
      min_ngram: the fewest that are looked up.
    """

    max_ngram: int = 5
    num_pred: int = 10
    min_ngram: int = 3
    Knobs = RepetitionKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("min_ngram", self.min_ngram, most=self.max_ngram)

    def find(self, tokens: Int[Array, "B S"], lengths: Int[Array, "B"]) -> tuple[Array, Array]:
        """K tokens a row that may come next, and how many of them count."""
        draft, sure = find_draft(tokens, lengths, self.max_ngram, self.num_pred, self.max_ngram)
        few, some = find_draft(tokens, lengths, self.max_ngram, 1, self.min_ngram)
        return jnp.where(sure[:, None], draft, few), jnp.where(sure, self.num_pred, 1 * some)

    def init(self, params: Any, request: Request, knobs: RepetitionKnobs) -> CachedState:
        """Reads the prompt and commits the first token."""
        rows, cache, _ = self.prefill(params, request, knobs, self.num_pred + 1)
        return CachedState(rows, cache)

    def step(
        self, params: Any, state: CachedState, knobs: RepetitionKnobs
    ) -> tuple[CachedState, PromptLookupInfo]:
        """One call: verifies what followed the newest tokens where they stood before."""
        # Look up the longest n-gram at the row's end that occurs earlier, and draft what followed.
        draft, drafted = self.find(state.rows.tokens, state.rows.length)
        # Verify: drafted tokens are right while the network chooses them itself.
        right = verify(self, params, state, draft[:, None], drafted, knobs, (1, 2))
        # Commit them, and its choice after them.
        rows = right.rows.commit(right.tokens, right.accepted + 1, right.log_probs)
        return CachedState(rows, right.cache), PromptLookupInfo(draft, drafted, right.accepted)

    def drafts(self, state: CachedState) -> Int[Array, "B K"]:
        """The draft that the next call verifies, where there is one."""
        return counted(*self.find(state.rows.tokens, state.rows.length))


def find_draft(
    tokens: Int[Array, "B S"],
    lengths: Int[Array, "B"],
    max_ngram: int,
    num_pred: int,
    min_ngram: int = 1,
) -> tuple[Int[Array, "B K"], Bool[Array, "B"]]:
    """The tokens after the first earlier occurrence of each row's newest ones.

    The longest n-gram, n = max_ngram .. min_ngram, that has an occurrence counts. An occurrence
    ends before the tail itself begins and has `num_pred` tokens after it.

    Args:
      tokens, lengths: rows, and how many of their tokens count.
      max_ngram: n to begin with.
      num_pred: K.
      min_ngram: n to end with.

    Returns:
      K tokens a row, and whether there are any.
    """
    slot = jnp.arange(tokens.shape[1])
    start = slot + 1  # first position after an n-gram that ends at a slot
    fits = start + num_pred <= lengths[:, None]
    same, first = jnp.ones_like(fits), jnp.zeros_like(lengths)
    some = jnp.zeros_like(lengths, dtype=bool)
    for n in range(1, max_ngram + 1):  # a longer n-gram overrules the shorter ones
        tail = jnp.take_along_axis(tokens, jnp.maximum(lengths - n, 0)[:, None], axis=1)
        same &= (jnp.roll(tokens, n - 1, axis=1) == tail) & (slot >= n - 1)
        if n < min_ngram:
            continue
        occurs = same & fits & (start < lengths[:, None] - n)
        first = jnp.where(jnp.any(occurs, axis=1), jnp.argmax(occurs, axis=1) + 1, first)
        some |= jnp.any(occurs, axis=1)
    room = jnp.pad(tokens, ((0, 0), (0, num_pred)))
    return window(room, first, num_pred), some
