"""Rematerialisation by name: what of a block is kept for the backward pass.

::

    none       everything
    layer      the block's input
    dots       the outputs of its products with matrices too; norms, attention, activations are made anew
    offload    as `layer`, but the block's input waits in the host's memory
"""

from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from paradec_jax.nn.visibility import Stream

INPUT = "block input"


def rematerialised(block: type[nn.Module], name: str) -> Any:
    """The class of blocks whose backward pass keeps what `name` says.

    "offload" asks the devices of the mesh in force, which a plan may only know by name, else the
    default backend's.

    Raises:
      ValueError: "offload" where devices cannot keep arrays in the host's memory.
    """
    policies = jax.checkpoint_policies
    if name == "layer":
        return nn.remat(block)
    if name == "dots":
        return nn.remat(block, policy=policies.dots_with_no_batch_dims_saveable)
    if name == "offload":
        planned = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        device = jax.devices()[0]
        # Else the program is compiled for other devices.
        here = planned is None or planned.device_kind == device.device_kind
        if here and "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
            raise ValueError(
                "remat 'offload' keeps arrays in the host's memory, which devices of kind "
                f"{device.device_kind!r} cannot: use 'layer'"
            )
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return nn.remat(block, policy=policy)
    return block


def block_input(x: Stream) -> Stream:
    """Names the stream where it enters a block, for "offload"."""
    return checkpoint_name(x, INPUT)
