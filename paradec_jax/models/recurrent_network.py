"""The recurrent-depth transformer as decoders and losses drive it: whole, or taken apart into its three parts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import RecurrentDepthConfig
from paradec_jax.models import recurrent_cache
from paradec_jax.models.axes import sizes
from paradec_jax.models.base import Forward, Prepared, Work
from paradec_jax.models.prepare import prepare_params
from paradec_jax.models.recurrent_cache import CACHE_MODES, RecurrentKV
from paradec_jax.models.recurrent_depth import Inputs, RecurrentDepth, View, parameter_shapes
from paradec_jax.nn import masks
from paradec_jax.nn.rope import rotation

# Recurrences of a decoding step are unrolled up to this many layers.
UNROLLED_LAYERS = 8
STEP_WIDTH = 32  # windows up to this width are steps of a decoder, wider ones are prompts


@dataclasses.dataclass(frozen=True)
class RecurrentDepthNetwork:
    """The network as decoders and losses see it: equal by its config, parameters always an argument.

    Attributes:
      config: the model's shape.
      cache: what a position leaves for later ones, one of `recurrent_cache.CACHE_MODES`.
      recurrence: r, recurrences of `forward` unless told otherwise, and the slots of "full" and "latest".
    """

    config: RecurrentDepthConfig
    cache: str = "shared"
    recurrence: int = 0

    def __post_init__(self) -> None:
        if self.cache not in CACHE_MODES:
            raise ValueError(f"cache must be one of {', '.join(CACHE_MODES)}, not {self.cache!r}")
        if self.recurrence < 0:
            raise ValueError(
                f"recurrence must be positive (or 0 for the config's mean), not {self.recurrence}"
            )
        if self.recurrence == 0:
            object.__setattr__(self, "recurrence", self.config.mean_recurrence)

    @property
    def module(self) -> RecurrentDepth:
        """The Linen module."""
        return RecurrentDepth(self.config)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sequence the model was built for."""
        return self.config.max_length

    def work(self, batch: int, positions: int, context: int, recurrence: int) -> Work:
        """The least that one call on `positions` positions of each row behind `context` cached ones can cost.

        Weights are read once for prelude, coda and output matrix and once a recurrence for core and adapter;
        keys and values of the context once a layer. A multiplication and an addition are two operations.
        """
        c = self.config
        of = sizes(c, parameter_shapes(c))
        once = of["prelude"] + of["coda"] + of["final"] + of["vocab"]
        weights = once + recurrence * (of["core"] + of["adapter"])
        layers = c.prelude_layers + c.coda_layers + c.core_layers * recurrence
        cached = 2 * layers * c.width * batch * context
        rows = batch * positions
        attention = 4 * layers * c.width * rows * (context + positions)
        moved = weights * jnp.dtype(c.param_dtype).itemsize + cached * jnp.dtype(c.dtype).itemsize
        return Work(moved, 2 * weights * rows + attention)

    def prepare(self, params: Any) -> Prepared:
        """Parameters as a decoding loop wants them (`models.prepare`); prepared ones as they are."""
        return params if isinstance(params, Prepared) else Prepared(prepare_params(self.config, params))

    @property
    def _slots(self) -> tuple[int, ...]:
        """Leading axes of the core's keys and values."""
        return () if self.cache == "shared" else (self.recurrence,)

    def _apply(self, params: Any, method: Callable, *args: Any) -> Any:
        prepared = isinstance(params, Prepared)
        module = RecurrentDepth(self.config, prepared)
        return module.apply({"params": params.params if prepared else params}, *args, method=method)

    def init_cache(self, batch: int, size: int) -> RecurrentKV:
        """An empty cache for `size` positions a row."""
        return recurrent_cache.empty(self.config, self._slots, batch, size, (batch, size))

    def empty_window(self, batch: int, width: int) -> RecurrentKV:
        """Room for the keys and values of one window of `width` positions."""
        return recurrent_cache.empty(self.config, self._slots, batch, width, (batch,))

    def write(self, cache: RecurrentKV, window: RecurrentKV, at: Int[Array, "B"]) -> RecurrentKV:
        """The cache with a window stored at positions `at .. at + W - 1` of each row."""
        return recurrent_cache.write(self.cache, cache, window, at)

    def view(
        self,
        positions: Int[Array, "B W"],
        cache: RecurrentKV | None = None,
        visible: Int[Array, "B"] | None = None,
        window_mask: Bool[Array, "*B W W"] | None = None,
    ) -> View:
        """What a window at `positions` sees: the first `visible` cached positions and itself, causally."""
        if window_mask is None:
            window_mask = masks.causal(positions.shape[1])
        prefix_mask = None
        if cache is not None and visible is not None:
            prefix_mask = masks.prefix(visible, cache.depth.shape[1])
        angles = rotation(positions, self.config.head_dim, self.config.rope_base)
        return View(angles, window_mask, cache, prefix_mask)

    def initial_state(self, keys: Array, scale: Float[Array, ""] | float = 1.0) -> Float[Array, "B W D"]:
        """Random states `sqrt(D) * TruncNormal(0, std, +-3 std)`, `std = scale * sqrt(2 / 5D)`, one key each."""
        c = self.config
        std = c.width**0.5 * c.init_std
        draw = functools.partial(jax.random.truncated_normal, lower=-3.0, upper=3.0, shape=(c.width,))
        draws = jax.vmap(draw)(keys.reshape(-1)).reshape(*keys.shape, c.width)
        return (draws * std * scale).astype(c.dtype)

    def embedding(self, params: Any) -> Float[Array, "V D"]:
        """The vector of each token. `embed` also takes vectors, such as mixtures `p @ embedding`."""
        return (params.params if isinstance(params, Prepared) else params)["embedding"]

    def embed(
        self, params: Any, tokens: Inputs, view: View, window: RecurrentKV
    ) -> tuple[Float[Array, "B W D"], RecurrentKV]:
        """Prelude output e of a window of tokens or vectors, and the window with the prelude's keys and values."""
        e, own = self._apply(params, RecurrentDepth.embed, tokens, view)
        return e, dataclasses.replace(window, prelude=own)

    def iterate(
        self,
        params: Any,
        state: Float[Array, "B W D"],
        e: Float[Array, "B W D"],
        view: View,
        window: RecurrentKV,
        index: Int[Array, ""] | int,
        rows: Bool[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B W D"], RecurrentKV]:
        """One recurrence of the window; `index` counts recurrences, `rows` (default all) are those that move."""
        prefix, prefix_mask = None, view.prefix_mask
        if view.cache is not None and view.prefix_mask is not None:
            prefix, prefix_mask = recurrent_cache.seen(self.cache, view.cache, view.prefix_mask, index)
        new, own = self._apply(params, RecurrentDepth.iterate, state, e, view, prefix, prefix_mask)
        if rows is not None:
            new = jnp.where(rows[:, None, None], new, state)
        return new, recurrent_cache.store(self.cache, window, own, index, rows)

    def recur(
        self,
        params: Any,
        state: Float[Array, "B W D"],
        e: Float[Array, "B W D"],
        view: View,
        window: RecurrentKV,
        recurrences: int,
    ) -> tuple[Float[Array, "B W D"], RecurrentKV]:
        """`recurrences` recurrences of the window, the first of them with index 0."""

        def body(carry: tuple[Array, RecurrentKV], index: Array) -> tuple[tuple[Array, RecurrentKV], None]:
            return self.iterate(params, carry[0], e, view, carry[1], index), None

        unroll = 1
        if state.shape[1] <= STEP_WIDTH:
            unroll = max(1, min(recurrences, UNROLLED_LAYERS // self.config.core_layers))
        return lax.scan(body, (state, window), jnp.arange(recurrences), unroll=unroll)[0]

    def readout(
        self, params: Any, state: Float[Array, "B W D"], view: View, window: RecurrentKV
    ) -> tuple[Float[Array, "B W D"], RecurrentKV]:
        """Head input of each state, and the window with the coda's keys and values."""
        hidden, own = self._apply(params, RecurrentDepth.readout, state, view)
        return hidden, dataclasses.replace(window, coda=own)

    def widen(self, window: RecurrentKV, width: int) -> RecurrentKV:
        """The window with room for `width` positions, the new ones zero."""
        return recurrent_cache.widen(window, width)

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Output scores in at least float32."""
        return self._apply(params, RecurrentDepth.logits, hidden)

    def normalise(self, params: Any, state: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        """A raw state after the final norm."""
        return self._apply(params, RecurrentDepth.normalise, state)

    def forward(
        self,
        params: Any,
        tokens: Int[Array, "B W"],
        positions: Int[Array, "B W"],
        cache: RecurrentKV | None,
        visible: Int[Array, "B"] | None,
        state: Float[Array, "B W D"],
        recurrence: int | None = None,
        window_mask: Bool[Array, "*B W W"] | None = None,
    ) -> Forward:
        """Reads a window through prelude, r recurrences and coda. The caller stores the keys and values.

        Args:
          params: the parameters.
          tokens, positions: the window and its absolute positions.
          cache, visible: the cache and how many of its positions each row may see; None for no cache.
          state: initial latent states.
          recurrence: r; the network's own by default.
          window_mask: which window keys a query sees; the earlier ones and itself by default.
        """
        r = self.recurrence if recurrence is None else recurrence
        view = self.view(positions, cache, visible, window_mask)
        e, window = self.embed(params, tokens, view, self.empty_window(*tokens.shape))
        state, window = self.recur(params, state, e, view, window, r)
        hidden, window = self.readout(params, state, view, window)
        return Forward(hidden, self.normalise(params, state), window)
