"""Forwards of recorded networks of full attention: every layer, logits, shifted logits, padded rows."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from reading import positions_of, read
from recorded import arrays_in, near
from recorded_full import LOGITS, model

from paradec_jax.models.transformer import Transformer
from paradec_jax.nn.blocks import PreNormBlock

PAD = "pad_attention_mask"
# Arrays of forward.npz that are compared here.
COMPARED = {"input_ids", "hidden_states", "logits", "shifted_logits"}
PADDED = {"pad_logits", PAD, "pad_position_ids"}


@functools.partial(jax.jit, static_argnums=0)
def layers_of(network: Any, params: Any, tokens: jax.Array) -> list[jax.Array]:
    """The embeddings, and what every layer makes of them."""
    _, state = Transformer(network.config).apply(
        {"params": params},
        tokens,
        network.view(positions_of(tokens), None, None),
        method=Transformer.hidden,
        capture_intermediates=lambda module, _: isinstance(module, PreNormBlock),
    )
    seen = state["intermediates"]
    outputs = [seen[f"layer_{i}"]["__call__"][0][0] for i in range(network.config.layers)]
    return [params["embedding"][tokens], *outputs]


def check_forward(folder: Path, normed: bool) -> set[str]:
    """Layers, logits, and logits moved one to the right; returns the arrays that were compared.

    Args:
      normed: whether the last of the recorded hidden states is normalised.
    """
    network, params, spec = model(folder)
    want, shifts = arrays_in(folder / "forward.npz"), spec.alignment == "next"
    tokens = jnp.asarray(want["input_ids"], jnp.int32)
    assert network.visibility == "full" and spec.mask in want["input_ids"]
    with jax.default_matmul_precision("highest"):
        logits, hidden, _ = read(network, params, tokens)
        layers = layers_of(network, params, tokens)
    if normed:
        layers[-1] = hidden
    assert len(layers) == len(want["hidden_states"])
    for got, states in zip(layers, want["hidden_states"], strict=True):
        near(got, states, **LOGITS)
    near(logits, want["logits"], **LOGITS)
    assert ("shifted_logits" in want) <= shifts
    if "shifted_logits" in want:
        shifted = np.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
        near(shifted, want["shifted_logits"], **LOGITS)
    return COMPARED & want.keys()


def check_padded(folder: Path) -> set[str]:
    """Rows beside padding, whose keys are hidden; returns the arrays that were compared."""
    network, params, _ = model(folder)
    want = arrays_in(folder / "forward.npz")
    real = want[PAD] > 0
    assert 0 < real.sum() < real.size
    tokens = jnp.asarray(want["input_ids"], jnp.int32)
    positions = jnp.asarray(want.get("pad_position_ids", positions_of(tokens)), jnp.int32)
    mask = jnp.broadcast_to(jnp.asarray(real)[:, None], (*real.shape, real.shape[1]))
    with jax.default_matmul_precision("highest"):
        logits, _, _ = read(network, params, tokens, positions, None, mask)
    near(logits[real], want["pad_logits"][real], **LOGITS)
    return PADDED & want.keys()
