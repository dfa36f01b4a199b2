"""Depth against width: s recurrences of each token or s copies of it (arXiv 2510.14961, appendix
C).

`python -m experiments.recurrent_depth.width_depth` counts operations, visible pairs and parallelism
of a prefill scaled by s in depth and in width, and writes JSON and a figure; `--preset huginn-0125`
counts the large model. No network runs. What decoding gains: `serial_steps.py`.

`read_wide` is the prefill that is counted. Masks alone save no time: an attention that masks scores
computes all `(s n)^2` of them under either rule.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, Int

from experiments.common.plots import picture
from experiments.common.record import write_record
from experiments.recurrent_depth import work
from experiments.recurrent_depth.copies import RULES
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.models.recurrent_cache import RecurrentKV
from paradec_jax.nn import masks

CURVE = tuple(
    sorted({round(2 ** (k / 4)) for k in range(57)})
)  # prompt lengths of the figure, 1 to 16,384


@dataclasses.dataclass(frozen=True)
class Options:
    """What to count.

    Attributes:
      preset: a named shape.
      tokens: prompt lengths n.
      factors: s.
      recurrence: recurrences of the unscaled network.
      capacity: C, positions whose products an ideal device does in one step.
      out: path of the JSON.
      figure: path of the figure; None for no figure.
    """

    preset: str = "tiny-recurrent"
    tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    factors: tuple[int, ...] = (1, 2, 4, 8)
    recurrence: int = 1
    capacity: int = 1024
    out: Path = Path("experiments/recurrent_depth/results/width_depth.json")
    figure: Path | None = Path("experiments/recurrent_depth/figures/width_depth.png")

    def __post_init__(self) -> None:
        if self.preset not in RECURRENT_PRESETS:
            raise ValueError(
                f"preset must be one of {', '.join(RECURRENT_PRESETS)}, not {self.preset!r}"
            )
        for name in ("recurrence", "capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("tokens", "factors"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name} must be one or more numbers from 1 on, not {values}")


# The prefill


def read_wide(
    network: RecurrentDepthNetwork,
    params: Any,
    tokens: Int[Array, "B T"],
    state: Float[Array, "B W D"],
    variant: str,
    factor: int,
    recurrence: int = 1,
    shared: bool = True,
) -> tuple[Float[Array, "B T D"], RecurrentKV]:
    """Reads a prompt at factor s: the final hidden state of each token (in width, of its last
    copy), keys and values.

    Recurrences are unrolled, because XLA counts the body of a loop once, however often it runs.

    Args:
      network, params: the network.
      tokens: the prompt, each token once.
      state: initial states, W = T in depth and W = T s in width, where each copy starts from its
        own.
      variant: one of `work.VARIANTS`.
      factor: s.
      recurrence: recurrences of the unscaled network.
      shared: whether copies share their token's rotary position, since they stand for one token:
        distances stay those of training and a prompt needs no more positions. Otherwise copies are
        numbered through.
    """
    length = tokens.shape[1]
    copies = 1 if variant == "depth" else factor
    wide = jnp.repeat(tokens, copies, axis=1)
    position = jnp.arange(length * copies)
    position = jnp.broadcast_to(position // copies if shared else position, wide.shape)
    mask = RULES[variant](length, copies) if variant in RULES else masks.causal(length)
    view = network.view(position, mask=mask)
    e, window = network.embed(params, wide, view, network.empty_window(*wide.shape))
    for i in range(recurrence * factor if variant == "depth" else recurrence):
        state, window = network.iterate(params, state, e, view, window, i)
    out = network.readout(params, state, view, window)
    return out.hidden[:, copies - 1 :: copies], out.kv


# Counts


def counts(options: Options) -> list[dict]:
    """The exact cost of a prefill in each variant, one row each."""
    config, rows = RECURRENT_PRESETS[options.preset], []
    for tokens, factor in itertools.product(options.tokens, options.factors):
        for variant in work.VARIANTS:
            cost = work.prefill(config, variant, tokens, factor, options.recurrence)
            rows.append(
                {"what": "prefill", "tokens": tokens, "factor": factor, "variant": variant}
                | dataclasses.asdict(cost)
                | {"total": cost.total, "parallelism": cost.parallelism}
            )
    return rows


def curves(options: Options) -> list[dict]:
    """Width over depth in one core layer against the prompt length, without limit and on the ideal
    device.
    """
    config = RECURRENT_PRESETS[options.preset]
    return [
        {"tokens": tokens, "factor": factor, "variant": variant}
        | dataclasses.asdict(
            work.width_over_depth(config, variant, tokens, factor, options.capacity)
        )
        for factor, variant, tokens in itertools.product(options.factors, RULES, CURVE)
        if factor > 1
    ]


def saturation(options: Options) -> list[dict]:
    """From which prompt length on one core layer fills the ideal device."""
    rows = []
    for factor, variant in itertools.product(options.factors, work.VARIANTS):
        at = work.filling_lengths(
            RECURRENT_PRESETS[options.preset], variant, factor, options.capacity
        )
        rows.append({"factor": factor, "variant": variant, "products": at[0], "attention": at[1]})
    return rows


# What comes of it


def draw(options: Options, result: dict, axes: Any) -> None:
    """Width over depth in three panels: work, parallelism, and steps of the ideal device."""
    config, lengths = RECURRENT_PRESETS[options.preset], np.array(CURVE)
    factors = [factor for factor in options.factors if factor > 1]
    for (i, factor), (variant, style) in itertools.product(
        enumerate(factors), (("no_share", "-"), ("kv_share", "--"))
    ):
        look = {"color": f"C{i}", "linestyle": style, "label": f"{variant}, s = {factor}"}
        curve = [
            row for row in result["curves"] if (row["factor"], row["variant"]) == (factor, variant)
        ]
        totals = {
            v: np.array(
                [work.prefill(config, v, int(n), factor, options.recurrence).total for n in lengths]
            )
            for v in ("depth", variant)
        }
        axes[0].plot(lengths, totals[variant] / totals["depth"], **look)
        axes[1].plot(lengths, [row["attention_achieved"] for row in curve], **look)
        if variant == "no_share":
            products = [row["products_achieved"] for row in curve]
            axes[1].plot(
                lengths, products, color=f"C{i}", linestyle=":", label=f"products, s = {factor}"
            )
            axes[1].axhline(factor**2, color=f"C{i}", alpha=0.3, linewidth=0.8)
        axes[2].plot(lengths, [row["speedup"] for row in curve], **look)
    titles = (
        "Work of a prefill, width / depth\n(counted)",
        f"Operations at once in a core layer, width / depth\n(device of {options.capacity} positions; products "
        "dotted, thin lines at s²)",
        "Time of a core layer, depth / width\n(the same ideal device)",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlabel("prompt length n")
        axis.axhline(1, color="black", linewidth=0.5)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Counts, prints, and writes the files."""
    result = {
        "rows": counts(options),
        "saturation": saturation(options),
        "curves": curves(options),
    }
    report(result)
    write_record(options.out, options, result)
    if options.figure is not None:
        with picture(options.figure, (14, 4)) as figure:
            draw(options, result, figure.subplots(1, 3))


def report(result: dict) -> None:
    """Prints the counts."""
    for row in result["rows"]:
        print(
            f"n {row['tokens']:5d}  s {row['factor']}  {row['variant']:8s}  linear {row['linear']:.4e}  "
            f"attention {row['attention']:.4e}  total {row['total']:.4e}  in {row['layers']} layers"
        )
    for row in result["saturation"]:
        print(
            f"s {row['factor']}  {row['variant']:8s}  products fill the device from n = {row['products']}, "
            f"attention from n = {row['attention']}"
        )


if __name__ == "__main__":
    tyro.cli(main)
