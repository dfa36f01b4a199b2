"""Residual heads (MRP) beside a backbone of type `sdar`: names, layouts and config fields."""

import dataclasses
import functools
from typing import Any

from paradec_jax.config import BlockDiffusionConfig, ResidualHeadConfig
from paradec_jax.disk.tensors import Lazy
from paradec_jax.store.model import ResidualHead

from . import qwen2
from .engine import (
    ConvertError,
    Json,
    Source,
    Table,
    export_tree,
    layered,
    read_table,
    rows_of,
    table_shapes,
)
from .fields import Fields, built, check_fixed, parse_fields, whole

PREFIX = "mrp_modules.0.model."  # names of its tensors begin so

LAYERS = "num_nextn_predict_layers"
FIELDS: Fields = {"layers": whole(LAYERS)}
FIXED: dict[str, Any] = {"num_mrp_heads": 1}


def read(
    tensors: Source, fields: Json, backbone: BlockDiffusionConfig, dtype: str | None = None
) -> ResidualHead | None:
    """The head of a backbone, its parameters read when they are asked for; None where none is
    there.

    Args:
      tensors: by their names without the prefix.
      fields, dtype: as of `qwen2.read`.
      backbone: its shape, types included.

    Raises:
      ConvertError: when config and tensors are not those of one complete head.
    """
    if not tensors.tensors and not fields.get(LAYERS):
        return None
    check_fixed(fields, FIXED)
    config = built(functools.partial(ResidualHeadConfig.of, backbone), parse_fields(fields, FIELDS))
    params, param_dtype = read_table(tensors, table(config), dtype, {})
    return ResidualHead(dataclasses.replace(config, param_dtype=param_dtype), params)


def export(
    head: ResidualHead, backbone: BlockDiffusionConfig
) -> tuple[dict[str, Lazy], dict[str, Any]]:
    """The tensors of a head by their whole names, and what config.json says of it.

    Raises:
      ConvertError: blocks of another shape than the backbone's, for which config.json has no field.
    """
    rows = table(head.config)
    like_backbone = table(ResidualHeadConfig.of(backbone, head.config.layers))
    if table_shapes(rows) != table_shapes(like_backbone):
        raise ConvertError(
            "only a residual head whose blocks have the shape of its backbone's has this layout"
        )
    tensors = {PREFIX + name: tensor for name, tensor in export_tree(head.params, rows).items()}
    return tensors, {LAYERS: head.config.layers} | FIXED


def table(config: ResidualHeadConfig) -> Table:
    """The rows of all parameters, names without the prefix."""
    rows = rows_of("""
        embedding_norm  enorm.weight    d -> d
        hidden_norm     hnorm.weight    d -> d
        fusion          eh_proj.weight  d e -> e d
        final_norm      norm.weight     d -> d
    """)
    rows += layered(qwen2.block_rows(config), config.layers, "layer", "layers")
    return qwen2.block_axes(config) | {"e": 2 * config.width}, rows
