"""Devices that programs are planned for, and the traced programs: an update of `fit`, and both of a
decoder. Nothing is made or run.
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
from paradec_jax.families import family_of, network_of, parameter_shapes
from paradec_jax.models import update_flops
from paradec_jax.sharding.layout import shardings
from paradec_jax.sharding.mesh import AXES, make_mesh, on, row_shardings
from paradec_jax.train import TrainState, adamw, make_train_step
from paradec_jax.train.step import state_shardings

STEPS = 1000  # of the schedule, whose length changes no shape
# Asked of a machine that is no TPU's, for which its runtime would wait, and without which one plan
# at a time is made.
_NO_HOST = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
}


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
        devices = jax.devices("cpu")
        if len(devices) < int(shape):
            raise ValueError(
                f"target {target!r} comes too late: JAX runs already, with {len(devices)} of the CPU's"
            )
        return devices[: int(shape)]
    if kind == "cpu" or not all(part.isdigit() for part in shape.split("x")):
        raise ValueError(
            f"target must be like 'v5p:2x2x2' (chips of a TPU) or 'cpu:8', not {target!r}"
        )
    from jax.experimental import topologies

    for name, value in _NO_HOST.items():
        os.environ.setdefault(name, value)
    try:
        devices = list(topologies.get_topology_desc(platform="tpu", topology_name=target).devices)
    except Exception as error:  # of the plugin: any
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"the TPU's compiler does not start for {target!r} ({reason}): install the extra 'tpu', "
            f"in an environment of its own, or plan for 'cpu:8'"
        ) from None
    os.environ["PARADEC_LAYOUTS"] = "plain"
    return devices


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
    masks = not isinstance(config, RecurrentDepthConfig | CausalConfig)
    return TokenSpec(mask=config.vocab_size - 1, alignment="own") if masks else TokenSpec()


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
      rows: rows of the batch.
      length: tokens of each prompt.
      new: tokens to be written after them.
      name: name of the decoder, as on the command line; it has the defaults of its paper.

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
