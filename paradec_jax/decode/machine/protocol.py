"""What a decoder is: the request it takes, the network it drives, the progress it keeps, the result it gives."""

import dataclasses
import enum
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.randomness import Recorded

State = TypeVar("State")
Knobs = Any
Params = Any
Cache = Any
Window = Any


class Reason(enum.IntEnum):
    """Why a row stopped."""

    RUNNING = 0
    STOP = 1
    BUDGET = 2
    CALLER = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """Prompts and all that belongs to a row: its budget, its stop tokens, its key.

    Attributes:
      tokens: prompts, right-padded, [B, P].
      lengths: prompt tokens of each row, [B], at least 1.
      budgets: new tokens each row may produce, [B], at least 1.
      keys: one typed PRNG key a row, [B].
      stop: token ids that end a row (and stay in its output), [B, K], padded with -1.
      recorded: recorded draws that take the place of the keys.
    """

    tokens: Int[Array, "B P"]
    lengths: Int[Array, "B"]
    budgets: Int[Array, "B"]
    keys: Array
    stop: Int[Array, "B K"]
    recorded: Recorded | None = None

    @property
    def batch(self) -> int:
        """B, number of rows."""
        return self.tokens.shape[0]


def make_request(
    tokens: Any,
    lengths: Any = None,
    *,
    max_new_tokens: Any,
    stop: tuple[int, ...] = (),
    seed: int = 0,
    keys: Array | None = None,
    recorded: Recorded | None = None,
) -> Request:
    """A request from prompt tokens [B, P] or a list of unequal prompts.

    Args:
      tokens: array [B, P] (right-padded where `lengths` is given) or a list of token lists.
      lengths: prompt lengths [B]; by default each list's length, or P.
      max_new_tokens: one budget for all rows, or one a row.
      stop: token ids that end a row.
      seed: row i draws with `fold_in(key(seed), i)` unless `keys` are given.
      keys: one typed key a row.
      recorded: recorded draws.

    Raises:
      ValueError: an empty prompt, a length beyond P, or a budget below 1.
    """
    if isinstance(tokens, list | tuple):
        lengths = [len(row) for row in tokens] if lengths is None else lengths
        padded = np.zeros((len(tokens), max((len(row) for row in tokens), default=0)), np.int32)
        for row, values in zip(padded, tokens, strict=True):
            row[: len(values)] = values
        tokens = padded
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or tokens.shape[0] == 0:
        raise ValueError(f"tokens must be [B, P] with at least one row, not of shape {tokens.shape}")
    batch, width = tokens.shape
    lengths = np.full(batch, width) if lengths is None else np.asarray(lengths)
    budgets = np.broadcast_to(np.asarray(max_new_tokens), (batch,))
    if lengths.shape != (batch,) or lengths.min() < 1 or lengths.max() > width:
        raise ValueError(f"lengths must be {batch} numbers from 1 to {width}, not {lengths.tolist()}")
    if budgets.min() < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {budgets.min()}")
    if keys is None:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.arange(batch))
    stop_rows = np.broadcast_to(np.asarray(stop or (-1,), np.int32), (batch, max(len(stop), 1)))
    return Request(
        jnp.asarray(tokens),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(budgets, jnp.int32),
        keys,
        jnp.asarray(stop_rows),
        recorded,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """What every decoder's state keeps of its rows.

    Attributes:
      tokens: prompt, committed tokens, then scratch, [B, S].
      prompt_lengths: prompt tokens, [B].
      length: committed tokens, prompt included, [B].
      limit: length at which the budget is used, [B].
      reason: a `Reason`, [B].
      keys, stop: of the request.
      initial: initial latent state of each position, the same in every call that computes it, [B, S, D].
      log_probs: log-probability of each committed token, [B, S], or None where not asked for.
      network_calls: calls of the network while the row was running, prefill included, [B].
      positions: positions those calls computed for the row, [B].
      recurrences: passes of the core those calls made one after the other, [B].
      recorded: recorded draws of the request.
    """

    tokens: Int[Array, "B S"]
    prompt_lengths: Int[Array, "B"]
    length: Int[Array, "B"]
    limit: Int[Array, "B"]
    reason: Int[Array, "B"]
    keys: Array
    stop: Int[Array, "B K"]
    initial: Float[Array, "B S D"]
    log_probs: Float[Array, "B S"] | None
    network_calls: Int[Array, "B"]
    positions: Int[Array, "B"]
    recurrences: Int[Array, "B"]
    recorded: Recorded | None = None

    @property
    def done(self) -> Bool[Array, "B"]:
        """Rows that have stopped."""
        return self.reason != Reason.RUNNING

    @property
    def generated(self) -> Int[Array, "B"]:
        """Tokens committed beyond the prompt."""
        return self.length - self.prompt_lengths

    def count(self, calls: Array | int, positions: Array | int, recurrences: Array | int) -> "Progress":
        """Adds to the counters of the rows that are running."""
        running = ~self.done
        return dataclasses.replace(
            self,
            network_calls=self.network_calls + running * calls,
            positions=self.positions + running * positions,
            recurrences=self.recurrences + running * recurrences,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """The result of a decoder.

    Attributes:
      tokens: prompt and generated tokens, `pad` behind them, [B, S].
      prompt_lengths: prompt tokens, [B].
      lengths: prompt and generated tokens, [B].
      reasons: why each row stopped, a `Reason`, [B].
      log_probs: log-probability of each generated token, [B, S], or None.
      network_calls: calls of the network for the row, prefill included, [B].
      positions: positions computed for the row, [B].
      recurrences: passes of the core, one after the other, [B].
    """

    tokens: Int[Array, "B S"]
    prompt_lengths: Int[Array, "B"]
    lengths: Int[Array, "B"]
    reasons: Int[Array, "B"]
    log_probs: Float[Array, "B S"] | None
    network_calls: Int[Array, "B"]
    positions: Int[Array, "B"]
    recurrences: Int[Array, "B"]

    @property
    def generated(self) -> Int[Array, "B"]:
        """Tokens generated in each row."""
        return self.lengths - self.prompt_lengths

    def completions(self) -> list[list[int]]:
        """The generated tokens of each row, as lists."""
        tokens, start, end = (
            np.asarray(self.tokens),
            np.asarray(self.prompt_lengths),
            np.asarray(self.lengths),
        )
        return [row[a:b].tolist() for row, a, b in zip(tokens, start, end, strict=True)]


class Network(Protocol):
    """A network as the machine drives it; frozen and hashable, parameters always an argument.

    A cache is addressed by absolute position. `forward` reads the first `visible` positions of it and returns
    the window's keys and values; the decoder stores them with `write`, or does not. Without a cache a window
    sees itself alone.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def recurrence(self) -> int: ...
    def prepare(self, params: Params) -> Params: ...
    def init_cache(self, batch: int, size: int) -> Cache: ...
    def write(self, cache: Cache, window: Window, at: Int[Array, "B"]) -> Cache: ...
    def initial_state(self, keys: Array, scale: Any) -> Float[Array, "B W D"]: ...
    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        cache: Cache | None,
        visible: Int[Array, "B"] | None,
        state: Float[Array, "B W D"],
        recurrence: int | None = None,
    ) -> Any: ...
    def logits(self, params: Params, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]: ...


class CandidateNetwork(Network, Protocol):
    """A network whose window may hold several candidates: who sees whom is told, the winner's slots are picked."""

    def pick(self, window: Window, start: Int[Array, "B"], width: int) -> Window: ...
    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        cache: Cache | None,
        visible: Int[Array, "B"] | None,
        state: Float[Array, "B W D"] | None = None,
        recurrence: int | None = None,
        window_mask: Bool[Array, "*B W W"] | None = None,
    ) -> Any: ...


class RecurrentNetwork(Network, Protocol):
    """A network whose forward can be taken apart: prelude, one recurrence at a time, coda."""

    def view(
        self, positions: Int[Array, "B W"], cache: Cache | None, visible: Int[Array, "B"] | None
    ) -> Any: ...
    def empty_window(self, batch: int, width: int) -> Window: ...
    def embedding(self, params: Params) -> Float[Array, "V D"]: ...
    def embed(
        self, params: Params, tokens: Int[Array, "B W"] | Float[Array, "B W D"], view: Any, window: Window
    ) -> tuple[Float[Array, "B W D"], Window]: ...
    def iterate(
        self,
        params: Params,
        state: Float[Array, "B W D"],
        e: Float[Array, "B W D"],
        view: Any,
        window: Window,
        index: Any,
        rows: Bool[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B W D"], Window]: ...
    def recur(
        self,
        params: Params,
        state: Float[Array, "B W D"],
        e: Float[Array, "B W D"],
        view: Any,
        window: Window,
        recurrences: int,
    ) -> tuple[Float[Array, "B W D"], Window]: ...
    def widen(self, window: Window, width: int) -> Window: ...
    def readout(
        self, params: Params, state: Float[Array, "B W D"], view: Any, window: Window
    ) -> tuple[Float[Array, "B W D"], Window]: ...


@runtime_checkable
class Decoder(Protocol[State]):
    """A frozen, hashable dataclass of static choices with pure methods.

    `network` and `size` (buffer length S, prompt and new tokens) may be left out and bound later with `bind`.
    """

    Knobs: ClassVar[type]

    def init(self, params: Params, request: Request, knobs: Knobs) -> State:
        """Allocates every buffer, reads the prompt, and commits the first token where the rule says so."""
        ...

    def step(self, params: Params, state: State, knobs: Knobs) -> State:
        """One round of the network over all rows; rows that are done keep tokens, lengths and counters."""
        ...

    def done(self, state: State) -> Bool[Array, "B"]:
        """Rows that have stopped."""
        ...

    def finish(self, state: State) -> Decoded:
        """The result so far."""
        ...

    def differentiable(self) -> "Decoder":
        """The same decoder with inner loops of a fixed number of steps, which reverse mode can cross."""
        ...
