"""The running window of the released serving engine of Jacobi Forcing, greedy decoder.

The window never shrinks: the last committed token is fed again (its cache slot is rewritten), speculative tokens
follow, and random ids of the whole vocabulary fill it up::

    position   length-1  length ...
    window     seed      s s s s s r r        s speculative, r random
    predicted            g g g g g g g        commits the leading s that agree; g itself only where none does
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paradec_jax.decode import select, stop
from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.base import after, newest, where_rows
from paradec_jax.decode.official_blocks import BlockDecoder, draw, until_stop
from paradec_jax.decode.protocol import Decoded, Progress, Reason, Request
from paradec_jax.decode.sampling import check


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningWindowKnobs(AutoRegressiveKnobs):
    """The engine's loop. It is greedy here, so the sampling knobs keep their defaults.

    Attributes:
      max_iterations: network calls of an engine step. A request that needs more goes on in the next step, whose
        first window is the seed and random ids.
    """

    max_iterations: Int[Array, "..."] | int = 128

    def checked(self) -> "RunningWindowKnobs":
        """Self, after a look at the values that are not traced. Raises ValueError."""
        super().checked()
        check(self.max_iterations, "max_iterations", lambda x: x >= 1, "at least 1")
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowPass:
    """What one network call of a row was fed: the window [B, L], its predictions [B, L - 1], tokens before it [B]."""

    running: Bool[Array, "B"]
    window: Int[Array, "B n"]
    predicted: Int[Array, "B _"]
    length: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningWindowState:
    """Rows, cache (one entry less than tokens), the next window, network calls done, [B], and the last call."""

    progress: Progress
    cache: Any
    window: Int[Array, "B n"]
    time: Int[Array, "B"]
    passed: WindowPass


@dataclasses.dataclass(frozen=True)
class OfficialRunningWindow(BlockDecoder):
    """The engine's greedy decoder; a step is one network call. It keeps what the engine does:

    - where k - 1 speculative tokens agree, k - 1 tokens are committed, not the k that are known;
    - after a window that agrees as a whole, the first new guess repeats the seed;
    - the budget is looked at between network calls, so the result may overrun it by up to L - 2 tokens.

    Attributes:
      block: L, width of the window, at least 2.
    """

    Knobs: ClassVar[type] = RunningWindowKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 2:
            raise ValueError(f"block must be at least 2 (a seed and a guess), not {self.block}")

    def init(self, params: Any, request: Request, knobs: RunningWindowKnobs) -> RunningWindowState:
        """Reads the prompt; the first window is its last token and what the prefill predicted."""
        progress, cache, predicted = self.read(params, request, knobs, 2 * self.block, self.block)
        window = jnp.concatenate([newest(progress)[0], predicted[:, :-1]], axis=1)
        zeros = jnp.zeros_like(request.lengths)
        passed = WindowPass(jnp.zeros(request.batch, bool), window, predicted[:, :-1], zeros)
        return RunningWindowState(progress, cache, window, zeros, passed)

    def step(self, params: Any, state: RunningWindowState, knobs: RunningWindowKnobs) -> RunningWindowState:
        """Feeds the window, commits the guesses that agree (or one prediction), and fills the window up."""
        before, width = state.progress, self.block
        at = before.length - 1
        positions = at[:, None] + jnp.arange(width)
        latent = stop.window(before.initial, at, width)
        out = self.network.forward(params, state.window, positions, state.cache, at, latent)
        predicted = self.predict(params, out.hidden[:, :-1])  # the last position's goes unused
        cache = self.network.write(state.cache, out.kv, after(at, predicted))

        guesses = state.window[:, 1:]
        agreed = select.prefix(guesses == predicted)
        tokens = jnp.where(agreed[:, None] > 0, guesses, predicted)
        count = jnp.maximum(agreed, 1)
        first, stopped = until_stop(before, tokens, count)
        progress = stop.extend(before.count(1, width, 1), tokens, jnp.where(stopped, first, count))
        used_up = progress.length >= progress.limit
        reason = jnp.where(stopped, Reason.STOP, jnp.where(used_up, Reason.BUDGET, Reason.RUNNING))
        progress = dataclasses.replace(progress, reason=jnp.where(before.done, before.reason, reason))

        time = state.time + 1
        window = self._next(progress, predicted, agreed, time, knobs)
        window, time = where_rows(~before.done, (window, time), (state.window, state.time))
        passed = WindowPass(~before.done, state.window, predicted, before.length)
        return RunningWindowState(progress, cache, window, time, passed)

    def _next(
        self,
        progress: Progress,
        predicted: Int[Array, "B _"],
        agreed: Int[Array, "B"],
        time: Int[Array, "B"],
        knobs: RunningWindowKnobs,
    ) -> Int[Array, "B n"]:
        """Seed, predictions behind the committed tokens, random ids."""
        guesses = self.block - 1
        used = jnp.where(agreed > 0, jnp.minimum(agreed, guesses - 1), 1)
        kept = jnp.where(time % knobs.max_iterations == 0, 0, guesses - used)
        slots = jnp.arange(guesses)
        ahead = progress.length[:, None] + slots
        fill = draw(progress.keys, ahead, jnp.full_like(time, self.network.vocab_size), time)
        recorded = progress.recorded
        if recorded is not None and recorded.windows is not None:
            given = recorded.windows[:, :, 1:]
            at = jnp.minimum(time, given.shape[1] - 1)[:, None, None]
            given = jnp.where(
                (time < given.shape[1])[:, None], jnp.take_along_axis(given, at, axis=1)[:, 0], -1
            )
            fill = jnp.where(given < 0, fill, given)
        window = jnp.where(slots < kept[:, None], stop.shift(predicted, used), fill)
        return jnp.concatenate([newest(progress)[0], window], axis=1)

    def finish(self, state: RunningWindowState) -> Decoded:
        """All committed tokens, those beyond the budget included."""
        return stop.finish(state.progress, self.size + self.block, self.pad)
