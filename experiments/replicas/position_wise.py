"""Lossy: drafts of a block judged position by position in one call, as the text of MRP, not its program, has it."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from experiments.replicas.residual import drafted
from paradec_jax.decode.block.candidates import candidates_of
from paradec_jax.decode.block.canvas import BlockCall, block_of, of_rows, read_prompt
from paradec_jax.decode.block.denoising import Denoised
from paradec_jax.decode.block.head import check_head, first_call, fresh_with_head
from paradec_jax.decode.block.residual_speculative import DraftedCanvas
from paradec_jax.decode.block.rules import DenoisingKnobs, draw
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.machine.network import CachedNetwork, Prefix
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.alignment import aligned
from paradec_jax.decode.rules.sampling import tempered
from paradec_jax.decode.rules.windows import where_rows


@dataclasses.dataclass(frozen=True)
class LossyPositionWise(DecoderBase):
    """An ablation that writes other texts than one position a step: it is not lossless, though its source says so.

    ::

        drafted   _ b _ _  ->  a b c _      K drafts of the head, all in one block
        call      a b c _                   the network reads them all at once
        said      a x c z                   a and c stay, b is masked again; the next drafts come from this call

    A draft is judged where it is seen already, which the network never learned, and given later drafts; the order of
    positions is not judged at all; and where a draft falls, the next ones come from scores that knew it. The first
    draft stays if all others fall and it falls too.

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
    visibilities: ClassVar[tuple[str, ...]] = ("block",)
    alignments: ClassVar[tuple[str, ...]] = ("own", "next")
    any_order: ClassVar[bool] = True
    further_networks: ClassVar[tuple[str, ...]] = ("head",)

    def __post_init__(self) -> None:
        check_head(self.head)
        if self.candidates < 2:
            raise ValueError(f"candidates must be at least 2, not {self.candidates}")
        if self.log_probs:
            raise ValueError("LossyPositionWise keeps no log-probabilities")

    @property
    def block(self) -> int:
        """B, a fact of the checkpoint."""
        return block_of(self)

    def init(self, params: Any, request: Request, knobs: SamplingKnobs) -> DraftedCanvas:
        """Network and head read the prompts' whole blocks."""
        del knobs
        state = fresh_with_head(self, request)
        call = read_prompt(self, params["network"], state, request.tokens.shape[1], opens=False)
        state = state.spend(call.counts, call.width, call.calls)
        state = state.stored(self.network, call, state.rows.tokens)
        state, _ = first_call(self, params, state, call, jnp.zeros_like(call.reads), prompt=True)
        nothing = jnp.zeros((request.batch, self.candidates, self.block), jnp.int32)
        return DraftedCanvas(**vars(state), where=nothing > 0, tokens=nothing)

    def step(self, params: Any, state: DraftedCanvas, knobs: SamplingKnobs) -> tuple[DraftedCanvas, Denoised]:
        """A block's first call, or a round, or a store."""
        alone = DenoisingKnobs(**vars(knobs))
        at, step, clean = state.cached, state.step, state.clean
        fed = candidates_of(state, state.where, state.tokens, rides=False).tokens[:, -1]
        positions = at[:, None] + jnp.arange(self.block)
        out = self.network.forward(params["network"], fed, positions, Prefix(state.cache, at))
        state = state.spend(out.counts, self.block)
        previous = state.previous
        hidden = aligned(out.hidden, self.spec.alignment, previous)
        if previous is not None:
            previous = where_rows(clean, out.hidden[:, -1:], previous)
        logits = self.network.logits(params["network"], hidden)
        said = draw(self, logits, positions, step, state.rows, alone)
        stays = jnp.any(state.where, axis=1) & (said == fed)
        stays |= state.where[:, 0] & ~jnp.any(stays, axis=1)[:, None]
        reads = ~state.rows.done & ~clean
        call = BlockCall(
            clean=clean,
            reads=reads,
            start=at + self.block * clean,
            step=jnp.where(clean, 0, step),
            hidden=hidden,
            own=out.hidden,
            window=out.hidden,
            previous=previous,
            kv=out.kv,
            at=at,
            calls=jnp.ones_like(at),
            width=jnp.full_like(at, self.block),
            counts=of_rows(out.counts, at),
        )
        state = state.stored(self.network, call, said)
        state = state.reveal(fed, stays, at)
        state, _ = first_call(self, params, state, call, jnp.zeros_like(reads), prompt=False)
        info = Denoised(
            at=at,
            step=step,
            where=stays,
            tokens=fed,
            scores=score.probability(tempered(logits, alone.temperature), fed),
            reads=reads,
            stored=clean,
            hidden=hidden,
        )
        return drafted(self, params, state, call, alone), info
