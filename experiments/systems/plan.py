"""What training or decoding a large model costs on a cluster, by its compiler: nothing is made or
run.

    python -m experiments.systems.plan qwen2.5-coder-7b --target v5p:2x2x2 --mesh fsdp=8 --batch 8
    --seq 4096 python -m experiments.systems.plan --table experiments/systems/results/plans.json

With `--decode NAME` the two programs of a decoder are planned: reading prompts, and a step. The
devices of the target need not be there: "v5p:4x4x4" is planned by the compiler of TPUs, which comes
with the extra `tpu` (0.7 GB, in an environment of its own). "cpu:8" tries the command out; the
memory that the compiler of CPUs plans is no plan.

The train step is that of `fit` on a mesh: AdamW, float32 parameters and state, products in
bfloat16. Memory of a chip is that of arguments, results outside of arguments, temporaries and the
program. Operations are counted three ways: by XLA, which takes the body of a loop once; as matrix
products of the traced program (`products`); and by the network's own `work`, what the model asks
for. Collectives are read from the compiled program (`collectives`).

`--largest` compiles twice the batch as well; the line through both plans gives the largest batch in
80 GB, 141 GB and a v5p. For GPUs that is an estimate: another compiler plans there.
"""

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments.common.command import run
from experiments.common.record import record, write_record
from experiments.systems.collectives import collectives, unknown_loops
from experiments.systems.products import products
from experiments.systems.programs import (
    Program,
    decode_programs,
    devices_of,
    mesh_of_target,
    train_program,
)
from paradec_jax.config import (
    ModelConfig,
    RecurrentDepthConfig,
)
from paradec_jax.families import PRESETS

GIB = 2**30
# What one chip's memory holds, in bytes: a GPU's by its name, the TPU's as its compiler has it.
LIMITS = {"80 GB": 80 * 10**9, "141 GB": 141 * 10**9, "v5p": round(95.74 * GIB)}
_USED = re.compile(r"Used ([\d.]+)([MG]) of [\d.]+[MG] hbm")
SHORT = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}
HEAD = (
    "model",
    "program",
    "chips, mesh",
    "rows x tokens",
    "GiB a chip",
    "Tflop a chip: done, asked",
    "collectives, GiB a chip",
    "compilation, s: processor, wall",
    "largest batch: " + ", ".join(LIMITS),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to plan.

    Attributes:
      preset: shape of the model; may be left out with `table`.
      target: devices, "v5p:2x2x2" (a TPU's topology) or "cpu:8".
      mesh: sizes of its axes; with fewer devices than the target has, its first ones.
      batch: rows on all devices.
      seq: tokens of a row; of a prompt with `decode`.
      decode: name of a decoder; the train step when None.
      new: tokens that decoding may write.
      remat: what a train step computes anew; by layer, or of a recurrent model by recurrence, when
        None.
      chunk: positions whose logits a train step makes at a time; all at once when None.
      backprop: recurrences that carry gradient; the config's when None.
      scan: whether layers are a loop (`scan_layers` of the config) in train steps and where prompts
        are read; a recurrent model has a loop of its own.
      largest: whether to find the largest batch.
      out: path of the JSON; nothing is written when None.
      table: files of plans to print as one table; nothing is planned then.
    """

    preset: tyro.conf.Positional[str] = "qwen2.5-coder-7b"
    target: str = "v5p:2x2x2"
    mesh: str = "fsdp=8"
    batch: int = 8
    seq: int = 4096
    decode: str | None = None
    new: int = 64
    remat: str | None = None
    chunk: int | None = 512
    backprop: int | None = None
    scan: bool = True
    largest: bool = False
    out: Path | None = None
    table: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        train = self.decode is None
        other = ("new",) if train else ("remat", "chunk", "backprop")
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        for name in other:
            if getattr(self, name) != usual[name]:
                where = (
                    "with --decode, not of a train step"
                    if train
                    else "of a train step, not with --decode"
                )
                raise ValueError(f"{name} is an option {where}")
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {self.preset!r}")
        for name in ("batch", "seq", "new"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def config_of(options: Options) -> ModelConfig:
    """The preset's shape as it is to be trained (float32 parameters) or served (bfloat16)."""
    config = PRESETS[options.preset]
    recurrent = isinstance(config, RecurrentDepthConfig)
    changes: dict[str, Any] = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    if options.decode is None:
        remat = options.remat or ("iteration" if recurrent else "layer")
        changes |= {"remat": remat, "param_dtype": "float32"}
    if options.scan and not recurrent:
        changes["scan_layers"] = True
    if options.backprop is not None:
        if not recurrent:
            raise ValueError(f"{options.preset} has no recurrences to limit")
        changes["mean_backprop_depth"] = options.backprop
    return dataclasses.replace(config, **changes)


def price(name: str, program: Program, devices: int) -> tuple[dict[str, Any], Any]:
    """What a program takes on one chip, and the compiled program; None where the compiler says it
    does not fit.
    """
    start = time.perf_counter()
    lowered = program.traced.lower()
    lowering = time.perf_counter() - start
    row: dict[str, Any] = {
        "program": name,
        "products": products(program.traced.jaxpr, program.loops) // devices,
        "work": None if program.work is None else program.work // devices,
    }
    start, busy = time.perf_counter(), time.process_time()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        used = _USED.search(str(error))
        if used is None:
            raise
        size = float(used[1]) / (1024 if used[2] == "M" else 1)
        return row | {"fits": False, "gib": size, "said": str(error)[:4000]} | _seconds(
            start, busy
        ), None
    seconds = _seconds(start, busy)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    parts = {kind: getattr(memory, f"{kind}_size_in_bytes") / GIB for kind in kinds}
    cost = compiled.cost_analysis()
    collected = collectives(text, program.loops)
    return row | {
        "fits": True,
        "gib": sum(parts.values()) - 2 * parts["alias"],
        "gib_of": parts,
        "xla_flops": cost.get("flops"),
        "xla_bytes": cost.get("bytes accessed"),
        "collectives": {kind: dataclasses.asdict(one) for kind, one in collected.items()},
        "loops_by_data": unknown_loops(text),
        "iterations_of_those": program.loops,
        "lower_seconds": lowering,
        **seconds,
    }, compiled


def _seconds(start: float, busy: float) -> dict[str, float]:
    """Wall and processor time since; the first is the machine's, which may have other work."""
    passed = time.perf_counter() - start, time.process_time() - busy
    return dict(zip(("compile_seconds", "compile_processor_seconds"), passed, strict=True))


def plan(options: Options, mesh: Any, batch: int) -> list[dict[str, Any]]:
    """The rows of a batch: one of the train step, or those of reading prompts and of a step of
    decoding.
    """
    config = config_of(options)
    if options.decode is None:
        program = train_program(config, mesh, batch, options.seq, options.chunk)
        row, _ = price("train step", program, mesh.size)
        return [row | {"batch": batch}]
    start, advance = decode_programs(config, mesh, batch, options.seq, options.new, options.decode)
    row, compiled = price("prompt", start, mesh.size)
    rows = [row | {"batch": batch}]
    if compiled is not None:
        program = advance(compiled.output_shardings)
        row, _ = price("decode step", program, mesh.size)
        rows.append(row | {"batch": batch})
    return rows


def largest_of(
    rows: list[dict[str, Any]], twice: list[dict[str, Any]], unit: int
) -> dict[str, dict[str, int]]:
    """The largest batch of each program that both plans have and that has products.

    Where a prompt does not fit, its step has none.
    """
    second = {row["program"]: row for row in twice if row.get("products", 1)}
    return {
        row["program"]: largest(row, second[row["program"]], unit)
        for row in rows
        if row["program"] in second
    }


def largest(one: dict[str, Any], two: dict[str, Any], unit: int) -> dict[str, int]:
    """The largest batch in each memory by the line through two plans, in multiples of `unit` rows;
    0 for none.

    A row costs no less than what it adds to arguments: temporaries shrink where the compiler takes
    another layout. They may grow again, so there it is at most that many rows.
    """
    rows = two["batch"] - one["batch"]
    before, after = (plan.get("gib_of", {}).get("argument", 0.0) for plan in (one, two))
    arguments = after - before
    each = max(two["gib"] - one["gib"], arguments, 1e-9) / rows
    fixed = two["gib"] - each * two["batch"]
    rooms = {name: (limit / GIB - fixed) / each for name, limit in LIMITS.items()}
    return {name: max(int(room // unit) * unit, 0) for name, room in rooms.items()}


def line(options: dict[str, Any], row: dict[str, Any], chips: int, largest: Any) -> str:
    """One program."""
    name = row["program"] if options["decode"] is None else f"{options['decode']}: {row['program']}"
    counts = [row[kind] for kind in ("products", "work")]
    tera = ["" if count is None else f"{count / 1e12:.4g}" for count in counts]
    through = [
        f"{SHORT[kind]} {one['bytes'] / GIB:.3g}"
        for kind, one in row.get("collectives", {}).items()
    ]
    none = "not computed" if row["products"] else "none"
    cells = (
        options["preset"],
        name,
        f"{chips}, {options['mesh']}",
        f"{row['batch']} x {options['seq']}",
        f"{row['gib']:.1f}" + ("" if row["fits"] else ", does not fit"),
        ", ".join(tera),
        ", ".join(through) or "none",
        f"{row['compile_processor_seconds']:.0f}, {row['compile_seconds']:.0f}",
        ", ".join(str(size) for size in (largest or {}).values()) or none,
    )
    return f"| {' | '.join(cells)} |"


def lines_of(record: dict[str, Any]) -> list[str]:
    """A line for each program of a plan at its batch."""
    options = record["options"]
    sizes = dict(part.split("=") for part in options["mesh"].split(","))
    once = [row for row in record["rows"] if row["batch"] == options["batch"]]
    twice = [row for row in record["rows"] if row["batch"] != options["batch"]]
    room = largest_of(once, twice, int(sizes.get("data", 1)) * int(sizes.get("fsdp", 1)))
    return [line(options, row, record["chips"], room.get(row["program"])) for row in once]


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the plan, or prints the table of plans."""
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for path in options.table:  # each the file of one plan, or of several by name
        plans = json.loads(path.read_text(encoding="utf-8"))
        for one in plans.get("plans", {"": plans}).values():
            print("\n".join(lines_of(one)))
    if options.table:
        return
    jax.config.update("jax_enable_compilation_cache", False)  # which would hide the seconds
    mesh = mesh_of_target(devices_of(options.target), options.mesh)
    dtypes = ["bfloat16", *({"float32"} if options.decode is None else ())]
    # Of the sources as they are now: compilations take minutes.
    begun = record(options, {}, dtypes)["facts"]
    result: dict[str, Any] = {"rows": plan(options, mesh, options.batch), "chips": mesh.size}
    if options.target.startswith("cpu"):
        result["memory"] = "by the CPU's compiler: no plan"
    if options.largest:
        if options.out is not None:  # the second compilation may fail or be ended
            write_record(options.out, options, result | {"facts": begun}, dtypes=dtypes)
        once, twice = result["rows"], plan(options, mesh, 2 * options.batch)
        room = largest_of(once, twice, mesh.shape["data"] * mesh.shape["fsdp"])
        result |= {"rows": [*once, *twice], "largest_batch": room}
    if options.out is not None:
        write_record(options.out, options, result | {"facts": begun}, dtypes=dtypes)
    lines = lines_of(result | {"options": dataclasses.asdict(options)})
    print("\n".join(lines), result.get("memory", ""), sep="\n")


if __name__ == "__main__":
    run(main)
