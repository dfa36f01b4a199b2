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

    def __call__(
        self, x: Stream, view: View, prefix: KV | None = None, gain: Any = None, add: Any = None
    ) -> tuple[Stream, KV]:
        """The attended window and its keys and values; `prefix` is what this layer has cached.

        Args:
          x, view, prefix: the window.
          gain: gain [D] of a norm that x passes first, or None.
          add: what is added to the output, or None.
        """
        c = self.config
        weights = {n: rearrange(w, "d h c -> d (h c)") for n, w in self.matrices.items()}
        out = rearrange(self.out, "h c d -> (h c) d")
        if view.adapted is None and not c.out_bias and are_few(c, x, out, *weights.values()):
            made = few_products(x, [[w] for w in weights.values()], gain, eps=c.norm_eps)
            mixed, kv = self.mix(dict(zip(weights, made, strict=True)), view, prefix)
            return few_products(mixed, [[out]], add=add)[0], kv
        x = x if gain is None else rms_norm(x, gain, c.norm_eps)
        rows = {n: adapted(self, n, x, dense(x, w), view.adapted) for n, w in weights.items()}
        mixed, kv = self.mix(rows, view, prefix)
        x = adapted(self, "out", mixed, dense(mixed, out), view.adapted)
        x = x + self.out_bias.astype(x.dtype) if c.out_bias else x
        return x if add is None else add + x, kv

    def mix(
        self, products: dict[str, Float[Array, "B W _"]], view: View, prefix: KV | None
    ) -> tuple[Stream, KV]:
        """The mixed heads [B, W, H C] of the products with the input matrices, and the window's
        keys and values.
        """
        c = self.config
        heads = {n: rearrange(x, "b w (h c) -> b w h c", c=c.head_dim) for n, x in products.items()}
        given = (heads, self.bias, self.gains, view, prefix)
        able = c.rotation == "halves" and c.head_dim in (32, 64, 128)
        able &= view.prefix_mask is None or view.prefix_mask.shape[-1] <= LONGEST
        if able and kernels(c.attention, heads["q"].shape[1], heads["q"], *prefix or ()):
            return on_cuda(functools.partial(_by_kernel, c), functools.partial(_mixed, c), given)
        return _mixed(c, given)


def _mixed(c: Any, given: Any) -> Any:
    """As `Attention.mix`, of heads [B, W, H, C], in plain JAX."""
    (heads, biases, gains, view, prefix), turn = given, ROTATIONS[c.rotation]
    heads = {name: rearrange(x, "b w h c -> b h w c") for name, x in heads.items()}
    for name, bias in biases.items():
        heads[name] = heads[name] + bias.astype(heads[name].dtype)[:, None]
    for name, gain in gains.items():
        heads[name] = rms_norm(heads[name], gain, c.norm_eps)
    kv = KV(rearrange(turn(heads["k"], view.angles), "b g w c -> b g c w"), heads["v"])
    queries = turn(heads["q"], view.angles)
    mixed = attention(queries, kv, view.seen, prefix, view.prefix_mask, backend=c.attention)
    return rearrange(mixed, "b h w c -> b w (h c)"), kv


def _by_kernel(c: Any, given: Any) -> Any:
    """As `_mixed`, by a kernel for GPUs."""
    # Imported late, which takes a second and is seldom needed.
    from paradec_jax.nn.window_kernel import window_attention

    heads, biases, gains, view, prefix = given
    (batch, width, *_), visible = heads["q"].shape, view.prefix_mask
    seen = jnp.broadcast_to(mask_of(view.seen, width), (batch, width, width))
    if visible is not None:
        size = visible.shape[-1]
        visible = jnp.broadcast_to(visible.reshape(batch, -1, size), (batch, width, size))
    heads = heads | {n: heads[n] + bias.astype(heads[n].dtype) for n, bias in biases.items()}
    angles = [angle[:, 0] for angle in view.angles]
    out, keys = window_attention(heads, gains, angles, seen, prefix, visible, eps=c.norm_eps)
    return rearrange(out, "b w h c -> b w (h c)"), KV(
        keys, rearrange(heads["v"], "b w g c -> b g w c")
    )


def are_few(c: Any, x: Stream, *weights: Array) -> bool:
    """Whether products of these rows may be kernels, which read whole tiles of a matrix."""
    whole = not any(weight.shape[0] % 64 or weight.shape[1] % 16 for weight in weights)
    return whole and kernels(c.attention, x.shape[0] * x.shape[1], x, *weights)


def few_products(
    x: Stream,
    weights: Any,
    gain: Any = None,
    add: Any = None,
    bias: Any = None,
    eps: float = 0.0,
) -> list[Array]:
    """`norm(x) W` of each matrix, `silu(norm(x) W_1) * (norm(x) W_2)` of two, or `gelu(x W + b)`;
    one kernel on CUDA (`row_kernel.products`, which says what is given).
    """
    from paradec_jax.nn.row_kernel import products  # late, as above

    def plain(x: Array, weights: Any, gain: Any, add: Any, bias: Any) -> list[Array]:
        normed = x if gain is None else rms_norm(x, gain, eps)
        made = [[dense(normed, weight) for weight in of] for of in weights]
        out = [jax.nn.silu(of[0]) * of[1] if of[1:] else of[0] for of in made]
        if bias is not None:
            out = [jax.nn.gelu(out[0] + bias.astype(x.dtype), approximate=True)]
        return out if add is None else [add + out[0]]

    return on_cuda(functools.partial(products, eps=eps), plain, x, weights, gain, add, bias)


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

    def __call__(
        self, x: Stream, where: Bool[Array, "B W"] | None = None, gain: Any = None, add: Any = None
    ) -> Stream:
        """The branch's output; `where` is a view's `adapted`, `gain` and `add` are as of attention."""
        c = self.config
        if where is None and not c.mlp_bias and are_few(c, x, self.gate, self.up, self.down):
            (x,) = few_products(x, [[self.gate, self.up]], gain, eps=c.norm_eps)
            return few_products(x, [[self.down]], add=add)[0]

        def product(name: str, x: Array, weight: Array) -> Array:
            out = adapted(self, name, x, dense(x, weight), where)
            return out + self.bias[name].astype(x.dtype) if name in self.bias else out

        x = x if gain is None else rms_norm(x, gain, c.norm_eps)
        inner = jax.nn.silu(product("gate", x, self.gate)) * product("up", x, self.up)
        out = product("down", inner, self.down)
        return out if add is None else add + out


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
        x = block_input(by_rows(x))
        x, kv = self.attention(x, view, prefix, self.attention_norm, x)
        return by_rows(self.mlp(x, view.adapted, self.mlp_norm, x)), kv
