"""Depth against width: s recurrences of each token or s copies of it (arXiv 2510.14961, appendix C).

`python -m experiments.recurrent_depth.width_depth` counts operations, visible pairs and parallelism of a
prefill scaled by s in depth and in width, measures the same prefill with random weights, and writes JSON and
a figure. `--no-measure` leaves the clock out; `--preset huginn-0125 --no-measure` counts the large model.
What decoding gains: `serial_steps.py`.

Masks alone save no time: an attention that masks scores computes all `(s n)^2` of them under either rule. So
one layer's attention is measured apart, with KVShare's keys gathered as well.

Copies share the rotary position of their token by default, for they stand for one token: distances stay those
of training and a prompt needs no more positions. `--positions own` numbers them through instead.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, Int

from experiments.common.programs import Compiled, timed
from experiments.common.record import write_record
from experiments.recurrent_depth import work
from experiments.recurrent_depth.copies import RULES, kv_share, no_share
from paradec_jax import facts
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.families import init_params, parameter_shapes
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.models.recurrent_cache import RecurrentKV
from paradec_jax.nn import masks
from paradec_jax.nn.attention import MASKED, attend
from paradec_jax.nn.cache import KV

CURVE = tuple(sorted({round(2 ** (k / 4)) for k in range(57)}))  # prompt lengths of the figure, 1 to 16,384


@dataclasses.dataclass(frozen=True)
class Options:
    """What to count and what to measure.

    Attributes:
      preset: a named shape.
      tokens: prompt lengths n.
      factors: s.
      recurrence: recurrences of the unscaled network.
      positions: whether copies share their token's rotary position or have their own.
      capacity: C, positions whose products an ideal device does in one step.
      measure: whether to compile and time prefills.
      largest: n s above which nothing is measured (the scores of one layer take 4 H (n s)^2 bytes).
      passes: timings of each.
      seed: of weights, prompts and initial states.
      out: where the JSON goes.
      figure: where the figure goes; None for no figure.
    """

    preset: str = "tiny-recurrent"
    tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    factors: tuple[int, ...] = (1, 2, 4, 8)
    recurrence: int = 1
    positions: Literal["shared", "own"] = "shared"
    capacity: int = 1024
    measure: bool = True
    largest: int = 8192
    passes: int = 5
    seed: int = 0
    out: Path = Path("experiments/recurrent_depth/results/width_depth.json")
    figure: Path | None = Path("experiments/recurrent_depth/figures/width_depth.png")

    def __post_init__(self) -> None:
        if self.preset not in RECURRENT_PRESETS:
            raise ValueError(f"preset must be one of {', '.join(RECURRENT_PRESETS)}, not {self.preset!r}")
        for name in ("recurrence", "capacity", "largest", "passes"):
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
    """Reads a prompt at factor s: the head input of each token (in width, of its last copy), keys and values.

    Recurrences are unrolled, because XLA counts the body of a loop once, however often it runs.

    Args:
      network, params: the network.
      tokens: the prompt, each token once.
      state: initial states, W = T in depth and W = T s in width, where each copy starts from its own.
      variant: one of `work.VARIANTS`.
      factor: s.
      recurrence: recurrences of the unscaled network.
      shared: whether copies share their token's rotary position.
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


def gathered_kv_share(q: Float[Array, "B H W C"], keys: KV, copies: int) -> Float[Array, "B H W C"]:
    """KVShare attention of `s n^2 + n s^2` scores, where `attend` with its mask computes `(s n)^2`.

    The last copies are n keys for all queries; beside them each token has a block of s by s own copies.
    """
    *batch, width, channels = q.shape
    tokens = width // copies
    q, k, v = (
        x.reshape(*batch, tokens, copies, channels)
        for x in (q * channels**-0.5, keys.k.swapaxes(-1, -2), keys.v)
    )
    last_k, last_v = k[:, :, :, -1], v[:, :, :, -1]
    earlier = jnp.tril(jnp.ones((tokens, tokens), bool), -1)[:, None]
    seen = jnp.where(earlier, jnp.einsum("bhisc,bhjc->bhisj", q, last_k), MASKED)
    own = jnp.where(masks.causal(copies), jnp.einsum("bhisc,bhitc->bhist", q, k), MASKED)
    weights = jax.nn.softmax(jnp.concatenate([seen, own], axis=-1), axis=-1)
    seen, own = weights[..., :tokens], weights[..., tokens:]
    out = jnp.einsum("bhisj,bhjc->bhisc", seen, last_v) + jnp.einsum("bhist,bhitc->bhisc", own, v)
    return out.reshape(*batch, width, channels)


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
    """Width over depth in one core layer against the prompt length, without limit and on the ideal device."""
    config = RECURRENT_PRESETS[options.preset]
    return [
        {"tokens": tokens, "factor": factor, "variant": variant}
        | dataclasses.asdict(work.width_over_depth(config, variant, tokens, factor, options.capacity))
        for factor, variant, tokens in itertools.product(options.factors, RULES, CURVE)
        if factor > 1
    ]


def saturation(options: Options) -> list[dict]:
    """From which prompt length on one core layer fills the ideal device."""
    rows = []
    for factor, variant in itertools.product(options.factors, work.VARIANTS):
        at = work.filling_lengths(RECURRENT_PRESETS[options.preset], variant, factor, options.capacity)
        rows.append({"factor": factor, "variant": variant, "products": at[0], "attention": at[1]})
    return rows


# Measurements


def prefill_programs(options: Options, params: Any, tokens: int, factor: int) -> dict[str, Compiled]:
    """The three prefills, each with the logits of the last token."""
    network = RecurrentDepthNetwork(RECURRENT_PRESETS[options.preset])
    key = jax.random.key(options.seed)
    prompt = jax.random.randint(key, (1, tokens), 0, network.vocab_size)

    def program(variant: str) -> Compiled:
        positions = work.positions_at_once(variant, tokens, factor)
        state = network.initial_state(jax.random.split(key, (1, positions)))

        def read(params: Any, prompt: Array, state: Array) -> tuple[Array, RecurrentKV]:
            shared = options.positions == "shared"
            hidden, window = read_wide(
                network, params, prompt, state, variant, factor, options.recurrence, shared
            )
            return network.logits(params, hidden[:, -1:]), window

        return Compiled.of(read, params, prompt, state)

    return {variant: program(variant) for variant in work.VARIANTS}


def attention_programs(options: Options, tokens: int, factor: int) -> dict[str, Compiled]:
    """Attention of one core layer: s passes in depth, one in width, KVShare with its mask and with gathered keys."""
    config = RECURRENT_PRESETS[options.preset]

    def operands(width: int) -> tuple[Array, KV]:
        shape = (3, 1, config.heads, width, config.head_dim)
        q, k, v = jax.random.normal(jax.random.key(options.seed), shape, jnp.dtype(config.dtype))
        return q, KV(k.swapaxes(-1, -2), v)

    def deep(q: Array, keys: KV) -> Array:
        for _ in range(factor):
            q = attend(q, keys, masks.causal(tokens))
        return q

    wide = operands(tokens * factor)
    return {
        "depth": Compiled.of(deep, *operands(tokens)),
        "no_share": Compiled.of(lambda q, keys: attend(q, keys, no_share(tokens, factor)), *wide),
        "kv_share": Compiled.of(lambda q, keys: attend(q, keys, kv_share(tokens, factor)), *wide),
        "kv_share gathered": Compiled.of(lambda q, keys: gathered_kv_share(q, keys, factor), *wide),
    }


def measured(options: Options, rows: list[dict]) -> list[dict]:
    """The rows of `counts` with what was measured of them, and rows of one layer's attention."""
    params = init_params(RECURRENT_PRESETS[options.preset], jax.random.key(options.seed))
    found: dict[tuple, dict] = {}
    for tokens, factor in itertools.product(options.tokens, options.factors):
        if tokens * factor > options.largest:
            print(f"n {tokens:5d}  s {factor}  not measured: more than {options.largest} positions")
            continue
        for what, programs in (
            ("prefill", prefill_programs(options, params, tokens, factor)),
            ("attention", attention_programs(options, tokens, factor)),
        ):
            for variant, row in timed(programs, options.passes).items():
                found[what, tokens, factor, variant] = row
                print(
                    f"n {tokens:5d}  s {factor}  {what:9s}  {variant:17s}  {row['xla_flops']:.3e} operations by XLA  "
                    f"{1e3 * row['seconds']:9.2f} ms",
                    flush=True,
                )
    names = ("what", "tokens", "factor", "variant")
    rows = [row | found.pop(tuple(row[name] for name in names), {}) for row in rows]
    return rows + [dict(zip(names, key, strict=True)) | row for key, row in found.items()]


# What comes of it


def plot(options: Options, result: dict, plt: Any) -> Any:
    """Width over depth: work, parallelism, steps of the ideal device, and measured time."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    config, lengths = RECURRENT_PRESETS[options.preset], np.array(CURVE)
    factors = [factor for factor in options.factors if factor > 1]
    seconds = {
        (row["tokens"], row["factor"], row["variant"]): row.get("seconds")
        for row in result["rows"]
        if row["what"] == "prefill"
    }
    for (i, factor), (variant, style) in itertools.product(
        enumerate(factors), (("no_share", "-"), ("kv_share", "--"))
    ):
        look = {"color": f"C{i}", "linestyle": style, "label": f"{variant}, s = {factor}"}
        curve = [row for row in result["curves"] if (row["factor"], row["variant"]) == (factor, variant)]
        totals = {
            v: np.array([work.prefill(config, v, int(n), factor, options.recurrence).total for n in lengths])
            for v in ("depth", variant)
        }
        axes[0, 0].plot(lengths, totals[variant] / totals["depth"], **look)
        axes[0, 1].plot(lengths, [row["attention_achieved"] for row in curve], **look)
        if variant == "no_share":
            products = [row["products_achieved"] for row in curve]
            axes[0, 1].plot(lengths, products, color=f"C{i}", linestyle=":", label=f"products, s = {factor}")
            axes[0, 1].axhline(factor**2, color=f"C{i}", alpha=0.3, linewidth=0.8)
        axes[1, 0].plot(lengths, [row["speedup"] for row in curve], **look)
        both = [
            (n, seconds[n, factor, "depth"] / seconds[n, factor, variant])
            for n in options.tokens
            if seconds[n, factor, variant]
        ]
        if both:
            axes[1, 1].plot(*np.array(both).T, marker="o", **look)
    axes[1, 1].set_visible(options.measure)
    titles = (
        "Work of a prefill, width / depth\n(counted)",
        f"Operations at once in a core layer, width / depth\n(device of {options.capacity} positions; products "
        "dotted, thin lines at s²)",
        "Time of a core layer, depth / width\n(the same ideal device)",
        f"Time of a prefill, depth / width\n(measured, {facts.device()['kind']}, scores masked)",
    )
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlabel("prompt length n")
        axis.axhline(1, color="black", linewidth=0.5)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    return figure


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            "the figure needs matplotlib: pip install 'paradec-jax[eval]', or give --figure None"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Counts, measures, prints, and writes the files."""
    plt = None if options.figure is None else _pyplot()
    result = {
        "rows": counts(options),
        "saturation": saturation(options),
        "curves": curves(options),
    }
    report(result)
    dtypes: list[str] = []
    if options.measure:
        result["rows"] = measured(options, result["rows"])
        dtypes = facts.dtypes(parameter_shapes(RECURRENT_PRESETS[options.preset]))
    write_record(options.out, options, result, dtypes=dtypes)
    if options.figure is not None:
        figure = plot(options, result, plt)
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.figure, dpi=120)


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
