"""A small decoder that shows what the canvas has room for, several open blocks in one call: it runs
through every driver and law.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paradec_jax.decode.block.reading import read_prompt
from paradec_jax.decode.canvas.blocks import BlockCanvas, BlockRead
from paradec_jax.decode.canvas.canvas import Canvas
from paradec_jax.decode.canvas.choose import DenoisingKnobs, RuledDecoder
from paradec_jax.decode.machine.knobs import NOT_NEGATIVE, knob
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.tree import Windows, forward_tree
from paradec_jax.decode.masked.masked import UnmaskedInfo
from paradec_jax.decode.rules.windows import window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OpenKnobs(DenoisingKnobs):
    """Denoising, and `share`, how much of a block is shown before the next one opens."""

    share: Float[Array, ""] | float = knob(0.5, NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class OpenBlocks(RuledDecoder):
    """Denoises several blocks at once; each sees those before it (as D2F, arXiv 2508.09192).

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      blocks: K, blocks that may be open.
      rule: one of `choose.RULES`.
    """

    _: dataclasses.KW_ONLY
    blocks: int = 2
    rule: str = "threshold"
    alignments: ClassVar[tuple[str, ...]] = ("own",)
    Knobs: ClassVar[type] = OpenKnobs

    def init(self, params: Any, request: Request, knobs: OpenKnobs) -> BlockCanvas:
        """Reads the prompts' whole blocks; room for K blocks after them."""
        rows = self.begin(request, self.blocks * self.block)
        canvas = Canvas.of(rows, self.spec.mask, self.block)
        state = BlockCanvas(
            **vars(canvas),
            cache=self.empty_cache(request, rows.tokens.shape[1]),
            cached=canvas.block_at(rows.length),
            step=jnp.zeros_like(rows.length),
            previous=None,
        )
        state, call = read_prompt(self, params, state, request, opens=False)
        return state.store(self.network, call, state.rows.tokens)

    def step(
        self, params: Any, state: BlockCanvas, knobs: OpenKnobs
    ) -> tuple[BlockCanvas, UnmaskedInfo]:
        """One call on the open blocks; the first is stored where it was clean before."""
        at, block, count, clean = state.cached, self.block, self.blocks, state.clean
        tokens, _, open_, _ = state.window(at, count * block)
        tokens, open_ = (x.reshape(len(at), count, block) for x in (tokens, open_))
        begin = at[:, None] + block * jnp.arange(count)
        enough = jnp.mean(~open_, axis=2) >= knobs.share
        follows = jnp.cumprod(enough[:, :-1], axis=1) * window(state.inside, at + block, 1)
        reads = jnp.concatenate([jnp.ones_like(clean)[:, None], follows > 0], axis=1)
        reads &= ~state.rows.done[:, None]
        tree = Windows(tokens, begin, reads, jnp.arange(count) - 1)
        call = forward_tree(self.network, params, Prefix(state.cache, at), tree)
        state = state.spend(call.counts, block * reads.sum(1))

        logits = self.network.logits(params, call.each)
        step = jnp.broadcast_to(state.step[:, None], begin.shape)
        choose = jax.vmap(lambda *of_block: self.choose(*of_block, state.rows, knobs), 1, 1)
        choice = choose(logits, open_ & reads[..., None], begin, step)
        choice = jax.tree.map(lambda x: x.reshape(len(at), -1), choice)
        state = state.show(choice.tokens, choice.where, at, choice.log_probs).seal()
        read = BlockRead(call.each[:, 0], call.each[:, 0], at, call.kv, reads[:, 0], clean)
        state = state.store(self.network, read, choice.tokens)
        state = state.after_block(clean, block, call.each[:, 0, -1:])
        return state, UnmaskedInfo(at, choice.where, choice.scores)
