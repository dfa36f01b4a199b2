"""What networks share as decoders and losses drive them: parameters, views, caches of layers."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode.machine.network import Prefix, Prepared
from paradec_jax.models.work import call_work
from paradec_jax.nn import cache as kv_cache
from paradec_jax.nn import masks
from paradec_jax.nn.attention import once
from paradec_jax.nn.backend import cpu_layouts
from paradec_jax.nn.rope import rotation
from paradec_jax.nn.visibility import RULES, Seen, Stream, View, by_block
from paradec_jax.sharding.rules import gathered

Inputs = Int[Array, "B W"] | Stream  # tokens, or a vector in the place of each
# Paths of matrices that meet rows.
PRODUCTS = re.compile("(^|/)(attention|mlp)/|^(adapter|fusion|head)$")


def raw(params: Any) -> Any:
    """The parameter tree, prepared or not."""
    return params.params if isinstance(params, Prepared) else params


@dataclasses.dataclass(frozen=True)
class ModelNetwork:
    """A model of a config: equal by it, parameters always an argument.

    A subclass names its Linen module, `linen`, the config's fields that count the blocks of each
    part, `parts`, the `table` of its parameters' axes, what a call costs beside itself and its
    positions, `counters`, and whether the mask has probability 0 by definition, `subs`.
    """

    config: Any

    linen: ClassVar[Any]
    table: ClassVar[Mapping[str, Any]]
    parts: ClassVar[Mapping[str, str]] = {"layer": "layers"}
    counters: ClassVar[tuple[str, ...]] = ()
    subs: ClassVar[bool] = False

    @classmethod
    def shapes(cls, config: Any) -> dict[str, Any]:
        """Shapes and dtypes of the parameters, without allocating any.

        Blocks of one part have equal shapes, so one of each is traced, and once for a config:
        whoever loads a model waits for it.
        """
        single = dataclasses.replace(config, **dict.fromkeys(cls.parts.values(), 1))
        traced = _initial.eval_shape(cls.linen, single, jax.random.key(0))
        shapes = {
            name: shape
            for name, shape in traced.items()
            if name.removesuffix("_0") not in cls.parts
        }
        for part, field in cls.parts.items():
            shapes |= {f"{part}_{i}": traced[f"{part}_0"] for i in range(getattr(config, field))}
        return jax.tree.map(lambda shape: shape, shapes)  # dictionaries of the caller's own

    @classmethod
    def init_params(cls, config: Any, key: Array) -> dict[str, Any]:
        """Random parameters: biases 0, gains 1, matrices as `nn.blocks` draws them."""
        return _initial(cls.linen, config, key)

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

    @property
    def visibility(self) -> str:
        """What a position sees: "causal" no later one, "block" none of a later block, "full" all."""
        return self.config.visibility

    @property
    def block(self) -> int | None:
        """Tokens of a block, counted from position 0; None where the visibility is another."""
        return getattr(self.config, "block", None)

    def prepare(self, params: Any) -> Prepared:
        """Parameters as a decoding loop wants them, never for training; prepared ones as they are.

        Matrices are cast to the dtype of their products. A tied output matrix is laid out as `head`
        [D, V] where it must be cast, and with layouts for the CPU (`nn.backend`).
        """
        if isinstance(params, Prepared):
            return params
        dtype = jnp.dtype(self.config.dtype)
        prepared = _cast(params, dtype)
        tied = getattr(self.config, "tie_embeddings", False)
        if tied and (cpu_layouts() or params["embedding"].dtype != dtype):
            prepared["head"] = _laid_out(params["embedding"], dtype)
        return Prepared(prepared)

    def apply(self, params: Any, method: Callable, *args: Any) -> Any:
        """A method of the Linen module on raw or prepared parameters."""
        module = self.linen(self.config, isinstance(params, Prepared))
        return module.apply({"params": raw(params)}, *args, method=method)

    def embedding(self, params: Any) -> Float[Array, "V D"]:
        """The vector of each token. Networks also read vectors, such as mixtures `p @ embedding`."""
        return raw(params)["embedding"]

    def output(self, params: Any) -> Any:
        """Parameters for `logits` alone: the output matrix is cast and gathered once."""
        if isinstance(params, Prepared):
            return params
        name, names = (
            ("head", ("embed", "vocab")) if "head" in params else ("embedding", ("vocab", "embed"))
        )
        return {**params, name: gathered(params[name], self.config.dtype, *names)}

    def logits(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Scores of all V columns in at least float32, a mask's among them."""
        return self.apply(params, self.linen.logits, hidden)

    def most_probable(self, params: Any, hidden: Float[Array, "*shape D"]) -> Int[Array, "*shape"]:
        """The token of the largest of `logits`, which need not exist for that."""
        if type(self).logits is not ModelNetwork.logits:  # a subclass whose scores are its own
            return jnp.argmax(self.logits(params, hidden), axis=-1).astype(jnp.int32)
        return self.apply(params, self.linen.most_probable, hidden)

    work = call_work


@dataclasses.dataclass(frozen=True)
class KVNetwork(ModelNetwork):
    """A network with a cache, by default of the keys and values of each layer."""

    def init_cache(self, keys: Array, size: int) -> Any:
        """An empty cache for `size` positions of each row; `keys` [B] only count the rows."""
        c, dtype = self.config, kv_cache.stored(self.config.dtype)
        return tuple(
            kv_cache.empty(len(keys), c.kv_heads, size, c.head_dim, dtype) for _ in range(c.layers)
        )

    def write(self, cache: Any, window: Any, at: Int[Array, "B"]) -> Any:
        """The cache with a window stored at positions `at .. at + W - 1` of each row."""
        return kv_cache.each_kv(lambda old, new: kv_cache.write(old, new, at), cache, window)

    def pick(self, window: Any, start: Int[Array, "B"], width: int) -> Any:
        """Positions `start .. start + width - 1` of each row's window."""
        return kv_cache.each_kv(lambda kv: kv_cache.pick(kv, start, width), window)

    def take(self, window: Any, slots: Int[Array, "B _"]) -> Any:
        """These positions of each row's window, in this order; zeros for one that is not in it."""
        return kv_cache.each_kv(lambda kv: kv_cache.take(kv, slots), window)

    def widen(self, window: Any, width: int) -> Any:
        """The window with room for `width` positions, the new ones zero."""
        return kv_cache.each_kv(lambda kv: kv_cache.widen(kv, width), window)

    def view(
        self, positions: Int[Array, "B W"], prefix: Prefix | None = None, mask: Seen | None = None
    ) -> View:
        """What a window at `positions` sees: of the cache what the prefix says, of itself what the
        network does.

        Args:
          positions: absolute positions.
          prefix: the cache and what the window sees of it; None for no cache.
          mask: which window keys a query sees; by default what the network's `visibility` says.
        """
        if mask is None:
            rule = RULES[self.visibility] if self.block is None else by_block(positions, self.block)
            mask = once(rule, positions.shape[1], self.config.attention)
        c = self.config
        angles = rotation(positions, c.head_dim, c.rope_base, c.rope_scaling)
        near = positions if c.windows else None
        if prefix is None or prefix.visible is None:
            return View(angles, mask, positions=near)
        seen = masks.visible(prefix.visible, kv_cache.size(prefix.kv))
        return View(angles, mask, prefix.kv, seen, near)


@jax.jit(static_argnums=(0, 1))
def _initial(module: Any, config: Any, key: Array) -> dict[str, Any]:
    """Random parameters of a Linen module, traced once for a config."""
    return module(config).init(key, jnp.zeros((1, 2), jnp.int32))["params"]


def _cast(params: Mapping[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """The tree with its matrices in the dtype of their products; every other leaf as it is.

    For the CPU an embedding is at least float32: its backend casts a whole table in bfloat16 to
    read a row of it.
    """

    def wanted(path: tuple[Any, ...], leaf: Any) -> Any:
        part = jax.tree_util.keystr(path, simple=True, separator="/")
        if leaf.ndim > 1 and PRODUCTS.search(part):
            return dtype
        table = part == "embedding" and cpu_layouts()
        return jnp.promote_types(leaf.dtype, jnp.float32) if table else leaf.dtype

    flat, tree = jax.tree_util.tree_flatten_with_path(dict(params))
    leaves, dtypes = [leaf for _, leaf in flat], [wanted(*each) for each in flat]
    others = [i for i, leaf in enumerate(leaves) if dtypes[i] != leaf.dtype]
    if not others:
        return dict(params)
    cast = _astype([leaves[i] for i in others], tuple(dtypes[i] for i in others))
    for i, leaf in zip(others, cast, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


@jax.jit(static_argnums=1)
def _astype(leaves: list[Array], dtypes: tuple[Any, ...]) -> list[Array]:
    """All of them in one program."""
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


@jax.jit(static_argnums=1)
def _laid_out(embedding: Array, dtype: Any) -> Array:
    # The CPU backend multiplies by a transposed matrix 20 times slower than by a plain one; the
    # barrier keeps it from folding the transposition into the product.
    return lax.optimization_barrier(embedding.T.astype(dtype))
