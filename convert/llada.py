"""LLaDA (model type `llada`): names, layouts and fields on both sides.

The block is that of Llama in names of OLMo: `ff_proj` is the gate, and `ff_out` is the last product
of each block and, one level up, the output matrix.
"""

import dataclasses
from pathlib import Path
from typing import Any

from paradec_jax.config import FullAttentionConfig
from paradec_jax.store.model import Model

from . import qwen2
from .engine import ConvertError, Json, Source, Table, check_tied, read_table
from .fields import Fields, built, check_fixed, parse_fields, typed

MODEL_TYPE = "llada"
EMBEDDING, HEAD = "model.transformer.wte.weight", "model.transformer.ff_out.weight"
# Parts of names in the layouts of Qwen, and here.
NAMES = {
    qwen2.EMBEDDING: EMBEDDING,
    qwen2.HEAD: HEAD,
    "model.norm": "model.transformer.ln_f",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}

FIELDS: Fields = {
    "vocab_size": (("embedding_size", "vocab_size"), int, None),
    "width": (("d_model",), int, None),
    "layers": (("n_layers",), int, None),
    "heads": (("n_heads",), int, None),
    "kv_heads": (("n_kv_heads",), int, 0),  # 0: as many as query heads
    "feed_forward": (("mlp_hidden_size",), int, None),
    "max_length": (("max_sequence_length",), int, None),
    "rope_base": (("rope_theta",), float, 10_000.0),
    "norm_eps": (("rms_norm_eps",), float, 1e-5),
    "tie_embeddings": (("weight_tying",), bool, True),
}

# Fields that admit one value, because only that is implemented.
FIXED: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
    "scale_logits": False,
}


def read_params(
    source: Source, fields: Json, dtype: str | None
) -> tuple[dict[str, Any], FullAttentionConfig]:
    """As `qwen2.read_params`, of the config that the fields describe.

    Raises:
      ConvertError: when config and weights are not those of one complete, supported model.
    """
    check_fixed(fields, FIXED)
    ours = parse_fields(fields, FIELDS)
    ours["kv_heads"] = ours["kv_heads"] or ours["heads"]
    config = built(FullAttentionConfig, ours | {"qkv_bias": False})
    tied = {HEAD: (config.vocab_size, config.width)} if config.tie_embeddings else {}
    params, param_dtype = read_table(source, table(config), dtype, tied)
    if tied:
        check_tied(source, HEAD, EMBEDDING, "weight_tying")
    return params, typed(config, fields, param_dtype)


def table(config: FullAttentionConfig) -> Table:
    """The rows of all parameters."""
    axes, rows = qwen2.table(config)
    return axes, [dataclasses.replace(row, name=_renamed(row.name)) for row in rows]


def _renamed(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def write(folder: Path, model: Model, more: Json) -> None:
    """As `qwen2.write_layout`."""
    config: Any = model.config
    qwen2.check_layout(config, MODEL_TYPE)
    if config.rope_scaling is not None or config.head_dim * config.heads != config.width:
        raise ConvertError(
            f"config.json of a {MODEL_TYPE} has no place for scaled rotary positions, nor for heads that do not "
            "split the width"
        )
    fields = {name: getattr(config, ours) for ours, (names, *_) in FIELDS.items() for name in names}
    fields |= FIXED | {"rope_full_precision": True, "torch_dtype": config.dtype, **more}
    qwen2.write_files(folder, model, table(config), fields, {})
