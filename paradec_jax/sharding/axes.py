"""Logical axes of every parameter, by path: what optimizers, cost estimates and sharding rules
read.

vocab      V, tokens          heads      H, query heads          mlp         F, inner width of the MLP
embed      D, model width     kv_heads   G, key-value heads      head_dim    C, channels of a head
embed_pair 2D, two vectors of width D side by side (latent state and prelude output, embedding and
head input) conditioning K, a denoiser's modulating vector, made from noise_features; six_vectors
and two_vectors come of it
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of a parameter.

    Attributes:
      names: one for each axis.
      inputs, outputs: those of the matrices in the parameter, for optimizers that treat matrices
        apart; axes in neither count matrices. Both empty: no matrix, or one that is looked up in
        (embedding, output matrix).
    """

    names: Names
    inputs: Names = ()
    outputs: Names = ()


def _matrix(inputs: Names, outputs: Names) -> Axes:
    return Axes(inputs + outputs, inputs, outputs)


SHARED: dict[str, Axes] = {
    r"^embedding$": Axes(("vocab", "embed")),
    r"^head$": Axes(("embed", "vocab")),
    r"attention/out$": _matrix(("heads", "head_dim"), ("embed",)),
    r"mlp/(gate|up)$": _matrix(("embed",), ("mlp",)),
    r"mlp/down$": _matrix(("mlp",), ("embed",)),
    r"(^|/)((attention|mlp|final)_norm|norm_[1-4])$": Axes(("embed",)),
}
BIASES: dict[str, Axes] = {
    r"attention/q_bias$": Axes(("heads", "head_dim")),
    r"attention/[kv]_bias$": Axes(("kv_heads", "head_dim")),
}
# All query heads of a layer are one matrix to the optimizer of the recurrent models, and so are its
# keys and values; in causal models each head is a matrix of its own. So the bundled models were
# trained.
RECURRENT: dict[str, Axes] = (
    SHARED
    | BIASES
    | {
        r"attention/q$": _matrix(("embed",), ("heads", "head_dim")),
        r"attention/[kv]$": _matrix(("embed",), ("kv_heads", "head_dim")),
        r"^adapter$": _matrix(("embed_pair",), ("embed",)),
    }
)
_BY_HEAD: dict[str, Axes] = {
    r"attention/q$": Axes(("embed", "heads", "head_dim"), ("embed",), ("head_dim",)),
    r"attention/[kv]$": Axes(("embed", "kv_heads", "head_dim"), ("embed",), ("head_dim",)),
}
_OF_MLP: dict[str, Axes] = {
    r"mlp/(gate|up)_bias$": Axes(("mlp",)),
    r"mlp/down_bias$": Axes(("embed",)),
}
TRANSFORMER: dict[str, Axes] = (
    SHARED
    | BIASES
    | _BY_HEAD
    | _OF_MLP
    | {r"attention/out_bias$": Axes(("embed",)), r"attention/[qk]_norm$": Axes(("head_dim",))}
)
RESIDUAL_HEAD: dict[str, Axes] = {
    pattern: names for pattern, names in TRANSFORMER.items() if "vocab" not in names.names
} | {
    r"^(embedding|hidden)_norm$": Axes(("embed",)),
    r"^fusion$": _matrix(("embed_pair",), ("embed",)),
}
# The layers that modulate are no matrices to that optimizer: they read one constant vector, so
# their gradients have rank one.
MASKED_DIFFUSION: dict[str, Axes] = (
    SHARED
    | _BY_HEAD
    | _OF_MLP
    | {
        r"^head_bias$": Axes(("vocab",)),
        r"^noise_in$": Axes(("noise_features", "conditioning")),
        r"^noise_out$": Axes(("conditioning", "conditioning")),
        r"^noise_(in|out)_bias$": Axes(("conditioning",)),
        r"/modulation$": Axes(("conditioning", "six_vectors", "embed")),
        r"/modulation_bias$": Axes(("six_vectors", "embed")),
        r"^final_modulation$": Axes(("conditioning", "two_vectors", "embed")),
        r"^final_modulation_bias$": Axes(("two_vectors", "embed")),
    }
)

# What `DenoiserNetwork.prepare` puts in the place of other parameters, and all parameters of all
# families.
PREPARED: dict[str, Axes] = {
    r"/constants$": Axes(("six_vectors", "embed")),
    r"^final_constants$": Axes(("two_vectors", "embed")),
}
# What is trained in the place of matrices (`lora`): A [r, in] and B [out, r], whole on every
# device.
ADAPTER: dict[str, Axes] = {
    r"/lora_a$": Axes(("rank", "inputs"), ("inputs",), ("rank",)),
    r"/lora_b$": Axes(("outputs", "rank"), ("rank",), ("outputs",)),
}
EVERY: dict[str, Axes] = (
    RECURRENT | TRANSFORMER | RESIDUAL_HEAD | MASKED_DIFFUSION | PREPARED | ADAPTER
)


def axes_of(rules: Mapping[str, Axes], path: str) -> Axes:
    """The axes of the parameter at `path`.

    Raises:
      ValueError: not exactly one regex of the table matches it.
    """
    entries = [axes for pattern, axes in rules.items() if re.search(pattern, path)]
    if len(entries) != 1:
        raise ValueError(
            f"parameter {path} has {len(entries)} entries in the table of axes, not one"
        )
    return entries[0]


def sizes(rules: Mapping[str, Axes], params: Any) -> dict[str, int]:
    """Numbers of each part ("prelude", "core", "layer", ...), embedding and output matrix left out."""
    total: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if (
            "vocab"
            not in axes_of(rules, jax.tree_util.keystr(path, simple=True, separator="/")).names
        ):
            part = path[0].key.split("_")[0]
            total[part] = total.get(part, 0) + math.prod(leaf.shape)
    return total
