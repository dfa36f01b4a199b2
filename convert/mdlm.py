"""Denoisers of masked text, MDLM and SDTT: names, layouts and config fields on both sides.

The released files agree in the network and differ in what is around it: MDLM's folders have a flat config.json
(model type `mdlm`), SDTT's the nested config of its training, which checkpoints of Lightning hold as well.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from convert import torch_files
from convert.engine import (
    ConvertError,
    Row,
    Source,
    check_depth,
    check_prefix,
    check_tensors,
    common_dtype,
    export_tree,
    import_tree,
    read_json,
    table_shapes,
)
from convert.fields import Fields, activation_dtype, check_fixed, parse_fields, token_ids
from convert.weights import opened
from paradec_jax.config import MaskedDiffusionConfig, TokenSpec
from paradec_jax.disk.tensors import Lazy
from paradec_jax.disk.writing import write_tensors
from paradec_jax.models.denoiser import FREQUENCIES, LONGEST
from paradec_jax.store import Model

MODEL_TYPES = ("mdlm",)
FAMILY = "masked_diffusion"
EMBEDDING, ROPE, NOISE = "vocab_embed.embedding", "rotary_emb.inv_freq", "sigma_map.mlp.0.weight"
PREFIX = "backbone."  # of exported names
WRAPPERS = (PREFIX, "_orig_mod.")  # parts of names that wrapping a model adds, some of them twice

FIELDS: Fields = {
    "vocab_size": (("vocab_size",), int, 0),  # 0: as many as the embedding has rows
    "max_length": (("model_length",), int, None),
    "width": (("hidden_dim",), int, None),
    "conditioning": (("cond_dim",), int, None),
    "layers": (("n_blocks",), int, None),
    "heads": (("n_heads",), int, None),
    "dropout": (("dropout",), float, 0.1),
}
NESTED = {
    "model_length": "length",
    "hidden_dim": "hidden_size",
}  # names in a training config; the others are equal
FIXED: dict[str, Any] = {"time_conditioning": False}

# Special tokens by the size of the vocabulary, where config.json names none: GPT-2's with the mask added, whose rows
# begin and end with its one special token, BERT's, and the letters of text8. Else the mask is the last id.
TOKENS = {
    50_258: TokenSpec(bos=50_256, stop=(50_256,), pad=50_256, mask=50_257, alignment="own"),
    30_522: TokenSpec(bos=101, stop=(102,), pad=0, mask=103, alignment="own"),
    35: TokenSpec(mask=4, alignment="own"),
}


@contextlib.contextmanager
def read(folder: Path, fields: Mapping[str, Any], dtype: str | None = None) -> Iterator[Model]:
    """A Hugging Face folder as a model without a tokenizer, whose parameters are read when they are indexed.

    Args:
      folder: the folder.
      fields: its config.json, flat or nested.
      dtype: type of the parameters; that of `engine.common_dtype` by default.

    Raises:
      ConvertError: when config and weights are not those of one complete, supported model.
    """
    with opened(folder, plain_name) as checkpoint:
        yield read_tensors(checkpoint, fields, dtype)


@contextlib.contextmanager
def read_checkpoint(path: Path, weights: str = "raw", dtype: str | None = None) -> Iterator[Model]:
    """As `read`, of a checkpoint of Lightning, which is not unpickled.

    The model's sizes are those of a config.json beside the file, or else of the settings that the file holds.

    Args:
      path: the file.
      weights: "raw" for those that were trained, "ema" for their moving averages.
      dtype: type of the parameters; that of `engine.common_dtype` by default.

    Raises:
      ConvertError: when the file is damaged, has no such weights, or is not of a complete, supported model.
    """
    beside = path.with_name("config.json")
    with torch_files.Archive(path) as archive:
        fields = read_json(beside) if beside.is_file() else torch_files.hyper_parameters(archive)
        if not fields:
            raise ConvertError(f"{path} does not tell the model's sizes; put its config.json beside it")
        raw = torch_files.state_dict(archive, plain_name)
        model = read_tensors(raw, fields, dtype)
        if weights == "ema":
            order = parameter_order(cast(MaskedDiffusionConfig, model.config))
            model = read_tensors(torch_files.averages(archive, order), fields, dtype)
        yield model


def read_tensors(checkpoint: Source, fields: Mapping[str, Any], dtype: str | None = None) -> Model:
    """As `read`, of tensors by their plain names."""
    fields = flat(fields)
    check_prefix(checkpoint, (EMBEDDING, NOISE))
    if EMBEDDING in checkpoint.names and not fields.get("vocab_size"):
        fields = {**fields, "vocab_size": next(iter(checkpoint.shape(EMBEDDING)), 0)}
    if EMBEDDING in checkpoint.names and NOISE not in checkpoint.names:
        raise ConvertError(
            f"{checkpoint.folder} has no tensor {NOISE}: a denoiser without layers that modulate is not supported"
        )
    shape = parse_config(fields)
    check_depth(checkpoint, MaskedDiffusionConfig(**shape))
    axes, rows = table(MaskedDiffusionConfig(**shape))
    shapes = table_shapes(rows, axes)
    names = list(shapes)
    if ROPE in checkpoint.names:
        shapes[ROPE] = (axes["c"] // 2,)
    check_tensors(checkpoint, shapes)
    if ROPE in checkpoint.names:
        _check_rope(checkpoint, axes["c"])
    param_dtype = dtype or common_dtype(checkpoint, names)
    params = import_tree(checkpoint, rows, axes, param_dtype)
    config = MaskedDiffusionConfig(
        **shape, dtype=activation_dtype(fields, param_dtype), param_dtype=param_dtype
    )
    return Model(config, params, parse_tokens(fields, config.vocab_size))


def write(folder: Path, model: Model, max_shard_bytes: int) -> None:
    """Writes config.json and the weights of a Hugging Face folder, without tokenizer and model code."""
    if not isinstance(model.config, MaskedDiffusionConfig):
        raise ConvertError(f"a model of family {model.family} has no {MODEL_TYPES[0]} layout")
    axes, rows = table(model.config)
    tensors = {PREFIX + name: tensor for name, tensor in export_tree(model.params, rows, axes).items()}
    rope = inverse_frequencies(axes["c"])
    tensors[PREFIX + ROPE] = Lazy.of(rope)
    write_tensors(folder, tensors, max_shard_bytes)
    fields = format_config(model.config) | format_tokens(model.token_spec)
    text = json.dumps(fields, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def plain_name(name: str) -> str:
    """The name of a tensor without what wrappers add."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def table(config: MaskedDiffusionConfig) -> tuple[dict[str, int], list[Row]]:
    """Lengths of the axes that patterns name, and the rows of all parameters, in the order of their registration."""
    axes = {
        "v": config.vocab_size,
        "d": config.width,
        "h": config.heads,
        "c": config.head_dim,
        "f": config.feed_forward,
        "k": config.conditioning,
        "o": config.conditioning,
        "e": 2 * FREQUENCIES,
        "m": 6,  # vectors of a block
        "n": 2,  # of the end
    }
    qkv = ("h c",) * 3
    block: list[tuple[str, str, str, tuple[str, ...], int]] = [
        ("attention_norm", "norm1.weight", "d -> d", (), 0),
        *((f"attention/{x}", "attn_qkv.weight", "(h c) d -> d h c", qkv, i) for i, x in enumerate("qkv")),
        ("attention/out", "attn_out.weight", "d (h c) -> h c d", (), 0),
        ("mlp_norm", "norm2.weight", "d -> d", (), 0),
        ("mlp/up", "mlp.0.weight", "f d -> d f", (), 0),
        ("mlp/up_bias", "mlp.0.bias", "f -> f", (), 0),
        ("mlp/down", "mlp.2.weight", "d f -> f d", (), 0),
        ("mlp/down_bias", "mlp.2.bias", "d -> d", (), 0),
        ("modulation", "adaLN_modulation.weight", "(m d) k -> k m d", (), 0),
        ("modulation_bias", "adaLN_modulation.bias", "(m d) -> m d", (), 0),
    ]
    rows = [
        Row("embedding", EMBEDDING, "v d -> v d"),
        Row("noise_in", NOISE, "k e -> e k"),
        Row("noise_in_bias", "sigma_map.mlp.0.bias", "k -> k"),
        Row("noise_out", "sigma_map.mlp.2.weight", "o k -> k o"),
        Row("noise_out_bias", "sigma_map.mlp.2.bias", "k -> k"),
    ]
    rows += [
        Row(f"layer_{{i}}/{path}", f"blocks.{{i}}.{name}", pattern, config.layers, pieces, piece)
        for path, name, pattern, pieces, piece in block
    ]
    rows += [
        Row("final_norm", "output_layer.norm_final.weight", "d -> d"),
        Row("head", "output_layer.linear.weight", "v d -> d v"),
        Row("head_bias", "output_layer.linear.bias", "v -> v"),
        Row("final_modulation", "output_layer.adaLN_modulation.weight", "(n d) k -> k n d"),
        Row("final_modulation_bias", "output_layer.adaLN_modulation.bias", "(n d) -> n d"),
    ]
    return axes, rows


def parameter_order(config: MaskedDiffusionConfig) -> list[str]:
    """Names of all parameters in the order in which the original program registers them, block after block."""
    axes, rows = table(config)
    names = list(table_shapes(rows, axes))
    first = next(i for i, name in enumerate(names) if name.startswith("blocks."))
    last = next(i for i, name in enumerate(names) if name.startswith("output_layer."))
    blocks = sorted(names[first:last], key=lambda name: int(name.split(".")[1]))  # which keeps ties in place
    return [*names[:first], *blocks, *names[last:]]


def flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of MDLM's config.json; those of a nested training config under the same names.

    Raises:
      ConvertError: a training config of another parameterisation or without sizes.
    """
    model = fields.get("model")
    if "model_type" in fields or not isinstance(model, dict):
        return dict(fields)
    kind = fields.get("parameterization")
    if isinstance(kind, str) and kind != "subs":
        raise ConvertError(f"field parameterization of config.json must be 'subs', not {kind!r}")
    found = {name: model[NESTED.get(name, name)] for name in _official() if NESTED.get(name, name) in model}
    known = (
        "time_conditioning",
        "torch_dtype",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "mask_token_id",
    )
    return found | {name: fields[name] for name in known if name in fields} | {"model_type": MODEL_TYPES[0]}


def _official() -> list[str]:
    return [name for names, _, _ in FIELDS.values() for name in names]


def parse_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Our config fields, without the two types, from the official ones.

    Raises:
      ConvertError: naming the field that is missing, of a wrong type or not supported.
    """
    check_fixed(fields, FIXED)
    ours = parse_fields(fields, FIELDS)
    try:
        MaskedDiffusionConfig(**ours)
    except ValueError as error:
        raise ConvertError(f"config.json describes no valid model: {error}") from error
    return ours


def format_config(config: MaskedDiffusionConfig) -> dict[str, Any]:
    """The official config fields, without special tokens."""
    fields = {names[0]: getattr(config, field) for field, (names, _, _) in FIELDS.items()}
    return (
        FIXED
        | fields
        | {
            "architectures": ["MDLM"],
            "model_type": MODEL_TYPES[0],
            "return_dict": False,
            "torch_dtype": config.dtype,
        }
    )


def parse_tokens(fields: Mapping[str, Any], vocab_size: int) -> TokenSpec:
    """Special tokens: those of config.json; of a known vocabulary where it names no mask.

    Raises:
      ConvertError: naming the field that holds no token id of the vocabulary.
    """
    ids = {name: token_ids(fields, f"{name}_token_id") for name in ("bos", "eos", "pad", "mask")}
    for name, tokens in ids.items():
        for token in tokens:
            if token >= vocab_size:
                raise ConvertError(
                    f"field {name}_token_id holds {token}, but config.json has a vocabulary of {vocab_size}"
                )
    if not ids["mask"] and vocab_size in TOKENS:
        return TOKENS[vocab_size]
    return TokenSpec(
        bos=next(iter(ids["bos"]), None),
        stop=tuple(dict.fromkeys(ids["eos"])),
        pad=next(iter([*ids["pad"], *ids["eos"]]), 0),
        mask=next(iter(ids["mask"]), vocab_size - 1),
        alignment="own",
    )


def format_tokens(tokens: TokenSpec) -> dict[str, Any]:
    """Special tokens as fields of config.json.

    Raises:
      ConvertError: a model whose logits are about the next token, or without a mask.
    """
    if tokens.alignment != "own" or tokens.mask is None:
        raise ConvertError("only a model with a mask and of alignment 'own' has this layout")
    fields: dict[str, Any] = {"mask_token_id": tokens.mask, "pad_token_id": tokens.pad}
    if tokens.bos is not None:
        fields["bos_token_id"] = tokens.bos
    if tokens.stop:
        fields["eos_token_id"] = list(tokens.stop)
    return fields


def inverse_frequencies(head_dim: int) -> np.ndarray:
    """Angles of the rotation at position 1, float32 [C/2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1) / np.float32(LONGEST) ** exponent


def _check_rope(checkpoint: Source, head_dim: int) -> None:
    """The stored frequencies are ours, up to the rounding of a bfloat16 copy."""
    stored = checkpoint.read(ROPE).astype(np.float32)
    if not np.allclose(stored, inverse_frequencies(head_dim), atol=0, rtol=1e-2):
        raise ConvertError(f"tensor {ROPE} holds other frequencies than those of base {LONGEST:g}")
