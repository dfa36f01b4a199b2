"""Logical axes of every parameter, by path, for optimizers, cost estimates and sharding rules.

::

    vocab         V, tokens
    embed         D, model width
    embed_pair    2D, two vectors side by side (latent state and prelude output, embedding and hidden state)
    heads         H, query heads
    kv_heads      G, key-value heads
    head_dim      C, channels of a head
    mlp           F, inner width of the MLP
    conditioning  K, a denoiser's modulating vector, made from noise_features; six_vectors and two_vectors come of it
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

Names = tuple[str, ...]


class Axes(NamedTuple):
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


def _axes(names: str, inputs: str = "", outputs: str = "") -> Axes:
    return Axes(*(tuple(each.split()) for each in (names, inputs, outputs)))


SHARED = {
    r"^embedding$": _axes("vocab embed"),
    r"^head$": _axes("embed vocab"),
    r"attention/out$": _axes("heads head_dim embed", "heads head_dim", "embed"),
    r"mlp/(gate|up)$": _axes("embed mlp", "embed", "mlp"),
    r"mlp/down$": _axes("mlp embed", "mlp", "embed"),
    r"(^|/)((attention|mlp|final)_norm|norm_[1-4])$": _axes("embed"),
}
BIASES = {
    r"attention/q_bias$": _axes("heads head_dim"),
    r"attention/[kv]_bias$": _axes("kv_heads head_dim"),
}
# All query heads of a layer are one matrix to the optimizer of the recurrent models, and so are its
# keys and values; in causal models each head is a matrix of its own. So the bundled models were
# trained.
RECURRENT = (
    SHARED
    | BIASES
    | {
        r"attention/q$": _axes("embed heads head_dim", "embed", "heads head_dim"),
        r"attention/[kv]$": _axes("embed kv_heads head_dim", "embed", "kv_heads head_dim"),
        r"^adapter$": _axes("embed_pair embed", "embed_pair", "embed"),
    }
)
_BY_HEAD = {
    r"attention/q$": _axes("embed heads head_dim", "embed", "head_dim"),
    r"attention/[kv]$": _axes("embed kv_heads head_dim", "embed", "head_dim"),
}
_OF_MLP = {
    r"mlp/(gate|up)_bias$": _axes("mlp"),
    r"mlp/down_bias$": _axes("embed"),
}
TRANSFORMER = (
    SHARED
    | BIASES
    | _BY_HEAD
    | _OF_MLP
    | {r"attention/out_bias$": _axes("embed"), r"attention/[qk]_norm$": _axes("head_dim")}
)
RESIDUAL_HEAD = {
    pattern: names for pattern, names in TRANSFORMER.items() if "vocab" not in names.names
} | {
    r"^(embedding|hidden)_norm$": _axes("embed"),
    r"^fusion$": _axes("embed_pair embed", "embed_pair", "embed"),
}
# The layers that modulate are no matrices to that optimizer: they read one constant vector, so
# their gradients have rank one.
MASKED_DIFFUSION = (
    SHARED
    | _BY_HEAD
    | _OF_MLP
    | {
        r"^head_bias$": _axes("vocab"),
        r"^noise_in$": _axes("noise_features conditioning"),
        r"^noise_out$": _axes("conditioning conditioning"),
        r"^noise_(in|out)_bias$": _axes("conditioning"),
        r"/modulation$": _axes("conditioning six_vectors embed"),
        r"/modulation_bias$": _axes("six_vectors embed"),
        r"^final_modulation$": _axes("conditioning two_vectors embed"),
        r"^final_modulation_bias$": _axes("two_vectors embed"),
    }
)

# What `DenoiserNetwork.prepare` and `DraftNetwork.prepare` put in the place of other parameters.
PREPARED = {
    r"/lora/\w+/0$": _axes("inputs rank", "inputs", "rank"),
    r"/lora/\w+/1$": _axes("rank outputs", "rank", "outputs"),
    r"/constants$": _axes("six_vectors embed"),
    r"^final_constants$": _axes("two_vectors embed"),
}
# What is trained in the place of matrices (`lora`): A [r, in] and B [out, r], whole on every
# device.
ADAPTER = {
    r"/lora_a$": _axes("rank inputs", "inputs", "rank"),
    r"/lora_b$": _axes("outputs rank", "rank", "outputs"),
}
# What drafts tokens beside a causal model (`models.drafts`).
DRAFTS = ADAPTER | {
    r"^masks$": _axes("drafts embed"),
    r"^embedding_norm$": _axes("embed"),
    r"^sampler_in$": _axes("embed_pair sampler", "embed_pair", "sampler"),
    r"^sampler_out$": _axes("sampler embed", "sampler", "embed"),
}
EVERY = RECURRENT | TRANSFORMER | RESIDUAL_HEAD | MASKED_DIFFUSION | PREPARED
EVERY |= {pattern: names for pattern, names in DRAFTS.items() if pattern != r"^embedding_norm$"}


def matrices(rules: Mapping[str, Axes]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Places of the input and output axes of the matrices of a table, by regex."""
    return {
        pattern: (tuple(map(of.names.index, of.inputs)), tuple(map(of.names.index, of.outputs)))
        for pattern, of in rules.items()
        if of.inputs
    }


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
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "vocab" not in axes_of(rules, name).names:
            part = path[0].key.split("_")[0]
            total[part] = total.get(part, 0) + math.prod(leaf.shape)
    return total
