"""Memory of gradients through `rollout` against the number of steps.

`python -m experiments.systems.rollout_memory`. XLA says how much temporary memory the compiled gradient of a
soft wavefront needs; nothing is run and nothing is timed. Three ways to group n steps: one segment (every
step's residuals are kept at once), sqrt(n) segments of sqrt(n) steps, and n segments of one step (every
step's state is kept). `XLA_FLAGS=--xla_backend_optimization_level=0` compiles sooner; memory is planned
before that level counts.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.common.record import write_record
from paradec_jax import SoftWavefront, facts, make_request, rollout
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.families import parameter_shapes
from paradec_jax.models.recurrent_network import RecurrentDepthNetwork

GROUPS = ("one segment", "sqrt(n) segments", "n segments")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      preset: shape of the model; weights are never made.
      steps: numbers of steps, each a square.
      batch: rows.
      context: prompt tokens of each row.
      width: slots of the window.
      inner_recurrence: recurrences of a step.
      out: where the JSON goes, and a CSV of the same name.
      figure: where the plot goes.
    """

    preset: str = "tiny-recurrent"
    steps: tuple[int, ...] = (4, 16, 64, 144)
    batch: int = 1
    context: int = 32
    width: int = 4
    inner_recurrence: int = 1
    out: Path = Path("experiments/systems/results/rollout_memory.json")
    figure: Path = Path("experiments/systems/figures/rollout_memory.png")


def motion(state: Any, info: Any) -> jax.Array:
    """Records one number of each step, so that the record itself takes no room."""
    del state
    return jnp.sum(jnp.square(info.refined))


def gradient_bytes(options: Options, n: int, segment: int) -> int:
    """Temporary bytes of the compiled gradient with respect to parameters and knobs."""
    config = RECURRENT_PRESETS[options.preset]
    # One buffer size for all numbers of steps, so that the cache does not grow with them.
    size = options.context + max(options.steps) + 1
    decoder = SoftWavefront(
        RecurrentDepthNetwork(config),
        size,
        window=options.width,
        inner_recurrence=options.inner_recurrence,
        prefill_recurrence=1,
        greedy=True,
    )
    request = make_request(
        jnp.zeros((options.batch, options.context), jnp.int32), max_new_tokens=size - options.context
    )

    def loss(params: Any, knobs: Any) -> jax.Array:
        return jnp.sum(rollout(decoder, params, request, knobs, n=n, segment=segment, record=motion)[1])

    # Knobs as arrays: a gradient needs something to be taken with respect to.
    knobs = jax.tree.map(jnp.asarray, decoder.Knobs(noise=0.1))
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))
    memory = gradient.lower(parameter_shapes(config), knobs).compile().memory_analysis()
    if memory is None:
        raise SystemExit(f"the backend {jax.default_backend()} tells nothing of its memory")
    return int(memory.temp_size_in_bytes)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bytes against steps, one line a grouping."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for group in GROUPS:
        chosen = [row for row in rows if row["group"] == group]
        axes.plot(
            [row["steps"] for row in chosen],
            [row["temp_bytes"] / 2**20 for row in chosen],
            marker="o",
            label=group,
        )
    axes.set(xlabel="steps n", ylabel="temporary memory of the gradient, MiB", xlim=0, ylim=0)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints, writes and draws the table."""
    if options.preset not in RECURRENT_PRESETS:
        raise SystemExit(f"preset must be one of {', '.join(RECURRENT_PRESETS)}, not {options.preset}")
    if any(n < 1 or math.isqrt(n) ** 2 != n for n in options.steps):
        raise SystemExit(f"steps must be squares, so that sqrt(n) divides n, not {options.steps}")
    rows: list[dict[str, Any]] = []
    for n in options.steps:
        for group, segment in zip(GROUPS, (n, math.isqrt(n), 1), strict=True):
            temp_bytes = gradient_bytes(options, n, segment)
            row = {"steps": n, "group": group, "segment": segment, "temp_bytes": temp_bytes}
            rows.append(row)
            print(f"n {n:4d}  {group:17s} {temp_bytes / 2**20:8.2f} MiB", flush=True)
    dtypes = facts.dtypes(parameter_shapes(RECURRENT_PRESETS[options.preset]))
    write_record(options.out, options, {"rows": rows}, dtypes=dtypes, lines=rows)
    plot(rows, options.figure)


if __name__ == "__main__":
    tyro.cli(main)
