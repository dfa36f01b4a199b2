"""What a window sees: of itself by a rule, which needs no mask [W, W], of a cache by a mask."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.nn import masks
from paradec_jax.nn.rope import Rotation, rotation
from paradec_jax.records import pytree, static

Stream = Float[Array, "B W D"]  # the states of a window on their way through the blocks
PrefixMask = Bool[Array, "B S"] | Bool[Array, "B W S"]


@pytree
class Rule:
    """A rule of `nn.masks` of which attention makes the rows that it is about to use.

    Attributes:
      name: "causal", "full", "block" (`masks.block_causal`) or "sliding" ("causal" within
        `masks.sliding`).
      blocks: number of each position's block where the rule is "block", each position where it is
        "sliding", else None.
      window: of "sliding".
    """

    name: str = static()
    blocks: Int[Array, "B W"] | None = None
    window: int | Int[Array, ""] | None = None

    def mask(self, width: int) -> Bool[Array, "*B W W"]:
        """The whole mask of a window of `width` positions."""
        return masks.causal(width) if self.name == "causal" else self.rows(jnp.arange(width), width)

    def rows(self, queries: Int[Array, "Q"], width: int) -> Bool[Array, "*B Q W"]:
        """Which positions of the window these queries see; those beyond it may see anything."""
        if self.name == "causal":
            return jnp.arange(width) <= queries[:, None]
        if self.blocks is None:
            return jnp.ones((len(queries), width), bool)
        block = jnp.take(self.blocks, queries, axis=1, mode="clip")
        if self.window is not None:
            causal = jnp.arange(width) <= queries[:, None]
            return causal & masks.sliding(block, self.window, self.blocks)
        return block[:, :, None] >= self.blocks[:, None]


Seen = Bool[Array, "*B W W"] | Rule
CAUSAL = Rule("causal")
FULL = Rule("full")
RULES = {"causal": CAUSAL, "full": FULL}  # that need no positions


@pytree
class View:
    """All that a window of positions sees besides its own states.

    Attributes:
      angles: rotation of its positions.
      seen: which of its own positions each sees; all of them for None.
      cache: keys and values of earlier positions.
      prefix_mask: which of those a row sees, or each of its queries.
      positions: the absolute positions, where layers have sliding windows.
      adapted: positions whose states pass through the adapters that a layer's parameters hold
        (`nn.adapters`); none of them for None.
    """

    angles: Rotation
    seen: Seen | None
    cache: Any = None
    prefix_mask: PrefixMask | None = None
    positions: Int[Array, "B W"] | None = None
    adapted: Bool[Array, "B W"] | None = None

    def within(self, window: int | Int[Array, ""] | None) -> "View":
        """The view of a layer with that sliding window; itself for None."""
        if window is None:
            return self
        at: Any = self.positions
        seen: Any = self.seen
        prefix = self.prefix_mask
        # A rule is that of causal networks: only they have sliding windows.
        seen = (
            Rule("sliding", at, window)
            if isinstance(seen, Rule)
            else seen & masks.sliding(at, window)
        )
        if prefix is not None:  # a cache is addressed by absolute position
            near = masks.sliding(at, window, jnp.arange(prefix.shape[-1])[None])
            prefix = near & (prefix if prefix.ndim == 3 else prefix[:, None])
        return dataclasses.replace(self, seen=seen, prefix_mask=prefix)


def whole_text(config: Any, shape: tuple[int, ...]) -> View:
    """The view of a window that begins a text, by the visibility of the config."""
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    block = config.visibility == "block"
    seen = by_block(positions, config.block) if block else RULES[config.visibility]
    angles = rotation(positions, config.head_dim, config.rope_base, config.rope_scaling)
    return View(angles, seen, positions=positions if config.windows else None)


def by_block(positions: Int[Array, "B W"], block: masks.BlockLength) -> Rule:
    """The rule of `masks.block_causal`."""
    return Rule("block", masks.block_of(positions, block))


def mask_of(seen: Seen | None, width: int) -> Bool[Array, "*B W W"]:
    """The whole mask of what a window sees of itself; all of it for None."""
    seen = FULL if seen is None else seen
    return seen.mask(width) if isinstance(seen, Rule) else seen
