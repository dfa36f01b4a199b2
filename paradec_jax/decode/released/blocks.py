"""What the released programs of block Jacobi decoding share: prefill, verification, drafts, the driver of calls.

A *call* decodes a block of n tokens behind the committed ones. Its first draft comes from the prefill, the later ones
are the known next token and n - 1 tokens drawn from everything generated so far::

    prefill   p p p p r r r r              prompt and n random prompt tokens
    call 0            d d d d              what it predicts from the last prompt token on
    call 1                    d r r r      the token behind call 0, and random ones

Stop tokens and budgets are looked at where the programs look: a budget only between calls, so that it is overrun.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import select, stop
from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.base import DecoderBase
from paradec_jax.decode.protocol import Progress, Reason, Request
from paradec_jax.decode.randomness import Purpose, fold
from paradec_jax.decode.sampling import check


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockKnobs(AutoRegressiveKnobs):
    """How long it goes on. The programs are greedy, so the sampling knobs keep their defaults.

    Attributes:
      max_calls: block calls at most.
    """

    max_calls: Int[Array, "..."] | int = 1024

    def checked(self) -> "BlockKnobs":
        """Self, after a look at the values that are not traced. Raises ValueError."""
        super().checked()
        check(self.max_calls, "max_calls", lambda x: x >= 1, "at least 1")
        return self


def verify(
    block: Int[Array, "R n"], done: Int[Array, "R"], predicted: Int[Array, "R n"]
) -> tuple[Int[Array, "R n"], Int[Array, "R"]]:
    """Accepts the draft of a block as far as its own predictions repeat it; they replace the rest.

    Tokens before `done` are accepted, the others are the draft; `predicted[x]` is what token x predicts. The
    first token of a draft is known to be right. Three tokens were accepted, now six are::

        x           0 1 2 3 4 5 6 7
        block       a a a d d d d d
        agrees            . = = x        d[x] == predicted[x - 1]
        afterwards  a a a a a a g g      g[x] =  predicted[x - 1], a refreshed draft

    Args:
      block: accepted tokens and draft.
      done: accepted tokens.
      predicted: argmax at each token; entries before `done` are not read, except that the last accepted one is
        where the draft is empty.

    Returns:
      The block afterwards, and its accepted tokens, more than before unless there was no draft. The token behind
      the accepted ones is `predicted[accepted - 1]`.
    """
    n = block.shape[1]
    sure = jnp.arange(n - 1) < done[:, None]
    accepted = 1 + select.prefix(sure | (block[:, 1:] == predicted[:, :-1]))
    refreshed = jnp.concatenate([block[:, :1], predicted[:, :-1]], axis=1)
    return jnp.where(jnp.arange(n) < accepted[:, None], block, refreshed), accepted


def until_stop(
    progress: Progress, tokens: Int[Array, "B W"], count: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """Which of the first `count` tokens come up to the first stop token: how many, and whether there is one."""
    hits = stop.is_stop(tokens, progress.stop) & (jnp.arange(tokens.shape[1]) < count[:, None])
    return jnp.argmax(hits, axis=1) + 1, jnp.any(hits, axis=1)


@dataclasses.dataclass(frozen=True)
class BlockDecoder(DecoderBase):
    """Static fields and methods of the block decoders.

    Attributes:
      block: n, tokens of a block.
      greedy: always; the programs take sampling arguments and ignore them, here they are refused.
    """

    _: dataclasses.KW_ONLY
    block: int = 64
    greedy: bool = True
    Knobs: ClassVar[type] = BlockKnobs

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be at least 1, not {self.block}")
        if not self.greedy or self.log_probs:
            raise ValueError(f"{type(self).__name__} is greedy and keeps no log-probabilities")

    def read(
        self, params: Any, request: Request, knobs: Any, scratch: int, width: int
    ) -> tuple[Progress, Any, Int[Array, "B n"]]:
        """Reads prompts and `width` random prompt tokens behind each in one call; commits nothing.

        Returns:
          Progress, a cache that holds the prompts, and the predictions from the last prompt token on.
        """
        ahead = request.lengths[:, None] + jnp.arange(width)
        drawn = draw(request.keys, ahead, request.lengths)
        drawn = jnp.take_along_axis(request.tokens, drawn, axis=1)
        recorded = request.recorded
        if recorded is not None and recorded.prefill_drafts is not None:
            drawn = jnp.where(recorded.prefill_drafts < 0, drawn, recorded.prefill_drafts)
        progress, cache, hidden = self.prefill_ahead(params, request, knobs, drawn, scratch)
        predicted = self.predict(params, hidden[:, :-1])
        return progress.count(1, request.lengths + width, 1), cache, predicted

    def predict(self, params: Any, hidden: Float[Array, "B W D"]) -> Int[Array, "B W"]:
        """The most probable next token at each position."""
        return jnp.argmax(self.network.logits(params, hidden), axis=-1).astype(jnp.int32)

    def first_draft(self, progress: Progress, predicted: Int[Array, "B n"]) -> Int[Array, "B n"]:
        """The draft of call 0: what the prefill predicted, unless another one was recorded."""
        return self._recorded(progress, predicted, jnp.zeros_like(progress.length))

    def next_draft(
        self, progress: Progress, known: Int[Array, "B"], call: Int[Array, "B"]
    ) -> Int[Array, "B n"]:
        """The draft of a later call: the known next token, and tokens drawn from all that the row holds."""
        ahead = progress.length[:, None] + jnp.arange(self.block)
        drawn = jnp.take_along_axis(
            progress.tokens, draw(progress.keys, ahead, progress.length, call), axis=1
        )
        return self._recorded(progress, drawn.at[:, 0].set(known), call)

    def _recorded(
        self, progress: Progress, draft: Int[Array, "B n"], call: Int[Array, "B"]
    ) -> Int[Array, "B n"]:
        recorded = progress.recorded
        if recorded is None or recorded.drafts is None:
            return draft
        calls = recorded.drafts.shape[1]
        at = jnp.minimum(call, calls - 1)[:, None, None]
        given = jnp.take_along_axis(recorded.drafts, at, axis=1)[:, 0]
        taken = (given >= 0) & (call < calls)[:, None] & (jnp.arange(self.block) > 0)
        return jnp.where(taken, given, draft)

    def reason(
        self,
        progress: Progress,
        stopped: Bool[Array, "B"],
        over: Bool[Array, "B"],
        used_up: Bool[Array, "B"],
        calls: Int[Array, "B"],
        knobs: BlockKnobs,
    ) -> Progress:
        """Progress with the reason of rows that `stopped`, or whose call is over with nothing left for another."""
        used_up = over & (used_up | (calls >= knobs.max_calls))
        reason = jnp.where(stopped, Reason.STOP, jnp.where(used_up, Reason.BUDGET, Reason.RUNNING))
        return dataclasses.replace(progress, reason=jnp.where(progress.done, progress.reason, reason))


def passed(state: Any) -> Any:
    """Record function for `trace`: what the last network call of each row was fed and what became of it."""
    return state.passed


def draw(
    keys: Array,
    positions: Int[Array, "B W"],
    below: Int[Array, "B"],
    call: Int[Array, "B"] | None = None,
) -> Int[Array, "B W"]:
    """A uniform number from 0 to `below - 1` for each position."""
    folded = fold(keys, Purpose.DRAFT, positions, call)
    uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(folded)
    drawn = jnp.floor(uniform * below[:, None]).astype(jnp.int32)
    return jnp.minimum(drawn, below[:, None] - 1)
