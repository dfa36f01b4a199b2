"""What a block size costs and what it brings (Jacobi Forcing, arXiv 2512.14681, figure 4).

    python -m experiments.jacobi.block_sizes

Cost (figure 4a): seconds of one step over a window of n positions after a context, with random weights of any
shape. A step is the network's call, the most probable token of each position, and the winner's keys and
values written. With R candidates (the draft among them) the window holds R n positions, and candidates do not
see each other. A decoder that commits c tokens a step is then at most

    c t(1 position) / t(n positions, R candidates)

times as fast as autoregressive decoding: what it does besides, to judge drafts and to make new ones, is not
in it. Windows take turns, and the range of a ratio is a bootstrap over passes. Weights are float32 unless
`--dtype` says otherwise: a CPU turns bfloat16 weights into float32 inside the timed loop, which hides what a
position costs, so that is refused there. Return (figure 4b): tokens a network call against n, with given models:

    python -m experiments.jacobi.block_sizes --presets qwen2.5-coder-7b --context 1024
    python -m experiments.jacobi.block_sizes --presets --models tiny-causal tiny-jacobi
"""

import dataclasses
import functools
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

from experiments.common.record import write_record
from experiments.tasks import word_problems
from paradec_jax import AutoRegressive, Jacobi, Prefix, facts, load
from paradec_jax.config import CAUSAL_PRESETS, CausalConfig
from paradec_jax.decode.machine.candidates import fold_candidates
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.decode.rules.windows import write_after_read
from paradec_jax.evaluate import compare
from paradec_jax.evaluate.intervals import ends, quicker, times
from paradec_jax.families import init_params
from paradec_jax.models import TransformerNetwork


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      presets: named shapes whose steps are timed; none leaves the cost out.
      windows: n, positions of a candidate.
      candidates: R, candidates verified in a call.
      context: cached positions before the window.
      counts: tokens a step for which speed-ups are told.
      steps: steps of a timing, in one compiled loop.
      passes: timings of each window, of which the median counts; windows take turns.
      dtype: of the timed weights and activations.
      models: model folders or names of bundled models; none leaves the return out.
      blocks: n, tokens of a block, of the return.
      problems: unseen problems that the models decode.
      step_range: fewest and most written steps of a problem.
      budget: new tokens of a problem; room for the longest reference solution when None.
      batch: problems decoded together.
      seed: of weights, tokens and problems.
      out: where the JSON goes.
      figure: where the plot goes.
    """

    presets: tuple[str, ...] = ("tiny-causal",)
    windows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    candidates: tuple[int, ...] = (1, 4)
    context: int = 256
    counts: tuple[int, ...] = (2, 4, 8)
    steps: int = 16
    passes: int = 7
    dtype: str = "float32"
    models: tuple[str, ...] = ()
    blocks: tuple[int, ...] = (4, 8, 16, 32, 64)
    problems: int = 200
    step_range: tuple[int, int] = (2, 8)
    budget: int | None = None
    batch: int = 50
    seed: int = 2
    out: Path = Path("experiments/jacobi/results/block_sizes.json")
    figure: Path = Path("experiments/jacobi/figures/block_sizes.png")


def check(options: Options) -> None:
    """Refuses, before anything is compiled, what cannot be measured. Raises ValueError."""
    for name in ("windows", "candidates", "context", "counts", "steps", "passes", "problems", "batch"):
        if np.min(getattr(options, name), initial=1) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(options, name)}")
    if not options.presets and not options.models:
        raise ValueError("there is nothing to measure: name a preset or a model")
    if options.presets and not (options.windows and options.candidates):
        raise ValueError("there is nothing to time: name a window and a number of candidates")
    if options.models and min(options.blocks, default=0) < 2:
        raise ValueError(f"blocks must be numbers of at least 2, not {options.blocks}")
    if options.presets and options.dtype != "float32" and jax.default_backend() == "cpu":
        raise ValueError(f"a CPU times float32 weights alone, not {options.dtype}")
    longest = options.context + max(options.windows, default=0)
    for name in options.presets:
        if name not in CAUSAL_PRESETS:
            raise ValueError(f"presets must be of {', '.join(CAUSAL_PRESETS)}, not {name!r}")
        if longest > CAUSAL_PRESETS[name].max_length:
            raise ValueError(
                f"context and the longest window are {longest} positions, more than the "
                f"{CAUSAL_PRESETS[name].max_length} that {name} was built for"
            )


# Cost


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def run_steps(
    network: TransformerNetwork, count: int, steps: int, params: Any, cache: Any, tokens: Any, at: Any
) -> Any:
    """`steps` steps at the same place, each fed what the one before it predicted. `params` are prepared ones."""
    width = tokens.shape[1] // count
    _, positions, mask = fold_candidates(tokens.reshape(len(at), count, width), at)

    def step(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        cache, tokens = carry
        out = network.forward(params, tokens, positions, Prefix(cache, at), mask)
        predicted = jnp.argmax(network.logits(params, out.hidden), axis=-1).astype(jnp.int32)
        # Which candidate wins is known only after the call, as in a decoder.
        winner = predicted[:, 0] % count
        kv = network.pick(out.kv, winner * width, width) if count > 1 else out.kv
        return network.write(cache, kv, write_after_read(at, predicted)), predicted

    return lax.fori_loop(0, steps, step, (cache, tokens))


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled loop of steps over one window, and what it takes."""

    width: int
    candidates: int
    compiled: Any
    compile_seconds: float

    def seconds(self, network: TransformerNetwork, params: Any, context: int, seed: int) -> float:
        """Seconds of one run; buffers are made before the clock starts."""
        draw = np.random.default_rng(seed).integers(0, network.vocab_size, (1, self.candidates * self.width))
        arguments = (
            params,
            network.init_cache(jnp.zeros(1), context + self.width),
            jnp.asarray(draw, jnp.int32),
            jnp.full(1, context, jnp.int32),
        )
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(*arguments))
        return time.perf_counter() - start


def compile_steps(
    network: TransformerNetwork, params: Any, width: int, count: int, context: int, steps: int
) -> Compiled:
    """Compiles the loop of one window; nothing is run."""
    shapes = jax.eval_shape(lambda: network.init_cache(jnp.zeros(1), context + width))
    tokens = jax.ShapeDtypeStruct((1, count * width), jnp.int32)
    start = time.perf_counter()
    lowered = run_steps.lower(
        network, count, steps, params, shapes, tokens, jax.ShapeDtypeStruct((1,), jnp.int32)
    )
    return Compiled(width, count, lowered.compile(), time.perf_counter() - start)


def cost(name: str, config: CausalConfig, options: Options) -> list[dict[str, Any]]:
    """One row for each window and number of candidates; that of autoregressive decoding, 1 position, comes first."""
    config = dataclasses.replace(config, dtype=options.dtype, param_dtype=options.dtype)
    network = TransformerNetwork(config)
    params = jax.jit(network.prepare)(init_params(config, jax.random.key(options.seed)))
    pairs = dict.fromkeys([(1, 1), *((n, count) for count in options.candidates for n in options.windows)])
    programs = [compile_steps(network, params, *pair, options.context, options.steps) for pair in pairs]
    for program in programs:
        program.seconds(network, params, options.context, options.seed)  # the first call is slower
    timings = np.asarray(
        [
            [program.seconds(network, params, options.context, options.seed) for program in programs]
            for _ in range(options.passes)
        ]
    )
    a_step = timings / options.steps
    single = a_step[:, 0].tolist()
    found = []
    for i, program in enumerate(programs):
        seconds = a_step[:, i].tolist()
        over, interval = quicker(single, seconds)
        work = network.work(1, program.candidates * program.width, options.context)
        found.append(
            {
                "preset": name,
                "window": program.width,
                "candidates": program.candidates,
                "context": options.context,
                "microseconds": 1e6 * statistics.median(seconds),
                "fastest": 1e6 * min(seconds),
                "slowest": 1e6 * max(seconds),
                "passes": seconds,
                "over_one_position": over,
                "over_one_position_interval": ends(interval),
                **speedups(program.width, quicker(seconds, single), options.counts),
                "step_bytes": work.bytes,
                "step_flops": work.flops,
                "compile_seconds": program.compile_seconds,
                "dtype": config.dtype,
                "dtypes": facts.dtypes(params),
            }
        )
    return found


def speedups(width: int, of_step: tuple[float, tuple[float, float]], counts: Sequence[int]) -> dict[str, Any]:
    """Speed-up over autoregressive decoding at each count, with its range.

    None where a window of `width` cannot commit so many.

    Args:
      width: positions of a candidate.
      of_step: how many times as fast as a step over one position this one is, and the range.
      counts: tokens a step.
    """
    found: dict[str, Any] = {}
    for count in counts:
        ratio, interval = of_step if count <= width else (None, None)
        found[f"speedup_{count}"] = None if ratio is None else count * ratio
        found[f"speedup_{count}_interval"] = (
            [None, None] if interval is None else ends([count * x for x in interval])
        )
    return found


def speedups_told(row: Mapping[str, Any]) -> dict[int, str]:
    """The speed-ups of a row with their ranges, by tokens a step; those that its window can commit."""
    counts = [int(key.removeprefix("speedup_")) for key in row if re.fullmatch(r"speedup_\d+", key)]
    found = {count: (row[f"speedup_{count}"], row[f"speedup_{count}_interval"]) for count in counts}
    return {count: times(*of) for count, of in found.items() if of[0] is not None}


# Return


def decoders(block: int) -> dict[str, Setting]:
    """The three decoders of the return at one block size."""
    spawn = Jacobi.Knobs(spawn=0.5)
    return {
        "Jacobi": Setting("jacobi", Jacobi(block=block)),
        "running window, candidates": Setting("jacobi", Jacobi(block=block, running=True, candidates=4)),
        "multi-block": Setting("multiblock", Jacobi(block=block, blocks=2, pool=4), spawn),
    }


def gain(name: str, options: Options) -> list[dict[str, Any]]:
    """One row for each decoder and block size: tokens a network call, the prompts' calls included."""
    model = load(name)
    if model.family != "causal":
        raise ValueError(f"{name} is of family {model.family}; block sizes are those of a causal model")
    problems = word_problems(options.problems, seed=options.seed, steps=options.step_range)
    named = [(label, n, setting) for n in options.blocks for label, setting in decoders(n).items()]
    found = compare(
        model,
        problems,
        [Setting("autoregressive", AutoRegressive(), baseline=True), *(setting for _, _, setting in named)],
        name=Path(name).name,
        seed=options.seed,
        budget=options.budget,
        timed=0,
        rows=options.batch,
    )
    dtypes = found.facts["dtypes"]
    kept = ("model", "problems", "exact", "tokens_per_network_call", "equals_greedy", "settings")
    return [
        {"decoder": label, "block": n} | {key: row[key] for key in kept} | {"dtypes": dtypes}
        for (label, n, _), row in zip(named, found.rows[1:], strict=True)
    ]


# What is written


def plot(costs: Sequence[dict[str, Any]], gains: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel of speed-ups for each preset, then a panel of tokens a call for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    presets = list(dict.fromkeys(row["preset"] for row in costs))
    models = list(dict.fromkeys(row["model"] for row in gains))
    count = len(presets) + len(models)
    figure, axes = plt.subplots(1, count, figsize=(4.6 * count, 3.8), squeeze=False, layout="constrained")
    for panel, preset in zip(axes[0], presets, strict=False):
        _plot_cost(panel, [row for row in costs if row["preset"] == preset])
        panel.set_title(preset, fontsize=11)
    for panel, model in zip(axes[0, len(presets) :], models, strict=True):
        mine = [row for row in gains if row["model"] == model]
        for label in dict.fromkeys(row["decoder"] for row in mine):
            line = [row for row in mine if row["decoder"] == label]
            x, y = [row["block"] for row in line], [row["tokens_per_network_call"] for row in line]
            panel.plot(x, y, "o-", markersize=4, label=label)
        panel.set_ylabel("tokens a network call")
        panel.set_title(f"{model}, {mine[0]['problems']} problems", fontsize=11)
    for panel in axes[0]:
        ticks = sorted({x for line in panel.lines for x in line.get_xdata() if x > 1})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
        panel.minorticks_off()
        panel.set_xlabel("block size n")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_cost(panel: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Speed-ups of one preset: a colour for each count, a line style for each number of candidates."""
    counts = [key for key in rows[0] if re.fullmatch(r"speedup_\d+", key)]
    styles = dict(zip(dict.fromkeys(row["candidates"] for row in rows), ("-", "--", ":", "-."), strict=False))
    for color, key in enumerate(counts):
        for number, style in styles.items():
            line = [row for row in rows if row["candidates"] == number and row[key] is not None]
            label = f"{key.removeprefix('speedup_')} tokens a step, {number} candidate{'s' * (number > 1)}"
            panel.plot(
                [row["window"] for row in line],
                [row[key] for row in line],
                color=f"C{color}",
                linestyle=style,
                marker="o",
                markersize=4,
                label=label,
            )
    panel.axhline(1, color="0.5", linestyle="--", linewidth=1)
    panel.set_ylabel("speed-up over one by one")


def write(costs: Sequence[dict[str, Any]], gains: Sequence[dict[str, Any]], options: Options) -> None:
    """The JSON and the plot."""
    told = {**dataclasses.asdict(options), "models": [Path(name).name for name in options.models]}
    dtypes = [dtype for row in (*costs, *gains) for dtype in row["dtypes"]]
    result = {"cost": list(costs), "gain": list(gains)}
    write_record(options.out, told, result, dtypes=dtypes)
    plot(costs, gains, options.figure)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the tables."""
    check(options)
    costs: list[dict[str, Any]] = []
    for name in options.presets:
        for row in cost(name, CAUSAL_PRESETS[name], options):
            gained = "  ".join(f"{count} tokens {text}" for count, text in speedups_told(row).items())
            print(
                f"{name}  window {row['window']:4d}  candidates {row['candidates']:2d}  "
                f"{row['microseconds']:9.0f} us  {gained}"
            )
            costs.append(row)
    gains: list[dict[str, Any]] = []
    for name in options.models:
        for row in gain(name, options):
            print(
                f"{row['model']}  block {row['block']:4d}  {row['decoder']:27s} "
                f"{row['tokens_per_network_call']:.2f} tokens a call  as greedy {row['equals_greedy']:.1%}"
            )
            gains.append(row)
    write(costs, gains, options)


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
