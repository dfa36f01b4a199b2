"""The rows of block diffusion, with residual heads and without."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from decoder_rows import Row
from plain_baselines import Count
from plain_canvas import (
    block_count,
    drafted_block_count,
    flight_count,
    residual_count,
    verified_block_count,
)
from stubs import StubDenoiser, StubHead

from experiments import replicas
from experiments.decoders.elastic import ElasticDenoising
from experiments.decoders.residual_veto import ResidualVeto
from paradec_jax import decode

SURE = {"threshold": 2.0}  # that nothing reaches, so that a step reveals one token
APART = {"fuse_store": False, "fuse_prompt": False}


def block_row(
    kind: type,
    block: int,
    count: Callable[..., Count] | None = None,
    knobs: Any = None,
    first: tuple[int, int] | None = None,
    alignment: str = "own",
    others: tuple[int, ...] = (),
    origin: str = "start",
    each: int = 2,
    **options: Any,
) -> Row:
    """A row on the denoiser that sees in blocks; one token a step, from left to right, unless told
    otherwise.

    The options tell the calls as well, and whether the prompt's call commits a token.
    """
    stub = {"sharpness": 12.0, "block": block, "alignment": alignment, "origin": origin}
    longest = max((block, *others))
    return Row(
        kind,
        options,
        knobs or {},
        stub if not others else {**stub, "others": others},
        StubDenoiser,
        count=count and functools.partial(count, {"block": block, "origin": origin, **options}),
        first=first or (1, int(options.get("fuse_prompt", True))),
        most=lambda new: 1 + each * (new + longest),
    )


def head_row(
    kind: type,
    block: int,
    count: Any = None,
    knobs: Any = None,
    says: str | None = "right",
    **rest: Any,
) -> Row:
    """A row of a decoder with a residual head that is right, lies, guesses, or (None) does not run."""
    of = StubDenoiser(sharpness=12.0, block=block, alignment=rest.get("alignment", "own"))
    return block_row(
        kind, block, count, knobs, head="zero" if says is None else StubHead(of, says), **rest
    )


BLOCKS = {
    "block": block_row(decode.BlockDenoising, 4, block_count, rule="static", log_probs=True),
    "block-next": block_row(
        decode.BlockDenoising, 3, block_count, SURE, alignment="next", rule="dynamic"
    ),
    "block-unfused": block_row(
        decode.BlockDenoising, 2, block_count, SURE, rule="threshold", **APART
    ),
    "block-from-prompt": block_row(
        decode.BlockDenoising, 3, block_count, SURE, origin="prompt", alignment="next"
    ),
    "block-random": block_row(
        decode.BlockDenoising, 4, None, {"steps": 2}, first=(1, 0), rule="random"
    ),
    "soft-block": block_row(decode.SoftBlock, 4, block_count, SURE, log_probs=True),
    "self-verified": dataclasses.replace(
        block_row(
            decode.SelfVerified, 4, verified_block_count, causal=True, log_probs=True, each=3
        ),
        first=(2, 1),
    ),
    "self-verified-by-score": block_row(
        decode.SelfVerified,
        2,
        None,
        {"price": 0.5},
        first=(1, 0),
        alignment="next",
        each=3,
        route="score",
        **APART,
    ),
    "multi-block": block_row(decode.MultiBlock, 4, flight_count, SURE, log_probs=True),
    "multi-block-unfused": block_row(
        decode.MultiBlock,
        2,
        None,
        {"entropy": 1.0},
        first=(1, 0),
        flight=3,
        rule="certain",
        **APART,
    ),
    "multi-block-edits": block_row(
        decode.MultiBlock,
        3,
        None,
        {"threshold": 0.8, "looks": 2},
        first=(1, 0),
        alignment="next",
        origin="prompt",
        each=4,
        flight=3,
        edits=True,
        log_probs=True,
    ),
    "elastic": block_row(
        ElasticDenoising,
        2,
        None,
        {"length_entropy": 1.0},
        others=(4,),
        rule="static",
        log_probs=True,
    ),
    "elastic-one": block_row(ElasticDenoising, 4, block_count, SURE, rule="dynamic"),
    "residual": head_row(
        decode.Residual, 4, residual_count, rule="static", head_steps=2, log_probs=True
    ),
    "residual-next": head_row(
        decode.Residual, 2, residual_count, SURE, alignment="next", rule="threshold", **APART
    ),
    "residual-zero": head_row(
        decode.Residual, 4, None, SURE, says=None, rule="dynamic", head_rule="dynamic"
    ),
    "residual-speculative": head_row(
        decode.ResidualSpeculative, 4, drafted_block_count, rule="static", log_probs=True
    ),
    "residual-speculative-next": head_row(
        decode.ResidualSpeculative,
        3,
        drafted_block_count,
        says="liar",
        alignment="next",
        rule="static",
        candidates=2,
    ),
    "residual-speculative-unfused": head_row(
        decode.ResidualSpeculative,
        2,
        drafted_block_count,
        SURE,
        rule="threshold",
        candidates=2,
        ride=False,
        **APART,
    ),
    "residual-speculative-random": head_row(
        decode.ResidualSpeculative, 4, None, {"threshold": 0.4}, says="random", rule="dynamic"
    ),
    "residual-veto": head_row(
        ResidualVeto, 4, None, {"threshold": 0.5}, judge="confidence", log_probs=True
    ),
    # Released programs
    "released-denoising": dataclasses.replace(
        block_row(replicas.ReleasedDenoising, 2, None, SURE, first=(1, 0), program="jetengine"),
        overruns=True,
    ),
    "released-speculative": dataclasses.replace(
        head_row(replicas.ReleasedSpeculative, 4, first=(1, 0), each=3, candidates=2),
        overruns=True,
        batch_wide=True,
    ),
    "released-veto": head_row(replicas.ReleasedVeto, 2, None, {"threshold": 0.5}, first=(1, 0)),
    "replayed-flight": block_row(replicas.ReplayedFlight, 4, flight_count, SURE),
    "released-forcing": dataclasses.replace(
        block_row(replicas.ReleasedForcing, 4, flight_count, SURE), overruns=True
    ),
    "released-verified": dataclasses.replace(
        block_row(replicas.ReleasedVerified, 2, None, {"temperature": 0.01}, first=(1, 0), each=3),
        overruns=True,
        only_greedy=True,
    ),
    "lossy-position-wise": head_row(replicas.LossyPositionWise, 2, first=(1, 0), each=3),
}
