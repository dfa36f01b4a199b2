"""Devices that a program is planned for: their numbers and their compiler, without the devices."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax

from paradec_jax.sharding.mesh import AXES, make_mesh

GIB = 2**30
# What one chip's memory holds, in bytes: a GPU's by its name, the TPU's as its compiler has it.
LIMITS = {"80 GB": 80 * 10**9, "141 GB": 141 * 10**9, "v5p": round(95.74 * GIB)}
# Asked of a machine that is no TPU's, for which its runtime would wait, and without which one plan at a time is made.
_NO_HOST = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
}


def devices_of(target: str) -> list[Any]:
    """The devices of a target: "v5p:2x2x2" and the like by the TPU's compiler, "cpu:8" simulated.

    Call it before anything runs: a simulated device is made when JAX starts, and products are laid out for the
    target (`PARADEC_LAYOUTS`).

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
        raise ValueError(f"target must be like 'v5p:2x2x2' (chips of a TPU) or 'cpu:8', not {target!r}")
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
    """A mesh such as "fsdp=8" or "data=2,tensor=4" of a target's devices, the first ones where it needs fewer.

    Raises:
      ValueError: a text that is no mesh, or more devices than the target has.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in mesh.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdigit() or not int(size):
            raise ValueError(f"mesh must be sizes of {', '.join(AXES)} such as 'data=2,fsdp=4', not {mesh!r}")
        sizes[name] = int(size)
    count = sizes["data"] * sizes["fsdp"] * sizes["tensor"]
    if count > len(devices):
        raise ValueError(f"mesh {mesh!r} needs {count} devices, but the target has {len(devices)}")
    return make_mesh(**sizes, devices=list(devices[:count]))
