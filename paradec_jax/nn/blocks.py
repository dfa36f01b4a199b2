"""Transformer blocks, which read a shape of `config.shapes`; Linen names the parameters alone."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from paradec_jax.nn.adapters import adapted
from paradec_jax.nn.attention import attention
from paradec_jax.nn.backend import kernels, on_cuda
from paradec_jax.nn.cache import KV
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.nn.products import dense
from paradec_jax.nn.remat import block_input
from paradec_jax.nn.rope import rotate, rotate_halves
from paradec_jax.nn.visibility import Stream, View, mask_of
from paradec_jax.sharding.rules import by_rows

LONGEST = 2048  # positions of a cache that one program of a kernel reads; XLA splits longer ones
ROTATIONS = {"interleaved": rotate, "halves": rotate_halves}


def rms_norm(
    x: Float[Array, "*shape D"], gain: Float[Array, "D"], eps: float
) -> Float[Array, "*shape D"]:
    """Root-mean-square norm, `x / sqrt(mean(x^2) + eps) * gain`.

    The statistics are at least float32 and the quotient returns to the dtype of `x` before the gain
    multiplies it.
    """
    wide = at_least_float32(x)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * gain.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*shape D"], gain: Float[Array, "... D"], eps: float
) -> Float[Array, "*shape D"]:
    """Layer norm without a bias, `(x - mean(x)) / sqrt(var(x) + eps) * gain`, in at least float32."""
    wide = at_least_float32(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps) * gain


# Of a standard deviation: normal draws, cut at three of it; it is the one before the cut.
truncated_normal = functools.partial(nn.initializers.truncated_normal, lower=-3.0, upper=3.0)


def uniform(bound: float) -> Callable[..., Array]:
    """Uniform draws between -bound and bound."""
    return functools.partial(jax.random.uniform, minval=-bound, maxval=bound)


def drawn(config: Any, std: float) -> Callable[..., Array]:
    """How a shape's random matrices are drawn: normal, or uniform, of that spread."""
    return uniform(std) if config.uniform else truncated_normal(std)


def parameter(
    module: Any,
    name: str,
    init: Callable[..., Array],
    shape: tuple[int, ...],
    dtype: str | None = None,
) -> Any:
    """As `module.param`, which traces `init` in every call to learn the shape of a parameter that
    is there; of the config's dtype of parameters where no other is given.

    Raises:
      flax.errors.ScopeParamShapeError: a parameter of another shape.
    """
    known = module.get_variable("params", name)
    if getattr(known, "shape", None) == shape:
        return known
    return module.param(name, init, shape, dtype or module.config.param_dtype)


def ones(module: Any, name: str, *shape: int) -> Any:
    """A parameter that begins as ones, such as a norm's gain."""
    return parameter(module, name, nn.initializers.ones, shape)


def zeros(module: Any, name: str, *shape: int) -> Any:
    """A parameter that begins as zeros, such as a bias."""
    return parameter(module, name, nn.initializers.zeros, shape)


class Attention(nn.Module):
    """Multi-head attention; G key-value heads serve H query heads (grouped queries where G < H).

    Parameters: `q` [D, H, C], `k` and `v` [D, G, C], `out` [H, C, D], and where the config has them
    `q_bias` [H, C], `k_bias` and `v_bias` [G, C], `q_norm` and `k_norm` [C], `out_bias` [D]. Bias,
    norm and rotation follow each other; cached keys have passed all three.
    """

    config: Any

    def setup(self) -> None:
        c = self.config
        rows, into = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}, drawn(c, c.init_std)
        self.matrices = {
            name: parameter(self, name, into, (c.width, count, c.head_dim))
            for name, count in rows.items()
        }
        self.bias = {n: zeros(self, f"{n}_bias", rows[n], c.head_dim) for n in c.biases}
        self.gains = {n: ones(self, f"{n}_norm", c.head_dim) for n in "qk" * c.qk_norm}
        out_shape = (c.heads, c.head_dim, c.width)
        self.out = parameter(self, "out", drawn(c, c.out_std), out_shape)
        if c.out_bias:
            self.out_bias = zeros(self, "out_bias", c.width)

    def __call__(self, x: Stream, view: View, prefix: KV | None = None) -> tuple[Stream, KV]:
        """The attended window and its keys and values; `prefix` is what this layer has cached."""
        products = {}
        for name, weight in self.matrices.items():
            rows = dense(x, rearrange(weight, "d h c -> d (h c)"))
            products[name] = adapted(self, name, x, rows, view.adapted)
        mixed, kv = self.mix(products, view, prefix)
        out = dense(mixed, rearrange(self.out, "h c d -> (h c) d"))
        out = adapted(self, "out", mixed, out, view.adapted)
        return out + self.out_bias.astype(x.dtype) if self.config.out_bias else out, kv

    def mix(
        self, products: dict[str, Float[Array, "B W _"]], view: View, prefix: KV | None
    ) -> tuple[Stream, KV]:
        """The mixed heads [B, W, H C] of the products with the input matrices, and the window's
        keys and values.
        """
        c = self.config
        heads = {n: rearrange(x, "b w (h c) -> b w h c", c=c.head_dim) for n, x in products.items()}
        for name, bias in self.bias.items():
            heads[name] = heads[name] + bias.astype(heads[name].dtype)
        given = (heads, self.gains, view, prefix)
        halves = c.rotation == "halves" and c.head_dim in (32, 64, 128)
        few = view.prefix_mask is None or view.prefix_mask.shape[-1] <= LONGEST
        if halves and few and kernels(c.attention, heads["q"].shape[1], heads["q"], *prefix or ()):
            return on_cuda(functools.partial(_by_kernel, c), functools.partial(_mixed, c), *given)
        return _mixed(c, *given)


def _mixed(c: Any, heads: Any, gains: Any, view: Any, prefix: Any) -> Any:
    """As `Attention.mix`, of heads [B, W, H, C] after bias, in plain JAX."""
    turn = ROTATIONS[c.rotation]
    heads = {name: rearrange(x, "b w h c -> b h w c") for name, x in heads.items()}
    for name, gain in gains.items():
        heads[name] = rms_norm(heads[name], gain, c.norm_eps)
    kv = KV(rearrange(turn(heads["k"], view.angles), "b g w c -> b g c w"), heads["v"])
    queries = turn(heads["q"], view.angles)
    mixed = attention(queries, kv, view.seen, prefix, view.prefix_mask, backend=c.attention)
    return rearrange(mixed, "b h w c -> b w (h c)"), kv


def _by_kernel(c: Any, heads: Any, gains: Any, view: Any, prefix: Any) -> Any:
    """As `_mixed`, by a kernel for GPUs."""
    # Imported late, which takes a second and is seldom needed.
    from paradec_jax.nn.window_kernel import window_attention

    (batch, width, *_), visible = heads["q"].shape, view.prefix_mask
    seen = jnp.broadcast_to(mask_of(view.seen, width), (batch, width, width))
    if visible is not None:
        size = visible.shape[-1]
        visible = jnp.broadcast_to(visible.reshape(batch, -1, size), (batch, width, size))
    angles = [angle[:, 0] for angle in view.angles]
    out, keys = window_attention(heads, gains, angles, seen, prefix, visible, eps=c.norm_eps)
    return rearrange(out, "b w h c -> b w (h c)"), KV(
        keys, rearrange(heads["v"], "b w g c -> b g w c")
    )


def few_products(
    x: Stream, weights: Any, gain: Any = None, add: Any = None, eps: float = 0.0
) -> list[Stream]:
    """`norm(x) W` of each matrix, or `silu(norm(x) W_1) * (norm(x) W_2)` of two; one kernel on
    CUDA (`row_kernel.products`, which says what is given).
    """
    from paradec_jax.nn.row_kernel import products  # late, as above

    def plain(x: Array, weights: Any, gain: Any, add: Any) -> list[Array]:
        normed = x if gain is None else rms_norm(x, gain, eps)
        made = [[dense(normed, weight) for weight in of] for of in weights]
        out = [jax.nn.silu(of[0]) * of[1] if of[1:] else of[0] for of in made]
        return out if add is None else [add + out[0]]

    return on_cuda(functools.partial(products, eps=eps), plain, x, weights, gain, add)


class GatedMLP(nn.Module):
    """Gated MLP `W_down (silu(W_gate x) * (W_up x))`.

    Parameters: `gate` and `up` [D, F], `down` [F, D], and where the config has them `gate_bias` and
    `up_bias` [F] and `down_bias` [D], added to the product of that name.
    """

    config: Any

    def setup(self) -> None:
        c = self.config
        into, shape = drawn(c, c.init_std), (c.width, c.feed_forward)
        self.gate = parameter(self, "gate", into, shape)
        self.up = parameter(self, "up", into, shape)
        self.down = parameter(self, "down", drawn(c, c.out_std), shape[::-1])
        sizes = {"gate": c.feed_forward, "up": c.feed_forward, "down": c.width}
        self.bias = {n: zeros(self, f"{n}_bias", sizes[n]) for n in sizes if c.mlp_bias}

    def __call__(self, x: Stream, where: Bool[Array, "B W"] | None = None) -> Stream:
        """The branch's output, without the residual sum; `where` is a view's `adapted`."""

        def product(name: str, x: Array, weight: Array) -> Array:
            out = adapted(self, name, x, dense(x, weight), where)
            return out + self.bias[name].astype(x.dtype) if name in self.bias else out

        inner = jax.nn.silu(product("gate", x, self.gate)) * product("up", x, self.up)
        return product("down", inner, self.down)


class SandwichBlock(nn.Module):
    """A block with norms before each branch and after each residual sum (tech report of Huginn,
    section 3).

    ::

        x <- norm_2( x + Attention(norm_1(x)) )
        x <- norm_4( x + MLP(norm_3(x)) )
    """

    config: Any

    def setup(self) -> None:
        c = self.config
        self.gains = [ones(self, f"norm_{i}", c.width) for i in range(1, 5)]
        self.attention = Attention(c)
        self.mlp = GatedMLP(c)

    def __call__(self, x: Stream, view: View, prefix: KV | None = None) -> tuple[Stream, KV]:
        """The block's output and the window's keys and values."""
        x = block_input(by_rows(x))
        mixed, kv = self.attention(self.norm(1, x), view, prefix)
        x = self.norm(2, x + mixed)
        return by_rows(self.norm(4, x + self.mlp(self.norm(3, x)))), kv

    def norm(self, which: int, x: Stream) -> Stream:
        """The `which`-th of the four norms."""
        return rms_norm(x, self.gains[which - 1], self.config.norm_eps)


class PreNormBlock(nn.Module):
    """A block with a norm before each branch.

    ::

        x <- x + Attention(norm(x))
        x <- x + MLP(norm(x))
    """

    config: Any

    def setup(self) -> None:
        c = self.config
        self.attention_norm = ones(self, "attention_norm", c.width)
        self.attention = Attention(c)
        self.mlp_norm = ones(self, "mlp_norm", c.width)
        self.mlp = GatedMLP(c)

    def __call__(self, x: Stream, view: View, prefix: KV | None = None) -> tuple[Stream, KV]:
        """The block's output and the window's keys and values."""
        x, eps = block_input(by_rows(x)), self.config.norm_eps
        c, a, m = self.config, self.attention, self.mlp
        bare = view.adapted is None and not (c.out_bias or c.mlp_bias)
        whole = not any(size % 32 for size in (c.width, c.feed_forward, c.head_dim))
        matrices = (*a.matrices.values(), a.out, m.gate, m.up, m.down)
        if bare and whole and kernels(c.attention, x.shape[0] * x.shape[1], x, *matrices):
            # Kernels of products do what is before and after them, too.
            weights = [[rearrange(weight, "d h c -> d (h c)")] for weight in a.matrices.values()]
            made = few_products(x, weights, self.attention_norm, eps=eps)
            mixed, kv = a.mix(dict(zip(a.matrices, made, strict=True)), view, prefix)
            (x,) = few_products(mixed, [[rearrange(a.out, "h c d -> (h c) d")]], add=x)
            (inner,) = few_products(x, [[m.gate, m.up]], self.mlp_norm, eps=eps)
            return few_products(inner, [[m.down]], add=x)[0], kv
        mixed, kv = self.attention(rms_norm(x, self.attention_norm, eps), view, prefix)
        x = x + mixed
        normed = rms_norm(x, self.mlp_norm, eps)
        return by_rows(x + self.mlp(normed, view.adapted)), kv
