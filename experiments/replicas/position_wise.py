"""Lossy: drafts of a block judged position by position in one call, as the text of MRP, not its
program, has it.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from experiments.replicas.residual import drafted
from paradec_jax.decode.block.denoising import Denoised
from paradec_jax.decode.block.drafts import DraftedCanvas
from paradec_jax.decode.block.head import ask_head, check_head, fresh_with_head
from paradec_jax.decode.block.reading import read_prompt
from paradec_jax.decode.canvas.blocks import BlockRead
from paradec_jax.decode.canvas.choose import DenoisingKnobs, RuledDecoder
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.machine.network import CachedNetwork, Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.subs import without_mask


@dataclasses.dataclass(frozen=True)
class LossyPositionWise(RuledDecoder):
    """An ablation that writes other texts than one position a step: it is not lossless, though its
    source says so.

    ::

        drafted   _ b _ _  ->  a b c _      K drafts of the head, all in one block
        call      a b c _                   the network reads them all at once
        said      a x c z                   a and c stay, b is masked again; the next drafts come from this call

    A draft is judged where it is seen already, which the network never learned, and given later
    drafts; the order of positions is not judged at all; and where a draft falls, the next ones come
    from scores that knew it. The first draft stays if all others fall and it falls too.

    A row of n new positions ends within 1 + 3 (n + B) network calls.

    Attributes:
      head: the head's network, or "zero".
      candidates: K, drafts of a round.
    """

    _: dataclasses.KW_ONLY
    head: CachedNetwork | str | None = None
    candidates: int = 3
    top_p_rule: str = "keep-renormalised"
    Knobs: ClassVar[type] = SamplingKnobs
    further_networks: ClassVar[tuple[str, ...]] = ("head",)

    def __post_init__(self) -> None:
        check_head(self.head)
        if self.candidates < 2:
            raise ValueError(f"candidates must be at least 2, not {self.candidates}")
        if self.log_probs:
            raise ValueError("LossyPositionWise keeps no log-probabilities")

    @property
    def rule(self) -> str:
        """One position a step."""
        return "static"

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> DraftedCanvas:
        """Network and head read the prompts' whole blocks."""
        del knobs
        state = fresh_with_head(self, request)
        state, call = read_prompt(self, params["network"], state, request, opens=False)
        state = state.store(self.network, call, state.rows.tokens)
        _, state = ask_head(self, params, state, call, jnp.zeros_like(call.reads))
        return DraftedCanvas.empty(state, self.candidates)

    def step(
        self, params: Any, state: DraftedCanvas, knobs: SamplingKnobs
    ) -> tuple[DraftedCanvas, Denoised]:
        """A block's first call, or a round, or a store."""
        alone = DenoisingKnobs(**vars(knobs))
        before, clean, at = state, state.clean, state.cached
        # One call on the block with all drafts in it.
        fed = state.candidates(ride=False).tokens[:, -1]
        positions = at[:, None] + jnp.arange(self.block)
        out = self.network.forward(params["network"], fed, positions, Prefix(state.cache, at))
        state = state.spend(out.counts, self.block)
        logits = self.network.logits(params["network"], state.aligned(out.hidden))
        # A draft stays where it is what the network says at its position; the first one does in any
        # case.
        likely = without_mask(logits, self.mask)
        said = self.sample(likely, positions, state.rows, alone, step=state.step)
        stays = jnp.any(state.where, axis=1) & (said == fed)
        stays |= state.where[:, 0] & ~jnp.any(stays, axis=1)[:, None]
        reads = ~state.rows.done & ~clean
        call = BlockRead(
            hidden=out.hidden, window=out.hidden, at=at, kv=out.kv, reads=reads, stored=clean
        )
        info = Denoised(
            at=at,
            step=before.step,
            where=stays,
            tokens=fed,
            scores=score.probability(self.shaped(logits, alone), fed),
            reads=reads,
            stored=clean,
            hidden=state.aligned(out.hidden),
        )
        state = state.after_block(clean, self.block, out.hidden[:, -1:])
        state = state.store(self.network, call, said).show(fed, stays, at).seal()
        _, state = ask_head(self, params, state, call, jnp.zeros_like(reads))
        return drafted(self, params, state, before, call, alone), info
