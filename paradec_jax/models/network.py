"""What networks share as decoders and losses drive them: parameters raw or prepared, and caches of layers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paradec_jax.decode.machine.network import Prefix, Prepared
from paradec_jax.models.prepare import prepare_params
from paradec_jax.nn import cache as kv_cache
from paradec_jax.nn import masks
from paradec_jax.nn.cache import Layers
from paradec_jax.sharding import axes
from paradec_jax.sharding.rules import gathered


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes that a network call must read and floating-point operations it must do."""

    bytes: int
    flops: int


def raw(params: Any) -> Any:
    """The parameter tree, prepared or not."""
    return params.params if isinstance(params, Prepared) else params


@functools.lru_cache
def part_sizes(kind: Any, config: Any) -> dict[str, int]:
    """Numbers of each part of a class of networks; found by tracing one, which takes seconds for a deep one."""
    return axes.sizes(kind.table, kind.shapes(config))


@dataclasses.dataclass(frozen=True)
class ModelNetwork:
    """A model of a config: equal by it, parameters always an argument.

    A subclass names its Linen module, `linen`, with the `shapes` of its parameters by config and the `table` of their
    axes; what a call costs beside itself and its positions, `counters`; and what a position sees, `visibility` and
    `block`.

    Attributes:
      config: the model's shape.
    """

    config: Any
    linen: ClassVar[Any]
    shapes: ClassVar[Callable[[Any], Any]]
    table: ClassVar[Mapping[str, Any]]
    counters: ClassVar[tuple[str, ...]] = ()

    @property
    def module(self) -> Any:
        """The Linen module."""
        return self.linen(self.config)

    @property
    def vocab_size(self) -> int:
        """V, a mask included."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sequence the model was built for."""
        return self.config.max_length

    def prepare(self, params: Any) -> Prepared:
        """Parameters as a decoding loop wants them (`models.prepare`); prepared ones as they are."""
        return params if isinstance(params, Prepared) else Prepared(prepare_params(self.config, params))

    def apply(self, params: Any, method: Callable, *args: Any) -> Any:
        """A method of the Linen module on raw or prepared parameters."""
        module = self.linen(self.config, isinstance(params, Prepared))
        return module.apply({"params": raw(params)}, *args, method=method)

    def embedding(self, params: Any) -> Float[Array, "V D"]:
        """The vector of each token. Networks also read vectors, such as mixtures `p @ embedding`."""
        return raw(params)["embedding"]

    def output(self, params: Any) -> Any:
        """Parameters for `logits` alone, made in chunks by a loss: the output matrix is cast and gathered once."""
        if isinstance(params, Prepared):
            return params
        name, names = ("head", ("embed", "vocab")) if "head" in params else ("embedding", ("vocab", "embed"))
        return {**params, name: gathered(params[name], self.config.dtype, *names)}

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Scores of all V columns in at least float32, a mask's among them."""
        return self.apply(params, self.linen.logits, hidden)


@dataclasses.dataclass(frozen=True)
class LayeredNetwork(ModelNetwork):
    """A network whose cache holds the keys and values of each layer once."""

    def work(self, batch: int, positions: int, context: int) -> Work:
        """The least that one call on `positions` positions of each row after `context` cached ones can cost.

        Weights are read once, keys and values of the context once a layer. A multiplication and an addition are
        two operations. An embedding is not counted, an output matrix is where the network has one.
        """
        c, rows = self.config, batch * positions
        kind: Any = type(self)
        weights = sum(part_sizes(kind, c).values()) + self.vocab_size * c.width
        cached = 2 * c.layers * c.kv_heads * c.head_dim * batch * context
        attention = 4 * c.layers * c.heads * c.head_dim * rows * (context + positions)
        moved = weights * jnp.dtype(c.param_dtype).itemsize + cached * jnp.dtype(c.dtype).itemsize
        return Work(moved, 2 * weights * rows + attention)

    def init_cache(self, keys: Array, size: int) -> Layers:
        """An empty cache for `size` positions of each row; `keys` [B] count the rows, nothing is drawn."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        return tuple(kv_cache.empty(len(keys), c.kv_heads, size, c.head_dim, dtype) for _ in range(c.layers))

    def write(self, cache: Layers, window: Layers, at: Int[Array, "B"]) -> Layers:
        """The cache with a window stored at positions `at .. at + W - 1` of each row."""
        return tuple(kv_cache.write(old, new, at) for old, new in zip(cache, window, strict=True))

    def pick(self, window: Layers, start: Int[Array, "B"], width: int) -> Layers:
        """Positions `start .. start + width - 1` of each row's window."""
        return tuple(kv_cache.pick(kv, start, width) for kv in window)

    def widen(self, window: Layers, width: int) -> Layers:
        """The window with room for `width` positions, the new ones zero."""
        return tuple(kv_cache.widen(kv, width) for kv in window)

    def seen(self, prefix: Prefix | None) -> tuple[Layers | None, Any]:
        """The cache that a window looks at and its mask there; None twice where nothing is visible."""
        if prefix is None or prefix.visible is None:
            return None, None
        return prefix.kv, masks.visible(prefix.visible, prefix.kv[0].v.shape[-2])
