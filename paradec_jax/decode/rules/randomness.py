"""Keys per request, folded by (purpose, step, position), never by row.

A row therefore draws the same alone, at any place of a batch, or refilled from a queue. Recorded draws may take
the place of the keys; that is how runs of other programs are replayed.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Purpose(enum.IntEnum):
    """What a draw is for."""

    STATE = 0
    TOKEN = 1
    NOISE = 2
    FILLER = 3
    DRAFT = 4
    ACCEPT = 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorded:
    """Draws recorded from another program, shared by all rows and indexed by position; any may be missing.

    The drafts of block decoding belong to rows; where one of them is -1, the key draws in its place.

    Attributes:
      states: initial latent state of each position at scale 1, [P, D].
      uniforms: number in [0, 1) that samples the token at each position, [P].
      step_uniforms: the same for the candidate at a position in a sampler step, [T, P].
      noise: noise of a sampler step at each position, at scale 1, [T, P, D].
      fillers: random tokens in front of the wave in a sampler step, [T, h].
      window: random tokens of lookahead's first window, [w].
      prefill_drafts: random tokens that the prefill reads behind each prompt, [B, n].
      drafts: draft with which each block call begins; its first token, which is known, is not read, [B, calls, n].
      windows: fill of the running window before each network call behind the tokens it knows, [B, T, n].
    """

    states: Float[Array, "P D"] | None = None
    uniforms: Float[Array, "P"] | None = None
    step_uniforms: Float[Array, "T P"] | None = None
    noise: Float[Array, "T P D"] | None = None
    fillers: Int[Array, "T h"] | None = None
    window: Int[Array, "w"] | None = None
    prefill_drafts: Int[Array, "B n"] | None = None
    drafts: Int[Array, "B calls n"] | None = None
    windows: Int[Array, "B T n"] | None = None

    def take(self, rows: Array) -> "Recorded":
        """The record of some rows of a request."""
        own = {name: getattr(self, name) for name in ("prefill_drafts", "drafts", "windows")}
        return dataclasses.replace(self, **{name: x[rows] for name, x in own.items() if x is not None})


def fold(
    keys: Array, purpose: Purpose, positions: Int[Array, "B W"], step: Int[Array, "B"] | None = None
) -> Array:
    """One key for each row and position, [B, W], from one key a row."""
    if step is None:
        step = jnp.zeros(positions.shape[:1], jnp.int32)

    def of_row(key: Array, step: Array, positions: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(key, purpose), step)
        return jax.vmap(lambda position: jax.random.fold_in(key, position))(positions)

    return jax.vmap(of_row)(keys, step, positions)
