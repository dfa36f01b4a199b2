"""Denoisers of masked text, MDLM and SDTT: names, layouts and config fields on both sides.

The released files agree in the network and differ in what is around it: MDLM's folders have a flat
config.json (model type `mdlm`), SDTT's the nested config of its training, which checkpoints of
Lightning hold as well.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paradec_jax.config import MaskedDiffusionConfig, TokenSpec
from paradec_jax.models.denoiser import FREQUENCIES
from paradec_jax.store.model import Model

from . import torch_files
from .engine import (
    ConvertError,
    Json,
    Source,
    Table,
    export_tree,
    fused,
    layered,
    read_table,
    rows_of,
    table_shapes,
)
from .fields import (
    Fields,
    built,
    check_fixed,
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
from .words import json_if_there

MODEL_TYPES = ("mdlm",)
FAMILY = "masked_diffusion"
EMBEDDING, ROPE = "vocab_embed.embedding", "rotary_emb.inv_freq"
PREFIX = "backbone."  # of exported names
WRAPPERS = (PREFIX, "_orig_mod.")  # parts of names that wrapping a model adds, some of them twice

FIELDS: Fields = {
    "vocab_size": whole("vocab_size", default=0),  # 0: as many as the embedding has rows
    "max_length": whole("model_length"),
    "width": whole("hidden_dim"),
    "conditioning": whole("cond_dim"),
    "layers": whole("n_blocks"),
    "heads": whole("n_heads"),
    "dropout": real("dropout", default=0.1),
}
# Names in a training config; the others are equal.
NESTED = {"model_length": "length", "hidden_dim": "hidden_size"}
FIXED: dict[str, Any] = {"time_conditioning": False}

# Special tokens by the size of the vocabulary, where config.json names none: GPT-2's with the mask
# added, whose rows begin and end with its one special token, BERT's, and the letters of text8. Else
# the mask is the last id.
TOKENS = {
    50_258: TokenSpec(bos=50_256, stop=(50_256,), pad=50_256, mask=50_257, alignment="own"),
    30_522: TokenSpec(bos=101, stop=(102,), pad=0, mask=103, alignment="own"),
    35: TokenSpec(mask=4, alignment="own"),
}


@contextlib.contextmanager
def read_checkpoint(path: Path, weights: str = "raw", dtype: str | None = None) -> Iterator[Model]:
    """The model of a checkpoint of Lightning, which is not unpickled.

    The model's sizes are those of a config.json beside the file, or else of the settings that the
    file holds.

    Args:
      path: the file.
      weights: "raw" for those that were trained, "ema" for their moving averages.
      dtype: type of the parameters; that of `engine.common_dtype` by default.

    Raises:
      ConvertError: when the file is damaged, has no such weights, or is not of a complete,
        supported model.
    """
    with torch_files.Archive(path) as archive:
        beside = json_if_there(path.with_name("config.json"))
        fields = beside or torch_files.hyper_parameters(archive)
        if not fields:
            raise ConvertError(
                f"{path} does not tell the model's sizes; put its config.json beside it"
            )
        model = read(torch_files.state_dict(archive, plain_name), fields, dtype)
        if weights == "ema":
            config: Any = model.config
            averages = torch_files.averages(archive, parameter_order(config))
            model = read(averages, fields, dtype)
        yield model


def read(source: Source, fields: Json, dtype: str | None = None) -> Model:
    """As `qwen2.read`, of a config.json that is flat or nested."""
    fields = flat(fields)
    if not fields.get("vocab_size"):
        if EMBEDDING not in source.tensors:
            raise source.missing(EMBEDDING)
        fields["vocab_size"] = next(iter(source.tensors[EMBEDDING].shape), 0)
    config = parse_config(fields)
    params, param_dtype = read_table(source, table(config), dtype, {ROPE: (config.head_dim // 2,)})
    frequencies = inverse_frequencies(config.head_dim, config.rope_base)
    check_rope(source, ROPE, frequencies, config.rope_base, atol=0, rtol=1e-2)
    tokens = parse_tokens(fields, config.vocab_size)
    return Model(typed(config, fields, param_dtype), params, tokens)


def write(folder: Path, model: Model) -> None:
    """Writes config.json and the weights of a Hugging Face folder."""
    config: Any = model.config
    if model.token_spec.alignment != "own" or model.token_spec.mask is None:
        raise ConvertError("only a model with a mask and of alignment 'own' has this layout")
    rope = inverse_frequencies(config.head_dim, config.rope_base)
    tensors = {**export_tree(model.params, table(config)), ROPE: rope}
    write_weights(folder, {PREFIX + name: tensor for name, tensor in tensors.items()})
    write_config(folder, format_config(config), model.token_spec)


def plain_name(name: str) -> str:
    """The name of a tensor without what wrappers add."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def table(config: MaskedDiffusionConfig) -> Table:
    """The rows of all parameters, in the order of their registration."""
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
    norm, *block = rows_of("""
        attention_norm   norm1.weight             d -> d
        attention/out    attn_out.weight          d (h c) -> h c d
        mlp_norm         norm2.weight             d -> d
        mlp/up           mlp.0.weight             f d -> d f
        mlp/up_bias      mlp.0.bias               f -> f
        mlp/down         mlp.2.weight             d f -> f d
        mlp/down_bias    mlp.2.bias               d -> d
        modulation       adaLN_modulation.weight  (m d) k -> k m d
        modulation_bias  adaLN_modulation.bias    (m d) -> m d
    """)
    qkv = fused([f"attention/{x}" for x in "qkv"], "attn_qkv.weight", "(h c) d -> d h c")
    start = rows_of(f"""
        embedding       {EMBEDDING}             v d -> v d
        noise_in        sigma_map.mlp.0.weight  k e -> e k
        noise_in_bias   sigma_map.mlp.0.bias    k -> k
        noise_out       sigma_map.mlp.2.weight  o k -> k o
        noise_out_bias  sigma_map.mlp.2.bias    k -> k
    """)
    end = rows_of("""
        final_norm             output_layer.norm_final.weight        d -> d
        head                   output_layer.linear.weight            v d -> d v
        head_bias              output_layer.linear.bias              v -> v
        final_modulation       output_layer.adaLN_modulation.weight  (n d) k -> k n d
        final_modulation_bias  output_layer.adaLN_modulation.bias    (n d) -> n d
    """)
    return axes, start + layered([norm, *qkv, *block], config.layers, "layer", "blocks") + end


def parameter_order(config: MaskedDiffusionConfig) -> list[str]:
    """Names of all parameters as the original program registers them, block after block."""
    parts = ("blocks.", "output_layer.")  # after what has no such prefix

    def place(name: str) -> tuple[int, int]:
        part = next((i for i, part in enumerate(parts) if name.startswith(part)), -1)
        return part, int(name.split(".")[1]) if part == 0 else 0

    return sorted(table_shapes(table(config)), key=place)


def flat(fields: Json) -> dict[str, Any]:
    """The fields of MDLM's config.json; those of a nested training config under the same names.

    Raises:
      ConvertError: a training config of another parameterisation or without sizes.
    """
    model = fields.get("model")
    if "model_type" in fields or not isinstance(model, dict):
        return dict(fields)
    kind = fields.get("parameterization")
    if isinstance(kind, str) and kind != "subs":  # SDTT's is an object
        raise ConvertError(f"field parameterization of config.json must be 'subs', not {kind!r}")
    names = {
        NESTED.get(name, name): name for official, _, _ in FIELDS.values() for name in official
    }
    sizes = {names[name]: value for name, value in model.items() if name in names}
    return {**fields, **sizes, "model": None, "model_type": MODEL_TYPES[0]}


def parse_config(fields: Json) -> MaskedDiffusionConfig:
    """Our config without the two types; errors as of `qwen2.parse_config`."""
    check_fixed(fields, FIXED)
    return built(MaskedDiffusionConfig, parse_fields(fields, FIELDS))


def format_config(config: MaskedDiffusionConfig) -> dict[str, Any]:
    """The official config fields, without special tokens."""
    fields = {names[0]: getattr(config, field) for field, (names, _, _) in FIELDS.items()}
    kind = {"architectures": ["MDLM"], "model_type": MODEL_TYPES[0], "return_dict": False}
    return {**FIXED, **fields, **kind, "torch_dtype": config.dtype}


def parse_tokens(fields: Json, vocab_size: int) -> TokenSpec:
    """Special tokens: those of config.json; of a known vocabulary where it names no mask.

    Raises:
      ConvertError: naming the field that holds no token id of the vocabulary.
    """
    bos, stop, pad, mask = (
        token_ids(fields, f"{name}_token_id", vocab_size) for name in ("bos", "eos", "pad", "mask")
    )
    if not mask and vocab_size in TOKENS:
        return TOKENS[vocab_size]
    return token_spec(bos, stop, [*pad, *stop], [*mask, vocab_size - 1], "own")
