"""Texts longer than the denoiser: windows that slide over the canvas, each with the end of the text
so far in it.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from paradec_jax.decode.machine import Request
from paradec_jax.decode.masked.masked import (
    MaskedDecoder,
    MaskedKnobs,
    MaskedState,
    UnmaskedInfo,
)
from paradec_jax.decode.rules import partition, window
from paradec_jax.records import choices


@choices
class Strided(MaskedDecoder):
    """`Masked` in one window after another (MDLM's semi-autoregressive sampler, arXiv 2406.07524,
    section 5.3).

    ::

        position   0 1 2 3 4 5 6 7 8 9        W = 6, stride 2
        window 0  [_ _ _ _ _ _]
        window 1      [c d e f _ _]           W - stride tokens of the text so far, and what is masked
        window 2          [e f g h _ _]

    A window's positions count from its own start, so the text may be longer than the network was
    built for. The next window opens once every position of this one is revealed; each window has N
    steps.

    Attributes:
      order, confidence: as of `Masked`.
      chunk: C, positions of a row whose logits exist at once.
      width: W, positions of a window; the network's longest sequence when None.
      stride: positions by which it moves; half of it when None. At most W - 1 where scores are
        about the next position, since none are about a window's first one.
    """

    width: int | None = None
    stride: int | None = None
    windowed = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride and self.width and self.stride > self.width:
            raise ValueError(f"stride must be from 1 to the width {self.width}, not {self.stride}")

    @property
    def shape(self) -> tuple[int, int]:
        """W and the stride."""
        width = min(self.width or self.network.max_length, self.size)
        most = max(width - (self.spec.alignment == "next"), 1)
        return width, min(self.stride or max(width // 2, 1), most)

    def init(self, params: Any, request: Request, knobs: MaskedKnobs) -> MaskedState:
        """Fills the canvas with masks and draws a partition of each window's; calls nothing."""
        return self.fill(request, self.shape[0], knobs)

    def step(
        self, params: Any, state: MaskedState, knobs: MaskedKnobs
    ) -> tuple[MaskedState, UnmaskedInfo]:
        """One call on the window that holds each row's first masked position, for the window's next
        group.
        """
        width, stride = self.shape

        def window_of(position: Array) -> Array:
            """Number of the first window that holds a position."""
            return jnp.maximum(-(-(position - width + 1) // stride), 0)

        # The window moves on once it is full; positions count from its start.
        current = window_of(state.rows.length)
        at = current * stride
        tokens, positions, _, mask = state.window(at, width)
        out = self.network.forward(params, tokens, positions - at[:, None], None, mask)
        state = state.spend(out.counts, jnp.sum(window(state.inside, at, width), axis=1))

        # The step of `Masked`, for positions that no earlier window holds.
        new = window_of(positions) == current[:, None]
        groups = jnp.where(new, window(state.groups, at, width), partition.NEVER)
        state, info, _ = self.unmask(params, state, out.hidden, at, groups, knobs)
        return state, info
