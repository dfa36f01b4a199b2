"""Huginn-0125 and its kin (model type `huginn_raven`): names, layouts and config fields on both sides."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.engine import (
    ConvertError,
    Row,
    Source,
    check_depth,
    check_tensors,
    check_tied,
    common_dtype,
    export_tree,
    import_tree,
    table_shapes,
)
from convert.fields import Fields, activation_dtype, check_derived, check_fixed, parse_fields, token_ids
from convert.weights import opened
from paradec_jax.config import RecurrentDepthConfig, TokenSpec
from paradec_jax.disk.tensors import Lazy
from paradec_jax.disk.writing import write_tensors
from paradec_jax.store import Model

MODEL_TYPES = ("huginn_raven",)
FAMILY = "recurrent_depth"
PREFIX = "_orig_mod._original_module."  # of the raw pre-training checkpoints
EMBEDDING, HEAD, ROPE = "transformer.wte.weight", "lm_head.weight", "freqs_cis"
REMAT = {"per-iteration": "iteration", "none": "none"}

FIELDS: Fields = {
    "vocab_size": (("vocab_size", "padded_vocab_size"), int, None),
    "width": (("n_embd", "hidden_size"), int, None),
    "heads": (("n_heads", "num_attention_heads", "num_key_value_heads"), int, None),
    "feed_forward": (("intermediate_size",), int, None),
    "prelude_layers": (("n_layers_in_prelude",), int, None),
    "core_layers": (("n_layers_in_recurrent_block",), int, None),
    "coda_layers": (("n_layers_in_coda",), int, None),
    "max_length": (("block_size",), int, None),
    "rope_base": (("rope_base",), float, 50_000.0),
    "norm_eps": (("norm_eps",), float, 1e-6),
    "qk_bias": (("qk_bias",), bool, True),
    "tie_embeddings": (("tie_embeddings", "tie_word_embeddings"), bool, True),
    "mean_recurrence": (("mean_recurrence",), int, 32),
    "mean_backprop_depth": (("mean_backprop_depth",), int, 8),
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

# Special tokens of the release's vocabulary. The original generation code stops at all three of STOP whatever
# its configuration says.
RELEASE_VOCAB, BOS, STOP, PAD = 65_536, 65_504, (65_504, 65_505, 65_508), 65_509


@contextlib.contextmanager
def read(folder: Path, fields: Mapping[str, Any], dtype: str | None = None) -> Iterator[Model]:
    """A Hugging Face folder as a model without a tokenizer, whose parameters are read when they are indexed.

    Args:
      folder: the folder.
      fields: its config.json.
      dtype: type of the parameters; that of `engine.common_dtype` by default.

    Raises:
      ConvertError: when config and weights are not those of one complete, supported model.
    """
    shape = parse_config(fields)
    axes, rows = table(RecurrentDepthConfig(**shape))
    with opened(folder, lambda name: name.removeprefix(PREFIX)) as checkpoint:
        check_depth(checkpoint, RecurrentDepthConfig(**shape))
        shapes = table_shapes(rows, axes)
        names = list(shapes)
        if HEAD in checkpoint.names:
            shapes[HEAD] = shapes[EMBEDDING]
        if ROPE in checkpoint.names:
            shapes[ROPE] = (1, shape["max_length"], 1, axes["c"] // 2, 2)
        check_tensors(checkpoint, shapes)
        if shape["tie_embeddings"]:
            check_tied(checkpoint, HEAD, EMBEDDING, "tie_embeddings")
        if ROPE in checkpoint.names:
            _check_rope(checkpoint, shape["rope_base"])
        param_dtype = dtype or common_dtype(checkpoint, names)
        params = import_tree(checkpoint, rows, axes, param_dtype)
        config = RecurrentDepthConfig(
            **shape, dtype=activation_dtype(fields, param_dtype), param_dtype=param_dtype
        )
        yield Model(config, params, parse_tokens(fields, config.vocab_size))


def write(folder: Path, model: Model, max_shard_bytes: int) -> None:
    """Writes config.json and the weights of a Hugging Face folder, without tokenizer and model code."""
    if not isinstance(model.config, RecurrentDepthConfig):
        raise ConvertError(f"a model of family {model.family} has no {MODEL_TYPES[0]} layout")
    axes, rows = table(model.config)
    tensors = export_tree(model.params, rows, axes)
    rope = rope_table(model.config.max_length, model.config.head_dim, model.config.rope_base)
    tensors[ROPE] = Lazy.of(rope)
    write_tensors(folder, tensors, max_shard_bytes)
    fields = format_config(model.config) | format_tokens(model.token_spec)
    text = json.dumps(fields, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def table(config: RecurrentDepthConfig) -> tuple[dict[str, int], list[Row]]:
    """Lengths of the axes that patterns name, and the rows of all parameters."""
    axes = {
        "v": config.vocab_size,
        "d": config.width,
        "e": 2 * config.width,  # state and prelude output, side by side
        "h": config.heads,
        "c": config.head_dim,
        "f": config.feed_forward,
    }
    rows = [
        Row("embedding", EMBEDDING, "v d -> v d"),
        Row("adapter", "transformer.adapter.weight", "d e -> e d"),
        Row("final_norm", "transformer.ln_f.weight", "d -> d"),
    ]
    if not config.tie_embeddings:
        rows.append(Row("head", HEAD, "v d -> d v"))
    qkv, pair, two = ("h c",) * 3, ("1",) * 2, ("f",) * 2
    block: list[tuple[str, str, str, tuple[str, ...], int]] = [
        *((f"norm_{i}", f"norm_{i}.weight", "d -> d", (), 0) for i in range(1, 5)),
        *((f"attention/{x}", "attn.Wqkv.weight", "(h c) d -> d h c", qkv, i) for i, x in enumerate("qkv")),
        ("attention/out", "attn.proj.weight", "d (h c) -> h c d", (), 0),
        *((f"mlp/{x}", "mlp.fc.weight", "f d -> d f", two, i) for i, x in enumerate(("gate", "up"))),
        ("mlp/down", "mlp.proj.weight", "d f -> f d", (), 0),
    ]
    if config.qk_bias:
        block += [
            (f"attention/{x}_bias", "attn.qk_bias", "1 1 h c -> h c", pair, i) for i, x in enumerate("qk")
        ]
    for part, official, layers in (
        ("prelude", "prelude", config.prelude_layers),
        ("core", "core_block", config.core_layers),
        ("coda", "coda", config.coda_layers),
    ):
        rows += [
            Row(
                f"{part}_{{i}}/{path}", f"transformer.{official}.{{i}}.{name}", pattern, layers, pieces, piece
            )
            for path, name, pattern, pieces, piece in block
        ]
    return axes, rows


def parse_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Our config fields, without the two types, from the official ones.

    Raises:
      ConvertError: naming the field that is missing, of a wrong type, contradictory or not supported.
    """
    ours = parse_fields(fields, FIELDS)
    check_fixed(fields, FIXED)
    derived = {
        "head_dim": ours["width"] // max(ours["heads"], 1),
        "n_layers": ours["prelude_layers"] + ours["core_layers"] + ours["coda_layers"],
    }
    check_derived(fields, derived)
    ours["remat"] = REMAT.get(str(fields.get("activation_checkpoint_impl")), "none")
    try:
        RecurrentDepthConfig(**ours)
    except ValueError as error:
        raise ConvertError(f"config.json describes no valid model: {error}") from error
    return ours


def format_config(config: RecurrentDepthConfig) -> dict[str, Any]:
    """The official config fields, those derived from others included."""
    fields = {names[0]: getattr(config, field) for field, (names, _, _) in FIELDS.items()}
    if config.rope_base.is_integer():
        fields["rope_base"] = int(config.rope_base)
    return (
        FIXED
        | INFORMATIVE
        | fields
        | {
            "model_type": MODEL_TYPES[0],
            "activation_checkpoint_impl": "none" if config.remat == "none" else "per-iteration",
            "effective_expected_depth": config.effective_depth,
            "head_dim": config.head_dim,
            "init_values": {
                "std": config.init_std,
                "embedding": config.init_std,
                "out_proj": config.init_std / math.sqrt(2 * config.effective_depth),
                "embed_scale": math.sqrt(config.width),
            },
            "n_layers": config.prelude_layers + config.core_layers + config.coda_layers,
            "num_key_value_heads": config.heads,
            "padded_vocab_size": config.vocab_size,
            "torch_dtype": config.dtype,
        }
    )


def parse_tokens(fields: Mapping[str, Any], vocab_size: int) -> TokenSpec:
    """Special tokens: those of config.json, joined to the release's where the vocabulary is the release's.

    Ids beyond the vocabulary are dropped: small models of the original code inherit the release's.

    Raises:
      ConvertError: naming the field that holds no token id.
    """
    ids = {
        name: [token for token in token_ids(fields, name) if token < vocab_size]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    release = vocab_size == RELEASE_VOCAB
    bos = next(iter(ids["bos_token_id"]), BOS if release else None)
    pad = next(iter(ids["pad_token_id"]), PAD if release else 0)
    stop = (*(STOP if release else ()), *ids["eos_token_id"])
    return TokenSpec(bos=bos, stop=tuple(dict.fromkeys(stop)), pad=pad)


def format_tokens(tokens: TokenSpec) -> dict[str, Any]:
    """Special tokens as fields of config.json."""
    fields: dict[str, Any] = {"pad_token_id": tokens.pad}
    if tokens.bos is not None:
        fields["bos_token_id"] = tokens.bos
    if tokens.stop:
        fields["eos_token_id"] = list(tokens.stop)
    return fields


def rope_table(length: int, head_dim: int, base: float) -> np.ndarray:
    """Cosines and sines of all positions, float32 [1, length, 1, C/2, 2], computed in float32."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1) / np.float32(base) ** exponent
    angle = np.arange(length, dtype=np.float32)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)[None, :, None]


def _check_rope(checkpoint: Source, base: float) -> None:
    """The stored table is that of `rope_base`, up to the rounding of a bfloat16 copy."""
    stored = checkpoint.read(ROPE).astype(np.float32)
    _, length, _, half, _ = stored.shape
    if not np.allclose(stored, rope_table(length, 2 * half, base), atol=1e-2, rtol=0):
        raise ConvertError(f"tensor {ROPE} contradicts rope_base {base:g} of config.json")
