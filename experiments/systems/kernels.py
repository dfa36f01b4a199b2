"""Kernels that a decoding call launches on a GPU, counted on a machine without one.

    make kernels                                              # presets and decoders, one table
    python -m experiments.systems.kernels --presets qwen3-0.6b --positions 1 8 --devices h100 a100

JAX's CUDA plugin compiles the programs for a described device, and nothing runs (`make kernels`
brings it). A preset is bfloat16 and not scanned, at batch 1, after 256 cached positions. A small
model's kernel takes 2 to 4 microseconds on an H100, whatever it does.

::

    kernels     fusions, calls of libraries, copies; bodies of loops as often as they run
    looks       conditions that the host reads: of loops whose iterations only the data knows, and
                conditionals, whose dearest branch counts
    bytes       that kernels read and write; of a buffer that is updated in place, or of which they
                take some entries, those alone

Autotuning is off, since it runs kernels; cuDNN is not there.
"""

import argparse
import dataclasses
import functools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from experiments.common.record import write_record
from experiments.systems.calls import CONTEXT, network_at, run_calls
from experiments.systems.collectives import Hlo, Instruction, called_by
from experiments.systems.programs import spec_of
from paradec_jax.config import ModelConfig
from paradec_jax.decode import make_request
from paradec_jax.decode.machine import drive
from paradec_jax.evaluate.tables import TABLES
from paradec_jax.families import PRESETS, network_of, parameter_shapes

CALLS = ("smollm2-135m", "qwen3-0.6b", "sdar-1.7b", "mdlm-small")
NEW = 64  # tokens of a decoder's request
# compute capability, cores, shared memory of a block, memory, its bytes a second, cache, name
DEVICES = {
    "h100": "9 132 232448 84978434048 3352320000000 52428800 H100 80GB HBM3",
    "h200": "9 132 232448 150000000000 4890000000000 62914560 H200",
    "a100": "8 108 166912 84978434048 2039000000000 41943040 A100-SXM4-80GB",
}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "copy-done"}


@functools.cache
def device(name: str) -> Any:
    """Where a program for a described device lies."""
    major, cores, shared, memory, rate, cache, kind = DEVICES[name].split(maxsplit=6)
    text = f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32
      shared_memory_per_block: 49152 shared_memory_per_core: {int(shared) + 1024}
      threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {64 if major == "8" else 128}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {rate} l2_cache_size: {cache} clock_rate_ghz: 1.98
      device_memory_size: {memory} shared_memory_per_block_optin: {shared}
      cuda_compute_capability {{ major: {major} }} registers_per_core_limit: 65536
      registers_per_block_limit: 65536 }} platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "NVIDIA {kind}" """
    described = topologies.get_topology_desc(
        name, platform="cuda", target_config=text, topology="1x1x1"
    )
    return jax.sharding.SingleDeviceSharding(described.devices[0])


def count(text: str) -> Counter[str]:
    """Kernels, looks and bytes of an iteration of the outermost loop with most kernels in a
    compiled program's text; loops that the data ends count as one iteration.
    """
    hlo = Hlo(text)

    def of(*names: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for name, one in ((n, one) for n in names for one in hlo.computations[n].values()):
            called = [part for part in called_by(one) if part in hlo.computations]
            if one.op == "while":
                trips = hlo.trips(name, one)
                total["looks"] += trips is None
                times = 1 if trips is None else trips
                total.update({what: times * n for what, n in of(*called).items()})
            elif one.op == "conditional":
                total["looks"] += 1
                total.update(max(map(of, called), key=lambda branch: branch["kernels"]))
            elif one.op == "call":
                total.update(of(*called))
            elif one.op not in FREE:
                total.update(kernels=1, bytes=_moved(hlo, one, hlo.computations[name]))
        return total

    loops = [one for one in hlo.computations[hlo.entry].values() if one.op == "while"]
    most = max((of(*called_by(loop)) for loop in loops), key=lambda loop: loop["kernels"])
    most["looks"] += 1
    return most


def _moved(hlo: Hlo, one: Instruction, inside: dict[str, Instruction]) -> int:
    """Bytes that a kernel reads and writes."""
    given = [inside[name].bytes for name in one.operands if name in inside]
    parts = hlo.computations[called_by(one)[0]] if one.op == "fusion" else {}
    whole, some = [], 0
    for part in parts.values():
        if part.op in ("dynamic-update-slice", "dynamic-slice", "gather"):
            updates = part.op == "dynamic-update-slice"
            some += parts[part.operands[1]].bytes if updates else part.bytes
            whole.append(parts[part.operands[0]].bytes)
    return some + sum(size for size in (*given, one.bytes) if size not in whole)


def shape_of(preset: str) -> Any:
    """The preset as an accelerator runs it."""
    config: Any = PRESETS[preset]
    changes: dict[str, Any] = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    if hasattr(config, "scan_layers"):
        changes["scan_layers"] = False
    return dataclasses.replace(config, **changes)


def compiled(function: Any, where: str, static: tuple[Any, ...], *arrays: Any) -> str:
    """The text of a jitted function's program for arrays of these shapes on a device."""

    def there(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device(where))

    traced = function.trace(*static, *jax.tree.map(there, arrays))
    lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"}).as_text()


def call(config: ModelConfig, positions: int, where: str) -> tuple[str, int]:
    """The program of a loop of calls, and the bytes of weights and cache that one needs."""
    network, cache = network_at(config), None
    params = jax.eval_shape(network.prepare, parameter_shapes(config))
    if network.visibility != "full":
        keys = jax.random.split(jax.random.key(0), 1)
        cache = jax.eval_shape(lambda: network.init_cache(keys, CONTEXT + positions))
    numbers = [np.zeros(shape, np.int32) for shape in ((1, positions), 1, ())]
    loop = jax.jit(functools.partial(run_calls, network), donate_argnums=(1, 2))
    read = dict(params.params)
    if "head" in read:
        del read["embedding"]  # but for some rows
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((read, cache)))
    return compiled(loop, where, (), params, cache, *numbers), needed


def step(config: ModelConfig, setting: Any, where: str) -> str:
    """The program of steps of a decoder."""
    decoder = setting.decoder.bind(network_of(config), CONTEXT + NEW, spec_of(config))
    request = make_request(np.zeros((1, CONTEXT), np.int32), max_new_tokens=NEW)
    knobs = jax.tree.map(np.asarray, decoder.knobs(setting.knobs))
    params = jax.eval_shape(decoder.prepare, parameter_shapes(config))
    state = jax.eval_shape(functools.partial(drive.start, decoder), params, request, knobs)
    return compiled(drive.advance, where, (decoder,), params, state, knobs, np.int32(1))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--presets", nargs="*", default=CALLS, help="shapes of counted calls")
    parser.add_argument("--positions", nargs="+", type=int, default=(1, 8, 32))
    parser.add_argument("--steps", nargs="*", default=(), help="shapes of counted decoders")
    parser.add_argument("--devices", nargs="+", default=["h100"], choices=list(DEVICES))
    parser.add_argument("--out", type=Path, help="JSON file")
    options, rows = parser.parse_args(), []
    os.environ["PARADEC_LAYOUTS"] = "plain"  # not those of the CPU, on which nothing runs
    jax.config.update("jax_enable_compilation_cache", False)  # which knows no such programs

    def add(where: str, preset: str, what: str, text: str, needed: int | None = None) -> None:
        found = count(text)
        row: dict[str, Any] = {"device": where, "preset": preset, "what": what, **found}
        row["a_layer"] = round(found["kernels"] / shape_of(preset).layers, 2)
        row["share"] = needed and round(found["bytes"] / needed, 3)  # of weights and cache
        rows.append(row)
        print(*row.values(), sep=" | ", flush=True)
        if options.out is not None:
            write_record(options.out, vars(options) | {"out": None}, {"rows": rows})

    print("device | preset | what | kernels | bytes | looks | a layer | of weights and cache")
    for where in options.devices:
        for preset in options.presets:
            for positions in options.positions:
                made = call(shape_of(preset), positions, where)
                add(where, preset, f"{positions} positions", *made)
        for preset, setting in ((p, s) for p in options.steps for s in TABLES[PRESETS[p].family]):
            if not setting.decoder.further_networks:
                text = step(shape_of(preset), setting, where)
                add(where, preset, f"{setting.name} {setting.label()}", text)


if __name__ == "__main__":
    main()
