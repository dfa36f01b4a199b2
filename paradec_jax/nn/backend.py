"""The switches for what suits a backend and is nobody's definition: layouts, and who computes attention."""

import os

import jax

SWITCH = "PARADEC_LAYOUTS"
ATTENTION = "PARADEC_ATTENTION"


def cpu_layouts() -> bool:
    """Whether products are laid out for XLA's CPU backend: where that is the default one, unless told otherwise.

    The environment variable `PARADEC_LAYOUTS` ("cpu" or "plain") decides for a whole process, since compiled programs
    do not know by which layout they were traced.

    Raises:
      ValueError: another value of the variable.
    """
    told = os.environ.get(SWITCH)
    if told not in (None, "cpu", "plain"):
        raise ValueError(f"{SWITCH} must be 'cpu' or 'plain', not {told!r}")
    return jax.default_backend() == "cpu" if told is None else told == "cpu"


def cudnn_attention() -> bool:
    """Whether cuDNN computes attention that is not causal: where the default backend is CUDA, unless told otherwise.

    The environment variable `PARADEC_ATTENTION` ("cudnn" or "plain") decides for a whole process, as above.

    Raises:
      ValueError: another value of the variable.
    """
    told = os.environ.get(ATTENTION)
    if told not in (None, "cudnn", "plain"):
        raise ValueError(f"{ATTENTION} must be 'cudnn' or 'plain', not {told!r}")
    if told is None:
        return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version
    return told == "cudnn"


def check_host_memory() -> None:
    """Refuses to keep arrays of a program in the host's memory where devices cannot.

    The devices are those of the mesh in force, which a plan may only know by name, else the default backend's.

    Raises:
      ValueError: devices without "pinned_host" memory.
    """
    planned = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = jax.devices()[0]
    if planned is not None and planned.device_kind != device.device_kind:
        return  # compiled for devices that are not here
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise ValueError(
            "remat 'offload' keeps arrays in the host's memory, which devices of kind "
            f"{device.device_kind!r} cannot: use 'layer'"
        )
