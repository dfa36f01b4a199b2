"""The rows of block diffusion, with residual heads and without."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from decoder_rows import Row
from plain_baselines import Count
from plain_canvas import block_count, drafted_block_count, residual_count
from stubs import StubDenoiser, StubHead

from experiments import replicas
from experiments.decoders.elastic import ElasticDenoising
from paradec_jax import decode


def block_row(
    kind: type,
    block: int,
    count: Callable[..., Count] | None = None,
    knobs: Any = None,
    first: tuple[int, int] = (1, 0),
    alignment: str = "own",
    others: tuple[int, ...] = (),
    each: int = 2,
    **options: Any,
) -> Row:
    """A row on the denoiser that sees in blocks; one token a step, from left to right, unless told otherwise."""
    stub = {"sharpness": 12.0, "block": block, "alignment": alignment}
    longest = max((block, *others))
    return Row(
        kind,
        options,
        knobs or {},
        stub if not others else {**stub, "others": others},
        StubDenoiser,
        count=count,
        first=first,
        most=lambda new: 1 + each * (new + longest),
    )


def head_row(
    kind: type, block: int, count: Any = None, says: str | None = "right", alignment: str = "own", **rest: Any
) -> Row:
    """A row of a decoder with a residual head that is right, lies, guesses, or (None) does not run."""
    of = StubDenoiser(sharpness=12.0, block=block, alignment=alignment)
    head: Any = "zero" if says is None else StubHead(of, says)
    return block_row(kind, block, count, alignment=alignment, head=head, **rest)


BLOCKS = {
    "block": block_row(
        decode.BlockDenoising,
        4,
        functools.partial(block_count, 4, True),
        first=(1, 1),
        rule="static",
        log_probs=True,
    ),
    "block-next": block_row(
        decode.BlockDenoising,
        3,
        functools.partial(block_count, 3, True),
        {"threshold": 2.0},
        (1, 1),
        "next",
        rule="dynamic",
    ),
    "block-unfused": block_row(
        decode.BlockDenoising,
        2,
        functools.partial(block_count, 2, False),
        rule="threshold",
        knobs={"threshold": 2.0},
        fuse_store=False,
        fuse_prompt=False,
    ),
    "block-random": block_row(decode.BlockDenoising, 4, knobs={"steps": 2}, rule="random"),
    "soft-block": block_row(
        decode.SoftBlock,
        4,
        functools.partial(block_count, 4, True),
        {"threshold": 2.0},
        (1, 1),
        log_probs=True,
    ),
    "elastic": block_row(
        ElasticDenoising,
        2,
        None,
        {"length_entropy": 1.0},
        (1, 1),
        others=(4,),
        rule="static",
        log_probs=True,
    ),
    "elastic-one": block_row(
        ElasticDenoising,
        4,
        functools.partial(block_count, 4, True),
        {"threshold": 2.0},
        (1, 1),
        rule="dynamic",
    ),
    "residual": head_row(
        decode.Residual,
        4,
        functools.partial(residual_count, 4, 2, True),
        first=(1, 1),
        rule="static",
        head_steps=2,
        log_probs=True,
    ),
    "residual-next": head_row(
        decode.Residual,
        2,
        functools.partial(residual_count, 2, 1, False),
        alignment="next",
        rule="threshold",
        knobs={"threshold": 2.0},
        fuse_store=False,
        fuse_prompt=False,
    ),
    "residual-zero": head_row(
        decode.Residual,
        4,
        says=None,
        first=(1, 1),
        rule="dynamic",
        head_rule="dynamic",
        knobs={"threshold": 2.0},
    ),
    "residual-speculative": head_row(
        decode.ResidualSpeculative,
        4,
        functools.partial(drafted_block_count, 4, 3),
        first=(1, 1),
        rule="static",
        log_probs=True,
    ),
    "residual-speculative-next": head_row(
        decode.ResidualSpeculative,
        3,
        functools.partial(drafted_block_count, 3, 2, right=False),
        says="liar",
        alignment="next",
        first=(1, 1),
        rule="static",
        candidates=2,
    ),
    "residual-speculative-unfused": head_row(
        decode.ResidualSpeculative,
        2,
        functools.partial(drafted_block_count, 2, 2, rides=False, fused=False),
        rule="threshold",
        knobs={"threshold": 2.0},
        candidates=2,
        ride=False,
        fuse_store=False,
        fuse_prompt=False,
    ),
    "residual-speculative-random": head_row(
        decode.ResidualSpeculative, 4, says="random", first=(1, 1), rule="dynamic", knobs={"threshold": 0.4}
    ),
    "residual-veto": head_row(
        decode.ResidualVeto, 4, judge="confidence", first=(1, 1), knobs={"threshold": 0.5}, log_probs=True
    ),
    # Released programs
    "released-denoising": dataclasses.replace(
        block_row(replicas.ReleasedDenoising, 2, knobs={"threshold": 2.0}, program="jetengine"), overruns=True
    ),
    "released-speculative": dataclasses.replace(
        head_row(replicas.ReleasedSpeculative, 4, each=3, candidates=2), overruns=True, batch_wide=True
    ),
    "released-veto": head_row(replicas.ReleasedVeto, 2, knobs={"threshold": 0.5}),
    "lossy-position-wise": head_row(replicas.LossyPositionWise, 2, each=3),
}
