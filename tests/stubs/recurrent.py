"""A recurrent-depth network with known answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.nn import masks
from stubs.base import CachedStub, Ids, Inputs, Mask, Probe, spoilt, write

State = Float[Array, "B W 2"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StubKV:
    """What a stub keeps of positions, of a whole buffer (S) or of one window (W).

    Attributes:
      tokens: input tokens, [B, S, 1].
      coda: predicted tokens, [B, S, 1].
      depth: recurrences done, [B, S] of a cache, [B] of a window.
    """

    tokens: Int[Array, "B S 1"]
    coda: Float[Array, "B S 1"]
    depth: Int[Array, "..."]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StubCache:
    """What is kept of a whole buffer, and the latent that each position starts from."""

    kv: StubKV
    initial: Float[Array, "B S 2"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StubView:
    """Positions of a window, the sum of the cached tokens that each query sees, and its mask within
    the window.
    """

    positions: Ids
    seen: Int[Array, "B *W"]
    mask: Bool[Array, "*B W W"]


@dataclasses.dataclass(frozen=True)
class StubNetwork(CachedStub):
    """A recurrent network whose every answer is known beforehand.

    The latent of position p is a counter: after n recurrences it is `min(n, c(p))`, so recurrence n
    moves it by the share 1/n while n <= c(p) and not at all afterwards. With a `rate` it is `1 -
    rate^n` instead. The next token is a function of token, position and the tokens before it (which
    come from the cache, so that a wrong cache gives wrong tokens); before c(p) recurrences are done
    another, known token is predicted.

    ::

        next(p) = (5 token(p) + 3 p + sum of tokens before p + 1) mod V      n >= c(p)
                  the same + 1                                  mod V        n <  c(p)

    Attributes:
      vocab_size: V.
      max_length: longest sequence.
      recurrence: recurrences of `forward`.
      needed: c(p), repeated along positions.
      errs: whether too few recurrences predict the other token.
      rate: ratio of a geometric approach; 0 for the counter.
      sharpness: logit of the predicted token; all others are 0.
      probe: called on the host with "network_calls" or "recurrences" whenever such a part really
        runs.
    """

    vocab_size: int = 11
    max_length: int = 64
    recurrence: int = 4
    needed: tuple[int, ...] = (3,)
    errs: bool = True
    rate: float = 0.0
    sharpness: float = 8.0
    probe: Probe | None = None
    # passes of the core, one after the other
    counters: ClassVar[tuple[str, ...]] = ("recurrences",)

    def at(self, recurrence: int | None) -> "StubNetwork":
        """The same network at another depth; itself when None."""
        return self if recurrence is None else dataclasses.replace(self, recurrence=recurrence)

    def needs(self, position: int) -> int:
        """c(p), recurrences after which a position predicts its true successor."""
        return self.needed[position % len(self.needed)]

    def expected(self, prompt: Sequence[int], count: int, recurrence: int = 1_000) -> list[int]:
        """The `count` tokens that follow a prompt where every position does `recurrence`
        recurrences.
        """
        tokens = list(prompt)
        for _ in range(count):
            last = len(tokens) - 1
            right = 5 * tokens[-1] + 3 * last + sum(tokens[:-1]) + 1
            early = self.errs and recurrence < self.needs(last)
            tokens.append((right + early) % self.vocab_size)
        return tokens[len(prompt) :]

    def init_cache(
        self, keys: Array, size: int, *, scale: Any = 1.0, states: Float[Array, "P 2"] | None = None
    ) -> StubCache:
        """An empty cache; `states` are recorded draws, the last of them for all later positions."""
        batch = len(keys)
        initial = jnp.zeros((batch, size, 2)) * scale
        if states is not None:
            initial = initial + states[jnp.minimum(jnp.arange(size), len(states) - 1)] * scale
        kv = dataclasses.replace(
            self.empty_window(batch, size), depth=jnp.zeros((batch, size), jnp.int32)
        )
        return StubCache(kv, initial)

    def latents(self, cache: StubCache, positions: Ids) -> State:
        return jnp.take_along_axis(cache.initial, positions[..., None], axis=1)

    def start_from(self, cache: StubCache, states: State, at: Int[Array, "B"]) -> StubCache:
        """The cache in which positions `at .. at + W - 1` start from these latents."""
        return dataclasses.replace(cache, initial=write(cache.initial, states, at))

    def initial_state(self, keys: Array, scale: Any) -> Float[Array, "*B 2"]:
        """Zeros: nothing is random but the tokens drawn from the logits."""
        return jnp.zeros((*keys.shape, 2)) * scale

    def empty_window(self, batch: int, width: int) -> StubKV:
        shape = (batch, width, 1)
        return StubKV(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(batch, jnp.int32))

    def write(self, cache: StubCache, window: StubKV, at: Int[Array, "B"]) -> StubCache:
        """The cache with a window stored at positions `at .. at + W - 1`."""
        depth = jnp.broadcast_to(window.depth[:, None], window.tokens.shape[:2])
        kv = write(cache.kv, dataclasses.replace(window, depth=depth), at)
        return dataclasses.replace(cache, kv=kv)

    def pick(self, window: StubKV, start: Int[Array, "B"], width: int) -> StubKV:
        """Slots `start .. start + width - 1` of each row's window."""
        return StubKV(*super().pick((window.tokens, window.coda), start, width), window.depth)

    def widen(self, window: StubKV, width: int) -> StubKV:
        """The window with zeros after its positions, up to `width`."""
        return StubKV(*super().widen((window.tokens, window.coda), width), window.depth)

    def view(self, positions: Ids, prefix: Prefix | None = None, mask: Mask = None) -> StubView:
        """What a window sees: of the cache what the prefix says, and itself, causally by default."""
        mask = masks.causal(positions.shape[1]) if mask is None else mask
        if prefix is None or prefix.visible is None:
            return StubView(positions, jnp.zeros(positions.shape[0], jnp.int32), mask)
        tokens = prefix.kv.kv.tokens[..., 0]
        within = masks.visible(prefix.visible, tokens.shape[1])
        tokens = tokens if within.ndim == 2 else tokens[:, None]
        return StubView(positions, jnp.sum(jnp.where(within, tokens, 0), axis=-1), mask)

    def embed(
        self, params: Any, inputs: Inputs, view: StubView, window: StubKV
    ) -> tuple[State, StubKV]:
        """Keeps the tokens, vectors as the nearest one; the conditioning itself is not used."""
        self.report("network_calls")
        inputs = self.tokens_of(inputs)
        e = jnp.stack([inputs, view.positions], axis=-1).astype(jnp.float32)
        return e, dataclasses.replace(window, tokens=inputs[..., None])

    def iterate(
        self,
        params: Any,
        state: State,
        e: State,
        view: StubView,
        window: StubKV,
        index: Any,
        rows: Bool[Array, "B"] | None = None,
    ) -> tuple[State, StubKV]:
        """One recurrence of the rows that move."""
        self.report("recurrences")
        level, count = state[..., 0], state[..., 1] + 1
        if self.rate:
            level = level + (1 - self.rate) * (1 - level)
            new = jnp.stack([level, jnp.zeros_like(level)], axis=-1)
        else:
            new = jnp.stack([jnp.zeros_like(level), jnp.minimum(count, self._needs(view))], axis=-1)
        new = new + spoilt(params).state
        depth = jnp.broadcast_to(jnp.asarray(index + 1, jnp.int32), window.depth.shape)
        if rows is not None:
            new = jnp.where(rows[:, None, None], new, state)
            depth = jnp.where(rows, depth, window.depth)
        return new, dataclasses.replace(window, depth=depth)

    def recur(
        self, params: Any, state: State, e: State, view: StubView, window: StubKV, recurrences: int
    ) -> tuple[State, StubKV]:

        def body(carry: tuple[Array, StubKV], index: Array) -> tuple[tuple[Array, StubKV], None]:
            return self.iterate(params, carry[0], e, view, carry[1], index), None

        return lax.scan(body, (state, window), jnp.arange(recurrences))[0]

    def readout(self, params: Any, state: State, view: StubView, window: StubKV) -> Forward:
        """Ends a call: the predicted token, as a number, the window, and its recurrences."""
        tokens = window.tokens[..., 0]
        seen = view.seen if view.seen.ndim == 2 else view.seen[:, None]
        before = seen + jnp.sum(view.mask * tokens[:, None], axis=-1) - tokens
        ready = state[..., 0] > 1 - self.rate ** (self._needs(view) - 0.5)
        if not self.rate:
            ready = state[..., 1] > self._needs(view) - 0.5
        early = ~ready & self.errs
        predicted = (5 * tokens + 3 * view.positions + before + 1 + early) % self.vocab_size
        hidden = jnp.stack([predicted, jnp.zeros_like(predicted)], axis=-1).astype(jnp.float32)
        window = dataclasses.replace(window, coda=hidden[..., :1])
        return Forward(hidden, window, {"recurrences": window.depth})

    def normalise(self, params: Any, state: Float[Array, "*shape 2"]) -> Float[Array, "*shape 2"]:
        """The state as it is: there is no norm."""
        return state

    def forward(
        self, params: Any, inputs: Inputs, positions: Ids, prefix: Prefix, mask: Mask = None
    ) -> Forward:
        """One call: embedding, r recurrences, readout. The caller stores the window."""
        states = self.latents(prefix.kv, positions)
        return self.forward_from(params, inputs, positions, states, prefix, mask)[0]

    def forward_from(
        self,
        params: Any,
        inputs: Inputs,
        positions: Ids,
        states: State,
        prefix: Prefix | None = None,
        mask: Mask = None,
    ) -> tuple[Forward, State]:
        """As `forward` from given latents; returns the latents after the last recurrence as well."""
        view = self.view(positions, prefix, mask)
        e, window = self.embed(params, inputs, view, self.empty_window(*positions.shape))
        # Each call starts anew: a latent that is carried on must not count as recurrences done.
        states, window = self.recur(
            params, jnp.zeros_like(states), e, view, window, self.recurrence
        )
        return self.readout(params, states, view, window), states

    def _needs(self, view: StubView) -> Float[Array, "B W"]:
        return jnp.asarray(self.needed, jnp.float32)[view.positions % len(self.needed)]
