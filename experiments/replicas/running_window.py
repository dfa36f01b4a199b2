"""The running window of the released serving engine of Jacobi Forcing, greedy decoder.

The window never shrinks: the last committed token is fed again (its cache slot is rewritten),
speculative tokens follow, and random ids of the whole vocabulary fill it up::

    position   length-1  length ...
    window     seed      s s s s s r r        s speculative, r random
    predicted            g g g g g g g        commits the leading s that agree; g itself only where none does
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from experiments.replicas import blocks
from paradec_jax.decode.machine.decoder import CachedState, DecoderBase
from paradec_jax.decode.machine.knobs import COUNT, SamplingKnobs, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.windows import shift, where_rows, write_after_read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningWindowKnobs(SamplingKnobs):
    """The engine's loop. It is greedy here, so the sampling knobs keep their defaults.

    Attributes:
      max_iterations: network calls of an engine step. A request that needs more goes on in the next
        step, whose first window is the seed and random ids.
    """

    max_iterations: Int[Array, ""] | int = knob(128, COUNT)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedRunningWindowInfo:
    """What a network call of each row was fed.

    Attributes:
      running: whether the row ran, [B]; otherwise the rest means nothing.
      window, predicted: seed and guesses, [B, L], and the argmax at all but the last, [B, L - 1].
      length: tokens before the guesses, [B].
    """

    running: Bool[Array, "B"]
    window: Int[Array, "B L"]
    predicted: Int[Array, "B _"]
    length: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedRunningWindowState(CachedState):
    """Rows, cache (one entry less than tokens), the next window, and network calls done, [B]."""

    window: Int[Array, "B L"]
    time: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class ReleasedRunningWindow(DecoderBase):
    """The engine's greedy decoder; a step is one network call. It keeps what the engine does:

    - where k - 1 speculative tokens agree, k - 1 tokens are committed, not the k that are known;
    - after a window that agrees as a whole, the first new guess repeats the seed;
    - the budget is looked at between network calls, so the result may overrun it by up to L - 2
      tokens.

    Attributes:
      block: L, width of the window, at least 2.
      greedy: always.
    """

    _: dataclasses.KW_ONLY
    block: int = 64
    greedy: bool = True
    Knobs: ClassVar[type] = RunningWindowKnobs

    def __post_init__(self) -> None:
        blocks.check_settings(self, 2, " (a seed and a guess)")

    def init(
        self, params: Any, request: Request, knobs: RunningWindowKnobs
    ) -> ReleasedRunningWindowState:
        """Reads the prompt; the first window is its last token and what the prefill predicted."""
        del knobs
        rows, cache, predicted = blocks.read(
            self, params, request, 2 * self.block, overrun=self.block
        )
        window = jnp.concatenate([rows.newest[0], predicted[:, :-1]], axis=1)
        return ReleasedRunningWindowState(rows, cache, window, jnp.zeros_like(request.lengths))

    def step(
        self, params: Any, state: ReleasedRunningWindowState, knobs: RunningWindowKnobs
    ) -> tuple[ReleasedRunningWindowState, ReleasedRunningWindowInfo]:
        """Feeds the window, commits the guesses that agree (or one prediction), and fills the
        window up.
        """
        before, at, width = state.rows, state.cached, self.block
        positions = at[:, None] + jnp.arange(width)
        out = self.network.forward(params, state.window, positions, Prefix(state.cache, at))
        # the last position's goes unused
        predicted = blocks.predict(self, params, out.hidden[:, :-1])
        cache = self.network.write(state.cache, out.kv, write_after_read(at, predicted))

        guesses = state.window[:, 1:]
        agreed = select.leading_run(guesses == predicted)
        tokens = jnp.where(agreed[:, None] > 0, guesses, predicted)
        count = jnp.maximum(agreed, 1)
        first, stopped = blocks.until_stop(before, tokens, count)
        rows = before.spend(out.counts, width)
        rows = blocks.extend(rows, tokens, jnp.where(stopped, first, count))
        rows = blocks.ended(rows, stopped, rows.length >= rows.limit)

        time = state.time + 1
        window = self._next(rows, predicted, agreed, time, knobs)
        window, time = where_rows(~before.done, (window, time), (state.window, state.time))
        info = ReleasedRunningWindowInfo(~before.done, state.window, predicted, before.length)
        return ReleasedRunningWindowState(rows, cache, window, time), info

    def drafts(self, state: ReleasedRunningWindowState) -> Int[Array, "B _"]:
        """The guesses after the seed."""
        return state.window[:, 1:]

    def _next(
        self,
        rows: Rows,
        predicted: Int[Array, "B _"],
        agreed: Int[Array, "B"],
        time: Int[Array, "B"],
        knobs: RunningWindowKnobs,
    ) -> Int[Array, "B L"]:
        """Seed, predictions after the committed tokens, random ids."""
        guesses = self.block - 1
        used = jnp.where(agreed > 0, jnp.minimum(agreed, guesses - 1), 1)
        kept = jnp.where(time % knobs.max_iterations == 0, 0, guesses - used)
        slots = jnp.arange(guesses)
        ahead = rows.length[:, None] + slots
        fill = blocks.draw(rows.keys, ahead, jnp.full_like(time, self.network.vocab_size), time)
        recorded = rows.recorded
        if recorded is not None and recorded.windows is not None:
            given = recorded.windows[:, :, 1:]
            at = jnp.minimum(time, given.shape[1] - 1)[:, None, None]
            given = jnp.where(
                (time < given.shape[1])[:, None], jnp.take_along_axis(given, at, axis=1)[:, 0], -1
            )
            fill = jnp.where(given < 0, fill, given)
        window = jnp.where(slots < kept[:, None], shift(predicted, used), fill)
        return jnp.concatenate([rows.newest[0], window], axis=1)
