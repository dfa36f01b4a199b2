"""Attention of a long window by JAX's Pallas kernel for TPUs, which keeps no scores and skips what nobody sees."""

import functools
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from paradec_jax.nn.cache import KV
from paradec_jax.nn.visibility import Rule
from paradec_jax.sharding.rules import row_axes, sizes_in_force

LANES = 128  # of a TPU: channels and positions come in multiples of it


def serves(q: Float[Array, "B H W C"], seen: Rule) -> bool:
    """Whether the kernel computes this window: causal or full, positions and channels multiples of 128."""
    return seen.name in ("causal", "full") and not any(size % LANES for size in q.shape[2:])


def splash(
    q: Float[Array, "B H W C"], window: KV, seen: Rule, *, interpret: bool = False
) -> Float[Array, "B H W C"]:
    """As `attend` of a window over itself; on a mesh each device computes its rows and heads.

    Args:
      q: queries after bias and rotation.
      window: keys and values.
      seen: a rule that `serves` accepts.
      interpret: whether the kernel runs as plain JAX, on any device: for tests.
    """

    def of_rows(q: Array, k: Array, v: Array) -> Array:
        return jax.vmap(_kernel(q.shape[1], q.shape[2], seen.name, interpret))(q * q.shape[-1] ** -0.5, k, v)

    sizes = sizes_in_force()
    if sizes:
        heads, tensor = (q.shape[1], window.v.shape[1]), sizes.get("tensor", 1)
        split = "tensor" if tensor > 1 and not any(n % tensor for n in heads) else None
        spec = P(row_axes(q.shape[0], sizes), split)
        of_rows = jax.shard_map(of_rows, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    return of_rows(q, rearrange(window.k, "b g c w -> b g w c"), window.v)


@functools.lru_cache
def _kernel(heads: int, width: int, rule: str, interpret: bool) -> Any:
    """The kernel of so many heads; making it goes through the mask once, outside of any trace."""
    from jax.experimental.pallas.ops.tpu import (
        splash_attention,  # late: it is imported in seconds and seldom needed
    )

    one = (splash_attention.CausalMask if rule == "causal" else splash_attention.FullMask)((width, width))
    size = next(size for size in (512, 256, LANES) if width % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: dict[str, Any] = {f"block_{name}": size for name in names}
    with jax.ensure_compile_time_eval():
        kernel = splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([one] * heads),
            block_sizes=splash_attention.BlockSizes(**blocks),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)
