"""Semi-autoregressive denoising (LLaDA, arXiv 2502.09992; Dream, arXiv 2508.15487): a canvas of
masks in which every position sees all, filled block after block or at once; with the caches of
Fast-dLLM (arXiv 2505.22618).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from paradec_jax.decode.canvas import CanvasDecoder, CanvasKnobs, CanvasState, Filled, read_span
from paradec_jax.decode.machine import COUNT, UNLIMITED, CachedNetwork, Request, Whole, knob
from paradec_jax.records import choices, pytree

CACHES = ("none", "prefix", "dual")


@pytree
class CacheKnobs(CanvasKnobs):
    """Sampling, how much a call reveals, and how old a cache may be.

    Attributes:
      renew: a cached block's calls from one reading of the whole canvas to the next; None for one
        at its beginning alone, 1 for no cache.
    """

    renew: Whole | None = knob(None, COUNT, unset=UNLIMITED, needs=("cache", ("prefix", "dual")))


@choices
class SemiAutoregressive(CanvasDecoder):
    """Fills blocks of B positions from left to right, the positions of a block in any order, see
    `canvas.weigh`.

    ::

        call    canvas                   B = 4, a prompt of 2, static in 2 steps
        0       p p | _ _ _ _ | _ _ _
        1       p p | a _ _ d | _ _ _
        2       p p | a b c d | _ _ _
        3       p p | a b c d | e _ g

    Every call sees the whole canvas, what is masked after the block too. With a cache a block's
    first call reads the whole canvas, the others the block alone ("dual") or the block and what
    follows ("prefix"): the rest is as it was at that first call, which is an approximation, since
    what a position sees has changed. Blocks count from the end of each row's prompt.

    A call reveals at least one position, so a row of n new positions ends within n calls; "static",
    "rounded" and "grid" keep to the N steps of each block.

    Attributes:
      length: B; None for the whole canvas as one block, as Dream has it.
      rule: "static", "rounded", "grid", "capped", "threshold", "factor", "entropy" or "bound".
      order: by which score positions are revealed, "confidence", "margin", "entropy" or "random".
      confidence: distribution that a score is taken from, "raw", "tempered" or "filtered"; None is
        that of the order's paper.
      cache: "none", "prefix" or "dual".
      first_alone: a block's first call reveals its first position and nothing else (Fast-dLLM for
        Dream, whose cached calls then need no row about that position).
      stops_last: stop tokens do not count in confidences, so that they are revealed last (LLaDA).
      guided: read the canvas a second time without what was given, and lean away from that.
      chunk: C, positions of a row whose logits exist at once.
    """

    cache: str = "none"
    first_alone: bool = False
    Knobs = CacheKnobs
    WORDS = {**CanvasDecoder.WORDS, "cache": CACHES}  # noqa: RUF012

    def init(self, params: Any, request: Request, knobs: Any) -> CanvasState:
        """Fills the canvas with masks; calls nothing."""
        room = self.size if self.cache == "prefix" else self.block + 1
        return self.blank(request, knobs, room, self.cache != "none")

    def step(self, params: Any, state: CanvasState, knobs: Any) -> tuple[CanvasState, Filled]:
        """One call: positions of each row's open block are revealed."""
        # The open block holds the first mask: all before it are complete.
        state, opens = state.opened()
        masked = state.masked(~state.rows.done)
        alone = opens & self.first_alone
        state, count = self.due(state, jnp.sum(masked, axis=1) * ~alone, knobs)

        # p(x_0 | x_t): one call on the canvas, or on the block where the cache holds the rest.
        renews = opens | (state.age + 1 >= knobs.renew) if self.cache != "none" else opens
        before = self.spec.alignment == "next" and not self.first_alone
        state, hidden = read_span(self, params, state, renews, int(before), self.cache == "dual")

        # A token for every mask of the block, and how sure it is.
        sure = self.weigh(params, state, hidden, state.cached, masked, knobs)
        # The rule says which stay; all others are masked again.
        where = self.reveals(sure.scores, masked, count, state.step, knobs)
        first = masked & (jnp.cumsum(masked, axis=1) == 1)
        where = jnp.where(alone[:, None], first, where)
        new = state.show(sure.tokens, where, state.cached, sure.log_probs).seal()
        new = dataclasses.replace(new, step=state.step + 1, age=jnp.where(renews, 0, state.age + 1))
        return new, Filled(state.cached, where, sure.tokens, sure.scores, hidden)

    def bind(self, network: Any, size: int, spec: Any = None) -> "SemiAutoregressive":
        """As of every decoder; a cache needs a network that has one."""
        if self.cache != "none" and not isinstance(network, CachedNetwork):
            raise ValueError(
                f"cache {self.cache} needs a network with one, which {type(network).__name__} has not"
            )
        return super().bind(network, size, spec)
