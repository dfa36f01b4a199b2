"""Full attention: LLaDA, and in layouts of Qwen Dream, CoDA, Open-dCoder and a2d, told apart by
`model_type`.

A folder of Open-dCoder has the type of its causal parent, and one of a2d that of block diffusion:
what these are is the caller's to say, as `kind`, where config.json has no `KIND_FIELD`.
"""

from pathlib import Path
from typing import Any, cast

from paradec_jax.config import FullAttentionConfig
from paradec_jax.store.model import Model

from . import llada, qwen2, sdar
from .engine import ConvertError, Json, Source, Table

FAMILY, KIND = "full_attention", "mdlm"
PREFIX, plain_name = qwen2.PREFIX, qwen2.plain_name  # of all its layouts
CODA = "CoDA"
# By model type: whose layout, the alignment, the class in the model's own code.
RELEASES: dict[str, tuple[str, str, str]] = {
    llada.MODEL_TYPE: (llada.MODEL_TYPE, "own", "LLaDAModelLM"),
    "Dream": ("qwen2", "next", "DreamModel"),
    "a2d-qwen2": ("qwen2", "own", "A2DQwen2LMHeadModel"),
    "a2d-qwen3": ("qwen3", "own", "A2DQwen3LMHeadModel"),
    CODA: ("qwen3", "next", "CoDALanguageModel"),
    "qwen2": ("qwen2", "next", "Qwen2ForCausalLM"),  # Open-dCoder
}
KIND_FIELD = "diffusion_kind"  # a field of our own
MODEL_TYPES = (llada.MODEL_TYPE, "Dream", CODA)  # that are of no other family


def read(
    source: Source,
    fields: Json,
    dtype: str | None = None,
    *,
    mask: int | None = None,
    alignment: str | None = None,
    words: Path | None = None,
) -> Model:
    """As `qwen2.read`, and besides:

    Args:
      mask: id of the mask token; that of the folder's files by default.
      alignment: which token logits are about, "own" or "next"; by default that of config.json, or
        else of `RELEASES`.
    """
    layout, usual, _ = RELEASES[fields["model_type"]]
    if layout == llada.MODEL_TYPE:
        params, config = llada.read_params(source, fields, dtype)
    else:
        fields = {**fields, "model_type": layout} | (
            {"tie_word_embeddings": False}  # whatever the field says, CoDA reads the head it has
            if fields["model_type"] == CODA and qwen2.HEAD in source.tensors
            else {}
        )
        config = qwen2.parse_config(fields, FullAttentionConfig)
        params, config = qwen2.read_params(source, fields, config, dtype)
    spec = sdar.parse_tokens(
        source.folder, fields, config.vocab_size, mask, alignment, (None, usual), words
    )
    return Model(config, params, spec)


def table(config: FullAttentionConfig) -> Table:
    """The rows of all parameters, in the layout that the shape is written in."""
    return (llada if _is_llada(config) else qwen2).table(config)


def _is_llada(config: FullAttentionConfig) -> bool:
    return not (config.qk_norm or config.qkv_bias)


def write(folder: Path, model: Model) -> None:
    """Writes a Hugging Face folder but for the tokenizer's files."""
    config, alignment = cast(FullAttentionConfig, model.config), model.token_spec.alignment
    if model.token_spec.mask is None:
        raise ConvertError("only a model with a mask has a layout of full attention")
    names = ("a2d-qwen3", CODA) if config.qk_norm else ("a2d-qwen2", "Dream")
    kind = llada.MODEL_TYPE if _is_llada(config) else names[alignment == "next"]
    layout, usual, architecture = RELEASES[kind]
    more: dict[str, Any] = {"model_type": kind, "architectures": [architecture], KIND_FIELD: KIND}
    if alignment != usual:
        more[sdar.ALIGNMENT] = alignment
    if layout == llada.MODEL_TYPE:
        llada.write(folder, model, more)
    else:
        qwen2.write_layout(folder, model, layout, more, {})
