"""Block diffusion (model type `sdar`): the layout of Qwen3, with a block length and a mask token besides.

The published config.json names neither, so the caller may. A folder may hold a residual head beside its backbone.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from paradec_jax.config import BlockDiffusionConfig, TokenSpec
from paradec_jax.disk.tensors import Lazy
from paradec_jax.model import Model

from . import mrp, qwen2
from .engine import ConvertError, parted
from .fields import Fields, parse_fields
from .weights import opened

MODEL_TYPES = ("sdar",)
FAMILY = "block_diffusion"
BLOCK, MASK = 4, 151_669  # where nobody says
ALIGNMENT = "alignment"  # a field of our own, written where logits are not about their own position
LENGTHS = "block_sizes"  # another one, where training mixed lengths of blocks

BLOCK_FIELD: Fields = {"block": (("block_size",), int, BLOCK)}


@contextlib.contextmanager
def read(
    folder: Path,
    fields: Mapping[str, Any],
    dtype: str | None = None,
    *,
    block: int | None = None,
    mask: int | None = None,
    alignment: str | None = None,
    words: Path | None = None,
) -> Iterator[Model]:
    """A Hugging Face folder as a model; arguments and errors as of `qwen2.read`, and besides:

    Args:
      block: tokens of a block; those of config.json by default, or else 4.
      mask: id of the mask token; that of config.json by default, or else 151669.
      alignment: which token logits are about, "own" or "next"; what config.json says by default, or else "own".
    """
    config = parse_config(fields, block)
    tokens = parse_tokens(folder, fields, config.vocab_size, mask, alignment, words)
    with opened(folder) as source:
        backbone, head = parted(source, mrp.PREFIX)
        params, config = qwen2.read_params(backbone, fields, config, dtype)
        found = mrp.read(head, fields, config, dtype) if mrp.there(head, fields) else None
        yield Model(config, params, tokens, head=found)


def write(folder: Path, model: Model) -> None:
    """Writes the weights and the JSON files of a Hugging Face folder, without those of the tokenizer."""
    config, alignment = cast(BlockDiffusionConfig, model.config), model.token_spec.alignment
    if not config.qk_norm or model.token_spec.mask is None:
        raise ConvertError(
            f"only a model with norms of queries and keys and with a mask has the {MODEL_TYPES[0]} layout"
        )
    more: dict[str, Any] = {"block_size": config.block}
    if alignment != "own":
        more[ALIGNMENT] = alignment
    if config.blocks is not None:
        more[LENGTHS] = list(config.blocks)
    further: Mapping[str, Lazy] = {}
    if model.head is not None:
        further, of_head = mrp.export(model.head, config)
        more |= of_head
    qwen2.write_layout(folder, model, MODEL_TYPES[0], more, further)


def parse_config(fields: Mapping[str, Any], block: int | None = None) -> BlockDiffusionConfig:
    """The shape, but for the two types.

    Raises:
      ConvertError: as `qwen2.parse_config`, and for a block length that cannot be.
    """
    more: dict[str, Any] = parse_fields(fields, BLOCK_FIELD) if block is None else {"block": block}
    lengths = fields.get(LENGTHS)
    if lengths is not None:
        if not isinstance(lengths, list) or not all(type(length) is int for length in lengths):
            raise ConvertError(f"field {LENGTHS} of config.json must hold whole numbers, not {lengths!r}")
        more["blocks"] = tuple(lengths)
    return qwen2.parse_config(fields, BlockDiffusionConfig, **more)


def parse_tokens(
    folder: Path,
    fields: Mapping[str, Any],
    vocab_size: int,
    mask: int | None,
    alignment: str | None,
    words: Path | None = None,
) -> TokenSpec:
    """Special tokens, mask and alignment: of the caller, of the folder's files, or SDAR's own.

    Raises:
      ConvertError: as `qwen2.parse_tokens`, and for a mask or an alignment that cannot be.
    """
    found = qwen2.parse_tokens(folder, fields, vocab_size, words)
    mask = next(token for token in (mask, found.mask, MASK) if token is not None)
    if not 0 <= mask < vocab_size:
        raise ConvertError(
            f"the mask token must be an id of the vocabulary of {vocab_size}, not {mask}: name it with --mask"
        )
    alignment = fields.get(ALIGNMENT, "own") if alignment is None else alignment
    if alignment not in ("own", "next"):
        raise ConvertError(f"field {ALIGNMENT} of config.json must be 'own' or 'next', not {alignment!r}")
    return dataclasses.replace(found, mask=mask, alignment=alignment)
