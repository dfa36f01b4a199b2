"""Transformer blocks. Linen names the parameters and does nothing else."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paradec_jax.nn.attention import attend
from paradec_jax.nn.cache import KV
from paradec_jax.nn.norms import rms_norm
from paradec_jax.nn.rope import Rotation, rotate, rotate_halves


def truncated_normal(std: float) -> Callable[..., Array]:
    """Normal draws cut at three standard deviations; `std` is the one before the cut."""

    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
        return std * jax.random.truncated_normal(key, -3.0, 3.0, shape, dtype)

    return init


def dense(x: Float[Array, "*shape D"], weight: Float[Array, "D out"]) -> Float[Array, "*shape out"]:
    """`x W`, computed on a matrix of all positions.

    With two leading axes the weight's gradient contracts both, which XLA's CPU backend does through transposed
    copies; a matrix halved the time of an MLP's backward pass there.

    Under `jax.default_matmul_precision("BF16_BF16_F32")` the operands are rounded to bfloat16 here, forward and
    backward, and sums stay float32: XLA's CPU backend ignores that setting, and its bfloat16 products are
    five times as fast as its float32 ones where the processor has matrix units.
    """
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    rounded = precision == "BF16_BF16_F32" and x.dtype == jnp.float32
    flat = x.reshape(-1, x.shape[-1])
    product = _rounded_product(flat, weight) if rounded else flat @ weight.astype(x.dtype)
    return product.reshape(*x.shape[:-1], weight.shape[-1])


def _contract(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _rounded_product(x: Array, weight: Array) -> Array:
    return _contract(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), (1, 0))


def _rounded_product_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    rounded = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    return _contract(*rounded, (1, 0)), rounded


def _rounded_product_backward(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = operands
    gradient = gradient.astype(jnp.bfloat16)
    return _contract(gradient, weight, (1, 1)), _contract(x, gradient, (0, 0))


_rounded_product.defvjp(_rounded_product_forward, _rounded_product_backward)


class Attention(nn.Module):
    """Multi-head attention with a fused input matrix and an optional bias on queries and keys.

    The bias is added before the rotation; cached keys are the rotated ones.
    """

    width: int
    heads: int
    qk_bias: bool
    std: float
    std_out: float
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    def setup(self) -> None:
        head_dim = self.width // self.heads
        self.qkv = self.param(
            "qkv", truncated_normal(self.std), (self.width, 3, self.heads, head_dim), self.param_dtype
        )
        self.out = self.param(
            "out", truncated_normal(self.std_out), (self.heads, head_dim, self.width), self.param_dtype
        )
        if self.qk_bias:
            self.bias = self.param(
                "qk_bias", nn.initializers.zeros, (2, self.heads, head_dim), self.param_dtype
            )

    def __call__(
        self,
        x: Float[Array, "B W D"],
        angles: Rotation,
        window_mask: Bool[Array, "*B W W"],
        prefix: KV | None,
        prefix_mask: Bool[Array, "B *W S"] | None,
    ) -> tuple[Float[Array, "B W D"], KV]:
        """The attended window and its own keys and values."""
        batch, width, _ = x.shape
        fused = dense(x, self.qkv.reshape(self.width, -1))
        q, k, v = fused.reshape(batch, width, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        if self.qk_bias:
            bias = self.bias.astype(self.dtype)[:, :, None]
            q, k = q + bias[0], k + bias[1]
        q, k = rotate(q, angles), rotate(k, angles)
        own = KV(k.swapaxes(-1, -2), v)
        mixed = attend(q, own, window_mask, prefix, prefix_mask)
        joined = mixed.transpose(0, 2, 1, 3).reshape(batch, width, -1)
        return dense(joined, self.out.reshape(-1, self.width)), own


class GroupedAttention(nn.Module):
    """Grouped-query attention: G key-value heads serve H query heads (Qwen2, Qwen3, Llama).

    One input matrix holds the H query heads, then the G key heads, then the G value heads, and so does the
    optional bias. Query and key norms work on each head. The rotation comes last and cached keys are rotated.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    std: float
    std_out: float
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    def setup(self) -> None:
        rows = self.heads + 2 * self.kv_heads
        self.qkv = self.param(
            "qkv", truncated_normal(self.std), (self.width, rows, self.head_dim), self.param_dtype
        )
        self.out = self.param(
            "out", truncated_normal(self.std_out), (self.heads, self.head_dim, self.width), self.param_dtype
        )
        if self.qkv_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (rows, self.head_dim), self.param_dtype)
        if self.qk_norm:
            ones = nn.initializers.ones
            self.q_norm = self.param("q_norm", ones, (self.head_dim,), self.param_dtype)
            self.k_norm = self.param("k_norm", ones, (self.head_dim,), self.param_dtype)

    def __call__(
        self,
        x: Float[Array, "B W D"],
        angles: Rotation,
        window_mask: Bool[Array, "*B W W"],
        prefix: KV | None,
        prefix_mask: Bool[Array, "B *W S"] | None,
    ) -> tuple[Float[Array, "B W D"], KV]:
        """The attended window and its own keys and values."""
        batch, width, _ = x.shape
        fused = dense(x, self.qkv.reshape(self.width, -1))
        if self.qkv_bias:
            fused = fused + self.bias.astype(self.dtype).reshape(-1)
        fused = fused.reshape(batch, width, -1, self.head_dim).transpose(0, 2, 1, 3)
        q, k, v = jnp.split(fused, [self.heads, self.heads + self.kv_heads], axis=1)
        if self.qk_norm:
            q, k = rms_norm(q, self.q_norm, self.norm_eps), rms_norm(k, self.k_norm, self.norm_eps)
        q, k = rotate_halves(q, angles), rotate_halves(k, angles)
        own = KV(k.swapaxes(-1, -2), v)
        mixed = attend(q, own, window_mask, prefix, prefix_mask)
        joined = mixed.transpose(0, 2, 1, 3).reshape(batch, width, -1)
        return dense(joined, self.out.reshape(-1, self.width)), own


class GatedMLP(nn.Module):
    """Gated MLP `W_down (silu(W_gate x) * (W_up x))`, gate and up fused in one matrix."""

    width: int
    feed_forward: int
    std: float
    std_out: float
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    def setup(self) -> None:
        self.gate_up = self.param(
            "gate_up", truncated_normal(self.std), (self.width, 2, self.feed_forward), self.param_dtype
        )
        self.down = self.param(
            "down", truncated_normal(self.std_out), (self.feed_forward, self.width), self.param_dtype
        )

    def __call__(self, x: Float[Array, "B W D"]) -> Float[Array, "B W D"]:
        """The branch's output, without the residual sum."""
        gate, up = jnp.split(dense(x, self.gate_up.reshape(self.width, -1)), 2, axis=-1)
        return dense(jax.nn.silu(gate) * up, self.down)


class SandwichBlock(nn.Module):
    """A block with norms before each branch and after each residual sum (tech report of Huginn, section 3).

    ::

        x <- norm_2( x + Attention(norm_1(x)) )
        x <- norm_4( x + MLP(norm_3(x)) )
    """

    width: int
    heads: int
    feed_forward: int
    qk_bias: bool
    norm_eps: float
    std: float
    std_out: float
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    def setup(self) -> None:
        ones = nn.initializers.ones
        self.gains = [self.param(f"norm_{i}", ones, (self.width,), self.param_dtype) for i in range(1, 5)]
        shared = (self.std, self.std_out, self.dtype, self.param_dtype)
        self.attention = Attention(self.width, self.heads, self.qk_bias, *shared)
        self.mlp = GatedMLP(self.width, self.feed_forward, *shared)

    def __call__(
        self,
        x: Float[Array, "B W D"],
        angles: Rotation,
        window_mask: Bool[Array, "*B W W"],
        prefix: KV | None = None,
        prefix_mask: Bool[Array, "B *W S"] | None = None,
    ) -> tuple[Float[Array, "B W D"], KV]:
        """The block's output and the window's keys and values."""
        mixed, own = self.attention(self.norm(1, x), angles, window_mask, prefix, prefix_mask)
        x = self.norm(2, x + mixed)
        return self.norm(4, x + self.mlp(self.norm(3, x))), own

    def norm(self, which: int, x: Float[Array, "B W D"]) -> Float[Array, "B W D"]:
        """The `which`-th of the four norms."""
        return rms_norm(x, self.gains[which - 1], self.norm_eps)


class PreNormBlock(nn.Module):
    """A block with a norm before each branch.

    ::

        x <- x + Attention(norm(x))
        x <- x + MLP(norm(x))
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    std: float
    std_out: float
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    def setup(self) -> None:
        ones = nn.initializers.ones
        shared = (self.std, self.std_out, self.dtype, self.param_dtype)
        self.attention_norm = self.param("attention_norm", ones, (self.width,), self.param_dtype)
        self.attention = GroupedAttention(
            self.width,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.qkv_bias,
            self.qk_norm,
            self.norm_eps,
            *shared,
        )
        self.mlp_norm = self.param("mlp_norm", ones, (self.width,), self.param_dtype)
        self.mlp = GatedMLP(self.width, self.feed_forward, *shared)

    def __call__(
        self,
        x: Float[Array, "B W D"],
        angles: Rotation,
        window_mask: Bool[Array, "*B W W"],
        prefix: KV | None = None,
        prefix_mask: Bool[Array, "B *W S"] | None = None,
    ) -> tuple[Float[Array, "B W D"], KV]:
        """The block's output and the window's keys and values."""
        normed = rms_norm(x, self.attention_norm, self.norm_eps)
        mixed, own = self.attention(normed, angles, window_mask, prefix, prefix_mask)
        x = x + mixed
        return x + self.mlp(rms_norm(x, self.mlp_norm, self.norm_eps)), own
