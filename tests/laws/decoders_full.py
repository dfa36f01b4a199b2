"""The rows of decoders of a canvas in which every position sees all."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from decoder_rows import Row
from plain_baselines import Count
from plain_canvas import cached_count, drafted_canvas_count, stepped_count, whole_canvas_count
from stubs import StubDenoiser

from paradec_jax import decode

SURE = {"threshold": 2.0}  # that nothing reaches, so that a call reveals one token


def full_row(
    kind: type,
    count: Callable[..., Count] | None,
    knobs: Any = SURE,
    alignment: str = "own",
    first: int = 0,
    **options: Any,
) -> Row:
    """A row on the denoiser, whose options and knobs tell the calls as well; `first` calls of
    `init`.
    """
    return Row(
        kind,
        options,
        knobs,
        {"sharpness": 12.0, "alignment": alignment},
        StubDenoiser,
        count=count and functools.partial(count, {**options, **knobs}),
        first=(first, 0),
    )


def every_call(options: dict, *of_row: Any) -> Count:
    return whole_canvas_count(*of_row)


semi = functools.partial(full_row, decode.SemiAutoregressive)
FULL = {
    "semi": semi(cached_count, length=4, cache="dual", chunk=4, log_probs=True),
    "semi-whole": semi(every_call, length=None, log_probs=True),
    "semi-whole-next": semi(every_call, alignment="next", length=None),
    "semi-static": semi(stepped_count, {"steps": 2}, length=4, rule="static"),
    "semi-prefix": semi(cached_count, alignment="next", length=3, cache="prefix"),
    "semi-renewed": semi(
        cached_count, {**SURE, "renew": 2}, alignment="next", length=5, cache="dual"
    ),
    "semi-first-alone": semi(
        cached_count, alignment="next", length=3, cache="dual", first_alone=True
    ),
    "semi-grid": semi(
        None, {"steps": 4, "epsilon": 0.01}, length=None, rule="grid", order="margin"
    ),
    "semi-capped": semi(stepped_count, {"steps": 3, "threshold": 0.0}, length=5, rule="capped"),
    "semi-bound": semi(None, {"entropy": 0.5}, length=4, rule="bound", order="entropy"),
    "multi-block-full": dataclasses.replace(
        full_row(decode.MultiBlock, None, {"threshold": 0.8}, length=3, flight=3),
        first=(1, 1),
        most=lambda new: 1 + 2 * (new + 3),
    ),
    "wino": full_row(decode.Wino, None, {"threshold": 0.5}, length=5, log_probs=True),
    "prophet": full_row(
        decode.Prophet, None, {"answer": 2, "early": 8.0, "middle": 8.0}, length=4, log_probs=True
    ),
    "prophet-unsure": full_row(
        decode.Prophet, every_call, {"early": 99.0, "middle": 99.0, "late": 99.0}, length=None
    ),
    "planned": full_row(decode.Planned, every_call, {}, log_probs=True),
    "speculative-denoising": full_row(
        decode.SpeculativeDenoising, drafted_canvas_count, {}, first=1, length=6
    ),
}
