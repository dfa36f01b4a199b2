"""Jacobi decoding of causal models: draft a window, compare it with the network's own predictions, keep what agrees.

::

    fed          x  d1 d2 d3 d4      x the newest committed token, d the draft behind it
    predictions  g0 g1 g2 g3 g4      g_i the token that belongs behind fed token i
    accepted        =  =  /          d1 = g0, d2 = g1, d3 != g2: m = 2 drafts
    committed    g0 g1 g2            m + 1 tokens; g3 g4 begin the next draft

The first prediction follows from committed tokens alone, and each accepted draft makes the next prediction follow
from them too. So what is committed is what one-by-one decoding commits, whatever the draft was (Santilli et al. 2023;
Jacobi Forcing, sections 3 and 4). `rejection` has the other rule for sampling, which judges drafts by chance.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import recycling, rejection, select, stop
from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.base import DecoderBase, after, newest
from paradec_jax.decode.protocol import Progress, Request
from paradec_jax.decode.randomness import Purpose, fold
from paradec_jax.decode.sampling import distribution, log_probability
from paradec_jax.nn import masks

ACCEPTANCES = ("coupled", "rejection")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JacobiState:
    """Rows, cache (one entry less than committed tokens) and what is guessed about the tokens to come.

    Attributes:
      progress, cache: as in every decoder.
      drafts: guesses of the W - 1 tokens behind the committed ones, [B, R, W - 1]: the draft, then its candidates.
      horizon: position at which the window ends, [B]; nothing is accepted from there on.
      pool: earlier iterates, the newest first, [B, G, W + 1].
      fractions: number in [0, 1) that draws the random guess at each position, [B, S].
      accepted: tokens committed in the newest step, [B] (the fast-forward count).
    """

    progress: Progress
    cache: Any
    drafts: Int[Array, "B R drafts"]
    horizon: Int[Array, "B"]
    pool: Int[Array, "B G _"]
    fractions: Float[Array, "B S"]
    accepted: Int[Array, "B"]

    @property
    def draft(self) -> Int[Array, "B drafts"]:
        """The draft itself, which the previous iterate left."""
        return self.drafts[:, 0]


@dataclasses.dataclass(frozen=True)
class Jacobi(DecoderBase):
    """Verifies a window of W = `block` tokens a network call; commits the accepted drafts and the token behind them.

    When sampling with "coupled" acceptance, each position keeps its Gumbel noise from step to step, so a prediction
    is a function of the tokens before it and the output is, token for token, that of `AutoRegressive` with the same
    keys. With "rejection" a draft x is accepted with probability p(x), and what is drafted is the most probable
    token: other tokens of the same distribution. At temperature 0 both are greedy decoding.

    Attributes:
      block: n, tokens of a block; the first token fed is the newest committed one.
      running: refill the window to its full width after every step (the running window). By default it shrinks
        until its block is complete and the next block starts from a random draft (block Jacobi).
      pool: G, earlier iterates that are searched for candidates (rejection recycling).
      rows: R, rows verified in a call: the draft and at most R - 1 candidates, those of the pool first, then
        `recycling.alternatives`. 1 + `pool` when 0.
      acceptance: "coupled" or "rejection" (see `rejection`), which verifies a single row: the longest of several
        would favour the tokens that are drafted.
    """

    _: dataclasses.KW_ONLY
    block: int = 16
    running: bool = False
    pool: int = 0
    rows: int = 0
    acceptance: str = "coupled"
    Knobs: ClassVar[type] = AutoRegressiveKnobs

    def __post_init__(self) -> None:
        if self.block < 2:
            raise ValueError(
                f"block must be at least 2, not {self.block}: a window of one token drafts nothing"
            )
        if self.pool < 0 or self.rows < 0:
            raise ValueError(f"pool and rows must not be negative, not {self.pool}, {self.rows}")
        if self.pool and self.rows == 1:
            raise ValueError(
                "a pool needs rows of at least 2 (or 0 for 1 + pool), not 1: it gives candidates"
            )
        if self.acceptance not in ACCEPTANCES:
            raise ValueError(f"acceptance must be one of {', '.join(ACCEPTANCES)}, not {self.acceptance!r}")
        if self.acceptance == "rejection" and self.lanes > 1:
            raise ValueError(
                f"acceptance 'rejection' verifies one row, so pool must be 0 and rows 0 or 1, "
                f"not {self.pool}, {self.rows}"
            )

    @property
    def width(self) -> int:
        """W, tokens fed of a row."""
        return self.block

    @property
    def lanes(self) -> int:
        """R, rows that are verified."""
        return self.rows or 1 + self.pool

    def init(self, params: Any, request: Request, knobs: Any) -> JacobiState:
        """Reads each prompt and W - 1 random tokens behind it in one call: the first token, the first iterate."""
        self._check(request)
        width, batch = self.width, request.batch
        fractions = _fractions(request.keys, self.size + width)
        ahead = _guesses(fractions, request.tokens, request.lengths, width - 1)
        progress, cache, hidden = self.prefill_ahead(params, request, knobs, ahead, width)
        logits = self.network.logits(params, hidden)
        own = progress.length[:, None] + jnp.arange(width)
        no_draft = jnp.zeros_like(ahead, bool)  # so the first token is drawn as every decoder draws it
        predicted = self._predict(logits, ahead[:, None], no_draft, own, progress, knobs)[0][:, 0]
        progress = progress.count(1, request.lengths + width - 1, self.network.recurrence)
        accepted = jnp.ones_like(progress.length)
        scores = log_probability(logits, predicted) if self.log_probs else None
        progress = stop.commit(progress, predicted, accepted, scores)
        horizon = self.horizon(progress, progress.prompt_lengths, accepted * 0, knobs)
        drafts = jnp.broadcast_to(predicted[:, None, 1:], (batch, self.lanes, width - 1))
        pool = jnp.full((batch, self.pool, width + 1), recycling.EMPTY, jnp.int32)
        return JacobiState(progress, cache, drafts, horizon, pool, fractions, accepted)

    def step(self, params: Any, state: JacobiState, knobs: Any) -> JacobiState:
        """Verifies draft and candidates in one call, commits the longest agreement, keeps the rest as a draft."""
        progress, width, rows = state.progress, self.width, self.lanes
        token, at = newest(progress)[0], progress.length - 1
        fed = jnp.concatenate([jnp.repeat(token[:, None], rows, axis=1), state.drafts], axis=2)
        logits, kv = self._verify(params, state, fed)
        own = at[:, None] + 1 + jnp.arange(width)
        inside = own[:, :-1] < state.horizon[:, None]
        predicted, agrees = self._predict(logits, state.drafts, inside, own, progress, knobs)
        matches = jax.vmap(select.prefix)(agrees)
        winner = jnp.argmax(matches, axis=1)  # the first of the longest

        def of_winner(x: Array) -> Array:
            return jnp.take_along_axis(x, winner[:, None, None], axis=1)[:, 0]

        tokens, count = of_winner(predicted), jnp.max(matches, axis=1) + 1
        start = winner * width
        if rows > 1:
            kv = self.network.pick(kv, start, width)
        cache = self.network.write(state.cache, kv, after(at, tokens))
        scores = log_probability(stop.window(logits, start, width), tokens) if self.log_probs else None
        before = progress.length
        progress = progress.count(1, rows * width, self.network.recurrence)
        progress = stop.commit(progress, tokens, count, scores)

        agreed = self.newest_agreement(of_winner(agrees), at, state.horizon)
        horizon = self.horizon(progress, state.horizon, agreed, knobs)
        # Predictions reach one position beyond what was fed inside the horizon.
        known = jnp.minimum(state.horizon - before + 1, width) - count
        random = _guesses(state.fractions, progress.tokens, progress.length, width - 1)
        left = stop.shift(tokens, count)[:, :-1]
        draft = jnp.where(jnp.arange(width - 1) < known[:, None], left, random)
        first = jnp.take_along_axis(logits, (start + jnp.minimum(count, width - 1))[:, None, None], axis=1)
        drafts = self._drafts(state, progress, draft, first[:, 0], known > 0)
        iterate = jnp.concatenate([token, tokens], axis=1)
        pool = recycling.push(state.pool, iterate)
        accepted = progress.length - before
        return JacobiState(progress, cache, drafts, horizon, pool, state.fractions, accepted)

    def _check(self, request: Request) -> None:
        """Refuses a network that cannot hold the rows, and recorded draws that have no use."""
        rows, network = self.lanes, self.network
        recorded = request.recorded
        if self.acceptance == "rejection" and recorded is not None and recorded.uniforms is not None:
            raise ValueError(
                "recorded.uniforms are one number a position, which acceptance 'rejection' has no use for: "
                "leave them out or choose 'coupled'"
            )
        if rows > 1 and not hasattr(network, "pick"):
            raise ValueError(
                f"{type(self).__name__} with {rows} rows needs a network with candidates in its window, "
                f"not {type(network).__name__}: set rows and pool to 0"
            )
        if rows > network.vocab_size:
            raise ValueError(
                f"rows (1 + pool where it is 0) must not exceed the {network.vocab_size} tokens of the "
                f"vocabulary, not {rows}"
            )

    def _verify(
        self, params: Any, state: JacobiState, fed: Int[Array, "B R W"]
    ) -> tuple[Float[Array, "B RW V"], Any]:
        """Logits of every row, side by side in one window: rows share the cache and do not see each other."""
        batch, rows, width = fed.shape
        at = state.progress.length - 1
        positions = jnp.tile(at[:, None] + jnp.arange(width), (1, rows))
        initial = jnp.tile(stop.window(state.progress.initial, at, width), (1, rows, 1))
        mask = {"window_mask": masks.side_by_side(rows, width)} if rows > 1 else {}
        flat = fed.reshape(batch, rows * width)
        out = self.network.forward(params, flat, positions, state.cache, at, initial, **mask)
        return self.network.logits(params, out.hidden), out.kv

    def _predict(
        self,
        logits: Float[Array, "B RW V"],
        drafts: Int[Array, "B R drafts"],
        inside: Bool[Array, "B drafts"],
        own: Int[Array, "B W"],
        progress: Progress,
        knobs: Any,
    ) -> tuple[Int[Array, "B R W"], Bool[Array, "B R drafts"]]:
        """The token that belongs at each position, and which drafts inside the horizon it agrees with."""
        batch, rows, _ = drafts.shape
        if self.acceptance == "rejection" and not self.greedy:
            probs = distribution(logits, knobs, top_p_rule=self.top_p_rule)
            step = progress.network_calls  # of the row alone
            tokens, accepted = rejection.verify(probs, drafts[:, 0], inside, own, progress.keys, step)
            return tokens[:, None], accepted[:, None]
        predicted = self.sample(logits, jnp.tile(own, (1, rows)), progress, knobs)
        predicted = predicted.reshape(batch, rows, -1)
        return predicted, (drafts == predicted[:, :, :-1]) & inside[:, None]

    def _drafts(
        self,
        state: JacobiState,
        progress: Progress,
        draft: Int[Array, "B drafts"],
        first: Float[Array, "B V"],
        known: Bool[Array, "B"],
    ) -> Int[Array, "B R drafts"]:
        """The new draft and its candidates: from the pool, then with the next-best first guess."""
        extra = self.lanes - 1
        if extra == 0:
            return draft[:, None]
        token = newest(progress)[0][:, 0]
        candidates, valid = recycling.recycled(state.pool, token, draft)
        repairs = recycling.alternatives(first, draft, extra)
        valid = jnp.concatenate([valid, jnp.broadcast_to(known[:, None], repairs.shape[:2])], axis=1)
        everything = jnp.concatenate([candidates, repairs], axis=1)
        chosen = recycling.distinct(draft, everything, valid, extra)
        return jnp.concatenate([draft[:, None], chosen], axis=1)

    def horizon(
        self, progress: Progress, old: Int[Array, "B"], agreed: Int[Array, "B"], knobs: Any
    ) -> Int[Array, "B"]:
        """Where the window ends: at its full width (running), or at the end of the block of the next token."""
        del agreed, knobs
        if self.running:
            return progress.length - 1 + self.width
        return jnp.where(progress.length > old, old + self.block, old)

    def newest_agreement(
        self, agrees: Bool[Array, "B drafts"], at: Int[Array, "B"], horizon: Int[Array, "B"]
    ) -> Int[Array, "B"]:
        """How far the newest block agrees with its prediction; not asked for with a single block."""
        del agrees, horizon
        return 0 * at


def _fractions(keys: Array, size: int) -> Float[Array, "B S"]:
    """One uniform number for each position, drawn once: a position is guessed at random at most a few times."""
    positions = jnp.broadcast_to(jnp.arange(size), (keys.shape[0], size))
    return jax.vmap(jax.vmap(jax.random.uniform))(fold(keys, Purpose.FILLER, positions))


def _guesses(
    fractions: Float[Array, "B S"], tokens: Int[Array, "B _"], lengths: Int[Array, "B"], count: int
) -> Int[Array, "B drafts"]:
    """Tokens for the `count` positions behind `lengths`, drawn uniformly from the row's tokens before them."""
    uniform = stop.window(fractions, lengths, count)
    drawn = jnp.floor(uniform * lengths[:, None]).astype(jnp.int32)
    return jnp.take_along_axis(tokens, drawn, axis=1)
