"""What training or decoding a large model costs on a cluster, by its compiler: nothing is made or run.

`python -m experiments.systems.scale_plan qwen2.5-coder-7b --target v5p:2x2x2 --mesh fsdp=8 --batch 8 --seq 4096`, and
with `--decode NAME` the two programs of a decoder: reading the prompts, and a step. The target's devices need not be
there: "v5p:4x4x4" is planned by the TPU's compiler, which comes with the extra `tpu` (0.7 GB, so in an environment of
its own). "cpu:8" tries the command out; the memory that the CPU's compiler tells is no plan.

The train step is that of `fit(mesh=)`: AdamW, float32 parameters and state, products in bfloat16. Memory of a chip is
what arguments, results and temporaries take, results that lie in arguments once, and the program. Operations are told
three ways: XLA's count, which takes the body of a loop once; products of the traced program, those of loops as often
as they run and what is done anew as well; and the network's own `work`, what the model asks for. Collectives are read
from the compiled program (`paradec_jax/timing/collectives.py`).

`--largest` compiles twice the batch as well, and tells by a line through the two which batch fits in 80 GB, 141 GB
and a v5p. For GPUs that is an estimate: another compiler plans there.
"""

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments.common.record import record, write_record
from experiments.systems.plan_programs import Program, decode_programs, train_program
from experiments.systems.plan_target import GIB, LIMITS, devices_of, mesh_of_target
from paradec_jax.config import ModelConfig, RecurrentDepthConfig
from paradec_jax.families import PRESETS
from paradec_jax.timing.collectives import collectives, unknown_loops
from paradec_jax.timing.products import products

_USED = re.compile(r"Used ([\d.]+)([MG]) of [\d.]+[MG] hbm")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to plan.

    Attributes:
      preset: shape of the model.
      target: devices, "v5p:2x2x2" (a TPU's topology) or "cpu:8".
      mesh: sizes of its axes; with fewer devices than the target has, its first ones.
      batch: rows on all devices.
      seq: tokens of a row; of a prompt with `decode`.
      decode: a decoder's name; the train step when None.
      new: tokens that decoding may write.
      remat: what a train step computes anew; by layer, or of a recurrent model by recurrence, when None.
      attention: who computes it; the config's own when None.
      chunk: positions whose logits a train step makes at a time; all at once when None.
      backprop: recurrences that carry gradient; the config's when None.
      scan: whether layers are a loop (`scan_layers` of the config) in train steps and where prompts are read; a
        recurrent model has a loop of its own.
      layers: of the model, fewer for a trial; the preset's when None.
      largest: whether to find the largest batch.
      json: whether to print the record instead of a table.
      out: where the record goes; nowhere when None.
      text: folder for the compiled programs, where one sees what takes the memory; nowhere when None.
    """

    preset: tyro.conf.Positional[str]
    target: str = "v5p:2x2x2"
    mesh: str = "fsdp=8"
    batch: int = 8
    seq: int = 4096
    decode: str | None = None
    new: int = 64
    remat: str | None = None
    attention: str | None = None
    chunk: int | None = 512
    backprop: int | None = None
    scan: bool = True
    layers: int | None = None
    largest: bool = False
    json: bool = False
    out: Path | None = None
    text: Path | None = None

    def __post_init__(self) -> None:
        train = self.decode is None
        other = ("new",) if train else ("remat", "chunk", "backprop")
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        for name in other:
            if getattr(self, name) != usual[name]:
                where = (
                    "with --decode, not of a train step" if train else "of a train step, not with --decode"
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
    if options.attention is not None:
        changes["attention"] = options.attention
    for name, value in (("mean_backprop_depth", options.backprop), ("layers", options.layers)):
        if value is not None:
            if not hasattr(config, name):
                raise ValueError(f"{options.preset} has no {name}")
            changes[name] = value
    return dataclasses.replace(config, **changes)


def price(
    name: str, program: Program, devices: int, folder: Path | None = None
) -> tuple[dict[str, Any], Any]:
    """What a program takes on one chip, and the compiled program; None where the compiler says it does not fit."""
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
        return row | {"fits": False, "gib": size, "said": str(error)[:4000]} | _seconds(start, busy), None
    seconds = _seconds(start, busy)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name.replace(' ', '-')}.txt").write_text(text, encoding="utf-8")
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    parts = {kind: getattr(memory, f"{kind}_size_in_bytes") / GIB for kind in kinds}
    cost = compiled.cost_analysis()
    found = collectives(text, program.loops)
    return row | {
        "fits": True,
        "gib": sum(parts.values()) - 2 * parts["alias"],
        "gib_of": parts,
        "xla_flops": cost.get("flops"),
        "xla_bytes": cost.get("bytes accessed"),
        "collectives": {kind: dataclasses.asdict(one) for kind, one in found.items()},
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
    """The rows of a batch: one of the train step, or those of reading prompts and of a step of decoding."""
    config = config_of(options)
    if options.decode is None:
        program = train_program(config, mesh, batch, options.seq, options.chunk)
        row, _ = price("train step", program, mesh.size, options.text)
        return [row | {"batch": batch}]
    start, advance = decode_programs(config, mesh, batch, options.seq, options.new, options.decode)
    row, compiled = price("prompt", start, mesh.size, options.text)
    rows = [row | {"batch": batch}]
    if compiled is not None:
        program = advance(compiled.output_shardings)
        row, _ = price("decode step", program, mesh.size, options.text)
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
        row["program"]: largest(row, second[row["program"]], unit) for row in rows if row["program"] in second
    }


def largest(one: dict[str, Any], two: dict[str, Any], unit: int) -> dict[str, int]:
    """The largest batch in each memory by the line through two plans, in multiples of `unit` rows; 0 for none.

    A row costs no less than what it adds to arguments: temporaries shrink where the compiler takes another layout.
    They may grow again, so there it is at most that many rows.
    """
    rows = two["batch"] - one["batch"]
    before, after = (plan.get("gib_of", {}).get("argument", 0.0) for plan in (one, two))
    arguments = after - before
    each = max(two["gib"] - one["gib"], arguments, 1e-9) / rows
    fixed = two["gib"] - each * two["batch"]
    rooms = {name: (limit / GIB - fixed) / each for name, limit in LIMITS.items()}
    return {name: max(int(room // unit) * unit, 0) for name, room in rooms.items()}


def show(row: dict[str, Any]) -> None:
    """One program for people."""
    head = f"{row['program']}, {row['batch']} rows: {row['gib']:.2f} GiB a chip"
    if not row["fits"]:
        print(f"{head}, more than there is")
        return
    parts = ", ".join(f"{kind} {size:.2f}" for kind, size in row["gib_of"].items())
    work = "" if row["work"] is None else f", of which the model asks {row['work'] / 1e12:.2f}"
    print(
        f"{head} ({parts}); compiled in "
        f"{row['compile_seconds']:.0f} s, {row['compile_processor_seconds']:.0f} s of processor time"
    )
    print(f"  {row['products'] / 1e12:.2f} Tflop a chip{work}; XLA counts {row['xla_flops'] / 1e12:.2f}")
    for kind, one in row["collectives"].items():
        print(f"  {kind}: {one['count']}, {one['bytes'] / GIB:.3f} GiB a chip")
    if row["loops_by_data"]:
        print(
            f"  loops that the data ends: {row['loops_by_data']}, {row['iterations_of_those']} iterations each"
        )


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the plan."""
    jax.config.update("jax_enable_compilation_cache", False)  # which would hide the seconds
    mesh = mesh_of_target(devices_of(options.target), options.mesh)
    dtypes = ["bfloat16", *({"float32"} if options.decode is None else ())]
    begun = record(options, {}, dtypes)["facts"]  # of the sources as they are now: compilations take minutes
    rows = plan(options, mesh, options.batch)
    found: dict[str, Any] = {"rows": rows, "chips": mesh.size}
    if options.largest:
        if options.out is not None:  # the second compilation may fail or be ended
            write_record(options.out, options, found | {"facts": begun}, dtypes=dtypes)
        twice, unit = plan(options, mesh, 2 * options.batch), mesh.shape["data"] * mesh.shape["fsdp"]
        found |= {"rows": [*rows, *twice], "largest_batch": largest_of(rows, twice, unit)}
    if options.target.startswith("cpu"):
        found["memory"] = "by the CPU's compiler: no plan"
    if options.out is not None:
        write_record(options.out, options, found | {"facts": begun}, dtypes=dtypes)
    if options.json:
        print(json.dumps(found))
        return
    for row in found["rows"]:
        show(row)
    for name, sizes in found.get("largest_batch", {}).items():
        print(f"largest batch, {name}: " + ", ".join(f"{limit} {size}" for limit, size in sizes.items()))
    if "memory" in found:
        print(found["memory"])


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
