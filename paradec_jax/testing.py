"""Networks with known answers, and tiny models, for tests of decoders."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import CAUSAL_PRESETS, RECURRENT_PRESETS
from paradec_jax.decode import Request, make_request
from paradec_jax.models import CausalNetwork, RecurrentDepthNetwork, causal
from paradec_jax.models.base import Forward
from paradec_jax.models.recurrent_depth import init_params
from paradec_jax.nn import masks

PROMPTS = ((3, 1, 4), (1, 5, 2, 6, 5), (2, 7))


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
class StubView:
    """Positions of a window, and the sum of the cached tokens that it sees."""

    positions: Int[Array, "B W"]
    seen: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StubForward:
    """What one call returns: head input, latent, and the window to be stored."""

    hidden: Float[Array, "B W 2"]
    latent: Float[Array, "B W 2"]
    kv: StubKV


@dataclasses.dataclass(frozen=True)
class StubNetwork:
    """A recurrent network whose every answer is known beforehand.

    The latent of position p is a counter: after n recurrences it is `min(n, c(p))`, so recurrence n moves it
    by the share 1/n while n <= c(p) and not at all afterwards. With a `rate` it is `1 - rate^n` instead. The
    next token is a function of token, position and the tokens before it (which come from the cache, so that a
    wrong cache gives wrong tokens); before c(p) recurrences are done another, known token is predicted.

    ::

        next(p) = (5 token(p) + 3 p + sum of tokens before p + 1) mod V      n >= c(p)
                  the same + 1                                  mod V        n <  c(p)

    Attributes:
      vocab_size: V.
      max_length: longest sequence.
      recurrence: recurrences of `forward` unless told otherwise.
      needed: c(p), repeated along positions.
      errs: whether too few recurrences predict the other token.
      rate: ratio of a geometric approach; 0 for the counter.
      sharpness: logit of the predicted token; all others are 0.
      probe: called on the host with "embed" or "iterate" whenever such a part really runs.
    """

    vocab_size: int = 11
    max_length: int = 64
    recurrence: int = 4
    needed: tuple[int, ...] = (3,)
    errs: bool = True
    rate: float = 0.0
    sharpness: float = 8.0
    probe: Callable[[str], None] | None = None

    def needs(self, position: int) -> int:
        """c(p), recurrences after which a position predicts its true successor."""
        return self.needed[position % len(self.needed)]

    def expected(self, prompt: Sequence[int], count: int, recurrence: int = 1_000) -> list[int]:
        """The `count` tokens that follow a prompt where every position does `recurrence` recurrences."""
        tokens = list(prompt)
        for _ in range(count):
            last = len(tokens) - 1
            right = 5 * tokens[-1] + 3 * last + sum(tokens[:-1]) + 1
            early = self.errs and recurrence < self.needs(last)
            tokens.append((right + early) % self.vocab_size)
        return tokens[len(prompt) :]

    def prepare(self, params: Any) -> Any:
        """The parameters as they are."""
        return params

    def init_cache(self, batch: int, size: int) -> StubKV:
        """An empty cache."""
        return dataclasses.replace(self.empty_window(batch, size), depth=jnp.zeros((batch, size), jnp.int32))

    def empty_window(self, batch: int, width: int) -> StubKV:
        """Room for one window."""
        shape = (batch, width, 1)
        return StubKV(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(batch, jnp.int32))

    def write(self, cache: StubKV, window: StubKV, at: Int[Array, "B"]) -> StubKV:
        """The cache with a window stored at positions `at .. at + W - 1`."""

        def put(old: Array, new: Array) -> Array:
            start = (0,) * (old.ndim - 2)
            return jax.vmap(lambda row, fresh, p: lax.dynamic_update_slice(row, fresh, (p, *start)))(
                old, new, at
            )

        depth = jnp.broadcast_to(window.depth[:, None], window.tokens.shape[:2])
        return StubKV(put(cache.tokens, window.tokens), put(cache.coda, window.coda), put(cache.depth, depth))

    def widen(self, window: StubKV, width: int) -> StubKV:
        """The window with zeros behind its positions, up to `width`."""
        extra = [(0, 0), (0, width - window.tokens.shape[1]), (0, 0)]
        return dataclasses.replace(
            window, tokens=jnp.pad(window.tokens, extra), coda=jnp.pad(window.coda, extra)
        )

    def initial_state(self, keys: Array, scale: Any) -> Float[Array, "B W 2"]:
        """Zeros: nothing is random but the tokens drawn from the logits."""
        return jnp.zeros((*keys.shape, 2)) * scale

    def view(
        self,
        positions: Int[Array, "B W"],
        cache: StubKV | None = None,
        visible: Int[Array, "B"] | None = None,
    ) -> StubView:
        """What a window sees: itself, causally, and the first `visible` positions of the cache."""
        if cache is None or visible is None:
            return StubView(positions, jnp.zeros(positions.shape[0], jnp.int32))
        within = jnp.arange(cache.tokens.shape[1]) < visible[:, None]
        return StubView(positions, jnp.sum(jnp.where(within, cache.tokens[..., 0], 0), axis=1))

    def embedding(self, params: Any) -> Float[Array, "V 1"]:
        """The vector of a token is its number."""
        return jnp.arange(self.vocab_size, dtype=jnp.float32)[:, None]

    def embed(
        self, params: Any, tokens: Int[Array, "B W"] | Float[Array, "B W 1"], view: StubView, window: StubKV
    ) -> tuple[Float[Array, "B W 2"], StubKV]:
        """Keeps the tokens, vectors as the nearest one; the conditioning itself is not used."""
        self._report("embed")
        if tokens.ndim == 3:
            tokens = jnp.round(tokens[..., 0]).astype(jnp.int32)
        e = jnp.stack([tokens, view.positions], axis=-1).astype(jnp.float32)
        return e, dataclasses.replace(window, tokens=tokens[..., None])

    def iterate(
        self,
        params: Any,
        state: Float[Array, "B W 2"],
        e: Float[Array, "B W 2"],
        view: StubView,
        window: StubKV,
        index: Any,
        rows: Bool[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B W 2"], StubKV]:
        """One recurrence of the rows that move."""
        self._report("iterate")
        level, count = state[..., 0], state[..., 1] + 1
        if self.rate:
            level = level + (1 - self.rate) * (1 - level)
            new = jnp.stack([level, jnp.zeros_like(level)], axis=-1)
        else:
            new = jnp.stack([jnp.zeros_like(level), jnp.minimum(count, self._needs(view))], axis=-1)
        depth = jnp.broadcast_to(jnp.asarray(index + 1, jnp.int32), window.depth.shape)
        if rows is not None:
            new = jnp.where(rows[:, None, None], new, state)
            depth = jnp.where(rows, depth, window.depth)
        return new, dataclasses.replace(window, depth=depth)

    def recur(
        self,
        params: Any,
        state: Float[Array, "B W 2"],
        e: Float[Array, "B W 2"],
        view: StubView,
        window: StubKV,
        recurrences: int,
    ) -> tuple[Float[Array, "B W 2"], StubKV]:
        """Several recurrences."""

        def body(carry: tuple[Array, StubKV], index: Array) -> tuple[tuple[Array, StubKV], None]:
            return self.iterate(params, carry[0], e, view, carry[1], index), None

        return lax.scan(body, (state, window), jnp.arange(recurrences))[0]

    def readout(
        self, params: Any, state: Float[Array, "B W 2"], view: StubView, window: StubKV
    ) -> tuple[Float[Array, "B W 2"], StubKV]:
        """Head input: the predicted token, as a number."""
        tokens = window.tokens[..., 0]
        before = view.seen[:, None] + jnp.cumsum(tokens, axis=1) - tokens
        ready = state[..., 0] > 1 - self.rate ** (self._needs(view) - 0.5)
        if not self.rate:
            ready = state[..., 1] > self._needs(view) - 0.5
        early = ~ready & self.errs
        predicted = (5 * tokens + 3 * view.positions + before + 1 + early) % self.vocab_size
        hidden = jnp.stack([predicted, jnp.zeros_like(predicted)], axis=-1).astype(jnp.float32)
        return hidden, dataclasses.replace(window, coda=hidden[..., :1])

    def logits(self, params: Any, hidden: Float[Array, "*shape 2"]) -> Float[Array, "*shape V"]:
        """`sharpness` at the predicted token."""
        predicted = jnp.round(hidden[..., 0]).astype(jnp.int32)
        return self.sharpness * jax.nn.one_hot(predicted, self.vocab_size)

    def forward(
        self,
        params: Any,
        tokens: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        cache: StubKV | None,
        visible: Int[Array, "B"] | None,
        state: Float[Array, "B W 2"],
        recurrence: int | None = None,
    ) -> StubForward:
        """One call: embedding, r recurrences, readout. The caller stores the window."""
        view = self.view(positions, cache, visible)
        e, window = self.embed(params, tokens, view, self.empty_window(*tokens.shape))
        count = self.recurrence if recurrence is None else recurrence
        # Each call starts anew: a latent that is carried on must not count as recurrences done.
        state, window = self.recur(params, jnp.zeros_like(state), e, view, window, count)
        hidden, window = self.readout(params, state, view, window)
        return StubForward(hidden, state, window)

    def _needs(self, view: StubView) -> Float[Array, "B W"]:
        return jnp.asarray(self.needed, jnp.float32)[view.positions % len(self.needed)]

    def _report(self, part: str) -> None:
        if self.probe is not None:
            jax.debug.callback(functools.partial(self.probe, part))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StubCausalKV:
    """Input tokens and their positions, of a whole buffer (S) or of one window (W)."""

    tokens: Int[Array, "B S"]
    positions: Int[Array, "B S"]


@dataclasses.dataclass(frozen=True)
class StubCausal:
    """A causal network whose next token is a known function of the tokens that a position sees.

    ::

        next(p) = (sum over d of w(d) token(p - d) + a p + b + astray(p)) mod V,    d = 0 .. p

    `astray` is 0 where each of the positions 0 .. p is seen once, through the cache or the window, and 1
    elsewhere: a wrong mask, position or cache gives wrong tokens even where w is mostly 0. With weights
    (0, 0, 1, 0) and neither a nor b the text repeats with period 3, so that drafts can be right.

    Attributes:
      vocab_size: V.
      max_length: longest sequence.
      weights: w(0), w(1), ..; the last one holds for all greater distances.
      slope, constant: a and b.
      sharpness: logit of the predicted token; all others are 0.
      probe: called on the host with "embed" and "iterate" whenever a call really runs (one recurrence).
    """

    vocab_size: int = 11
    max_length: int = 64
    weights: tuple[int, ...] = (5, 1)
    slope: int = 3
    constant: int = 1
    sharpness: float = 8.0
    probe: Callable[[str], None] | None = None

    @property
    def recurrence(self) -> int:
        """One pass."""
        return 1

    def expected(self, prompt: Sequence[int], count: int, recurrence: int = 1) -> list[int]:
        """The `count` tokens that follow a prompt."""
        del recurrence
        tokens, last = list(prompt), len(self.weights) - 1
        for _ in range(count):
            total = sum(self.weights[min(d, last)] * token for d, token in enumerate(reversed(tokens)))
            tokens.append((total + self.slope * (len(tokens) - 1) + self.constant) % self.vocab_size)
        return tokens[len(prompt) :]

    def prepare(self, params: Any) -> Any:
        """The parameters as they are."""
        return params

    def init_cache(self, batch: int, size: int) -> StubCausalKV:
        """An empty cache, its tokens and positions buffers of their own."""
        return StubCausalKV(jnp.zeros((batch, size), jnp.int32), jnp.zeros((batch, size), jnp.int32))

    def write(self, cache: StubCausalKV, window: StubCausalKV, at: Int[Array, "B"]) -> StubCausalKV:
        """The cache with a window stored at slots `at .. at + W - 1`."""
        put = jax.vmap(lambda row, new, slot: lax.dynamic_update_slice(row, new, (slot,)))
        return jax.tree.map(lambda old, new: put(old, new, at), cache, window)

    def pick(self, window: StubCausalKV, start: Int[Array, "B"], width: int) -> StubCausalKV:
        """Slots `start .. start + width - 1` of each row's window."""
        take = jax.vmap(lambda row, slot: lax.dynamic_slice(row, (slot,), (width,)))
        return jax.tree.map(lambda x: take(x, start), window)

    def initial_state(self, keys: Array, scale: Any = 1.0) -> Float[Array, "B W 0"]:
        """There is no latent state."""
        del scale
        return jnp.zeros((*keys.shape, 0), jnp.float32)

    def logits(self, params: Any, hidden: Float[Array, "*shape 1"]) -> Float[Array, "*shape V"]:
        """`sharpness` at the predicted token."""
        predicted = jnp.round(hidden[..., 0]).astype(jnp.int32)
        return self.sharpness * jax.nn.one_hot(predicted, self.vocab_size)

    def forward(
        self,
        params: Any,
        tokens: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        cache: StubCausalKV | None = None,
        visible: Int[Array, "B"] | None = None,
        state: Float[Array, "B W 0"] | None = None,
        recurrence: int | None = None,
        window_mask: Bool[Array, "*B W W"] | None = None,
    ) -> Forward:
        """One call; head input is the predicted token, as a number. The caller stores the window."""
        del state, recurrence
        if self.probe is not None:
            for part in ("embed", "iterate"):
                jax.debug.callback(functools.partial(self.probe, part))
        batch, width = tokens.shape
        keys = own = StubCausalKV(tokens, positions)
        seen = masks.causal(width) if window_mask is None else window_mask
        seen = jnp.broadcast_to(seen, (batch, width, width))
        if cache is not None and visible is not None:
            size = cache.tokens.shape[1]
            prefix = jnp.broadcast_to(masks.prefix(visible, size)[:, None], (batch, width, size))
            seen = jnp.concatenate([prefix, seen], axis=-1)
            keys = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), cache, own)

        distance = positions[:, :, None] - keys.positions[:, None]
        weight = jnp.asarray(self.weights)[jnp.clip(distance, 0, len(self.weights) - 1)]
        total = jnp.sum(seen * weight * keys.tokens[:, None], axis=-1)
        count = jnp.sum(seen, axis=-1)
        astray = (count != positions + 1) | (jnp.sum(seen * distance, axis=-1) != count * positions // 2)
        predicted = (total + self.slope * positions + self.constant + astray) % self.vocab_size
        return Forward(predicted[..., None].astype(jnp.float32), self.initial_state(positions), own)


def tiny_network(cache: str = "shared", recurrence: int = 0, **changes: Any) -> RecurrentDepthNetwork:
    """A recurrent-depth network of a few thousand parameters; `changes` are fields of its config."""
    config = dataclasses.replace(RECURRENT_PRESETS["test-recurrent"], **changes)
    return RecurrentDepthNetwork(config, cache=cache, recurrence=recurrence)


@functools.cache
def tiny_params(seed: int = 0, gain: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Random parameters of `tiny_network`, all multiplied by `gain`."""
    config = dataclasses.replace(RECURRENT_PRESETS["test-recurrent"], **changes)
    with jax.ensure_compile_time_eval():  # the first caller may be under a trace, the next one is not
        return jax.tree.map(lambda x: gain * x, init_params(config, jax.random.key(seed)))


def tiny_causal(**changes: Any) -> CausalNetwork:
    """A causal network of a few thousand parameters; `changes` are fields of its config."""
    return CausalNetwork(dataclasses.replace(CAUSAL_PRESETS["test-causal"], **changes))


@functools.cache
def tiny_causal_params(seed: int = 0, gain: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Random parameters of `tiny_causal`, all multiplied by `gain`."""
    with jax.ensure_compile_time_eval():
        config = tiny_causal(**changes).config
        return jax.tree.map(lambda x: gain * x, causal.init_params(config, jax.random.key(seed)))


def tiny_request(
    max_new_tokens: Any = 8, *, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> Request:
    """A request of unequal prompts; `options` are those of `make_request`."""
    return make_request([list(prompt) for prompt in prompts], max_new_tokens=max_new_tokens, **options)
