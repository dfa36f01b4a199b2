"""Causal transformers (`qwen2`, `qwen3`, `llama`): names, layouts and fields on both sides.

`sdar` and `full` read and write their layouts with what is here; `llada` names one of them. Fields mean what they
mean in transformers 5; those of version 4 are written, which both read.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from paradec_jax.config import (
    CausalConfig,
    ResidualHeadConfig,
    RopeScaling,
    TokenSpec,
    TransformerConfig,
)
from paradec_jax.config.rotary import KINDS
from paradec_jax.disk.tensors import Lazy
from paradec_jax.store.model import Model

from . import llada
from .engine import (
    ConvertError,
    Json,
    Row,
    Source,
    Table,
    check_tied,
    export_tree,
    layered,
    read_table,
    rows_of,
)
from .fields import (
    Fields,
    built,
    check_fixed,
    flag,
    format_tokens,
    parse_fields,
    present,
    real,
    token_ids,
    token_spec,
    typed,
    whole,
    write_json,
)
from .weights import plain_name as plain_name  # as the other modules have one
from .weights import write_weights
from .words import begin_of_text, json_if_there

MODEL_TYPES = ("qwen2", "qwen3", "llama")
WINDOWED = ("qwen2", "qwen3")  # those that may have sliding windows
FAMILY = "causal"
PREFIX = ""  # of exported names
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUT_BIAS = "model.layers.{i}.self_attn.o_proj.bias"
NORMED = ("qwen3", "sdar")  # types whose queries and keys are normed
AnyTransformer = TypeVar("AnyTransformer", bound=TransformerConfig)
QWEN3_HEAD_DIM = 128  # where config.json of these does not give it; the others split the width

FIELDS: Fields = {
    "vocab_size": whole("vocab_size"),
    "width": whole("hidden_size"),
    "layers": whole("num_hidden_layers"),
    "heads": whole("num_attention_heads"),
    "kv_heads": whole("num_key_value_heads", default=0),  # 0: as many as query heads
    "feed_forward": whole("intermediate_size"),
    "head_channels": whole("head_dim", default=0),
    "max_length": whole("max_position_embeddings"),
    "rope_base": real("rope_theta", "rope_theta in rope_parameters", default=10_000.0),
    "norm_eps": real("rms_norm_eps", default=1e-6),
    "qkv_bias": flag("attention_bias"),  # but for Qwen2, of attention's output too
    "mlp_bias": flag("mlp_bias"),
    "tie_embeddings": flag("tie_word_embeddings"),
}

# Fields that admit one value, because only that is implemented.
FIXED: dict[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
# The rows of a block; of its biases and norms, where the shape has them.
BLOCK = {
    "": """
        attention_norm    input_layernorm.weight           d -> d
        mlp_norm          post_attention_layernorm.weight  d -> d
        attention/q       self_attn.q_proj.weight          (h c) d -> d h c
        attention/k       self_attn.k_proj.weight          (g c) d -> d g c
        attention/v       self_attn.v_proj.weight          (g c) d -> d g c
        attention/out     self_attn.o_proj.weight          d (h c) -> h c d
        mlp/gate          mlp.gate_proj.weight             f d -> d f
        mlp/up            mlp.up_proj.weight               f d -> d f
        mlp/down          mlp.down_proj.weight             d f -> f d
    """,
    "out_bias": """
        attention/out_bias  self_attn.o_proj.bias  d -> d
    """,
    "mlp_bias": """
        mlp/gate_bias  mlp.gate_proj.bias  f -> f
        mlp/up_bias    mlp.up_proj.bias    f -> f
        mlp/down_bias  mlp.down_proj.bias  d -> d
    """,
    "qkv_bias": """
        attention/q_bias  self_attn.q_proj.bias  (h c) -> h c
        attention/k_bias  self_attn.k_proj.bias  (g c) -> g c
        attention/v_bias  self_attn.v_proj.bias  (g c) -> g c
    """,
    "qk_norm": """
        attention/q_norm  self_attn.q_norm.weight  c -> c
        attention/k_norm  self_attn.k_norm.weight  c -> c
    """,
}
SLIDING: Fields = {
    "on": flag("use_sliding_window"),
    "window": whole("sliding_window", default=4096),
    "first": whole("max_window_layers", default=28),
}
MOST_TYPES = 10_000  # layers among which a pattern is sought
LAYER_TYPES = ("full_attention", "sliding_attention")
ORIGINAL = "original_max_position_embeddings"
NUMBERS = "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim"
SCALING: Fields = {
    **{name: real(name, default=0.0) for name in NUMBERS.split()},
    "original": whole(ORIGINAL, f"{ORIGINAL} of config.json", default=0),
    "truncate": flag("truncate", default=True),
}
UNSCALED = ("linear", "dynamic")  # kinds whose original length is max_position_embeddings
# Other keys beside those of SCALING; the last one changes nothing.
ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"}


def read(
    source: Source, fields: Json, dtype: str | None = None, words: Path | None = None
) -> Model:
    """The model of a Hugging Face folder, without a tokenizer; its parameters are read when they
    are asked for.

    Args:
      source: the folder's tensors by their plain names.
      fields: its config.json.
      dtype: type of the parameters; that of `engine.common_dtype` by default.
      words: the tokenizer.json that says what texts begin with; the folder's own by default.

    Raises:
      ConvertError: when config and weights are not those of one complete, supported model.
    """
    config = parse_config(fields, CausalConfig)
    params, config = read_params(source, fields, config, dtype)
    return Model(config, params, parse_tokens(source.folder, fields, config.vocab_size, words))


def read_params(
    source: Source, fields: Json, config: AnyTransformer, dtype: str | None
) -> tuple[dict[str, Any], AnyTransformer]:
    """The parameters, and the config with its two types as `fields` and the tensors say them.

    Raises:
      ConvertError: when the tensors are not those of this config.
    """
    head = (named := _named(config))(HEAD)
    shallow = dataclasses.replace(config, layers=min(config.layers, len(source.tensors) + 1))
    zeros = [
        name for name in _out_biases(shallow, str(fields["model_type"])) if name in source.tensors
    ]
    if not any(source.read(name).any() for name in zeros):
        config = dataclasses.replace(config, out_bias=False)
    optional: dict[str, tuple[int, ...]] = dict.fromkeys(zeros, (config.width,))
    if config.tie_embeddings:
        optional[head] = (config.vocab_size, config.width)
    params, param_dtype = read_table(source, table(config), dtype, optional)
    if config.tie_embeddings:
        check_tied(source, head, named(EMBEDDING), "tie_word_embeddings")
    return params, typed(config, fields, param_dtype)


def write(folder: Path, model: Model) -> None:
    """Writes a Hugging Face folder but for the tokenizer's files."""
    if model.token_spec.alignment != "next":
        raise ConvertError(
            f"only a model of alignment 'next' has a layout of {', '.join(MODEL_TYPES)}"
        )
    config: Any = model.config
    write_layout(folder, model, model_type(config), {}, {})


def write_layout(
    folder: Path, model: Model, kind: str, more: Json, further: Mapping[str, Lazy]
) -> None:
    """Writes a model in the layout of that type, with `more` fields and `further` tensors."""
    config: Any = model.config
    check_layout(config, kind)
    zero = np.zeros(config.width, config.param_dtype)
    zeros = {} if config.out_bias else dict.fromkeys(_out_biases(config, kind), zero)
    write_weights(folder, {**export_tree(model.params, table(config)), **further, **zeros})
    ids = format_tokens(model.token_spec)
    write_json(folder / "config.json", format_config(config, kind) | ids | dict(more))
    drawn: dict[str, Any] = {"do_sample": "temperature" in model.sampling}
    if drawn["do_sample"]:
        drawn["top_k"] = 0
    write_json(folder / "generation_config.json", {**drawn, **model.sampling, **ids})


def table(config: TransformerConfig) -> Table:
    """The rows of all parameters."""
    rows = rows_of(f"""
        embedding   {EMBEDDING}        v d -> v d
        final_norm  model.norm.weight  d -> d
    """)
    if not config.tie_embeddings:
        rows.append(Row("head", HEAD, "v d -> d v"))
    rows += layered(block_rows(config), config.layers, "layer", "model.layers")
    named = _named(config)
    rows = [dataclasses.replace(row, name=named(row.name)) for row in rows]
    return block_axes(config) | {"v": config.vocab_size}, rows


def is_llada(config: TransformerConfig) -> bool:
    """Whether a shape has the layout of `llada`, as full attention without biases and norms has."""
    return config.visibility == "full" and not (config.qk_norm or config.qkv_bias)


def _named(config: TransformerConfig) -> Callable[[str], str]:
    """The name in a shape's layout of a tensor of Qwen's."""
    return llada.tensor if is_llada(config) else str


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
    parts = [rows for part, rows in BLOCK.items() if getattr(config, part or "width")]
    return rows_of("".join(map(str.rstrip, parts)))


def _out_biases(config: TransformerConfig, kind: str) -> list[str]:
    """Biases of attention's output, which all but Qwen2 have beside the others, if only zeros."""
    if kind == "qwen2" or not config.qkv_bias:
        return []
    return [OUT_BIAS.replace("{i}", str(i)) for i in range(config.layers)]


def model_type(config: CausalConfig) -> str:
    """The model type whose layout holds all that a model has, if any does."""
    plain = config.qkv_bias and not (config.out_bias or config.mlp_bias)
    return "qwen3" if config.qk_norm else "qwen2" if plain else "llama"


def check_layout(config: TransformerConfig, kind: str) -> None:
    """Refuses a model that has what no config.json of that type can say. Raises ConvertError."""
    wrong = {
        "mlp_bias": config.mlp_bias and kind != "llama",
        "out_bias without qkv_bias": config.out_bias and not config.qkv_bias,
        "sliding_window": config.windows and kind not in WINDOWED,
        "rope_scaling": config.rope_scaling and kind == llada.LLADA,
        "head_channels": config.head_dim * config.heads != config.width and kind == llada.LLADA,
    }
    for field, value in wrong.items():
        if value:
            raise ConvertError(f"config.json of a {kind} has no place for {field} of this model")


def parse_config(fields: Json, cls: type[AnyTransformer], **more: Any) -> AnyTransformer:
    """Our config, without the two types, from the official fields.

    Args:
      fields: config.json.
      cls: class of the config.
      more: its fields beyond those of `TransformerConfig`.

    Raises:
      ConvertError: naming the field that is missing, of a wrong type, contradictory or not
        supported.
    """
    kind = fields["model_type"]
    check_fixed(fields, FIXED)
    fields = llada.parsed(fields) if kind == llada.LLADA else fields
    rope = _rope(fields)
    ours = parse_fields({**fields, "rope_theta in rope_parameters": rope.get("rope_theta")}, FIELDS)
    ours["rope_scaling"] = scaling = _scaling(rope, fields)
    # Some files give the length before scaling.
    if scaling is not None and ours["max_length"] <= scaling.original:
        ours["max_length"] = math.floor(scaling.factor * scaling.original)
    ours |= (sliding := _sliding(fields, ours["layers"]))
    if sliding and not (kind in WINDOWED and issubclass(cls, CausalConfig)):
        raise ConvertError(
            f"field sliding_window of config.json is not supported for model type {kind}"
        )
    ours["out_bias"] = ours["qkv_bias"] and kind != "qwen2"
    ours["qkv_bias"] |= kind == "qwen2"
    ours["qk_norm"] = kind in NORMED
    ours["kv_heads"] = ours["kv_heads"] or ours["heads"]
    channels = ours["head_channels"] or QWEN3_HEAD_DIM * (kind in NORMED)
    even = channels * ours["heads"] in (0, ours["width"])
    ours["head_channels"] = None if even else channels
    return built(cls, ours | more)


def _sliding(fields: Json, layers: int) -> dict[str, Any]:
    """Our fields of sliding windows, none where no layer has one. Raises ConvertError."""
    given, full, sliding = parse_fields(fields, SLIDING), *LAYER_TYPES
    layers = min(layers, MOST_TYPES)  # more are refused where they have no tensors
    on = given["on"] and fields.get("sliding_window", ...) is not None
    types = fields.get("layer_types")
    if types is None:
        if not on or given["first"] >= layers:
            return {}
        types = [sliding if i >= given["first"] else full for i in range(layers)]
    listed = (
        isinstance(types, list)
        and len(types) == layers
        and all(name in LAYER_TYPES for name in types)
    )
    if not listed or (sliding in types and not on):
        raise ConvertError(
            f"field layer_types of config.json must hold {full} for each of {layers} layers, or {sliding} where "
            f"use_sliding_window is true, not {types!r}"
        )
    of = tuple(name == sliding for name in types)
    period = next(n for n in range(1, layers + 1) if of[n:] == of[:-n])
    return {"sliding_window": given["window"], "sliding_layers": of[:period]} if any(of) else {}


def _rope(fields: Json) -> dict[str, Any]:
    """The fields of rotary positions, perhaps of each layer type. Raises ConvertError."""
    names = ("rope_parameters", "rope_scaling")
    parts = [fields[name] for name in names if fields.get(name) is not None]
    if all(isinstance(part, dict) for part in parts):
        by_type = ([part[k] for k in LAYER_TYPES if part.get(k)] or [part] for part in parts)
        parts = [part for group in by_type for part in group]
        if all(part == parts[0] for part in parts):
            return parts[0] if parts else {}
    raise ConvertError(
        f"rope_parameters and rope_scaling of config.json must be one object, not {parts!r}"
    )


def _scaling(rope: Json, fields: Json) -> RopeScaling | None:
    """The scaling of rotary positions that `rope` names, if any. Raises ConvertError."""
    check_fixed(rope, {"partial_rotary_factor": FIXED["partial_rotary_factor"]})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":  # which reads no other key
        return None
    if kind not in tuple(KINDS):
        raise ConvertError(
            f"rope_type in config.json must be default, {', '.join(KINDS)}, not {kind!r}"
        )
    for key in sorted(rope.keys() - ROPE - {names[0] for names, _, _ in SCALING.values()}):
        raise ConvertError(
            f"field {key} of rotary positions in config.json is unknown: {dict(rope)!r}"
        )
    given = parse_fields({**rope, SCALING["original"][0][1]: fields.get(ORIGINAL)}, SCALING)
    longest = fields["max_position_embeddings"]
    if kind in UNSCALED or not given["original"]:
        given["original"] = longest
    if kind == "yarn":
        s = given["factor"] = given["factor"] or longest / given["original"]
        scales = given["mscale"], given["mscale_all_dim"]
        a, b = (0.1 * scale * math.log(max(s, 1)) + 1 for scale in scales)
        given["attention_factor"] = given["attention_factor"] or (a / b if a > 1 < b else 0.0)
        given["truncate"] = None if given["truncate"] else False
    more = {name: given[name] for name in KINDS[kind] if given[name] or given[name] is False}
    shared = {"kind": kind, "factor": given["factor"], "original": given["original"]}
    return built(RopeScaling, shared | more)


def format_config(config: TransformerConfig, kind: str) -> dict[str, Any]:
    """The official config fields of a model type, without special tokens."""
    fields = {names[0]: getattr(config, field) for field, (names, _, _) in FIELDS.items()}
    fields["head_dim"] = config.head_dim
    for name in {"qwen2": ("attention_bias", "mlp_bias"), "llama": ()}.get(kind, ("mlp_bias",)):
        del fields[name]  # queries, keys and values of Qwen2 always have one
    if kind != "llama":
        fields["use_sliding_window"] = bool(config.windows)
    if config.windows:
        fields["layer_types"] = [LAYER_TYPES[window is not None] for window in config.windows]
        fields["sliding_window"] = max(window or 0 for window in config.windows)
    if config.rope_scaling is not None:
        given = present(dataclasses.asdict(config.rope_scaling))
        scaled = {"rope_type": given.pop("kind"), ORIGINAL: given.pop("original"), **given}
        if scaled["rope_type"] in UNSCALED:
            fields["max_position_embeddings"] = scaled.pop(ORIGINAL)
        fields["rope_scaling"] = scaled
    fields |= {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "hidden_act": FIXED["hidden_act"],
        "model_type": kind,
        "torch_dtype": config.dtype,
        "use_cache": True,
    }
    return llada.formatted(fields) if kind == llada.LLADA else fields


def parse_tokens(
    folder: Path, fields: Json, vocab_size: int, words: Path | None = None
) -> TokenSpec:
    """Special tokens of generation_config.json, then of config.json; all that end a text count.

    Files name a begin-of-text token even where no text begins with it (Qwen2), so it counts only if
    the tokenizer puts it before a text. Padding is the first token that ends a text where nothing
    else is said.

    Args:
      folder, vocab_size: the folder, and V.
      fields, words: as of `read`.

    Raises:
      ConvertError: naming the field that holds no token id of the vocabulary, or files that
        contradict each other.
    """
    of_generation = "generation_config.json"
    files = {of_generation: json_if_there(folder / of_generation), "config.json": fields}

    def ids(name: str) -> list[tuple[str, int]]:
        """Tokens of a field, each with its file."""
        return [(f, i) for f in files for i in token_ids(files[f], name, vocab_size, f)]

    bos = begin_of_text(folder, dict(ids("bos_token_id")[:1]), words)
    names = ("eos_token_id", "pad_token_id", "mask_token_id")
    eos, pad, mask = ([token for _, token in ids(name)] for name in names)
    return token_spec([] if bos is None else [bos], eos, [*pad, *eos], mask)
