"""Adaptive computation: each token gets as many recurrences as an exit criterion asks for."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import stop
from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.base import DecoderBase, after, last_of, newest, prompt_positions, where_rows
from paradec_jax.decode.criteria import CRITERIA, Criterion
from paradec_jax.decode.protocol import Progress, Request


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptiveKnobs(AutoRegressiveKnobs):
    """Sampling, and when to look and leave.

    Attributes:
      exit_threshold: the criterion's threshold; NaN (the default) takes the criterion's own.
      min_recurrence: recurrences before the first check.
      check_every: recurrences between checks.
    """

    exit_threshold: Float[Array, "..."] | float = float("nan")
    min_recurrence: Int[Array, "..."] | int = 0
    check_every: Int[Array, "..."] | int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptiveState:
    """Rows, cache, and what the newest token took.

    Attributes:
      progress: the rows.
      cache: one entry less than committed tokens.
      latent: raw state of the last position at its exit, [B, 1, D].
      recurrences: recurrences the newest committed token took, [B].
      exit_values: what the criterion measured at each check of that token, [B, checks], NaN where it was not
        asked.
    """

    progress: Progress
    cache: Any
    latent: Float[Array, "B 1 D"]
    recurrences: Int[Array, "B"]
    exit_values: Float[Array, "B checks"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Thought:
    """Carry of the loop over recurrences of one window."""

    index: Int[Array, ""]
    latent: Float[Array, "B W D"]
    window: Any
    thinking: Bool[Array, "B"]
    previous: Any
    hidden: Float[Array, "B 1 D"]
    checks: Int[Array, "B"]
    exit_values: Float[Array, "B checks"]


@dataclasses.dataclass(frozen=True)
class Adaptive(DecoderBase):
    """Iterates the newest token until the criterion fires, then samples the next one.

    Attributes:
      criterion: a name of `criteria.CRITERIA`.
      max_recurrence: recurrences at most; the network's default when None.
      prefill_recurrence: recurrences of the prompt at most; `max_recurrence` when None.
      exit_in_prefill: whether the criterion may end the prompt's recurrences.
      continuous: start each new position from the raw state of the one before it at its exit.
      official: what the release does where a criterion that looks at logits never fires: sample from the logits
        of the last check, even where that was before the last recurrence.
    """

    _: dataclasses.KW_ONLY
    criterion: str = "latent-diff"
    max_recurrence: int | None = None
    prefill_recurrence: int | None = None
    exit_in_prefill: bool = True
    continuous: bool = False
    official: bool = False
    Knobs: ClassVar[type] = AdaptiveKnobs

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, not {self.criterion!r}")

    @property
    def _max(self) -> int:
        return self.network.recurrence if self.max_recurrence is None else self.max_recurrence

    @property
    def _prefill_max(self) -> int:
        return self._max if self.prefill_recurrence is None else self.prefill_recurrence

    @property
    def _checks(self) -> int:
        return max(self._max, self._prefill_max)

    def init(self, params: Any, request: Request, knobs: AdaptiveKnobs) -> AdaptiveState:
        """Thinks about the prompt and commits the first token."""
        progress, cache = self.start(request, knobs, 1)
        positions = prompt_positions(request)
        latent = progress.initial[:, : request.tokens.shape[1]]
        zeros = jnp.zeros(request.batch, jnp.int32)
        empty = AdaptiveState(progress, cache, latent[:, :1], zeros, jnp.zeros((request.batch, self._checks)))
        return self._decode(
            params, empty, knobs, request.tokens, positions, zeros, request.lengths, latent, prefill=True
        )

    def step(self, params: Any, state: AdaptiveState, knobs: AdaptiveKnobs) -> AdaptiveState:
        """Thinks about the newest token and commits the token it predicts."""
        progress = state.progress
        tokens, positions = newest(progress)
        latent = state.latent
        if not self.continuous:
            latent = stop.window(progress.initial, positions[:, 0], 1)
        cached = progress.length - 1
        ones = jnp.ones_like(cached)
        return self._decode(params, state, knobs, tokens, positions, cached, ones, latent)

    def _decode(
        self,
        params: Any,
        state: AdaptiveState,
        knobs: AdaptiveKnobs,
        tokens: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        cached: Int[Array, "B"],
        widths: Int[Array, "B"],
        latent: Float[Array, "B W D"],
        prefill: bool = False,
    ) -> AdaptiveState:
        """Feeds a window whose first `widths` positions are real, and commits what its last one predicts."""
        progress = state.progress
        thought = self._think(params, state, knobs, tokens, positions, cached, widths, latent, prefill)
        recurrences = thought.window.depth
        progress = progress.count(1, widths, recurrences)
        progress, token = self.commit_next(params, progress, thought.hidden, knobs)
        cache = self.network.write(state.cache, thought.window, after(cached, token))
        return AdaptiveState(
            progress, cache, last_of(thought.latent, widths), recurrences, thought.exit_values
        )

    def _think(
        self,
        params: Any,
        state: AdaptiveState,
        knobs: AdaptiveKnobs,
        tokens: Array,
        positions: Array,
        cached: Array,
        widths: Array,
        latent: Array,
        prefill: bool,
    ) -> _Thought:
        """Repeats the recurrence; rows whose criterion has fired stay as they are."""
        network, criterion = self.network, CRITERIA[self.criterion]
        reads_logits = criterion.looks_at == "logits"
        view = network.view(positions, None if prefill else state.cache, None if prefill else cached)
        valid = jnp.arange(tokens.shape[1]) < widths[:, None]
        e, window = network.embed(params, tokens, view, network.empty_window(*tokens.shape))
        may_exit = self.exit_in_prefill or not prefill
        threshold = jnp.where(jnp.isnan(knobs.exit_threshold), criterion.threshold, knobs.exit_threshold)

        def read(latent: Array, window: Any) -> tuple[Array, Any]:
            hidden, window = network.readout(params, latent, view, window)
            return last_of(hidden, widths), window

        def check(thought: _Thought) -> _Thought:
            """Rows that think measure, remember, and leave where the criterion fires."""
            if reads_logits:
                hidden, window = read(thought.latent, thought.window)
                hidden = where_rows(thought.thinking, hidden, thought.hidden)
                window = dataclasses.replace(
                    thought.window, coda=where_rows(thought.thinking, window.coda, thought.window.coda)
                )
                thought = dataclasses.replace(thought, hidden=hidden, window=window)
                seen = network.logits(params, hidden)[:, 0]
            else:
                seen = thought.latent
            value, previous = criterion.measure(thought.previous, seen, valid)
            column = jnp.arange(self._checks) == thought.checks[:, None]
            kept = jnp.where(column & thought.thinking[:, None], value[:, None], thought.exit_values)
            return dataclasses.replace(
                thought,
                thinking=thought.thinking & ~criterion.fires(value, threshold),
                previous=where_rows(thought.thinking, previous, thought.previous),
                checks=thought.checks + thought.thinking,
                exit_values=kept,
            )

        def body(thought: _Thought) -> _Thought:
            index = thought.index
            latent, window = network.iterate(
                params, thought.latent, e, view, thought.window, index, thought.thinking
            )
            thought = dataclasses.replace(thought, index=index + 1, latent=latent, window=window)
            due = (index >= knobs.min_recurrence) & ((index - knobs.min_recurrence) % knobs.check_every == 0)
            return lax.cond(due & may_exit, check, lambda t: t, thought)

        batch = tokens.shape[0]
        logits_like = jnp.zeros((batch, network.vocab_size), jnp.float32)
        start = _Thought(
            index=jnp.int32(0),
            latent=latent,
            window=window,
            thinking=~state.progress.done,
            previous=criterion.init(logits_like if reads_logits else latent),
            hidden=jnp.zeros_like(latent[:, :1]),
            checks=jnp.zeros(batch, jnp.int32),
            exit_values=jnp.full((batch, self._checks), jnp.nan, jnp.float32),
        )
        thought = _loop(body, start, self._prefill_max if prefill else self._max, self.bounded)
        return self._read_out(criterion, thought, read)

    def _read_out(self, criterion: Criterion, thought: _Thought, read: Any) -> _Thought:
        """Reads the final states, except where the last check has read them already."""
        hidden, window = read(thought.latent, thought.window)
        if criterion.looks_at != "logits":
            return dataclasses.replace(thought, hidden=hidden, window=window)
        stale = thought.thinking if not self.official else thought.thinking & (thought.checks == 0)
        coda = where_rows(stale, window.coda, thought.window.coda)
        return dataclasses.replace(
            thought,
            hidden=where_rows(stale, hidden, thought.hidden),
            window=dataclasses.replace(thought.window, coda=coda),
        )


def _loop(body: Any, start: _Thought, steps: int, bounded: bool) -> _Thought:
    if bounded:
        return lax.scan(lambda t, _: (body(t), None), start, length=steps)[0]
    return lax.while_loop(lambda t: (t.index < steps) & jnp.any(t.thinking), body, start)
