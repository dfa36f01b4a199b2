"""LLaDA (model type `llada`): the layout of Llama in names of its own.

`ff_proj` is the gate; `ff_out` is the last product of each block and, one level up, the output
matrix.
"""

from typing import Any

from .engine import Json, columns
from .fields import check_fixed

LLADA = "llada"
# Fields of config.json in transformers, and here.
FIELDS = columns("""
    vocab_size               embedding_size
    hidden_size              d_model
    num_hidden_layers        n_layers
    num_attention_heads      n_heads
    num_key_value_heads      n_kv_heads
    intermediate_size        mlp_hidden_size
    max_position_embeddings  max_sequence_length
    tie_word_embeddings      weight_tying
""")
# Parts of names of tensors in transformers, and here.
TENSORS = columns("""
    model.embed_tokens        model.transformer.wte
    lm_head                   model.transformer.ff_out
    model.norm                model.transformer.ln_f
    model.layers              model.transformer.blocks
    input_layernorm           attn_norm
    post_attention_layernorm  ff_norm
    self_attn.q_proj          q_proj
    self_attn.k_proj          k_proj
    self_attn.v_proj          v_proj
    self_attn.o_proj          attn_out
    mlp.gate_proj             ff_proj
    mlp.up_proj               up_proj
    mlp.down_proj             ff_out
""")
# Fields that admit one value, because only that is implemented.
FIXED: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "block_type": "llama",
    "include_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "rope": True,
    "scale_logits": False,
}


def parsed(fields: Json) -> dict[str, Any]:
    """Fields of config.json with their names in transformers as well. Raises ConvertError."""
    check_fixed(fields, FIXED)
    return {**fields, **{name: fields[own] for name, own in FIELDS if own in fields}}


def formatted(fields: Json) -> dict[str, Any]:
    """Fields of config.json by their names here, given those in transformers."""
    own = dict(FIELDS)
    return {own.get(name, name): value for name, value in fields.items()} | FIXED


def tensor(name: str) -> str:
    """A tensor's name here, given that in transformers."""
    for theirs, own in TENSORS:
        name = name.replace(theirs, own)
    return name
