"""Residual heads (MRP) beside a backbone of type `sdar`: names, layouts and config fields on both sides."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paradec_jax.config import BlockDiffusionConfig, ResidualHeadConfig
from paradec_jax.disk.tensors import Lazy
from paradec_jax.model import ResidualHead

from . import qwen2
from .engine import ConvertError, Row, Source, export_tree, layered, read_table, table_shapes
from .fields import Fields, check_fixed, parse_fields

PREFIX = "mrp_modules.0.model."  # names of its tensors begin so

FIELDS: Fields = {"layers": (("num_nextn_predict_layers",), int, None)}
FIXED: dict[str, Any] = {"num_mrp_heads": 1}


def there(tensors: Source, fields: Mapping[str, Any]) -> bool:
    """Whether a folder holds a head, or its config.json says so."""
    return bool(tensors.tensors) or bool(fields.get(FIELDS["layers"][0][0]))


def read(
    tensors: Source, fields: Mapping[str, Any], backbone: BlockDiffusionConfig, dtype: str | None = None
) -> ResidualHead:
    """The head of a backbone, whose parameters are read when they are asked for.

    Args:
      tensors: by their names without the prefix.
      fields: config.json.
      backbone: its shape, types included.
      dtype: type of the parameters; that of `engine.common_dtype` by default.

    Raises:
      ConvertError: when config and tensors are not those of one complete head.
    """
    check_fixed(fields, FIXED)
    shape = parse_fields(fields, FIELDS)
    try:
        config = ResidualHeadConfig.of(backbone, **shape)
    except ValueError as error:
        raise ConvertError(f"config.json describes no valid residual head: {error}") from error
    params, param_dtype = read_table(tensors, table(config), dtype, {})
    return ResidualHead(dataclasses.replace(config, param_dtype=param_dtype), params)


def export(head: ResidualHead, backbone: BlockDiffusionConfig) -> tuple[dict[str, Lazy], dict[str, Any]]:
    """The tensors of a head by their whole names, and what config.json says of it.

    Raises:
      ConvertError: blocks of another shape than the backbone's, for which config.json has no field.
    """
    axes, rows = table(head.config)
    axes_of_backbone, like_backbone = table(ResidualHeadConfig.of(backbone, head.config.layers))
    if table_shapes(rows, axes) != table_shapes(like_backbone, axes_of_backbone):
        raise ConvertError(
            "only a residual head whose blocks have the shape of its backbone's has this layout"
        )
    tensors = {PREFIX + name: tensor for name, tensor in export_tree(head.params, rows, axes).items()}
    return tensors, {FIELDS["layers"][0][0]: head.config.layers} | FIXED


def table(config: ResidualHeadConfig) -> tuple[dict[str, int], list[Row]]:
    """Lengths of the axes that patterns name, and the rows of all parameters, names without the prefix."""
    rows = [
        Row("embedding_norm", "enorm.weight", "d -> d"),
        Row("hidden_norm", "hnorm.weight", "d -> d"),
        Row("fusion", "eh_proj.weight", "d e -> e d"),
        Row("final_norm", "norm.weight", "d -> d"),
    ]
    rows += layered(qwen2.block_rows(config), config.layers, "layer", "layers")
    return qwen2.block_axes(config) | {"e": 2 * config.width}, rows
