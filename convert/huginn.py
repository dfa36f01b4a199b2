"""Huginn-0125 (model type `huginn_raven`): names, layouts and config fields on both sides."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from paradec_jax.config import RecurrentDepthConfig, TokenSpec
from paradec_jax.store.model import Model

from .engine import (
    Json,
    Row,
    Source,
    Table,
    check_tied,
    export_tree,
    fused,
    layered,
    read_table,
    rows_of,
)
from .fields import (
    Fields,
    built,
    check_fixed,
    flag,
    parse_fields,
    real,
    token_ids,
    token_spec,
    typed,
    whole,
    write_config,
)
from .rope import check_rope, inverse_frequencies
from .weights import write_weights

MODEL_TYPES = ("huginn_raven",)
FAMILY = "recurrent_depth"
PREFIX = ""  # of exported names
RAW = "_orig_mod._original_module."  # what names of the raw pre-training checkpoints begin with
EMBEDDING, HEAD, ROPE = "transformer.wte.weight", "lm_head.weight", "freqs_cis"

FIELDS: Fields = {
    "vocab_size": whole("vocab_size", "padded_vocab_size"),
    "width": whole("n_embd", "hidden_size"),
    "heads": whole("n_heads", "num_attention_heads", "num_key_value_heads"),
    "feed_forward": whole("intermediate_size"),
    "prelude_layers": whole("n_layers_in_prelude"),
    "core_layers": whole("n_layers_in_recurrent_block"),
    "coda_layers": whole("n_layers_in_coda"),
    "max_length": whole("block_size"),
    "rope_base": real("rope_base", default=50_000.0),
    "norm_eps": real("norm_eps", default=1e-6),
    "qk_bias": flag("qk_bias", default=True),
    "tie_embeddings": flag("tie_embeddings", "tie_word_embeddings", default=True),
    "mean_recurrence": whole("mean_recurrence", default=32),
    "mean_backprop_depth": whole("mean_backprop_depth", default=8),
}

# Fields that admit one value, because only that is implemented.
FIXED: dict[str, Any] = {
    "bias": False,
    "block_class_name": "SandwichBlock",
    "injection_type": "linear",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "norm_class_name": "RMSNorm_llama",
    "state_init": "like-init",
    "test_time_noise": 0,
}

# Fields that matter to the original training code alone; written as the release has them.
INFORMATIVE: dict[str, Any] = {
    "architecture_class_name": "RecurrentGPT",
    "architectures": ["RavenForCausalLM"],
    "init_orthogonal": False,
    "init_strategy": "takase",
    "padding_multiple": 4096,
    "sampling_scheme": "poisson-lognormal-filling",
    "test_time_noise_type": "fixed",
}

# Special tokens of the release's vocabulary. The original generation code stops at all three of
# STOP whatever its configuration says.
RELEASE_VOCAB, BOS, STOP, PAD = 65_536, 65_504, (65_504, 65_505, 65_508), 65_509


def plain_name(name: str) -> str:
    """The name of a tensor in the released folder."""
    return name.removeprefix(RAW)


def read(source: Source, fields: Json, dtype: str | None = None) -> Model:
    """As `qwen2.read`."""
    config = parse_config(fields)
    rope_shape = (1, config.max_length, 1, config.head_dim // 2, 2)
    optional = {HEAD: (config.vocab_size, config.width), ROPE: rope_shape}
    params, param_dtype = read_table(source, table(config), dtype, optional)
    if config.tie_embeddings:
        check_tied(source, HEAD, EMBEDDING, "tie_embeddings")
    check_rope(source, ROPE, rope_table(config), config.rope_base, atol=1e-2, rtol=0)
    tokens = parse_tokens(fields, config.vocab_size)
    return Model(typed(config, fields, param_dtype), params, tokens)


def write(folder: Path, model: Model) -> None:
    """Writes config.json and the weights of a Hugging Face folder."""
    config: Any = model.config
    write_weights(folder, {**export_tree(model.params, table(config)), ROPE: rope_table(config)})
    write_config(folder, format_config(config), model.token_spec)


def table(config: RecurrentDepthConfig) -> Table:
    """The rows of all parameters."""
    axes = {
        "v": config.vocab_size,
        "d": config.width,
        "e": 2 * config.width,  # state and prelude output, side by side
        "h": config.heads,
        "c": config.head_dim,
        "f": config.feed_forward,
    }
    rows = rows_of(f"""
        embedding   {EMBEDDING}                 v d -> v d
        adapter     transformer.adapter.weight  d e -> e d
        final_norm  transformer.ln_f.weight     d -> d
    """)
    if not config.tie_embeddings:
        rows.append(Row("head", HEAD, "v d -> d v"))
    block = [
        *(Row(f"norm_{i}", f"norm_{i}.weight", "d -> d") for i in range(1, 5)),
        *fused([f"attention/{x}" for x in "qkv"], "attn.Wqkv.weight", "(h c) d -> d h c"),
        Row("attention/out", "attn.proj.weight", "d (h c) -> h c d"),
        *fused(["mlp/gate", "mlp/up"], "mlp.fc.weight", "f d -> d f"),
        Row("mlp/down", "mlp.proj.weight", "d f -> f d"),
    ]
    if config.qk_bias:
        block += fused([f"attention/{x}_bias" for x in "qk"], "attn.qk_bias", "1 1 h c -> h c")
    rows += layered(block, config.prelude_layers, "prelude", "transformer.prelude")
    rows += layered(block, config.core_layers, "core", "transformer.core_block")
    return axes, rows + layered(block, config.coda_layers, "coda", "transformer.coda")


def parse_config(fields: Json) -> RecurrentDepthConfig:
    """Our config without the two types; errors as of `qwen2.parse_config`."""
    ours = parse_fields(fields, FIELDS)
    each = fields.get("activation_checkpoint_impl") == "per-iteration"
    ours["remat"] = "iteration" if each else "none"
    config = built(RecurrentDepthConfig, ours)
    check_fixed(fields, FIXED | _derived(config))
    return config


def _derived(config: RecurrentDepthConfig) -> dict[str, Any]:
    """Official fields that follow from others."""
    layers = config.prelude_layers + config.core_layers + config.coda_layers
    return {"head_dim": config.head_dim, "n_layers": layers}


def format_config(config: RecurrentDepthConfig) -> dict[str, Any]:
    """The official config fields, those derived from others included."""
    fields = {names[0]: getattr(config, field) for field, (names, _, _) in FIELDS.items()}
    deviations = {
        "std": config.init_std,
        "embedding": config.init_std,
        "out_proj": config.init_std / math.sqrt(2 * config.effective_depth),
        "embed_scale": math.sqrt(config.width),
    }
    more = {
        "model_type": MODEL_TYPES[0],
        "activation_checkpoint_impl": "none" if config.remat == "none" else "per-iteration",
        "effective_expected_depth": config.effective_depth,
        "init_values": deviations,
        "num_key_value_heads": config.heads,
        "padded_vocab_size": config.vocab_size,
        "torch_dtype": config.dtype,
    }
    return FIXED | INFORMATIVE | fields | _derived(config) | more


def parse_tokens(fields: Json, vocab_size: int) -> TokenSpec:
    """Special tokens of config.json, joined to the release's where the vocabulary is its own.

    Ids beyond the vocabulary are dropped: small models of the original code inherit the release's.

    Raises:
      ConvertError: naming the field that holds no token id.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    bos, stop, pad = (
        [i for i in token_ids(fields, name, 2**31) if i < vocab_size] for name in names
    )
    if vocab_size == RELEASE_VOCAB:
        bos, stop, pad = [*bos, BOS], [*STOP, *stop], [*pad, PAD]
    return token_spec(bos, stop, pad)


def rope_table(config: RecurrentDepthConfig) -> np.ndarray:
    """Cosines and sines of all positions, float32 [1, length, 1, C/2, 2], computed in float32."""
    frequency = inverse_frequencies(config.head_dim, config.rope_base)
    angle = np.arange(config.max_length, dtype=np.float32)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)[None, :, None]
