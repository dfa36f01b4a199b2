"""Block diffusion (SDAR, arXiv 2510.06303): block after block, the positions of a block revealed
over a few calls.
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.reading import fresh, read_block, read_prompt
from paradec_jax.decode.canvas import BlockCanvas, BlockDecoder, BlockRead, Choice, DenoisingKnobs
from paradec_jax.decode.machine import Request
from paradec_jax.records import choices, pytree


@pytree
class Denoised:
    """What a call did to a block of each row.

    Attributes:
      at: first position of the block, [B].
      step: steps done in it before, [B].
      where: positions that the call revealed, [B, W]; with a head, in each of R rounds, [B, R, W].
      tokens: tokens chosen for every position, of the same shape.
      scores: their confidences.
      reads: rows of which a block with masks was read, [B].
      stored: rows whose block before was stored, [B].
      hidden: hidden states about the block's positions, [B, W, D].
    """

    at: Int[Array, "B"]
    step: Int[Array, "B"]
    where: Bool[Array, "B *R W"]
    tokens: Int[Array, "B *R W"]
    scores: Float[Array, "B *R W"]
    reads: Bool[Array, "B"]
    stored: Bool[Array, "B"]
    hidden: Float[Array, "B W D"]

    @staticmethod
    def of(state: BlockCanvas, call: BlockRead, choice: Choice) -> "Denoised":
        """The info of a choice, given the canvas as the call left it."""
        return Denoised(
            at=state.cached,
            step=state.step,
            where=choice.where,
            tokens=choice.tokens,
            scores=choice.scores,
            reads=call.reads,
            stored=call.stored,
            hidden=state.aligned(call.hidden),
        )


@choices
class BlockDenoising(BlockDecoder):
    """Denoises one block of B positions after the other; a call reveals what the rule says (see
    `canvas.choose`).

    ::

        call      read                  B = 4, a prompt of 6, one position a step
        prompt    p p p p | p p _ _     the prompt's whole blocks, and the block that holds its end
        1                 | p p _ b
        2                 | p p a b | _ _ _ _       the block is clean: stored while the next one is read
        3                           | c _ _ _

    A row commits the leading run of what is revealed at once, so a stop token ends it before its
    block is complete. Blocks are read whole even where the budget ends inside one: a budget cuts a
    text and changes nothing before it.

    Without the fusions a call does one thing: a prompt's call reads whole blocks and reveals
    nothing, and a clean block is stored by a call of its own. They change no logits (but for
    rounding): each block sees what it sees in either case.

    One position a step at temperature 1 keeps the joint law that the scores are conditionals of, in
    any order that does not look at them ("sequential", "random"). Where scores are about the next
    position only "sequential" does: a block's first row is that of the block before, which sees
    nothing of what another order revealed.

    A row of n new positions ends within 1 + 2 (n + B) network calls.

    Attributes:
      length: B where the checkpoint serves several lengths; its own when None.
      rule: "static", "dynamic", "sequential", "random", "entropy", "threshold" or "factor".
      confidence: distribution that confidences and entropies are taken from, "raw", "tempered" or
        "filtered"; None is that of the rule's paper (see `canvas.choose`).
      fuse_store: store a block in the call that does the first step of the next one, in a window of
        2B.
      fuse_prompt: do the first step of the first block in the prompt's call.
      top_p_rule: SDAR's, unless told otherwise.
    """

    rule: str = "dynamic"
    Knobs = DenoisingKnobs

    def init(self, params: Any, request: Request, knobs: DenoisingKnobs) -> BlockCanvas:
        """Reads the prompts' whole blocks; with `fuse_prompt` the same call does the first step."""
        state = fresh(self, request)
        state, call = read_prompt(self, params, state, request, self.fuse_prompt)
        return self._denoise(params, state, call, knobs)[0]

    def step(
        self, params: Any, state: BlockCanvas, knobs: DenoisingKnobs
    ) -> tuple[BlockCanvas, Denoised]:
        """One call: a step in each row's open block, or a store, or both."""
        # The network sees the trusted cache and the whole open block, masks included.
        state, call = read_block(self, params, state, self.fuse_store)
        return self._denoise(params, state, call, knobs)

    def _denoise(
        self, params: Any, state: BlockCanvas, call: BlockRead, knobs: DenoisingKnobs
    ) -> tuple[BlockCanvas, Denoised]:
        # Each masked position draws a token, and the rule reveals some of them (SDAR's remasking).
        new, _, choice = self.denoise(params, state, call, knobs)
        return new.with_choice(choice), Denoised.of(state, call, choice)
