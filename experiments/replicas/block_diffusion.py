"""The released programs of block diffusion: SDAR's `generate.py` and evaluation, and the serving
engine JetEngine.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from experiments.replicas import blocks
from paradec_jax.config.bounds import check_words
from paradec_jax.decode.block.denoising import Denoised
from paradec_jax.decode.block.reading import fresh, read_block, read_prompt
from paradec_jax.decode.canvas.blocks import AnyBlocks, BlockCanvas
from paradec_jax.decode.canvas.canvas import Choice
from paradec_jax.decode.canvas.choose import DenoisingKnobs, RuledDecoder, quota, threshold_at
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import is_stop
from paradec_jax.decode.rules import select
from paradec_jax.decode.rules.windows import put

SDAR = ("static", "dynamic", "sequential", "entropy")
PROGRAMS = {"generate": SDAR, "evaluation": SDAR, "jetengine": (*SDAR, "random")}


@dataclasses.dataclass(frozen=True)
class ReleasedDenoising(RuledDecoder):
    """Denoises block after block, each read a last time by a call of its own. It keeps what the
    programs do:

    - "generate": the confidence of a token is its probability after truncation. With top-k 1 that
      is 1 everywhere, so that a dynamic step reveals a whole block and a static one has nothing but
      ties.
    - "jetengine": where fewer positions than the quota exceed the threshold, its batched path
      reveals the leftmost ones in place of the surest.
    - All of them ask for stop tokens once a block is stored, so a row holds the rest of the block
      after one; and they fill the block that holds the end of the budget, which is overrun by up to
      B - 1 tokens.

    "evaluation" has the last quirk alone. What went wrong is not repeated: `generate.py` overwrites
    committed tokens where a quota exceeds the masks that are left, cannot run its entropy rule
    (here it is repaired), and takes neither temperature 0 nor a batch; JetEngine may leave masks in
    a block.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      program: "generate", "evaluation" or "jetengine".
      rule: "static", "dynamic", "sequential", "entropy", or JetEngine's "random".
      top_p_rule: theirs.
    """

    _: dataclasses.KW_ONLY
    program: str = "generate"
    rule: str = "dynamic"
    top_p_rule: str = "keep-renormalised"
    Knobs: ClassVar[type] = DenoisingKnobs

    def __post_init__(self) -> None:
        if self.program not in PROGRAMS:
            raise ValueError(f"program must be one of {', '.join(PROGRAMS)}, not {self.program!r}")
        check_words(self, rule=PROGRAMS[self.program])
        if self.log_probs:
            raise ValueError("ReleasedDenoising keeps no log-probabilities")

    @property
    def confidence(self) -> str | None:
        """Of "generate" that after truncation, but for its entropies."""
        return "filtered" if self.program == "generate" and self.rule != "entropy" else None

    def init(self, params: Any, request: Request, knobs: DenoisingKnobs) -> BlockCanvas:
        """Reads the prompts' whole blocks."""
        del knobs
        state = whole_blocks(fresh(self, request, overrun=self.block))
        state, call = read_prompt(self, params, state, request, opens=False)
        return state.store(self.network, call, state.rows.tokens)

    def step(
        self, params: Any, state: BlockCanvas, knobs: DenoisingKnobs
    ) -> tuple[BlockCanvas, Denoised]:
        """A step in each row's block, or its store, after which the row may end."""
        state, call = read_block(self, params, state, fuse=False)
        new, _, choice = self.denoise(params, state, call, knobs)
        if self.program == "jetengine" and self.rule == "dynamic":
            choice = self._leftmost(choice, state.masked(call.reads), state.step, knobs)
        info = Denoised.of(state, call, choice)
        return revealed_late(new, choice.tokens, choice.where, state.cached, call.stored), info

    def _leftmost(
        self,
        choice: Choice,
        masked: Bool[Array, "B W"],
        step: Int[Array, "B"],
        knobs: DenoisingKnobs,
    ) -> Choice:
        """The choice of JetEngine's batched path: what exceeds the threshold, or the quota from the
        left.
        """
        sure = masked & (choice.scores > threshold_at(step, knobs))
        leftmost = select.first(masked, quota(masked.shape[1], step, knobs))
        enough = jnp.sum(sure, axis=1) >= jnp.sum(leftmost, axis=1)
        return dataclasses.replace(choice, where=jnp.where(enough[:, None], sure, leftmost))


def whole_blocks(canvas: AnyBlocks) -> AnyBlocks:
    """The canvas of rows that fill the block which holds the end of their budget."""
    limit = -(-canvas.rows.limit // canvas.block) * canvas.block
    return dataclasses.replace(canvas, rows=dataclasses.replace(canvas.rows, limit=limit))


def revealed_late(
    canvas: AnyBlocks,
    tokens: Int[Array, "B W"],
    where: Bool[Array, "B W"],
    at: Int[Array, "B"],
    stored: Bool[Array, "B"],
) -> AnyBlocks:
    """As `reveal`, but a row ends, by a stop token or its budget, where one of its blocks has been
    stored.
    """
    final = put(canvas.shown, jnp.ones_like(where), at, where)
    rows = canvas.rows.write(tokens, where, at)
    run = jnp.minimum(select.leading_run(final), rows.limit).astype(jnp.int32)
    rows = dataclasses.replace(rows, length=jnp.where(rows.done, rows.length, run))
    position = jnp.arange(final.shape[1])
    own = (position >= rows.prompt_lengths[:, None]) & (position < rows.length[:, None])
    if rows.fixed is not None:
        own &= ~rows.fixed
    stopped = stored & jnp.any(is_stop(rows.tokens, rows.stop) & own, axis=1)
    rows = blocks.ended(rows, stopped, stored & (rows.length >= rows.limit))
    return dataclasses.replace(canvas, rows=rows, shown=final)
