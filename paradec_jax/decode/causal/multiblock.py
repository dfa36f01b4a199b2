"""Multi-block Jacobi decoding: further blocks are drafted while one is verified (Jacobi Forcing, Algorithm 1)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode import select
from paradec_jax.decode.autoregressive import AutoRegressiveKnobs
from paradec_jax.decode.jacobi import Jacobi
from paradec_jax.decode.protocol import Progress
from paradec_jax.decode.sampling import check


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiBlockKnobs(AutoRegressiveKnobs):
    """Sampling, and when a block is spawned.

    Attributes:
      spawn: r, share of the newest block that must agree with its prediction before the next block is spawned; at 0
        all blocks are in flight from the start.
    """

    spawn: Float[Array, "..."] | float = 0.5

    def checked(self) -> "MultiBlockKnobs":
        """Self, after a look at the values that are not traced. Raises ValueError."""
        super().checked()
        check(self.spawn, "spawn", lambda x: (x >= 0) & (x <= 1), "between 0 and 1")
        return self


@dataclasses.dataclass(frozen=True)
class MultiBlock(Jacobi):
    """Jacobi decoding over a window of up to `blocks` consecutive blocks of `block` tokens.

    The first block is verified; those behind it (pseudo blocks) are drafts that every call refreshes from the winning
    row. When the newest block agrees with its prediction on a share `spawn` of its tokens, the next block is spawned
    with random guesses, up to `blocks` in flight. A pseudo block is promoted when the accepted tokens reach it: its
    tokens then follow from committed ones, so they are accepted by the same rule and may be in the same call.

    Attributes:
      blocks: K, blocks in flight at most.
    """

    _: dataclasses.KW_ONLY
    blocks: int = 2
    Knobs: ClassVar[type] = MultiBlockKnobs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ValueError(f"blocks must be at least 1, not {self.blocks}")
        if self.running:
            raise ValueError("a running window has no blocks: use Jacobi(block=..., running=True)")

    @property
    def width(self) -> int:
        """W, tokens fed of a row."""
        return self.blocks * self.block

    def horizon(
        self, progress: Progress, old: Int[Array, "B"], agreed: Int[Array, "B"], knobs: Any
    ) -> Int[Array, "B"]:
        """The end of the newest block: one more where the newest block agrees enough and there is room for it."""
        start = progress.prompt_lengths
        first = start + (progress.length - 1 - start) // self.block * self.block  # start of the first block
        enough = knobs.spawn * self.block - 1e-4  # in float32 0.6 * 25 is above 15
        spawned = old + self.block * (agreed >= enough)
        spawned = jnp.where(jnp.asarray(knobs.spawn) <= 0, first + self.width, spawned)
        return jnp.clip(spawned, first + self.block, first + self.width)

    def newest_agreement(
        self, agrees: Bool[Array, "B drafts"], at: Int[Array, "B"], horizon: Int[Array, "B"]
    ) -> Int[Array, "B"]:
        """Tokens of the newest block that are committed or lead it and agree with their prediction."""
        begin = horizon - self.block
        position = at[:, None] + 1 + jnp.arange(agrees.shape[1])
        ahead = position < begin[:, None]
        committed = jnp.clip(at + 1 - begin, 0, self.block)
        run = select.prefix(agrees | ahead) - jnp.sum(ahead, axis=1)
        return committed + jnp.maximum(run, 0)
