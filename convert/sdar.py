"""Block diffusion in layouts of Qwen: SDAR, a2d-qwen3 and Fast-dLLM v2, told apart by `model_type`.

The published config.json of SDAR and of a2d-qwen3 names neither block length nor mask, so the
caller may. A folder of SDAR may hold a residual head beside its backbone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paradec_jax.config import BlockDiffusionConfig, TokenSpec
from paradec_jax.store.model import Model

from . import mrp, qwen2
from .engine import ConvertError, Json, Source, parted
from .fields import built, parse_fields, whole
from .words import mask_of

FAMILY = "block_diffusion"
PREFIX, plain_name, table = qwen2.PREFIX, qwen2.plain_name, qwen2.table  # of all its layouts
# By model type: whose layout, the field of the block length; the usual length, mask (None: files
# say it) and alignment.
RELEASES: dict[str, tuple[str, str, int, int | None, str]] = {
    "sdar": ("sdar", "block_size", 4, 151_669, "own"),
    "a2d-qwen3": ("qwen3", "block_size", 32, 151_669, "own"),
    "a2d-qwen2": ("qwen2", "block_size", 32, None, "own"),
    "Fast_dLLM_Qwen": ("qwen2", "bd_size", 32, 151_665, "next"),
}
MODEL_TYPES, KIND = tuple(RELEASES), "bd3lm"
SDAR, FAST = "sdar", "Fast_dLLM_Qwen"
ALIGNMENT = "alignment"  # a field of our own, written where it is not that of the model type
ORIGIN = "block_origin"  # another one, where blocks do not count from position 0
LENGTHS = "block_sizes"  # another one, where training mixed lengths of blocks


def read(
    source: Source,
    fields: Json,
    dtype: str | None = None,
    *,
    block: int | None = None,
    mask: int | None = None,
    alignment: str | None = None,
    origin: str | None = None,
    words: Path | None = None,
) -> Model:
    """As `qwen2.read`, and besides:

    Args:
      block: tokens of a block; those of config.json by default, or else of `RELEASES`.
      mask: id of the mask token; that of config.json by default, or else of `RELEASES`.
      alignment: which token logits are about, "own" or "next"; by default as the block length.
      origin: where blocks of a decoded text count from, "start" or "padded"; by default what
        config.json says, or else "start".
    """
    named, _, _, *usual = RELEASES[fields["model_type"]]
    config = parse_config(fields, block, origin)
    tokens = parse_tokens(source.folder, fields, config.vocab_size, mask, alignment, usual, words)
    backbone, head = parted(source, mrp.PREFIX)
    params, config = qwen2.read_params(backbone, {**fields, "model_type": named}, config, dtype)
    return Model(config, params, tokens, head=mrp.read(head, fields, config, dtype))


def write(folder: Path, model: Model) -> None:
    """Writes a Hugging Face folder but for the tokenizer's files."""
    config: Any = model.config
    alignment = model.token_spec.alignment
    kind = SDAR if config.qk_norm else FAST
    layout, of_block, _, _, usual = RELEASES[kind]
    if model.token_spec.mask is None or (
        kind == FAST and (not config.qkv_bias or model.head is not None)
    ):
        raise ConvertError(
            f"only a model with norms of queries and keys and with a mask has the {SDAR} layout, or without a head, "
            f"with biases in place of norms, that of {FAST}"
        )
    architecture = f"{'SDAR' if kind == SDAR else FAST}ForCausalLM"
    more: Any = {of_block: config.block, "model_type": kind, "architectures": [architecture]}
    if alignment != usual:
        more[ALIGNMENT] = alignment
    if config.origin != "start":
        more[ORIGIN] = config.origin
    if config.blocks is not None:
        more[LENGTHS] = list(config.blocks)
    further, of_head = mrp.export(model.head, config) if model.head else ({}, {})
    qwen2.write_layout(folder, model, layout, more | of_head, further)


def parse_config(
    fields: Json, block: int | None = None, origin: str | None = None
) -> BlockDiffusionConfig:
    """The shape but for the two types; errors as of `qwen2.parse_config`, and for block lengths."""
    layout, of_block, usual, _, _ = RELEASES[fields["model_type"]]
    named = parse_fields(fields, {"block": whole(of_block, default=usual)})
    more: dict[str, Any] = named if block is None else {"block": block}
    more["origin"] = origin or fields.get(ORIGIN, "start")
    lengths = fields.get(LENGTHS)
    if lengths is not None:
        if not isinstance(lengths, list) or not all(type(length) is int for length in lengths):
            raise ConvertError(
                f"field {LENGTHS} of config.json must hold whole numbers, not {lengths!r}"
            )
        more["blocks"] = tuple(lengths)
    return qwen2.parse_config({**fields, "model_type": layout}, BlockDiffusionConfig, **more)


def parse_tokens(
    folder: Path,
    fields: Json,
    vocab_size: int,
    mask: int | None,
    alignment: str | None,
    usual: Sequence[Any],
    words: Path | None = None,
) -> TokenSpec:
    """Special tokens, mask and alignment: the caller's, the folder's, or the model type's.

    `usual` is the mask of the model type, None where only files say it, and its alignment.

    Raises:
      ConvertError: as `qwen2.parse_tokens`, and for a mask or an alignment that cannot be.
    """
    tokens = qwen2.parse_tokens(folder, fields, vocab_size, words)
    usual_mask, usual_alignment = usual
    mask = tokens.mask if mask is None else mask
    mask = mask_of(folder, words) if mask is None else mask
    mask = usual_mask if mask is None else mask
    if mask is None or not 0 <= mask < vocab_size:
        raise ConvertError(
            f"the mask token must be an id of the vocabulary of {vocab_size}, not {mask}: name it with "
            "paradec import --mask, unless this is a causal model, which has none"
        )
    alignment = alignment or fields.get(ALIGNMENT, usual_alignment)
    return built(TokenSpec, vars(tokens) | {"mask": mask, ALIGNMENT: alignment})
