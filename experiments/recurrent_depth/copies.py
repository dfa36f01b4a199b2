"""Which copies of a token see which: what width scaling asks of attention (arXiv 2510.14961,
appendix C).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from paradec_jax.nn import masks


def no_share(tokens: int, copies: int) -> Bool[Array, "W W"]:
    """NoShare width scaling: a copy sees all copies of earlier tokens, the earlier ones of its own,
    and itself.

    Position `i s + j` of the window is copy j of token i, W = T s. In this order the rule is
    `masks.causal`: the network reads a prompt s times as long. Two copies of the tokens a, b, c
    drawn::

             a a b b c c
        a    x . . . . .
        a    x x . . . .
        b    x x x . . .
        b    x x x x . .
        c    x x x x x .
        c    x x x x x x

    The rule says nothing of rotary positions. Copies usually share their token's: they stand for
    one token, so distances stay those of training and no position is used up. With positions of
    their own, tokens would lie s apart and a prompt would need s times the model's length. Copies
    with a common position and a common latent state still differ, by how many own copies they see
    (only those of the first token do not).

    Args:
      tokens: T.
      copies: s.

    Raises:
      ValueError: `tokens` or `copies` below 1.
    """
    _check(tokens, copies)
    return masks.causal(tokens * copies)


def kv_share(tokens: int, copies: int) -> Bool[Array, "W W"]:
    """KVShare width scaling: as `no_share`, but only the last copy of each earlier token is seen.

    Later tokens thus need the keys and values of one copy of each, and a cache is as long as
    without copies. Two copies of the tokens a, b, c drawn::

             a a b b c c
        a    x . . . . .
        a    x x . . . .
        b    . x x . . .
        b    . x x x . .
        c    . x . x x .
        c    . x . x x x

    Args:
      tokens: T.
      copies: s.

    Raises:
      ValueError: `tokens` or `copies` below 1.
    """
    _check(tokens, copies)
    token, copy = jnp.divmod(jnp.arange(tokens * copies), copies)
    own = (token[:, None] == token) & (copy[:, None] >= copy)
    return own | ((token[:, None] > token) & (copy == copies - 1))


def _check(tokens: int, copies: int) -> None:
    for name, value in (("tokens", tokens), ("copies", copies)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


RULES = {"no_share": no_share, "kv_share": kv_share}
