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

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.common.record import record, write_record
from experiments.systems.collectives import collectives, unknown_loops
from experiments.systems.products import products
from paradec_jax import losses
from paradec_jax.config import (
    BlockDiffusionConfig,
    CausalConfig,
    MaskedDiffusionConfig,
    ModelConfig,
    RecurrentDepthConfig,
    TokenSpec,
)
from paradec_jax.decode import make_request
from paradec_jax.decode.machine import drive
from paradec_jax.families import PRESETS, family_of, network_of, parameter_shapes
from paradec_jax.models import update_flops
from paradec_jax.sharding.layout import row_shardings, shardings
from paradec_jax.sharding.mesh import AXES, make_mesh, on
from paradec_jax.train import TrainState, adamw, make_train_step
from paradec_jax.train.step import state_shardings

GIB = 2**30
# What one chip's memory holds, in bytes: a GPU's by its name, the TPU's as its compiler has it.
LIMITS = {"80 GB": 80 * 10**9, "141 GB": 141 * 10**9, "v5p": round(95.74 * GIB)}
# Asked of a machine that is no TPU's, for which its runtime would wait, and without which one plan
# at a time is made.
_NO_HOST = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
}


_USED = re.compile(r"Used ([\d.]+)([MG]) of [\d.]+[MG] hbm")
STEPS = 1000  # of the schedule, whose length changes no shape
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


def devices_of(target: str) -> list[Any]:
    """The devices of a target: "v5p:2x2x2" and the like by the TPU's compiler, "cpu:8" simulated.

    Call it before anything runs: a simulated device is made when JAX starts, and products are laid
    out for the target (`PARADEC_LAYOUTS`).

    Raises:
      ValueError: a target that is neither, or a compiler that is not installed.
    """
    kind, _, shape = target.partition(":")
    if kind == "cpu" and shape.isdigit() and int(shape):
        with contextlib.suppress(RuntimeError):  # JAX runs already
            jax.config.update("jax_num_cpu_devices", int(shape))
        found = jax.devices("cpu")
        if len(found) < int(shape):
            raise ValueError(
                f"target {target!r} comes too late: JAX runs already, with {len(found)} of the CPU's"
            )
        return found[: int(shape)]
    if kind == "cpu" or not all(part.isdigit() for part in shape.split("x")):
        raise ValueError(
            f"target must be like 'v5p:2x2x2' (chips of a TPU) or 'cpu:8', not {target!r}"
        )
    from jax.experimental import topologies

    for name, value in _NO_HOST.items():
        os.environ.setdefault(name, value)
    try:
        found = list(topologies.get_topology_desc(platform="tpu", topology_name=target).devices)
    except Exception as error:  # of the plugin: any
        said = " ".join(str(error).split())[:160]
        raise ValueError(
            f"the TPU's compiler does not start for {target!r} ({said}): install the extra 'tpu', in an environment "
            f"of its own, or plan for 'cpu:8'"
        ) from None
    os.environ["PARADEC_LAYOUTS"] = "plain"
    return found


def mesh_of_target(devices: Sequence[Any], mesh: str) -> Any:
    """A mesh such as "fsdp=8" or "data=2,tensor=4" of a target's devices, the first ones where it
    needs fewer.

    Raises:
      ValueError: a text that is no mesh, or more devices than the target has.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in mesh.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdigit() or not int(size):
            raise ValueError(
                f"mesh must be sizes of {', '.join(AXES)} such as 'data=2,fsdp=4', not {mesh!r}"
            )
        sizes[name] = int(size)
    count = sizes["data"] * sizes["fsdp"] * sizes["tensor"]
    if count > len(devices):
        raise ValueError(f"mesh {mesh!r} needs {count} devices, but the target has {len(devices)}")
    return make_mesh(**sizes, devices=list(devices[:count]))


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program and what the model asks of it.

    Attributes:
      traced: of `jax.jit(..).trace`.
      work: the least operations that it can cost by the network's own `work`, on all devices; None
        where unknown.
      loops: iterations to expect of loops whose number only the data knows.
    """

    traced: Any
    work: int | None
    loops: int = 1


def spec_of(config: ModelConfig) -> TokenSpec:
    """Special tokens that every family takes: the last id is the mask of one that fills masks."""
    own = isinstance(config, MaskedDiffusionConfig | BlockDiffusionConfig)
    return TokenSpec(mask=config.vocab_size - 1, alignment="own") if own else TokenSpec()


def loss_of(config: ModelConfig, chunk: int | None) -> Any:
    """The family's objective, logits made for `chunk` positions at a time."""
    network, spec = network_of(config), spec_of(config)
    if isinstance(config, RecurrentDepthConfig):
        return losses.recurrent_loss(
            network, losses.poisson_lognormal(config.mean_recurrence), chunk=chunk
        )
    if isinstance(config, CausalConfig):
        return losses.next_token_loss(network, chunk=chunk)
    if isinstance(config, MaskedDiffusionConfig):
        return losses.masked_diffusion_loss(network, spec, chunk=chunk)
    return losses.block_diffusion_loss(network, spec, chunk=chunk)


def batch_of(config: ModelConfig, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of that objective."""
    kinds: dict[str, Any] = {"tokens": jnp.int32}
    if isinstance(config, BlockDiffusionConfig):
        kinds |= {"labelled": jnp.bool_, "positions": jnp.int32}
    elif isinstance(config, MaskedDiffusionConfig):
        kinds |= {"weights": jnp.float32}
    else:
        kinds |= {"targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct((rows, length), kind) for name, kind in kinds.items()}


def train_program(
    config: ModelConfig, mesh: Any, rows: int, length: int, chunk: int | None
) -> Program:
    """The update that `fit` compiles on a mesh: AdamW, clipped, its state donated."""
    optimizer = adamw(1e-4, STEPS)
    state = jax.eval_shape(
        lambda params: TrainState.create(params, optimizer, jax.random.key(0)),
        parameter_shapes(config),
    )
    batch, where = batch_of(config, rows, length), state_shardings(state, mesh)
    update = make_train_step(loss_of(config, chunk), optimizer).update
    whole = jax.NamedSharding(mesh, jax.P())
    program = jax.jit(update, out_shardings=(where, whole), donate_argnums=0)
    with on(mesh):
        traced = program.trace(
            placed_shapes(state, where), None, placed_shapes(batch, row_shardings(batch, mesh))
        )
    work = int(update_flops(network_of(config), rows, length))
    return Program(traced, work, constant_steps(config))


def placed_shapes(tree: Any, where: Any) -> Any:
    """Shapes and dtypes of arrays, with the place of each: what a program is planned for before an
    array is made.

    Args:
      tree: arrays, or shapes of them.
      where: a sharding for each.
    """
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, where
    )


def constant_steps(config: ModelConfig) -> int:
    """Recurrences that carry no gradient, in the mean: the one loop of a train step that only the
    data ends.
    """
    if not isinstance(config, RecurrentDepthConfig):
        return 1
    return max(config.mean_recurrence + 1 - config.mean_backprop_depth, 0)


def decode_programs(
    config: ModelConfig, mesh: Any, rows: int, length: int, new: int, name: str
) -> tuple[Program, Any]:
    """Reading prompts of `length` tokens, and a function from where its state lies to a step of
    decoding.

    Args:
      config: the model.
      mesh: of devices.
      rows: of the batch.
      length: tokens of each prompt.
      new: tokens to be written after them.
      name: of the decoder, as on the command line, with the defaults of its paper.

    Raises:
      ValueError: a decoder that the family has not, that needs a second network, or a request
        beyond the model.
    """
    family = family_of(config)
    kinds = {name: of for name, of in family.decoders.items() if not of.further_networks}
    if name not in kinds:
        raise ValueError(
            f"decode must be one of {', '.join(kinds)} for {family.name}, not {name!r}"
        )
    network = network_of(config)
    decoder = kinds[name].bind(network, length + new, spec_of(config))
    tokens = np.zeros((rows, length), np.int32)
    request = make_request(tokens, max_new_tokens=new)
    decoder.check(request)
    knobs = jax.tree.map(np.asarray, decoder.knobs(None))
    params = jax.eval_shape(decoder.prepare, parameter_shapes(config))  # no matrix is joined
    params = placed_shapes(params, shardings(params, mesh))
    request = placed_shapes(request, row_shardings(request, mesh))
    context = (
        {} if network.visibility == "full" else {"work": int(network.work(rows, length, 0).flops)}
    )
    with on(mesh):
        start = drive.start.trace(decoder, params, request, knobs)

    def advance(where: Any) -> Program:
        state = placed_shapes(jax.eval_shape(drive.start, decoder, params, request, knobs), where)
        with on(mesh):
            return Program(drive.advance.trace(decoder, params, state, knobs, np.int32(1)), None)

    return Program(start, context.get("work")), advance


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
    print(
        f"  {row['products'] / 1e12:.2f} Tflop a chip{work}; XLA counts {row['xla_flops'] / 1e12:.2f}"
    )
    for kind, one in row["collectives"].items():
        print(f"  {kind}: {one['count']}, {one['bytes'] / GIB:.3f} GiB a chip")
    if row["loops_by_data"]:
        print(
            f"  loops that the data ends: {row['loops_by_data']}, {row['iterations_of_those']} iterations each"
        )


def line(
    options: dict[str, Any], row: dict[str, Any], record: dict[str, Any], largest: dict[str, int]
) -> tuple[str, ...]:
    """One program."""
    name = row["program"] if options["decode"] is None else f"{options['decode']}: {row['program']}"
    tera = [None if row[kind] is None else row[kind] / 1e12 for kind in ("products", "work")]
    through = row.get("collectives", {})
    none = "not computed" if row["products"] else "none"
    return (
        options["preset"],
        name,
        f"{record['chips']}, {options['mesh']}",
        f"{row['batch']} x {options['seq']}",
        f"{row['gib']:.1f}" + ("" if row["fits"] else ", does not fit"),
        ", ".join("" if number is None else f"{number:.4g}" for number in tera),
        ", ".join(f"{SHORT[kind]} {one['bytes'] / GIB:.3g}" for kind, one in through.items())
        or "none",
        f"{row['compile_processor_seconds']:.0f}, {row['compile_seconds']:.0f}",
        ", ".join(str(size) for size in largest.values()) or none,
    )


def table(paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """A line for each program of the plans in some files, each the file of one plan or of several
    by name.
    """
    found = [HEAD, ("---",) * len(HEAD)]
    for path in paths:
        told = json.loads(path.read_text(encoding="utf-8"))
        for plan in told.get("plans", {"": told}).values():
            options, sizes = (
                plan["options"],
                dict(part.split("=") for part in plan["options"]["mesh"].split(",")),
            )
            once = [row for row in plan["rows"] if row["batch"] == options["batch"]]
            twice = [row for row in plan["rows"] if row["batch"] != options["batch"]]
            room = largest_of(once, twice, int(sizes.get("data", 1)) * int(sizes.get("fsdp", 1)))
            found += [line(options, row, plan, room.get(row["program"], {})) for row in once]
    return found


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the plan, or prints the table of plans."""
    if options.table:
        print("\n".join(f"| {' | '.join(cells)} |" for cells in table(options.table)))
        return
    jax.config.update("jax_enable_compilation_cache", False)  # which would hide the seconds
    mesh = mesh_of_target(devices_of(options.target), options.mesh)
    dtypes = ["bfloat16", *({"float32"} if options.decode is None else ())]
    begun = record(options, {}, dtypes)[
        "facts"
    ]  # of the sources as they are now: compilations take minutes
    rows = plan(options, mesh, options.batch)
    found: dict[str, Any] = {"rows": rows, "chips": mesh.size}
    if options.largest:
        if options.out is not None:  # the second compilation may fail or be ended
            write_record(options.out, options, found | {"facts": begun}, dtypes=dtypes)
        twice, unit = (
            plan(options, mesh, 2 * options.batch),
            mesh.shape["data"] * mesh.shape["fsdp"],
        )
        found |= {"rows": [*rows, *twice], "largest_batch": largest_of(rows, twice, unit)}
    if options.target.startswith("cpu"):
        found["memory"] = "by the CPU's compiler: no plan"
    if options.out is not None:
        write_record(options.out, options, found | {"facts": begun}, dtypes=dtypes)
    for row in found["rows"]:
        show(row)
    for name, sizes in found.get("largest_batch", {}).items():
        print(
            f"largest batch, {name}: "
            + ", ".join(f"{limit} {size}" for limit, size in sizes.items())
        )
    if "memory" in found:
        print(found["memory"])


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
