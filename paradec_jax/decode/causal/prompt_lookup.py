"""Prompt lookup: drafts are copied from where the row's newest tokens stood before."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.config.bounds import check_number
from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.knobs import RepetitionKnobs
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.machine.tree import Reading, Windows, forward_tree
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.windows import window, write_after_read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class PromptLookup(DecoderBase):
    """Looks the newest tokens up in the row itself and verifies, in one call, what followed them
    there.

    Each call feeds the newest token and drafted ones and commits the drafts that equal the
    network's own choices, and one choice more. (In the original the prompt's call too, whose
    template seldom foretells what follows.) Where no running row holds an earlier occurrence the
    call is a step of autoregressive decoding, of one position. Few tokens that stood before
    foretell little, and on a processor a wide call must earn its price: so what is looked up has a
    least length, and only what equals `max_ngram` tokens is followed far. (The original:
    `max_ngram` 3, `min_ngram` 1 and `num_short` 10.)

    The network's choice at a position is drawn with that position's noise, so a draft x is right
    with probability p(x), and the token in its place is else drawn from p without x: speculative
    sampling with a draft that has all of the proposal's mass. The output is that of
    `AutoRegressive`, token for token, at every temperature. (Prompt lookup decoding, Saxena 2023;
    verification as in arXiv 2211.17192.)

    Attributes:
      max_ngram: tokens that are looked up; where they are not found, fewer.
      num_pred: K, tokens copied.
      min_ngram: the fewest that are looked up.
      num_short: tokens copied after fewer than `max_ngram`, K at most.
    """

    _: dataclasses.KW_ONLY
    max_ngram: int = 5
    num_pred: int = 10
    min_ngram: int = 3
    num_short: int = 1
    Knobs: ClassVar[type] = RepetitionKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("min_ngram", self.min_ngram, most=self.max_ngram)

    def find(self, tokens: Int[Array, "B S"], lengths: Int[Array, "B"]) -> tuple[Array, Array]:
        """K tokens a row that may come next, and how many of them count."""
        short, most = min(self.num_short, self.num_pred), self.max_ngram
        draft, sure = find_draft(tokens, lengths, most, self.num_pred, most)
        few, found = find_draft(tokens, lengths, most, short, self.min_ngram)
        draft = jnp.where(sure[:, None], draft, jnp.pad(few, ((0, 0), (0, self.num_pred - short))))
        return draft, jnp.where(sure, self.num_pred, jnp.where(found, short, 0))

    def init(self, params: Any, request: Request, knobs: RepetitionKnobs) -> CachedState:
        """Reads the prompt and commits the first token."""
        rows, cache, _ = self.prefill(params, request, knobs, self.num_pred + 1)
        return CachedState(rows, cache)

    def step(
        self, params: Any, state: CachedState, knobs: RepetitionKnobs
    ) -> tuple[CachedState, PromptLookupInfo]:
        """One call: verifies what followed the newest tokens where they stood before."""
        # Look up: the longest n-gram at the row's end that occurs earlier, and the tokens after it
        # there.
        draft, drafted = self.find(state.rows.tokens, state.rows.length)
        # Verify and commit: the drafted tokens that the network chooses itself, and its choice
        # after them.
        state, accepted = verify(self, params, state, draft, drafted, knobs, (0, self.num_short))
        return state, PromptLookupInfo(draft, drafted, accepted)

    def drafts(self, state: CachedState) -> Int[Array, "B K"]:
        """The draft that the next call verifies, where there is one."""
        return counted(*self.find(state.rows.tokens, state.rows.length))


def counted(draft: Int[Array, "B K"], drafted: Int[Array, "B"]) -> Int[Array, "B K"]:
    """A draft with -1 after what counts of it."""
    return jnp.where(jnp.arange(draft.shape[1]) < drafted[:, None], draft, -1)


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
    found = jnp.zeros_like(lengths, dtype=bool)
    for n in range(1, max_ngram + 1):  # a longer n-gram overrules the shorter ones
        tail = jnp.take_along_axis(tokens, jnp.maximum(lengths - n, 0)[:, None], axis=1)
        same &= (jnp.roll(tokens, n - 1, axis=1) == tail) & (slot >= n - 1)
        if n < min_ngram:
            continue
        occurs = same & fits & (start < lengths[:, None] - n)
        first = jnp.where(jnp.any(occurs, axis=1), jnp.argmax(occurs, axis=1) + 1, first)
        found |= jnp.any(occurs, axis=1)
    room = jnp.pad(tokens, ((0, 0), (0, num_pred)))
    return window(room, first, num_pred), found


def verify(
    decoder: DecoderBase,
    params: Any,
    state: CachedState,
    draft: Int[Array, "B K"],
    drafted: Int[Array, "B"],
    knobs: Any,
    sizes: tuple[int, ...],
) -> tuple[CachedState, Int[Array, "B"]]:
    """One call on the newest token and a draft.

    Args:
      decoder, params, state, knobs: as for `step`.
      draft: K tokens.
      drafted: how many of them count.
      sizes: numbers of drafted tokens below K for which a call is compiled too.

    Returns:
      The state after the call, and how many drafted tokens were right.
    """
    network, at = decoder.network, state.cached
    fed = jnp.concatenate([state.rows.newest[0], draft], axis=1)[:, None]
    call = forward_tree(
        network,
        params,
        Prefix(state.cache, at),
        Windows.star(fed, at, 1 - state.rows.done),
        functools.partial(read, decoder, params, state.rows, knobs, draft),
        width=1 + drafted,
        widths=tuple(1 + n for n in sizes if n < draft.shape[1]),
        bounded=decoder.bounded,
    )
    rows = state.rows.spend(call.counts, call.positions)
    rows, tokens, accepted = commit_right(rows, call.one, draft, drafted)
    cache = network.write(state.cache, call.kv, write_after_read(at, tokens))
    return CachedState(rows, cache), accepted


def read(
    decoder: DecoderBase, params: Any, rows: Rows, knobs: Any, draft: Array, hidden: Array
) -> Reading:
    """What a call predicts: tokens [B, W], and their log-probabilities where they are kept."""
    tokens, logits = (x[:, 0] for x in decoder.predict(params, rows, knobs, hidden, draft[:, None]))
    return Reading(one=(tokens, decoder.scores(logits, tokens)))


def commit_right(
    rows: Rows, predicted: Any, draft: Int[Array, "B K"], drafted: Int[Array, "B"]
) -> tuple[Rows, Int[Array, "B W"], Int[Array, "B"]]:
    """Commits the network's choices up to the first that differs from the draft, that one included.

    Returns:
      Rows, the choices at all W = K + 1 positions, and how many drafted tokens were right.
    """
    tokens, log_probs = predicted
    counts = jnp.arange(draft.shape[1]) < drafted[:, None]
    accepted = select.leading_run((draft == tokens[:, :-1]) & counts)
    return rows.commit(tokens, accepted + 1, log_probs), tokens, accepted
