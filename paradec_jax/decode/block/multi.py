"""Several blocks in flight (D2F, arXiv 2508.09192; MultiBD, arXiv 2606.29215): later blocks are
begun while earlier ones are not complete.

::

    call    reads                                 B = 4, two blocks in flight
    1       | a _ c _ |                           the first one reveals at least one position
    2       | a b c _ | _ _ f _ |                 the next one is admitted, and reveals what is sure
    3       | a b c d | e _ f _ |                 one is complete, so the other has to reveal
    4       | a b c d | e g f _ | _ _ i _ |       it is stored along with this call
    5                 | e g f h | _ j i _ |
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.block.flight import FlightCanvas, FlightRead, read_blocks
from paradec_jax.decode.block.reading import fresh, read_prompt
from paradec_jax.decode.canvas import BlockDecoder, Choice, DenoisingKnobs
from paradec_jax.decode.machine import NOT_NEGATIVE, SHARE, Number, Request, Whole, knob
from paradec_jax.decode.rules import pad_slots, write_after_read
from paradec_jax.records import choices, pytree

BLOCK = 32  # of a network of full attention, where `length` is not set
EDITS = ("edits", (True,))


@pytree
class MultiBlockKnobs(DenoisingKnobs):
    """Of `BlockDenoising`, and when blocks are begun, hurried and edited.

    Attributes:
      admit: tau_add, share of the last block that is shown before another one is admitted.
      activate: tau_act, share of a block that is shown before the one after it has to reveal a
        position in each call; until then that reveals what passes the threshold alone.
      edit: tau_edit, confidence above which another token takes the place of a shown one; None is
        0.9.
      looks: calls on a block without masks, after which its edits end; None is 16.
    """

    admit: Number = knob(0.1, SHARE)
    activate: Number = knob(0.95, SHARE)
    edit: Number | None = knob(None, NOT_NEGATIVE, unset=0.9, needs=EDITS)
    looks: Whole | None = knob(None, NOT_NEGATIVE, unset=16, needs=EDITS)


@pytree
class Flown:
    """What a call did to R blocks of each row.

    Attributes:
      at: first position of the first block, [B].
      reads: blocks that were read, [B, R].
      stored: how many of them were stored, the first ones, [B].
      full: blocks that had to reveal a position, [B, R].
      choice: what was revealed, and as what, [B, R, W].
      edited: shown positions whose token was replaced, [B, R, W].
      hidden: hidden states about all positions, [B, R W, D].
    """

    at: Int[Array, "B"]
    reads: Bool[Array, "B R"]
    stored: Int[Array, "B"]
    full: Bool[Array, "B R"]
    choice: Choice
    edited: Bool[Array, "B R W"]
    hidden: Float[Array, "B _ D"]


@choices
class MultiBlock(BlockDecoder):
    """Denoises F blocks together, each of which sees the cache, itself and those before it.

    A block's keys and values are stored once it and all before it are complete, by a call that reads
    later blocks along: the cache is exact. Without edits, with `flight` 1 or with `admit` and `activate`
    1, texts are those of `BlockDenoising`. A network of full attention is read in blocks that count from the
    prompt's end, as D2F's adapters were trained.

    A row of n new positions ends within 1 + 2 (n + B) network calls, with edits within 1 + (2 +
    looks) (n + B).

    Attributes:
      flight: F, blocks that may be in flight.
      edits: replace shown tokens of blocks in flight, too, and commit a block once a call on all of
        it changes nothing (LLaDA2.1); for models that were trained on wrong tokens.
      length: B, as of `BlockDenoising`; of a network of full attention any, 32 when None.
      rule, confidence, fuse_prompt, top_p_rule: as of `BlockDenoising`.
      fuse_store: store complete blocks in the call that reads later ones; otherwise those wait.
    """

    flight: int = 2
    rule: str = "dynamic"
    edits: bool = False
    Knobs = MultiBlockKnobs
    visibilities = ("block", "full")

    @property
    def block(self) -> int:
        """B."""
        return super().block if self.network.block else self.length or BLOCK

    @property
    def origin(self) -> str:
        """Where blocks count from, of a network of full attention the prompt's end."""
        return super().origin if self.network.block else "prompt"

    def init(self, params: Any, request: Request, knobs: MultiBlockKnobs) -> FlightCanvas:
        """Reads the prompts' whole blocks; with `fuse_prompt` along with the first block."""
        canvas = fresh(self, request, blocks=self.flight + 2)
        state = FlightCanvas.of_blocks(canvas, self.flight + 1)
        opens = jnp.full_like(state.rows.done, self.fuse_prompt)
        state = state.admitted(self.flight, knobs.admit, opens)
        state, call = read_prompt(self, params, state, request, self.fuse_prompt)
        reads, full = self._blocks(state.count), state.full(knobs.activate)
        choice = self._judge(params, state, knobs, reads, full, call.hidden)
        read = FlightRead(call.at, reads, call.kv, call.hidden, choice)
        return self._settle(state, read, full, knobs)[0]

    def step(
        self, params: Any, state: FlightCanvas, knobs: MultiBlockKnobs
    ) -> tuple[FlightCanvas, Flown]:
        """One call: a step in each block in flight, and the store of those before them."""
        # Another block of masks, once tau_add of the last one is shown.
        waits = (state.ready > 0) & (not self.fuse_store)
        state = state.admitted(self.flight, knobs.admit, ~waits)
        # Fully active is a block once tau_act of the one before it is shown.
        full = state.full(knobs.activate)
        # One call: the blocks that are to be stored, and those in flight, block-causally.
        count = jnp.where(waits, state.ready, state.count)
        reads = self._blocks(jnp.where(state.rows.done, 0, count))
        choose = functools.partial(self._judge, params, state, knobs, reads, full)
        state, call = read_blocks(self, params, state, reads, choose)
        # What passes tau_conf is revealed; complete blocks will be stored.
        return self._settle(state, call, full, knobs)

    def _blocks(self, count: Int[Array, "B"]) -> Bool[Array, "B R"]:
        return jnp.arange(self.flight + 1) < count[:, None]

    def _judge(
        self,
        params: Any,
        state: FlightCanvas,
        knobs: MultiBlockKnobs,
        reads: Bool[Array, "B R"],
        full: Bool[Array, "B R"],
        hidden: Float[Array, "B _ D"],
    ) -> Choice:
        """What the rule reveals of the first r blocks, given the hidden states of their positions."""
        size = hidden.shape[1] // self.block
        begin = state.cached[:, None] + self.block * jnp.arange(size)
        logits = self.network.logits(params, state.aligned(hidden))
        logits = logits.reshape(*begin.shape, self.block, logits.shape[-1])
        masked = state.slots(state.open) & reads[..., None]

        def choose(logits: Array, masked: Array, at: Array, step: Array, best: Array) -> Choice:
            return self.choose(logits, masked, at, step, state.rows, knobs, best=best)

        of_each = logits, masked[:, :size], begin, state.step[:, :size], full[:, :size]
        chosen = jax.vmap(choose, in_axes=1, out_axes=1)(*of_each)
        chosen = jax.tree.map(lambda x: pad_slots(x, self.flight + 1), chosen)
        return jax.tree.map(lambda x: jnp.where(reads[..., None], x, False), chosen)

    def _settle(
        self,
        state: FlightCanvas,
        call: FlightRead,
        full: Bool[Array, "B R"],
        knobs: MultiBlockKnobs,
    ) -> tuple[FlightCanvas, Flown]:
        """The canvas after a call, whose keys are trusted of the blocks that were ready."""
        stored = jnp.where(state.rows.done, 0, state.ready)
        edit = knobs.edit if self.edits else None
        new, edited, run = state.taken(call.choice, call.reads, edit, knobs.looks)
        about = state.aligned(call.hidden)
        info = Flown(state.cached, call.reads, stored, full, call.choice, edited, about)
        at = write_after_read(call.at, call.choice.tokens.reshape(len(stored), -1))
        cache = self.network.write(state.cache, call.kv, at)
        return new.passed(stored, run, call.hidden, cache), info
