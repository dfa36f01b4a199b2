"""Kernels that a decoding call launches on a GPU, counted on a machine without one.

    make kernels                                                          # a table of presets
    python -m experiments.systems.kernels --presets qwen3-0.6b --positions 1 8 --devices h100 a100

JAX's CUDA plugin compiles the programs for a described device, and nothing runs (`make kernels`
brings it). A preset is bfloat16 and not scanned, at batch 1, after 256 cached positions. A small
model's kernel takes 2 to 4 microseconds on an H100, whatever it does.

::

    kernels     fusions, calls of libraries, copies; bodies of loops as often as they run
    looks       conditions that the host reads: of loops whose iterations only the data knows, and
                conditionals, whose dearest branch counts
    bytes       read and written by all kernels, against weights and cache

Autotuning is off, since it runs kernels; cuDNN is not there.
"""

import argparse
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["PARADEC_LAYOUTS"] = "plain"  # not those of the CPU, on which nothing runs

import jax
import jax.numpy as jnp
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
POSITIONS = (1, 8, 32)
STEPS = ("smollm2-135m",)  # whose families' decoders are counted, those of `paradec compare`
NEW = 64  # tokens of a request
# compute capability, cores, shared memory of a block, memory and its bytes a second, cache, name
DEVICES = {
    "h100": (9, 132, 232_448, 84_978_434_048, 3_352_320_000_000, 52_428_800, "H100 80GB HBM3"),
    "h200": (9, 132, 232_448, 150_000_000_000, 4_890_000_000_000, 62_914_560, "H200"),
    "a100": (8, 108, 166_912, 84_978_434_048, 2_039_000_000_000, 41_943_040, "A100-SXM4-80GB"),
}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "copy-done"}
PARTS = ("dynamic-slice", "gather", "slice")  # read some of what they are given


@functools.cache
def device(name: str) -> Any:
    """Where a program for a described device lies.

    Raises:
      ValueError: the plugin is not there.
    """
    major, cores, shared, memory, rate, cache, kind = DEVICES[name]
    text = f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32
      shared_memory_per_block: 49152 shared_memory_per_core: {shared + 1024}
      threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {128 if major > 8 else 64}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {rate} l2_cache_size: {cache} clock_rate_ghz: 1.98
      device_memory_size: {memory} shared_memory_per_block_optin: {shared}
      cuda_compute_capability {{ major: {major} }} registers_per_core_limit: 65536
      registers_per_block_limit: 65536 }} platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "NVIDIA {kind}" """
    try:
        described = topologies.get_topology_desc(
            name, platform="cuda", target_config=text, topology="1x1x1"
        )
    except Exception as error:  # of the plugin: any
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"JAX's CUDA plugin does not start ({reason}): `make kernels`") from None
    return jax.sharding.SingleDeviceSharding(described.devices[0])


@dataclasses.dataclass
class Count:
    """What a loop's body launches.

    Attributes:
      kernels: by kind, a fusion's with it.
      looks: from the host, the loop's own condition among them.
      bytes: that kernels read and write.
    """

    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    looks: int = 0
    bytes: int = 0

    def add(self, other: "Count", times: int = 1) -> None:
        """Adds so many times another one."""
        self.kernels.update({kind: times * n for kind, n in other.kernels.items()})
        self.looks += times * other.looks
        self.bytes += times * other.bytes


def count(text: str) -> Count:
    """Of an iteration of the outermost loop with most kernels in a program's `as_text()`; loops
    that the data ends count as one iteration.
    """
    hlo = Hlo(text)
    loops = [one for one in hlo.computations[hlo.entry].values() if one.op == "while"]
    counted = [_body(hlo, *called_by(one)) for one in loops]
    most = max(counted, key=lambda one: one.kernels.total())
    most.looks += 1
    return most


def _body(hlo: Hlo, *names: str) -> Count:
    """Of computations, such as a loop's condition and body."""
    total = Count()
    for name in names:
        inside = hlo.computations[name]
        for one in inside.values():
            called = [part for part in called_by(one) if part in hlo.computations]
            if one.op == "while":
                trips = hlo.trips(name, one)
                total.add(_body(hlo, *called), 1 if trips is None else trips)
                total.looks += trips is None
            elif one.op == "conditional":
                branches = [_body(hlo, part) for part in called]
                total.add(max(branches, key=lambda branch: branch.kernels.total()))
                total.looks += 1
            elif one.op == "call":
                total.add(_body(hlo, *called))
            elif one.op not in FREE:
                kind = one.rest.partition("kind=")[2].partition(",")[0] or one.op
                total.kernels[kind] += 1
                total.bytes += _moved(hlo, one, inside)
    return total


def _moved(hlo: Hlo, one: Instruction, inside: dict[str, Instruction]) -> int:
    """Bytes that a kernel reads and writes: of a buffer that it updates in place the update, of one
    from which it takes a part that part.
    """
    given = [inside[name].bytes if name in inside else 0 for name in one.operands]
    if one.op != "fusion":
        return one.bytes + sum(given)
    parts, written = hlo.computations[called_by(one)[0]], one.bytes
    for part in parts.values():
        if part.op == "dynamic-update-slice":
            written += parts[part.operands[1]].bytes - part.bytes
    for part in parts.values():
        if part.op == "parameter":
            users = [user for user in parts.values() if part.name in _through(user, parts)]
            if all(user.op == "dynamic-update-slice" for user in users):
                given[int(part.rest)] = 0
            elif all(user.op in PARTS for user in users):
                taken = sum(user.bytes for user in users)
                given[int(part.rest)] = min(given[int(part.rest)], taken)
    return max(written, 0) + sum(given)


def _through(one: Instruction, parts: dict[str, Instruction]) -> list[str]:
    """What an instruction reads first, before changes of shape; all that any other one reads."""
    if one.op in ("bitcast", "reshape"):
        return []
    operands = one.operands[:1] if one.op in (*PARTS, "dynamic-update-slice") else one.operands
    found = []
    for name in operands:
        while name in parts and parts[name].op in ("bitcast", "reshape"):
            name = parts[name].operands[0]
        found.append(name)
    return found


def shape_of(preset: str, **changes: Any) -> ModelConfig:
    """The preset as an accelerator runs it."""
    config, half = PRESETS[preset], {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    scans = {"scan_layers": False} if hasattr(config, "scan_layers") else {}
    return dataclasses.replace(config, **half, **scans, **changes)


def on(place: Any, tree: Any) -> Any:
    """Shapes of arrays that lie there."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def _compiled(traced: Any) -> str:
    lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"}).as_text()


def call_text(config: ModelConfig, positions: int, where: str, batch: int = 1) -> tuple[str, int]:
    """The program of a loop of calls, and the bytes of weights and cache that a call needs."""
    network, place = network_at(config), device(where)
    params, cache = jax.eval_shape(network.prepare, parameter_shapes(config)), None
    if network.visibility != "full":
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
        cache = jax.eval_shape(lambda keys: network.init_cache(keys, CONTEXT + positions), keys)
    numbers = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((batch, positions), (batch,), ())]
    loop = jax.jit(functools.partial(run_calls, network), donate_argnums=(1, 2))
    traced = loop.trace(*on(place, (params, cache, *numbers)))
    table = network.embedding(params)
    tied = getattr(config, "tie_embeddings", False) and "head" not in params.params
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, cache)))
    return _compiled(traced), needed - (0 if tied else table.size * table.dtype.itemsize)


def step_text(config: ModelConfig, setting: Any, where: str) -> str:
    """The program of steps of a decoder with some setting."""
    network = network_of(config)
    decoder = setting.decoder.bind(network, CONTEXT + NEW, spec_of(config))
    request = make_request(np.zeros((1, CONTEXT), np.int32), max_new_tokens=NEW)
    knobs = jax.tree.map(np.asarray, decoder.knobs(setting.knobs))
    params = jax.eval_shape(decoder.prepare, parameter_shapes(config))
    state = jax.eval_shape(drive.start, decoder, params, request, knobs)
    arrays = on(device(where), (params, state, knobs, np.int32(1)))
    return _compiled(drive.advance.trace(decoder, *arrays))


def rows_of(
    presets: Sequence[str], positions: Sequence[int], steps: Sequence[str], where: str
) -> list[dict[str, Any]]:
    """A row a call, and one a decoder without a second network."""
    rows: list[dict[str, Any]] = []

    def add(preset: str, config: Any, what: str, text: str, needed: int | None = None) -> None:
        found, layers = count(text), config.layers
        total = found.kernels.total()
        row = {"device": where, "preset": preset, "what": what, "kernels": total}
        row |= {"a_layer": round(total / layers, 2), "kinds": dict(found.kernels)}
        row |= {"looks": found.looks, "bytes": found.bytes, "needed": needed}
        rows.append(row)
        share = "" if needed is None else f", {found.bytes / needed:.2f} times weights and cache"
        kernels = f"{total} kernels, {total / layers:.1f} a layer, {found.looks} looks"
        print(
            f"{where}, {preset}, {what}: {kernels}, {found.bytes / 1e6:,.0f} MB{share}", flush=True
        )

    for preset in presets:
        config = shape_of(preset)
        for width in positions:
            text, needed = call_text(config, width, where)
            add(preset, config, f"{width} positions", text, needed)
    for preset in steps:
        config = shape_of(preset)
        for setting in TABLES[config.family]:
            if not setting.decoder.further_networks:
                what = f"{setting.name} {setting.label()}".strip()
                add(preset, config, what, step_text(config, setting, where))
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--presets", nargs="*", default=CALLS, help="shapes of counted calls")
    parser.add_argument("--positions", nargs="+", type=int, default=POSITIONS)
    parser.add_argument("--steps", nargs="*", default=STEPS, help="shapes of counted decoders")
    parser.add_argument("--devices", nargs="+", default=["h100"], choices=list(DEVICES))
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    rows = []
    for where in options.devices:
        rows += rows_of(options.presets, options.positions, options.steps, where)
        if options.out is not None:
            write_record(options.out, vars(options) | {"out": None}, {"rows": rows})


if __name__ == "__main__":
    main()
