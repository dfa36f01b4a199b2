"""Causal transformers (model types `qwen2`, `qwen3`, `llama`): names, layouts and config fields on both sides.

`sdar` has the layout of `qwen3` and reads and writes it with what is here.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from paradec_jax.config import CausalConfig, ResidualHeadConfig, TokenSpec, TransformerConfig
from paradec_jax.disk.tensors import Lazy
from paradec_jax.model import Model

from .engine import ConvertError, Row, Source, check_tied, export_tree, layered, read_table
from .fields import (
    Fields,
    built,
    check_fixed,
    format_tokens,
    matches,
    parse_fields,
    token_ids,
    typed,
    write_json,
)
from .weights import opened, write_weights
from .words import begin_of_text, json_if_there

MODEL_TYPES = ("qwen2", "qwen3", "llama")
FAMILY = "causal"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUT_BIAS = "model.layers.{i}.self_attn.o_proj.bias"
ARCHITECTURES = {kind: f"{kind.capitalize()}ForCausalLM" for kind in MODEL_TYPES} | {
    "sdar": "SDARForCausalLM"
}
NORMED = ("qwen3", "sdar")  # types whose queries and keys are normed
AnyTransformer = TypeVar("AnyTransformer", bound=TransformerConfig)
QWEN3_HEAD_DIM = 128  # where config.json of one of these does not give it; the others split the width

FIELDS: Fields = {
    "vocab_size": (("vocab_size",), int, None),
    "width": (("hidden_size",), int, None),
    "layers": (("num_hidden_layers",), int, None),
    "heads": (("num_attention_heads",), int, None),
    "kv_heads": (("num_key_value_heads",), int, 0),  # 0: as many as query heads
    "feed_forward": (("intermediate_size",), int, None),
    "head_channels": (("head_dim",), int, 0),
    "max_length": (("max_position_embeddings",), int, None),
    "rope_base": (("rope_theta", "rope_theta in rope_parameters"), float, 10_000.0),
    "norm_eps": (("rms_norm_eps",), float, 1e-6),
    "qkv_bias": (("attention_bias",), bool, False),
    "tie_embeddings": (("tie_word_embeddings",), bool, False),
}

# Fields that admit one value, because only that is implemented.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}
PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}


@contextlib.contextmanager
def read(
    folder: Path, fields: Mapping[str, Any], dtype: str | None = None, words: Path | None = None
) -> Iterator[Model]:
    """A Hugging Face folder as a model without a tokenizer, whose parameters are read when they are asked for.

    Args:
      folder: the folder.
      fields: its config.json.
      dtype: type of the parameters; that of `engine.common_dtype` by default.
      words: the tokenizer.json that says what texts begin with; the folder's own by default.

    Raises:
      ConvertError: when config and weights are not those of one complete, supported model.
    """
    config = parse_config(fields, CausalConfig)
    with opened(folder) as source:
        params, config = read_params(source, fields, config, dtype)
        yield Model(config, params, parse_tokens(folder, fields, config.vocab_size, words))


def read_params(
    source: Source, fields: Mapping[str, Any], config: AnyTransformer, dtype: str | None
) -> tuple[dict[str, Any], AnyTransformer]:
    """The parameters, and the config with its two types as `fields` and the tensors say them.

    Raises:
      ConvertError: when the tensors are not those of this config.
    """
    axes, rows = table(config)
    zeros = _out_biases(config, str(fields["model_type"]))
    optional = {HEAD: (axes["v"], axes["d"])} if config.tie_embeddings else {}
    params, param_dtype = read_table(
        source, (axes, rows), dtype, optional | dict.fromkeys(zeros, (axes["d"],))
    )
    if config.tie_embeddings:
        check_tied(source, HEAD, EMBEDDING, "tie_word_embeddings")
    for name in zeros:
        if name in source.tensors and source.read(name).any():
            raise ConvertError(
                f"tensor {name} is not zero, but a bias of attention's output is not supported"
            )
    return params, typed(config, fields, param_dtype)


def write(folder: Path, model: Model) -> None:
    """Writes the weights and the JSON files of a Hugging Face folder, without those of the tokenizer."""
    if model.token_spec.alignment != "next":
        raise ConvertError(f"only a model of alignment 'next' has a layout of {', '.join(MODEL_TYPES)}")
    write_layout(folder, model, model_type(cast(CausalConfig, model.config)), {}, {})


def write_layout(
    folder: Path,
    model: Model,
    kind: str,
    more: Mapping[str, Any],
    further: Mapping[str, Lazy],
) -> None:
    """Writes a model in the layout of that type, with `more` fields in its config.json and `further` tensors."""
    config = cast(TransformerConfig, model.config)
    axes, rows = table(config)
    zero = np.zeros(axes["d"], config.param_dtype)
    zeros = dict.fromkeys(_out_biases(config, kind), zero)
    write_weights(folder, {**export_tree(model.params, rows, axes), **further, **zeros})
    ids = format_tokens(model.token_spec)
    write_json(folder / "config.json", format_config(config, kind) | ids | dict(more))
    write_json(folder / "generation_config.json", {"do_sample": False, **ids})


def table(config: TransformerConfig) -> tuple[dict[str, int], list[Row]]:
    """Lengths of the axes that patterns name, and the rows of all parameters."""
    rows = [Row("embedding", EMBEDDING, "v d -> v d"), Row("final_norm", "model.norm.weight", "d -> d")]
    if not config.tie_embeddings:
        rows.append(Row("head", HEAD, "v d -> d v"))
    rows += layered(block_rows(config), config.layers, "layer", "model.layers")
    return block_axes(config) | {"v": config.vocab_size}, rows


def block_axes(config: TransformerConfig | ResidualHeadConfig) -> dict[str, int]:
    """Lengths of the axes of a block's patterns."""
    return {
        "d": config.width,
        "h": config.heads,
        "g": config.kv_heads,
        "c": config.head_dim,
        "f": config.feed_forward,
    }


def block_rows(config: TransformerConfig | ResidualHeadConfig) -> list[Row]:
    """The rows of one block."""
    heads = {"q": "h", "k": "g", "v": "g"}  # the axis of heads of each matrix
    block = [
        Row("attention_norm", "input_layernorm.weight", "d -> d"),
        Row("mlp_norm", "post_attention_layernorm.weight", "d -> d"),
        *(
            Row(f"attention/{x}", f"self_attn.{x}_proj.weight", f"({n} c) d -> d {n} c")
            for x, n in heads.items()
        ),
        Row("attention/out", "self_attn.o_proj.weight", "d (h c) -> h c d"),
        *(Row(f"mlp/{x}", f"mlp.{x}_proj.weight", "f d -> d f") for x in ("gate", "up")),
        Row("mlp/down", "mlp.down_proj.weight", "d f -> f d"),
    ]
    if config.qkv_bias:
        for x, n in heads.items():
            block.append(Row(f"attention/{x}_bias", f"self_attn.{x}_proj.bias", f"({n} c) -> {n} c"))
    if config.qk_norm:
        block += [Row(f"attention/{x}_norm", f"self_attn.{x}_norm.weight", "c -> c") for x in "qk"]
    return block


def _out_biases(config: TransformerConfig, kind: str) -> list[str]:
    """Biases that all but Qwen2 have beside those of queries, keys and values; we have none, they must be 0."""
    if kind == "qwen2" or not config.qkv_bias:
        return []
    return [OUT_BIAS.replace("{i}", str(i)) for i in range(config.layers)]


def model_type(config: CausalConfig) -> str:
    """The model type whose layout holds all that a model has."""
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def parse_config(fields: Mapping[str, Any], cls: type[AnyTransformer], **more: Any) -> AnyTransformer:
    """Our config, without the two types, from the official fields.

    Args:
      fields: config.json.
      cls: class of the config.
      more: its fields beyond those of `TransformerConfig`.

    Raises:
      ConvertError: naming the field that is missing, of a wrong type, contradictory or not supported.
    """
    kind = fields["model_type"]
    check_fixed(fields, FIXED)
    ours = parse_fields({**fields, **_rope(fields)}, FIELDS)
    layer_types = fields.get("layer_types")
    if layer_types is None:
        _check_window(fields, ours["layers"])
    elif layer_types != ["full_attention"] * ours["layers"]:
        raise ConvertError(
            f"field layer_types of config.json must hold full_attention for each of {ours['layers']} layers, "
            f"not {layer_types!r}"
        )
    ours["qkv_bias"] |= kind == "qwen2"
    ours["qk_norm"] = kind in NORMED
    ours["kv_heads"] = ours["kv_heads"] or ours["heads"]
    channels = ours["head_channels"] or QWEN3_HEAD_DIM * (kind in NORMED)
    even = channels * ours["heads"] in (0, ours["width"])
    ours["head_channels"] = None if even else channels
    return built(cls, ours | more)


def _check_window(fields: Mapping[str, Any], layers: int) -> None:
    """Refuses a sliding window that a layer has; without a length, or beyond the last layer, none has it.

    Raises:
      ConvertError: naming the field.
    """
    first, window = fields.get("max_window_layers", 0), fields.get("sliding_window", ...)
    beyond = matches(first, int) and first >= layers
    if fields.get("use_sliding_window") and window is not None and not beyond:
        check_fixed(fields, {"use_sliding_window": False})


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The base of the rotary embedding where newer files have it, once it is clear that nothing is scaled."""
    found = {}
    for name in ("rope_parameters", "rope_scaling"):
        values = fields.get(name)
        if values is None:
            continue
        given = dict(values) if isinstance(values, dict) else {name: values}
        base = given.pop("rope_theta", None)
        if "default" in (given.get("rope_type"), given.get("type")):  # which reads no other keys
            given = {key: value for key, value in given.items() if key in PLAIN_ROPE}
        if any(key not in PLAIN_ROPE or PLAIN_ROPE[key] != value for key, value in given.items()):
            raise ConvertError(
                f"field {name} of config.json scales rotary positions, which is not supported: {values!r}"
            )
        if base is not None:
            found["rope_theta in rope_parameters"] = base
    return found


def format_config(config: TransformerConfig, kind: str) -> dict[str, Any]:
    """The official config fields of a model type, without special tokens."""
    fields = {names[0]: getattr(config, field) for field, (names, _, _) in FIELDS.items()}
    fields["head_dim"] = config.head_dim
    if kind == "qwen2":
        del fields["attention_bias"]  # queries, keys and values always have one
    return fields | {
        "architectures": [ARCHITECTURES[kind]],
        "hidden_act": FIXED["hidden_act"],
        "model_type": kind,
        "torch_dtype": config.dtype,
        "use_cache": True,
        **({"mlp_bias": False} if kind == "llama" else {"use_sliding_window": False}),
    }


def parse_tokens(
    folder: Path, fields: Mapping[str, Any], vocab_size: int, words: Path | None = None
) -> TokenSpec:
    """Special tokens: those of generation_config.json, then those of config.json; all that end a text are kept.

    Files name a begin-of-text token even where no text begins with it (Qwen2), so it counts only if the
    tokenizer puts it before a text. Padding is the first token that ends a text where nothing else is said.

    Args:
      folder: the folder.
      fields: its config.json.
      vocab_size: V.
      words: a tokenizer.json in the place of the folder's own, or None.

    Raises:
      ConvertError: naming the field that holds no token id of the vocabulary, or files that contradict each other.
    """
    files = {
        "generation_config.json": json_if_there(folder / "generation_config.json"),
        "config.json": fields,
    }
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
    ids = {
        name: [(token, file) for file in files for token in token_ids(files[file], name, vocab_size, file)]
        for name in names
    }
    bos = begin_of_text(folder, {file: token for token, file in ids["bos_token_id"][:1]}, words)
    eos, pad, mask = ([token for token, _ in ids[name]] for name in names[1:])
    return TokenSpec(
        bos=bos,
        stop=tuple(dict.fromkeys(eos)),
        pad=next(iter([*pad, *eos]), 0),
        mask=next(iter(mask), None),
    )
