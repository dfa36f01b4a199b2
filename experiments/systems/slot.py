"""What an accelerator that is there for minutes does with this library (`slot.sh`): laws, and calls
under several flags.

    python -m experiments.systems.slot laws --out slot
    python -m experiments.systems.slot variants --out slot --seconds 120
    python -m experiments.systems.slot demo --out slot

`laws`: on a bundled model of each family parallel decoding of a batch gives the tokens of plain
decoding of each prompt alone, and those recorded on a CPU. `variants`: a call over 1, 8 and 32
positions under several flags, each in a process of its own, in turns; `share` is that of the read
rate. A shape and a batch make a group; one that finds no time is left out. `demo`: `paradec demo`
under the quickest flags. The parts that train are in `made_fast`. A part that was stopped goes on
with what it lacks.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

import paradec_jax as pd
from experiments.common.record import rows_begun, write_record
from experiments.systems.calls import CONTEXT, SEED, call_loops, network_at
from experiments.systems.machine import PASSES, Clock, compiled, in_turns, rates
from experiments.systems.report import dtype_here, leave
from experiments.tasks import word_problems
from paradec_jax.cli import demo as demo_of_families
from paradec_jax.cli.output import print_table
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import case_of, empty_prompts, prompts_of

BLOCKS = pd.BlockDenoising(rule="factor")
ALONE = dataclasses.replace(BLOCKS, fuse_store=False, fuse_prompt=False)
# plain decoding, parallel decoding, knobs, digest of the tokens; a masked canvas has no plain
# decoding
LAWS = {
    "tiny-jacobi": (pd.AutoRegressive(), pd.Jacobi(running=True), None, "58eda7cce9ea4b3a"),
    "tiny-recurrent-distilled": (
        pd.Static(recurrence=1),
        pd.Jacobi(block=8, recurrence=1),
        None,
        "58eda7cce9ea4b3a",
    ),
    "tiny-sdar": (ALONE, BLOCKS, None, "58eda7cce9ea4b3a"),
    "tiny-mdlm-distilled": (
        pd.Masked(),
        pd.Masked(),
        pd.Masked.Knobs(steps=16),
        "35b333d02c5172fc",
    ),
}
GRAPHS = (
    "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE"
)
# The baseline first. One that is quicker on a device becomes what the commands do by one constant:
# its variables, set in `main` of `paradec_jax/cli/__init__.py` before JAX looks for devices.
VARIANTS: dict[str, dict[str, str]] = {
    "kernels": {},
    "plain": {"PARADEC_ATTENTION": "plain"},
    "graphs": {"XLA_FLAGS": GRAPHS},
    "loops": {"XLA_FLAGS": f"{GRAPHS} --xla_gpu_command_buffer_unroll_loops=true"},
    "none": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="},
}
BASE = "kernels"
# Shapes and batches of groups, the important ones first, and positions of each.
GROUPS = tuple(itertools.product((1, 16), ("qwen3-0.6b", "smollm2-135m")))
POSITIONS = (1, 8, 32)
TOYS = tuple(itertools.product((1, 2), ("test-causal",)))


@dataclasses.dataclass(frozen=True)
class Options:
    """What is done.

    Attributes:
      part: the part.
      out: folder of the results.
      runs: folder of what is trained.
      seconds: time of the part.
      real: a checkpoint in the place of the model of word problems.
      toy: whether all of it is a dry run at toy size.
    """

    part: tyro.conf.Positional[Literal["laws", "variants", "demo", "fast", "gain"]]
    out: Path = Path("slot")
    runs: Path = Path("runs/slot")
    seconds: float = 120.0
    real: str | None = None
    toy: bool = False


def answers(name: str, parallel: bool) -> list[list[int]]:
    """The tokens of a bundled model, products in full float32: after the prompts of four unseen
    word problems, or from nothing.
    """
    model, knobs = pd.load(name), LAWS[name][2]
    if model.family == "masked_diffusion":
        prompts = empty_prompts(model, 4, 64, SEED)
    else:
        prompts = prompts_of(model, word_problems(4, seed=SEED, steps=(2, 4)), SEED, 96)
    case = case_of(Setting(name, LAWS[name][parallel], knobs), model, prompts.size)
    requests = [
        prompts.request(rows) for rows in ([range(4)] if parallel else [[0], [1], [2], [3]])
    ]
    with jax.default_matmul_precision("highest"):
        done = [pd.run(case.decoder, case.params, one, case.knobs) for one in requests]
    return [ids for one in done for ids in one.completions()]


def laws(options: Options, clock: Clock) -> None:
    """Writes for each family whether the tokens are equal, and those that were recorded."""
    jobs = {
        f"{name} {way}": functools.partial(answers, name, bool(way))
        for name in LAWS
        for way in (0, 1)
    }
    (done, left), rows = compiled(jobs, clock), []
    for name, (*_, recorded) in LAWS.items():
        plain, parallel = (done.get(f"{name} {way}") for way in (0, 1))
        digest = hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
        equal = plain is not None and plain == parallel
        rows.append(
            {"model": name, "digest": digest, "equal": equal, "recorded": digest == recorded}
        )
        print(rows[-1], left, flush=True)
    write_record(options.out / "laws.json", {}, {"rows": rows, "left_out": left})


LOOPS: dict[str, Any] = {}  # of the process of a variant


def begin(variables: Mapping[str, str]) -> None:
    """Begins the process of a variant, which ends with the one that made it."""
    os.environ.update(variables)
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def build(batch: int, shape: str, positions: Sequence[int]) -> dict[str, str]:
    """Compiles the calls of a group; returns why some of them are missing."""
    LOOPS.clear()  # makes room
    loops, left = call_loops(config_of(shape), positions, CONTEXT, batch)
    LOOPS.update(loops)
    return left


def turn() -> dict[str, float]:
    """Seconds of a call, by its number of positions."""
    timings = in_turns(LOOPS, Clock(), 1)
    return {name: timings[name].each(loop.steps).seconds for name, loop in LOOPS.items()}


def config_of(shape: str) -> Any:
    """A preset in the dtype of this device."""
    dtype = dtype_here()
    return dataclasses.replace(pd.PRESETS[shape], dtype=dtype, param_dtype=dtype)


def variants(options: Options, clock: Clock) -> None:
    """A row for each call: each variant compiles a group, then each runs it in its turn in every
    pass.
    """
    path, groups = options.out / "variants.json", TOYS if options.toy else GROUPS
    told = {"variants": VARIANTS, "groups": groups}
    rows, read, longest = rows_begun(path, told) or [], rates(dtype_here()).read, 0.0
    done, left = {(row["batch"], row["shape"]) for row in rows}, dict[str, str]()
    spawn = multiprocessing.get_context("spawn")
    pools = {
        name: ProcessPoolExecutor(1, spawn, begin, (variables,))
        for name, variables in VARIANTS.items()
    }
    for batch, shape in (group for group in groups if group not in done):
        what, begun = f"{shape}, batch {batch}", clock.left()
        if begun <= longest:
            left[what] = "no time was left"
            continue
        positions = POSITIONS[: 2 if options.toy else None]
        network = network_at(config_of(shape))
        for count, seconds in timed(pools, (batch, shape, positions), left).items():
            least = 1e3 * network.work(batch, int(count), CONTEXT).bytes / read
            took = {name: 1e3 * statistics.median(passes) for name, passes in seconds.items()}
            row = {"shape": shape, "batch": batch, "positions": int(count), "passes": seconds}
            row |= {"milliseconds": took, "share": {name: least / of for name, of in took.items()}}
            rows.append(row | {"speed": {name: took[BASE] / of for name, of in took.items()}})
        longest = max(longest, begun - clock.left())
        results = {"rows": rows, "median_speed": medians(rows), "left_out": left}
        write_record(path, told, results, dtypes=[dtype_here()])
    show(rows)
    print(f"left out: {left}")


def timed(pools: dict[str, Any], group: Any, left: dict[str, str]) -> dict[str, Any]:
    """Seconds of a call of each pass, by its number of positions and the variant; notes what is
    missing, and gives a variant up that fails.
    """
    # What the first one finds quickest for a product, the cache of programs hands to the others.
    for some in ([BASE], [name for name in pools if name != BASE]):
        asked = {name: pools[name].submit(build, *group) for name in some}
        for name, answer in asked.items():
            try:
                missing = answer.result()
            except Exception as error:  # a process that ended, or a device that refuses
                missing = {"all": f"{error!r}"[:200]}
                del pools[name]
            left |= {f"{name}, {group}, {of}": why for of, why in missing.items()}
    passes = [
        {name: pool.submit(turn).result() for name, pool in pools.items()} for _ in range(PASSES)
    ]
    return {
        count: {
            name: [each[name][count] for each in passes]
            for name in pools
            if count in passes[0][name]
        }
        for count in passes[0][BASE]
    }


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many times as fast as the baseline each variant is, the median of all calls; the quickest
    first, and none that failed.
    """
    whole = [name for name in VARIANTS if all(name in row["speed"] for row in rows)]
    found = {name: statistics.median(row["speed"][name] for row in rows) for name in whole}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints milliseconds and share of the read rate of every call, a column a variant."""
    speeds = medians(rows)
    columns = {name: f"{{{name}}}" for name in ("shape", "batch", "positions")}
    for name in speeds:
        columns[name] = f"{{milliseconds[{name}]:.3f}} ms, {{share[{name}]:.0%}}"
    note = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
    print_table("Calls, the quickest variant first", columns, rows, [f"Median speed: {note}"])


def use_quickest(out: Path) -> None:
    """Sets what the quickest variant sets, where they were measured; to be called before JAX looks
    for devices.
    """
    path, name = out / "variants.json", BASE
    if path.exists():
        name = next(iter(json.loads(path.read_text(encoding="utf-8"))["median_speed"]))
    os.environ.update(VARIANTS[name])
    print(f"variant: {name}")


def demo(options: Options, clock: Clock) -> None:
    """`paradec demo`; in a dry run one family on one problem."""
    use_quickest(options.out)
    if options.toy:
        demo_of_families.FAMILIES = {"causal": demo_of_families.FAMILIES["causal"]}
        demo_of_families.PROBLEMS = demo_of_families.PASSES = 1
    demo_of_families.demo_command()


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Runs a part."""
    parts, clock = globals(), Clock(options.seconds)
    if options.part in ("fast", "gain"):
        from experiments.systems import made_fast  # which imports what training needs

        parts = vars(made_fast)
    parts[options.part](options, clock)
    leave(f"done: {options.part}")


if __name__ == "__main__":
    tyro.cli(main)
