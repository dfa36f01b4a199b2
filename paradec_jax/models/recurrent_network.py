"""The recurrent-depth transformer as decoders and losses drive it: whole, or in its three parts."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import RecurrentDepthConfig, check_number, check_words
from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.models import recurrent_cache
from paradec_jax.models.network import Inputs, KVNetwork
from paradec_jax.models.recurrent_cache import CACHE_MODES, RecurrentCache, RecurrentKV
from paradec_jax.models.recurrent_depth import RecurrentDepth
from paradec_jax.nn.cache import stored
from paradec_jax.nn.visibility import Seen, Stream, View
from paradec_jax.sharding import axes

# Recurrences of a decoding step are unrolled up to this many layers.
UNROLLED_LAYERS = 8
STEP_WIDTH = 32  # windows up to this width are steps of a decoder, wider ones are prompts


@dataclasses.dataclass(frozen=True)
class RecurrentDepthNetwork(KVNetwork):
    """A recurrent-depth transformer with a cache of a kind and a number of recurrences.

    Attributes:
      config: the model's shape.
      cache: what a position leaves for later ones, one of `recurrent_cache.CACHE_MODES`.
      recurrence: r, recurrences of a call; the config's mean when None.
      slots: recurrences that "full" and "latest" have room for; those of a call when None.
    """

    config: RecurrentDepthConfig
    cache: str = "shared"
    recurrence: Any = None
    slots: Any = None
    linen = RecurrentDepth
    table = axes.RECURRENT
    parts: ClassVar[Any] = {part: f"{part}_layers" for part in ("prelude", "core", "coda")}
    # Passes of the core, one after the other.
    counters = ("recurrences",)

    def __post_init__(self) -> None:
        check_words(self, cache=CACHE_MODES)
        if self.recurrence is None:
            object.__setattr__(self, "recurrence", self.config.mean_recurrence)
        check_number("recurrence", self.recurrence)
        if self.slots is None:
            object.__setattr__(self, "slots", self.recurrence)
        if self.cache != "shared" and self.recurrence > self.slots:
            raise ValueError(
                f"cache {self.cache!r} has {self.slots} slots a position, too few for {self.recurrence} recurrences"
            )

    def at(self, recurrence: int | None) -> "RecurrentDepthNetwork":
        """The same network and cache at another depth; itself when None."""
        return self if recurrence is None else dataclasses.replace(self, recurrence=recurrence)

    def init_cache(
        self, keys: Array, size: int, *, scale: Any = 1.0, states: Float[Array, "P D"] | None = None
    ) -> RecurrentCache:
        """An empty cache for `size` positions of each row, and the latent that each position starts
        from.

        They are drawn here, once: inside a decoding loop the draws would cost more than a layer of
        a small model.

        Args:
          keys: one key a row, [B]; the position is folded in.
          size: S.
          scale: of the initial latents, see `initial_state`.
          states: recorded draws at scale 1, the same for all rows; the last one holds for later
            positions.
        """
        positions = jnp.broadcast_to(jnp.arange(size), (len(keys), size))
        if states is None:
            folded = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, positions)
            initial = self.initial_state(folded, scale)
        else:
            initial = states[jnp.minimum(positions, len(states) - 1)] * scale
        dtype = stored(self.config.dtype)
        empty = recurrent_cache.empty(self.config, self._room, len(keys), size, dtype)
        depth = jnp.zeros((len(keys), size), jnp.int32)
        return RecurrentCache(dataclasses.replace(empty, depth=depth), initial)

    def latents(self, cache: RecurrentCache, positions: Int[Array, "B W"]) -> Stream:
        """The initial latents of these positions."""
        return jnp.take_along_axis(cache.initial, positions[..., None], axis=1)

    def start_from(
        self, cache: RecurrentCache, states: Stream, at: Int[Array, "B"]
    ) -> RecurrentCache:
        """The cache in which positions `at .. at + W - 1` start from these latents."""
        put = jax.vmap(lambda row, new, p: lax.dynamic_update_slice(row, new, (p, 0)))
        initial = put(cache.initial, states.astype(cache.initial.dtype), at)
        return dataclasses.replace(cache, initial=initial)

    def empty_window(self, batch: int, width: int) -> RecurrentKV:
        """Room for the keys and values of one window of `width` positions."""
        dtype = jnp.dtype(self.config.dtype)
        return recurrent_cache.empty(self.config, self._room, batch, width, dtype)

    @property
    def _room(self) -> tuple[int, ...]:
        """The axis of slots of a core's keys and values."""
        return () if self.cache == "shared" else (self.slots,)

    def write(
        self, cache: RecurrentCache, window: RecurrentKV, at: Int[Array, "B"]
    ) -> RecurrentCache:
        """The cache with a window stored at positions `at .. at + W - 1` of each row."""
        return dataclasses.replace(
            cache, kv=recurrent_cache.write(self.cache, cache.kv, window, at)
        )

    def view(
        self, positions: Int[Array, "B W"], prefix: Prefix | None = None, mask: Seen | None = None
    ) -> View:
        """As of other networks; a window sees the keys and values of the cache, not its latents."""
        if prefix is not None:
            prefix = Prefix(prefix.kv.kv, prefix.visible)
        return super().view(positions, prefix, mask)

    def initial_state(self, keys: Array, scale: Float[Array, ""] | float = 1.0) -> Stream:
        """States `sqrt(D) * TruncNormal(0, std, +-3 std)`, `std = scale * sqrt(2 / 5D)`."""
        c = self.config
        std = c.width**0.5 * c.init_std
        draw = jax.vmap(lambda key: jax.random.truncated_normal(key, -3.0, 3.0, (c.width,)))
        draws = draw(keys.reshape(-1)).reshape(*keys.shape, c.width)
        return (draws * std * scale).astype(c.dtype)

    def embed(
        self, params: Any, inputs: Inputs, view: View, window: RecurrentKV
    ) -> tuple[Stream, RecurrentKV]:
        """Prelude output e of tokens or vectors, and the window with the prelude's keys and values."""
        e, kv = self.apply(params, RecurrentDepth.embed, inputs, view)
        return e, dataclasses.replace(window, prelude=kv)

    def iterate(
        self,
        params: Any,
        state: Stream,
        e: Stream,
        view: View,
        window: RecurrentKV,
        index: Int[Array, ""] | int,
        rows: Bool[Array, "B"] | None = None,
    ) -> tuple[Stream, RecurrentKV]:
        """One recurrence of the window, the `index`-th; only `rows` move, all by default."""
        prefix = None
        if view.cache is not None and view.prefix_mask is not None:
            prefix, mask = recurrent_cache.seen(self.cache, view.cache, view.prefix_mask, index)
            view = dataclasses.replace(view, prefix_mask=mask)
        new, kv = self.apply(params, RecurrentDepth.iterate, state, e, view, prefix)
        if rows is not None:
            new = jnp.where(rows[:, None, None], new, state)
        return new, recurrent_cache.store(self.cache, window, kv, index, rows)

    def recur(
        self,
        params: Any,
        state: Stream,
        e: Stream,
        view: View,
        window: RecurrentKV,
        recurrences: int,
    ) -> tuple[Stream, RecurrentKV]:
        """`recurrences` recurrences of the window, the first of them with index 0."""

        def body(
            carry: tuple[Array, RecurrentKV], index: Array
        ) -> tuple[tuple[Array, RecurrentKV], None]:
            return self.iterate(params, carry[0], e, view, carry[1], index), None

        unroll = 1
        if state.shape[1] <= STEP_WIDTH:
            unroll = max(1, min(recurrences, UNROLLED_LAYERS // self.config.core_layers))
        return lax.scan(body, (state, window), jnp.arange(recurrences), unroll=unroll)[0]

    def readout(self, params: Any, state: Stream, view: View, window: RecurrentKV) -> Forward:
        """Ends a call: hidden states, the window with the coda's keys and values, recurrences."""
        hidden, kv = self.apply(params, RecurrentDepth.readout, state, view)
        return Forward(hidden, dataclasses.replace(window, coda=kv), {"recurrences": window.depth})

    def normalise(self, params: Any, state: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        """A raw state after the final norm."""
        return self.apply(params, RecurrentDepth.normalise, state)

    def forward(
        self,
        params: Any,
        inputs: Inputs,
        positions: Int[Array, "B W"],
        prefix: Prefix | None = None,
        mask: Seen | None = None,
    ) -> Forward:
        """Reads a window through prelude, r recurrences and coda, from the initial latents of the
        prefix's cache.

        The caller stores the keys and values.

        Raises:
          ValueError: no prefix, so no latents to start from.
        """
        if prefix is None:
            raise ValueError(
                "a recurrent network starts from the latents in its cache: give Prefix(cache, visible=None)"
            )
        states = self.latents(prefix.kv, positions)
        return self.forward_from(params, inputs, positions, states, prefix, mask)[0]

    def forward_from(
        self,
        params: Any,
        inputs: Inputs,
        positions: Int[Array, "B W"],
        states: Stream,
        prefix: Prefix | None = None,
        mask: Seen | None = None,
    ) -> tuple[Forward, Stream]:
        """As `forward` from given latents; returns the latents after the last recurrence as well."""
        view = self.view(positions, prefix, mask)
        e, window = self.embed(params, inputs, view, self.empty_window(*positions.shape))
        states, window = self.recur(params, states, e, view, window, self.recurrence)
        return self.readout(params, states, view, window), states
