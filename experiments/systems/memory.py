"""Memory of gradients through the sampler, and of what is done with weights.

    python -m experiments.systems.memory gradients      # planned by XLA, nothing runs
    python -m experiments.systems.memory weights        # each kind in a process of its own, weights of 1.2 GB

*Gradients*: temporary memory of the compiled gradient of a soft wavefront through `rollout`,
against the number of steps. Three ways to group n steps: one segment (residuals of all steps are
kept at once), sqrt(n) segments of sqrt(n) steps, and n segments of one step (the state of every
step is kept). `XLA_FLAGS=--xla_backend_optimization_level=0` compiles sooner; memory is planned
before that level counts.

*Weights*: export to a Hugging Face folder, import of that folder, `load` of that folder, of a model
folder, and of that on four simulated devices. A process is compared with itself while it is idle,
everything imported: `above_idle` is the peak of all pages in memory (VmHWM), `anonymous_above_idle`
that of pages that belong to no file (RssAnon, read every 5 ms), `kept` the bytes of JAX's arrays
afterwards. Weights are random and lie in a temporary folder, which is removed.
"""

import dataclasses
import gc
import math
import multiprocessing
import os
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import paradec_jax as pd
from experiments.common.record import write_record
from paradec_jax import SoftWavefront, facts, make_request, rollout
from paradec_jax.config import CAUSAL_PRESETS, RECURRENT_PRESETS, CausalConfig, TokenSpec
from paradec_jax.families import init_params, parameter_shapes
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.store import Model

RESULTS = Path("experiments/systems/results")
GROUPS = ("one segment", "sqrt(n) segments", "n segments")
KINDS = ("export", "import", "converting load", "load", "sharded load")
DEVICES = "--xla_force_host_platform_device_count=4"
OWN, OTHERS, AGAIN = "model", "hugging-face", "again"  # folders
PERIOD = 0.005  # seconds between two readings


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients through the sampler.

    Attributes:
      preset: shape of the model; weights are never made.
      steps: numbers of steps, each a square.
      batch: rows.
      context: prompt tokens of each row.
      width: slots of the window.
      inner_recurrence: recurrences of a step.
      out: path of the JSON.
    """

    preset: str = "tiny-recurrent"
    steps: tuple[int, ...] = (4, 16, 64, 144)
    batch: int = 1
    context: int = 32
    width: int = 4
    inner_recurrence: int = 1
    out: Path = RESULTS / "rollout_memory.json"

    def __post_init__(self) -> None:
        if self.preset not in RECURRENT_PRESETS:
            raise ValueError(
                f"preset must be one of {', '.join(RECURRENT_PRESETS)}, not {self.preset}"
            )
        if any(n < 1 or math.isqrt(n) ** 2 != n for n in self.steps):
            raise ValueError(f"steps must be squares, so that sqrt(n) divides n, not {self.steps}")


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of a causal model with an output matrix of its own.

    Attributes:
      width, feed_forward, vocab_size, layers, heads: the shape, by default 1.2 GB in float32.
      preset: instead, a named shape of causal models, such as "smollm2-135m", in bfloat16 then.
      folder: where the temporary folder is made; in that of the system when None.
      out: path of the JSON.
    """

    width: int = 1024
    feed_forward: int = 4096
    vocab_size: int = 49_152
    layers: int = 12
    heads: int = 16
    preset: str | None = None
    folder: Path | None = None
    out: Path = RESULTS / "weights_memory.json"

    @property
    def config(self) -> CausalConfig:
        """The shape."""
        if self.preset is not None:
            return CAUSAL_PRESETS[self.preset]
        sizes = {
            name: getattr(self, name)
            for name in ("width", "feed_forward", "vocab_size", "layers", "heads")
        }
        return CausalConfig(**sizes, kv_heads=self.heads, max_length=128, tie_embeddings=False)


def reading(name: str) -> float:
    """MiB by a name of /proc/self/status: VmRSS is in memory now, VmHWM the peak, RssAnon without
    pages of files.

    Raises:
      ValueError: a system that has no such reading.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
    except (OSError, StopIteration):
        raise ValueError(f"this system has no {name} in /proc/self/status") from None


def motion(state: Any, info: Any) -> jax.Array:
    """Records one number of each step, so that the record itself takes no room."""
    del state
    return jnp.sum(jnp.square(info.refined))


def gradient_bytes(options: Gradients, n: int, segment: int) -> int:
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
    prompts = jnp.zeros((options.batch, options.context), jnp.int32)
    request = make_request(prompts, max_new_tokens=size - options.context)

    def loss(params: Any, knobs: Any) -> jax.Array:
        return jnp.sum(
            rollout(decoder, params, request, knobs, n=n, segment=segment, record=motion)[1]
        )

    # Knobs as arrays: a gradient needs something to be taken with respect to.
    knobs = jax.tree.map(jnp.asarray, decoder.Knobs(noise=0.1))
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))
    memory = gradient.lower(parameter_shapes(config), knobs).compile().memory_analysis()
    if memory is None:
        raise SystemExit(f"the backend {jax.default_backend()} says nothing of its memory")
    return int(memory.temp_size_in_bytes)


class Watch:
    """The peak of two readings while a block runs."""

    def __enter__(self) -> "Watch":
        gc.collect()
        self.done, self.anonymous = threading.Event(), 0.0
        self.idle = {name: reading(name) for name in ("VmRSS", "RssAnon")}
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()
        self.most = reading("VmHWM")

    def _look(self) -> None:
        while not self.done.wait(PERIOD):
            self.anonymous = max(self.anonymous, reading("RssAnon"))

    def row(self, kept: float = 0.0) -> dict[str, float]:
        """MiB above idle, and of what is kept."""
        idle = self.idle["VmRSS"]
        anonymous = max(self.anonymous - self.idle["RssAnon"], 0.0)
        figures = {"idle": idle, "above_idle": self.most - idle}
        return figures | {"anonymous_above_idle": anonymous, "kept": kept}


def do(kind: str, config: CausalConfig, folder: Path) -> Any:
    """One thing done with weights in this process; `make` and `check` come before and after the
    kinds.
    """
    if kind == "make":
        return pd.save(
            folder / OWN, Model(config, init_params(config, jax.random.key(0)), TokenSpec())
        )
    if kind == "check":
        return pd.store.fingerprint(folder / OWN) == pd.store.fingerprint(folder / AGAIN)
    if kind in ("export", "import"):
        from paradec_jax.cli import main as paradec  # here, because a load needs no command

        places = (OWN, OTHERS) if kind == "export" else (OTHERS, AGAIN)
        with Watch() as watch:
            if code := paradec([kind, *(str(folder / place) for place in places)]):
                raise SystemExit(code)
        return watch.row()
    mesh = pd.make_mesh(fsdp=2, tensor=2) if kind == "sharded load" else None
    jnp.zeros(()).block_until_ready()
    with Watch() as watch:
        place = folder / (OTHERS if kind == "converting load" else OWN)
        leaves = jax.block_until_ready(jax.tree.leaves(pd.load(place, mesh=mesh).params))
    return watch.row(
        sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards) / 2**20
    )


def in_a_process(kind: str, config: CausalConfig, folder: Path) -> Any:
    """What `do` returns, in a process of its own on the CPU."""
    flags = os.environ.get("XLA_FLAGS", "") + (f" {DEVICES}" if kind == "sharded load" else "")
    os.environ["JAX_PLATFORMS"] = "cpu"  # which the process reads when it imports JAX
    setting = os.putenv, ("XLA_FLAGS", flags)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), *setting) as pool:
        return pool.submit(do, kind, config, folder).result()


def measure_gradients(options: Gradients) -> dict[str, Any]:
    """A row for each number of steps and way to group them."""
    rows: list[dict[str, Any]] = []
    for n in options.steps:
        for group, segment in zip(GROUPS, (n, math.isqrt(n), 1), strict=True):
            size = gradient_bytes(options, n, segment)
            rows.append({"steps": n, "group": group, "segment": segment, "temp_bytes": size})
            print(f"n {n:4d}  {group:17s} {size / 2**20:8.2f} MiB", flush=True)
    return {"rows": rows}


def measure_weights(options: Weights) -> dict[str, Any]:
    """A row for each kind, and whether an import gives back what was exported."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        in_a_process("make", options.config, folder)
        for kind in KINDS:
            rows.append({"kind": kind, **in_a_process(kind, options.config, folder)})
            print(
                "  ".join(
                    f"{key} {x if key == 'kind' else f'{x:.0f}'}" for key, x in rows[-1].items()
                ),
                flush=True,
            )
        same = in_a_process("check", options.config, folder)
    print(f"an import gives back what was exported: {same}")
    return {"same": same, "rows": rows}


def main(options: Gradients | Weights) -> None:
    """Prints and writes the rows."""
    if isinstance(options, Gradients):
        shapes, found = (
            parameter_shapes(RECURRENT_PRESETS[options.preset]),
            measure_gradients(options),
        )
    else:
        shapes, found = parameter_shapes(options.config), measure_weights(options)
    write_record(options.out, options, found, dtypes=facts.dtypes(shapes))


if __name__ == "__main__":
    try:
        main(tyro.cli(Gradients | Weights))  # type: ignore[arg-type]
    except ValueError as error:
        raise SystemExit(str(error)) from None
