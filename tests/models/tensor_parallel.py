"""Two blocks of each family on four simulated devices, heads and feed-forward split: which collectives they need.

Run by test_tensor_parallel.py with `--xla_force_host_platform_device_count=4`; prints one JSON object.
"""

import dataclasses
import json
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from stubs import tiny_denoiser, tiny_denoiser_params

from paradec_jax.config import ModelConfig
from paradec_jax.decode import Prefix
from paradec_jax.families import PRESETS, init_params, logical_axes, network_of
from paradec_jax.models.denoiser import LONGEST
from paradec_jax.models.denoiser import block_config as denoiser_block
from paradec_jax.models.recurrent_depth import block_config as recurrent_block
from paradec_jax.models.transformer import block_config as causal_block
from paradec_jax.nn import cache, masks
from paradec_jax.nn.blocks import PreNormBlock, SandwichBlock
from paradec_jax.nn.cache import KV
from paradec_jax.nn.modulated import ModulatedBlock
from paradec_jax.nn.rope import rotation

RULES = {"heads": "model", "kv_heads": "model", "mlp": "model"}
COLLECTIVES = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
BATCH, WIDTH, SIZE = 2, 3, 8
SMALL = {"width": 32, "heads": 8, "feed_forward": 64}
FAMILIES: dict[str, tuple[ModelConfig, Any, str]] = {
    "causal": (
        dataclasses.replace(PRESETS["test-causal"], qk_norm=True, kv_heads=4, **SMALL),
        lambda config: PreNormBlock(causal_block(config)),
        "layer",
    ),
    "recurrent_depth": (
        dataclasses.replace(PRESETS["test-recurrent"], **SMALL),
        lambda config: SandwichBlock(recurrent_block(config)),
        "core",
    ),
}
DENOISER = {"width": 32, "heads": 8}


def shardings(config: ModelConfig, params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Where each parameter lies, by its logical axes."""

    def place(names: tuple[str, ...]) -> jax.NamedSharding:
        return jax.NamedSharding(mesh, jax.P(*(RULES.get(name) for name in names)))

    return jax.tree.map(place, logical_axes(config, params), is_leaf=lambda x: isinstance(x, tuple))


def collectives(function: Any, *arguments: Any) -> dict[str, int]:
    """How often each collective stands in the compiled program."""
    return Counter(re.findall(COLLECTIVES, jax.jit(function).lower(*arguments).compile().as_text()))


def blocks(name: str, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Collectives of two blocks, and of the whole network."""
    config, make, stem = FAMILIES[name]
    raw = init_params(config, jax.random.key(0))
    params = jax.device_put(raw, shardings(config, raw, mesh))
    module = make(config)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, WIDTH, config.width)), jnp.float32)
    kv_heads = getattr(config, "kv_heads", config.heads)
    split = jax.NamedSharding(mesh, jax.P(None, "model"))
    prefix = KV(
        *jax.device_put(tuple(cache.empty(BATCH, kv_heads, SIZE, config.head_dim, jnp.float32.dtype)), split)
    )
    positions = jnp.broadcast_to(SIZE + jnp.arange(WIDTH), (BATCH, WIDTH))
    angles = rotation(positions, config.head_dim, config.rope_base)
    seen = masks.visible(jnp.array([3, SIZE]), SIZE)

    def two(params: Any, x: Any, prefix: Any) -> Any:
        kept = []
        for i in range(2):
            x, kv = module.apply(
                {"params": params[f"{stem}_{i}"]}, x, angles, masks.causal(WIDTH), prefix, seen
            )
            kept.append(kv)
        return x, kept

    def whole(params: Any, tokens: Any) -> Any:
        network = network_of(config)
        if name == "recurrent_depth":
            network = network.at(1)
        keys = jax.random.split(jax.random.key(1), len(tokens))
        out = network.forward(params, tokens, positions, Prefix(network.init_cache(keys, WIDTH), None))
        return network.logits(params, out.hidden)

    error = jnp.abs(jax.jit(two)(params, x, prefix)[0] - jax.jit(two)(raw, x, prefix)[0])
    return {
        "blocks": collectives(two, params, x, prefix),
        "network": collectives(whole, params, positions),
        "error": float(jnp.max(error)),
    }


def denoiser_blocks(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """The same of the denoiser, whose blocks keep nothing and read a vector."""
    network, raw = tiny_denoiser(**DENOISER), tiny_denoiser_params(**DENOISER)
    config = network.config
    params = jax.device_put(raw, shardings(config, raw, mesh))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(BATCH, WIDTH, config.width)), jnp.float32)
    vector = jnp.asarray(rng.normal(size=(1, config.conditioning)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(WIDTH), (BATCH, WIDTH))
    angles = rotation(positions, config.head_dim, LONGEST)
    module = ModulatedBlock(denoiser_block(config))

    def two(params: Any, x: Any, vector: Any) -> Any:
        for i in range(2):
            x = module.apply({"params": params[f"layer_{i}"]}, x, angles, None, vector)
        return x

    def whole(params: Any, tokens: Any) -> Any:
        return network.logits(params, network.forward(params, tokens, positions).hidden)

    error = jnp.abs(jax.jit(two)(params, x, vector) - jax.jit(two)(raw, x, vector))
    return {
        "blocks": collectives(two, params, x, vector),
        "network": collectives(whole, params, positions),
        "error": float(jnp.max(error)),
    }


if __name__ == "__main__":
    four = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    found = {name: blocks(name, four) for name in FAMILIES}
    print(json.dumps(found | {"masked_diffusion": denoiser_blocks(four)}))
