"""Full attention in layouts of `qwen2`: LLaDA, Dream, CoDA, Open-dCoder and a2d, told apart by
`model_type`.

A folder of Open-dCoder has the type of its causal parent, and one of a2d that of block diffusion:
what these are is the caller's to say, as `kind`, where config.json has no `KIND_FIELD`.
"""

from pathlib import Path
from typing import Any

from paradec_jax.config import FullAttentionConfig
from paradec_jax.store.model import Model

from . import qwen2, sdar
from .engine import ConvertError, Json, Source, columns

FAMILY, KIND = "full_attention", "mdlm"
KIND_FIELD = "diffusion_kind"  # a field of our own
PREFIX, plain_name, table = qwen2.PREFIX, qwen2.plain_name, qwen2.table  # of all its layouts
# By model type: whose layout, the alignment, the class in the model's own code. The last one is
# Open-dCoder, which is written as Dream.
RELEASES = {
    kind: facts
    for kind, *facts in columns("""
    llada      llada  own   LLaDAModelLM
    Dream      qwen2  next  DreamModel
    CoDA       qwen3  next  CoDALanguageModel
    a2d-qwen2  qwen2  own   A2DQwen2LMHeadModel
    a2d-qwen3  qwen3  own   A2DQwen3LMHeadModel
    qwen2      qwen2  next  Qwen2ForCausalLM
""")
}
LLADA, DREAM, CODA, A2D_QWEN2, A2D_QWEN3, _ = RELEASES
MODEL_TYPES = (LLADA, DREAM, CODA)  # that are of no other family


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
    layout, usual, _ = RELEASES[kind := fields["model_type"]]
    fields = {**fields, "model_type": layout}
    if kind == CODA and qwen2.HEAD in source.tensors:  # which it reads whatever the field says
        fields["tie_word_embeddings"] = False
    config = qwen2.parse_config(fields, FullAttentionConfig)
    spec = sdar.parse_tokens(
        source.folder, fields, config.vocab_size, mask, alignment, (None, usual), words
    )
    params, config = qwen2.read_params(source, fields, config, dtype)
    return Model(config, params, spec)


def write(folder: Path, model: Model) -> None:
    """Writes a Hugging Face folder but for the tokenizer's files."""
    config: Any = model.config
    alignment = model.token_spec.alignment
    if model.token_spec.mask is None:
        raise ConvertError("only a model with a mask has a layout of full attention")
    kinds = (CODA, A2D_QWEN3) if config.qk_norm else (DREAM, A2D_QWEN2)
    kind = LLADA if qwen2.is_llada(config) else kinds[alignment == "own"]
    layout, usual, architecture = RELEASES[kind]
    more = {"model_type": kind, "architectures": [architecture], KIND_FIELD: KIND}
    if alignment != usual:
        more[sdar.ALIGNMENT] = alignment
    qwen2.write_layout(folder, model, layout, more, {})
