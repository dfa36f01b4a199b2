"""A network called once on a window."""

import functools

import jax
import jax.numpy as jnp


def positions_of(tokens, start=0):
    """Absolute positions of a window [B, W, ...] that begins at `start`, one number or one a row."""
    return jnp.broadcast_to(
        jnp.asarray(start)[..., None] + jnp.arange(tokens.shape[1]), tokens.shape[:2]
    )


@functools.partial(jax.jit, static_argnums=0)
def read(network, params, tokens, positions=None, prefix=None, mask=None):
    """Logits, head inputs, keys and values of a window, by default at the first positions."""
    positions = positions_of(tokens) if positions is None else positions
    out = network.forward(params, tokens, positions, prefix, mask)
    return network.logits(params, out.hidden), out.hidden, out.kv
