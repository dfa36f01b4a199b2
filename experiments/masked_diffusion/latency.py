"""Seconds of a whole text: a denoiser in N steps beside one-by-one decoding with a cache, and where
the two cross.

    python -m experiments.masked_diffusion.latency                                      # measured at a tiny size
    python -m experiments.masked_diffusion.latency --preset mdlm-1.3b --dtype bfloat16  # on an
    accelerator python -m experiments.masked_diffusion.latency --preset mdlm-1.3b --dtype bfloat16
    --rates 4.8e12 9.9e14

Both sides have random weights, as many of them, one dtype and one compiled loop each; beside the
seconds stand those that the limits of the device leave. The denoiser multiplies and reads hardly
anything, the other side reads all weights for every token and hardly multiplies: a batch divides
the reading among its rows, so the ratio falls with it. With `--rates` (bytes and operations a
second, such as a data sheet has them) nothing runs: the seconds are those that `--shares` of these
rates give.

SDTT (arXiv 2410.21035), figures 1 and 20 to 22, tells of 8 and 4 times at 16 and 32 steps and batch
8.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from experiments.common.command import run
from experiments.common.plots import draw_lines
from experiments.common.record import write_record
from experiments.systems.machine import rates
from paradec_jax import AutoRegressive, Masked, facts, make_request
from paradec_jax.config import (
    MASKED_DIFFUSION_PRESETS,
    CausalConfig,
    MaskedDiffusionConfig,
    TokenSpec,
)
from paradec_jax.evaluate.timing import Case, measure
from paradec_jax.families import init_params, network_of

Row = dict[str, Any]
ONE_BY_ONE = "autoregressive"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      preset: shape of the denoiser.
      length: tokens of a text; as long as the shape when None.
      steps: N of the denoiser.
      batches: texts at once.
      dtype: of weights and activations.
      passes: timings, of which the median counts.
      seed: of the weights.
      rates: bytes and operations a second of a device that is not here; None measures this one.
      shares: of those rates that decoding one by one reads, and that the denoiser multiplies.
      out: where the JSON goes.
      figure: where the picture goes.
    """

    preset: str = "tiny-mdlm"
    length: int | None = None
    steps: tuple[int, ...] = (8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    dtype: Literal["preset", "float32", "bfloat16"] = "preset"
    passes: int = 3
    seed: int = 0
    rates: tuple[float, float] | None = None
    shares: tuple[float, float] = (0.8, 0.5)
    out: Path = Path("experiments/masked_diffusion/results/latency.json")
    figure: Path = Path("experiments/masked_diffusion/figures/latency.png")


def denoiser_of(options: Options) -> MaskedDiffusionConfig:
    """The denoiser's shape.

    Raises:
      ValueError: an unknown preset, a text longer than it, or a number below its least.
    """
    if options.preset not in MASKED_DIFFUSION_PRESETS:
        raise ValueError(
            f"preset must be one of {', '.join(MASKED_DIFFUSION_PRESETS)}, not {options.preset!r}"
        )
    if (
        not options.steps
        or not options.batches
        or min(*options.steps, *options.batches, options.passes) < 1
    ):
        raise ValueError("steps, batches and passes must be at least 1, and there must be some")
    config = MASKED_DIFFUSION_PRESETS[options.preset]
    length = config.max_length if options.length is None else options.length
    if not 3 <= length <= config.max_length:
        raise ValueError(
            f"length must be from 3 to the {config.max_length} of {options.preset}, not {length}"
        )
    if min(*(options.rates or (1.0,)), *options.shares) <= 0:
        raise ValueError(
            f"rates and shares must be above 0, not {options.rates} and {options.shares}"
        )
    kinds: dict[str, Any] = (
        {} if options.dtype == "preset" else {"dtype": options.dtype, "param_dtype": options.dtype}
    )
    return dataclasses.replace(config, max_length=length, **kinds)


def rival_of(config: MaskedDiffusionConfig) -> CausalConfig:
    """A causal transformer of as many weights: its gated MLP has three matrices in the place of
    two.
    """
    return CausalConfig(
        vocab_size=config.vocab_size,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.heads,
        feed_forward=round(2 * config.feed_forward / 3),
        max_length=config.max_length,
        rope_base=10_000.0,
        qkv_bias=False,
        tie_embeddings=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
    )


def measured(config: MaskedDiffusionConfig, options: Options) -> list[Row]:
    """Rows of both sides at every batch, timed here."""
    mask = TokenSpec(mask=config.vocab_size - 1, alignment="own")
    alone: list[Any] = [(ONE_BY_ONE, None, AutoRegressive(greedy=True), None)]
    of_steps = [("masked", n, Masked(spec=mask), Masked.Knobs(steps=n)) for n in options.steps]
    sides: list[tuple[Any, list[Any]]] = [(rival_of(config), alone), (config, of_steps)]
    limits, rows = rates(config.param_dtype), []
    for shape, decoders in sides:
        network, params = network_of(shape), init_params(shape, jax.random.key(options.seed))
        prepared, length = network.prepare(params), config.max_length
        cases = [
            Case(decoder.bind(network, length), prepared, knobs)
            for _, _, decoder, knobs in decoders
        ]
        for batch in options.batches:
            prompts = np.ones((batch, 1), np.int32)
            request = make_request(prompts, max_new_tokens=length - 1, seed=options.seed)
            speeds = measure(cases, [request], passes=options.passes)
            for (name, steps, _, _), speed in zip(decoders, speeds, strict=True):
                calls = speed.counts["network_calls"]
                a_row = calls / batch
                if steps is None:
                    work = network.work(batch, 1, length // 2)
                else:
                    work = network.work(batch, length, 0, length / a_row)
                rows.append(
                    {
                        "decoder": name,
                        "steps": steps,
                        "batch": batch,
                        "tokens": speed.tokens,
                        "network_calls": calls,
                        "seconds": speed.seconds,
                        "passes": list(speed.passes),
                        "limit_seconds": a_row
                        * max(work.bytes / limits.read, work.flops / limits.flops),
                        "dtypes": facts.dtypes(params),
                    }
                )
    return rows


def predicted(config: MaskedDiffusionConfig, options: Options) -> list[Row]:
    """Rows of both sides at every batch by formula: the slower of reading and multiplying, at
    shares of the rates.
    """
    assert options.rates is not None
    read, multiplied = (
        rate * share for rate, share in zip(options.rates, options.shares, strict=True)
    )
    length, rival, denoiser = config.max_length, network_of(rival_of(config)), network_of(config)

    def seconds(work: Any) -> float:
        return max(work.bytes / read, work.flops / multiplied)

    rows = []
    for batch in options.batches:
        cost = length * seconds(rival.work(batch, 1, length // 2))
        rows.append({"decoder": ONE_BY_ONE, "steps": None, "batch": batch, "seconds": cost})
    for batch in options.batches:
        for steps in options.steps:
            # As many of the steps reveal something, on average; the others call nothing.
            calls = steps * -math.expm1(length * math.log1p(-1 / steps)) if steps > 1 else 1.0
            cost = calls * seconds(denoiser.work(batch, length, 0, length / calls))
            rows.append({"decoder": "masked", "steps": steps, "batch": batch, "seconds": cost})
    return rows


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows with the time of decoding one by one over theirs, as timed and as limits would have it."""
    base = {row["batch"]: row for row in rows if row["decoder"] == ONE_BY_ONE}
    extended = []
    for row in rows:
        other = base[row["batch"]]
        ratios = {"speedup": other["seconds"] / row["seconds"]}
        if "limit_seconds" in row:
            ratios["speedup_at_limits"] = other["limit_seconds"] / row["limit_seconds"]
        extended.append(row | ratios)
    return extended


def crossovers(rows: Sequence[Row]) -> dict[int, float | None]:
    """For each N the batch at which both sides take as long, logarithms interpolated; None where
    none does.
    """
    crossed: dict[int, float | None] = {}
    for steps in dict.fromkeys(row["steps"] for row in rows if row["steps"] is not None):
        mine = sorted((row["batch"], row["speedup"]) for row in rows if row["steps"] == steps)
        crossed[steps] = None
        for (low, before), (high, after) in itertools.pairwise(mine):
            if (before - 1) * (after - 1) <= 0 and before != after:
                share = math.log(before) / (math.log(before) - math.log(after))
                crossed[steps] = low * (high / low) ** share
                break
    return crossed


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints, writes and draws the table."""
    config = denoiser_of(options)
    rows = with_ratios(predicted(config, options) if options.rates else measured(config, options))
    crossed = crossovers(rows)
    for row in rows:
        number = "" if row["steps"] is None else f"{row['steps']} steps"
        limits = (
            f"  {row['speedup_at_limits']:6.2f}x at the limits"
            if "speedup_at_limits" in row
            else ""
        )
        print(
            f"{row['decoder']:15s} {number:10s} batch {row['batch']:3d}  {row['seconds']:9.4f} s  "
            f"{row['speedup']:6.2f}x{limits}"
        )
    for steps, batch in crossed.items():
        place = f"at batch {batch:.1f}" if batch is not None else "at no batch between these"
        print(f"{steps} steps take as long as one by one {place}")
    dtypes = [dtype for row in rows for dtype in row.get("dtypes", (config.param_dtype,))]
    result = {"rows": rows, "crossovers": {str(steps): batch for steps, batch in crossed.items()}}
    write_record(options.out, options, result, dtypes=dtypes)
    lines: dict[str, list[tuple[float, float, Sequence[float]]]] = {}
    for row in rows:
        if row["steps"] is not None:
            point = row["batch"], row["speedup"], [row["speedup"]] * 2
            lines.setdefault(f"{row['steps']} steps", []).append(point)
    draw_lines(lines, options.figure, x="texts at once", y="times as fast as one by one")


if __name__ == "__main__":
    run(main)
