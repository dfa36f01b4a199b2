"""The named shapes of each family."""

from typing import Any

from paradec_jax.config.rotary import RopeScaling
from paradec_jax.config.shapes import (
    BlockDiffusionConfig,
    CausalConfig,
    FullAttentionConfig,
    MaskedDiffusionConfig,
    RecurrentDepthConfig,
)

Fields = dict[str, Any]  # of a config
_BFLOAT16: Fields = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
# Sizes of the small models: the bundled ones, and those of tests.
_TINY: Fields = {
    "vocab_size": 384,
    "width": 128,
    "heads": 4,
    "feed_forward": 256,
    "max_length": 512,
}
_TEST: Fields = {"vocab_size": 32, "width": 16, "feed_forward": 24}
# Of the recurrent ones, and of the transformers, causal and of blocks.
_SMALL_PARTS: Fields = {"prelude_layers": 1, "core_layers": 2, "coda_layers": 1}
_TINY_LAYERS: Fields = {**_TINY, "layers": 6, "kv_heads": 4, "rope_base": 10_000.0}
_TEST_LAYERS: Fields = {
    **_TEST,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "max_length": 128,
    "rope_base": 10_000.0,
}

RECURRENT_PRESETS = {
    "huginn-0125": RecurrentDepthConfig(
        vocab_size=65_536, width=5280, heads=55, feed_forward=17_920, dtype="bfloat16"
    ),
    "tiny-recurrent": RecurrentDepthConfig(
        **_TINY, **_SMALL_PARTS, mean_recurrence=16, mean_backprop_depth=4
    ),
    "test-recurrent": RecurrentDepthConfig(
        **_TEST, **_SMALL_PARTS, heads=2, max_length=64, mean_recurrence=4, mean_backprop_depth=2
    ),
}

_QWEN: Fields = {"vocab_size": 151_936, **_BFLOAT16}
# What Llama and SmolLM2 have instead of the defaults, which are those of Qwen2.
_LLAMA: Fields = {"norm_eps": 1e-5, "qkv_bias": False, **_BFLOAT16}
_LLAMA_ROPE = RopeScaling(
    kind="llama3", factor=32.0, original=8192, low_freq_factor=1.0, high_freq_factor=4.0
)

_QWEN2_HALF: Fields = {
    "width": 896,
    "layers": 24,
    "heads": 14,
    "kv_heads": 2,
    "feed_forward": 4864,
    **_QWEN,
}
_QWEN2_7B: Fields = {
    "vocab_size": 152_064,
    "width": 3584,
    "layers": 28,
    "heads": 28,
    "kv_heads": 4,
    "feed_forward": 18_944,
    "tie_embeddings": False,
    **_BFLOAT16,
}
_QWEN3_HALF: Fields = {
    "width": 1024,
    "layers": 28,
    "heads": 16,
    "kv_heads": 8,
    "head_channels": 128,
    "feed_forward": 3072,
    "max_length": 40_960,
    "qkv_bias": False,
    "qk_norm": True,
    **_QWEN,
}

CAUSAL_PRESETS = {
    "qwen2.5-coder-0.5b": CausalConfig(**_QWEN2_HALF),
    "qwen2.5-coder-1.5b": CausalConfig(
        width=1536, layers=28, heads=12, kv_heads=2, feed_forward=8960, **_QWEN
    ),
    "qwen2.5-coder-7b": CausalConfig(**_QWEN2_7B),
    "qwen3-0.6b": CausalConfig(**_QWEN3_HALF),
    "smollm2-135m": CausalConfig(
        vocab_size=49_152,
        width=576,
        layers=30,
        heads=9,
        kv_heads=3,
        feed_forward=1536,
        max_length=8192,
        rope_base=100_000.0,
        **_LLAMA,
    ),
    "llama-3.2-1b": CausalConfig(
        vocab_size=128_256,
        width=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        feed_forward=8192,
        max_length=131_072,
        rope_base=500_000.0,
        rope_scaling=_LLAMA_ROPE,
        **_LLAMA,
    ),
    "tiny-causal": CausalConfig(**_TINY_LAYERS, qkv_bias=False, qk_norm=True, tie_embeddings=False),
    "test-causal": CausalConfig(**_TEST_LAYERS),
}

# SDAR, each size with blocks of 4; checkpoints with longer blocks have the same parameters.
_SDAR: Fields = {"kv_heads": 8, **_QWEN}

BLOCK_DIFFUSION_PRESETS = {
    "sdar-1.7b": BlockDiffusionConfig(width=2048, layers=28, heads=16, feed_forward=6144, **_SDAR),
    "sdar-4b": BlockDiffusionConfig(
        width=2560, layers=36, heads=32, head_channels=128, feed_forward=9728, **_SDAR
    ),
    "sdar-8b": BlockDiffusionConfig(width=4096, layers=36, heads=32, feed_forward=12_288, **_SDAR),
    "tiny-sdar": BlockDiffusionConfig(**_TINY_LAYERS, block=8),
    "test-sdar": BlockDiffusionConfig(**_TEST_LAYERS),
}

# Sizes of MDLM and SDTT, and those of SDTT's table of latencies (arXiv 2410.21035, table 2).
# GPT-2's vocabulary and the mask, with no row more.
_GPT2: Fields = {"vocab_size": 50_258, "dtype": "bfloat16"}

MASKED_DIFFUSION_PRESETS = {
    "mdlm-tiny": MaskedDiffusionConfig(width=512, layers=8, heads=8, **_GPT2),
    "mdlm-small": MaskedDiffusionConfig(width=768, layers=12, heads=12, **_GPT2),
    "mdlm-medium": MaskedDiffusionConfig(width=1024, layers=24, heads=16, **_GPT2),
    "mdlm-large": MaskedDiffusionConfig(width=1536, layers=24, heads=16, **_GPT2),
    "mdlm-1.3b": MaskedDiffusionConfig(width=2048, layers=24, heads=32, **_GPT2),
    "mdlm-3b": MaskedDiffusionConfig(width=3072, layers=26, heads=32, **_GPT2),
    "mdlm-8b": MaskedDiffusionConfig(width=4096, layers=40, heads=32, **_GPT2),
    "tiny-mdlm": MaskedDiffusionConfig(  # the 65 characters of Tiny Shakespeare and the mask
        vocab_size=66, width=128, layers=4, heads=4, conditioning=16, max_length=256, dropout=0.0
    ),
    "test-mdlm": MaskedDiffusionConfig(
        vocab_size=32, width=16, layers=2, heads=4, conditioning=8, max_length=64
    ),
}

FULL_ATTENTION_PRESETS = {
    "llada-8b": FullAttentionConfig(
        vocab_size=126_464,
        width=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        feed_forward=12_288,
        max_length=4096,
        rope_base=500_000.0,
        tie_embeddings=False,
        **_LLAMA,
    ),
    "dream-7b": FullAttentionConfig(**_QWEN2_7B, max_length=131_072),
    "qwen3-0.6b-diffusion": FullAttentionConfig(**_QWEN3_HALF),
    "open-dcoder-0.5b": FullAttentionConfig(**_QWEN2_HALF),
    "test-full": FullAttentionConfig(**_TEST_LAYERS),
}
