"""Named visibility rules: which keys a query may see (True = visible).

A window of W queries looks at two groups of keys: a cached prefix and the window itself. Each rule below is
drawn with queries as rows and keys as columns.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def causal(width: int) -> Bool[Array, "W W"]:
    """A position of the window sees itself and the earlier ones.

    ::

        x . . .
        x x . .
        x x x .
        x x x x
    """
    return jnp.tril(jnp.ones((width, width), dtype=bool))


def segments(ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Packed documents: causal, and only within the own segment (ids 1, 1, 2, 2 drawn).

    ::

        x . . .
        x x . .
        . . x .
        . . x x
    """
    same = ids[:, :, None] == ids[:, None, :]
    return same & causal(ids.shape[1])


def prefix(visible: Int[Array, "B"], size: int) -> Bool[Array, "B S"]:
    """Every position of the window sees the first `visible` cached positions (2 of 5 drawn).

    ::

        x x . . .
    """
    return jnp.arange(size) < visible[:, None]
