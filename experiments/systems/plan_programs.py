"""Programs to be planned: the train step of a preset, and the two halves of decoding with it, traced for shapes."""

import dataclasses
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
from paradec_jax.sharding.layout import placed_shapes, row_shardings, shardings
from paradec_jax.sharding.mesh import on
from paradec_jax.train import adamw
from paradec_jax.train.place import planned
from paradec_jax.train.step import make_train_step

STEPS = 1000  # of the schedule, whose length changes no shape


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program and what the model asks of it.

    Attributes:
      traced: of `jax.jit(..).trace`.
      work: the least operations that it can cost by the network's own `work`, on all devices; None where unknown.
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
        return losses.recurrent_loss(network, losses.poisson_lognormal(config.mean_recurrence), chunk=chunk)
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


def train_program(config: ModelConfig, mesh: Any, rows: int, length: int, chunk: int | None) -> Program:
    """The update that `fit(mesh=)` compiles: AdamW, clipped, its state donated."""
    params, optimizer = parameter_shapes(config), adamw(1e-4, STEPS)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, place = planned(mesh, params, optimizer, key)
    step = make_train_step(loss_of(config, chunk), optimizer)
    traced = place.traced(step, state, None, batch_of(config, rows, length))
    work = int(update_flops(network_of(config), rows, length))
    return Program(traced, work, constant_steps(config))


def constant_steps(config: ModelConfig) -> int:
    """Recurrences that carry no gradient, in the mean: the one loop of a train step that only the data ends."""
    if not isinstance(config, RecurrentDepthConfig):
        return 1
    return max(config.mean_recurrence + 1 - config.mean_backprop_depth, 0)


def decode_programs(
    config: ModelConfig, mesh: Any, rows: int, length: int, new: int, name: str
) -> tuple[Program, Any]:
    """Reading prompts of `length` tokens, and a function from where its state lies to a step of decoding.

    Args:
      config: the model.
      mesh: of devices.
      rows: of the batch.
      length: tokens of each prompt.
      new: tokens to be written after them.
      name: of the decoder, as on the command line, with the defaults of its paper.

    Raises:
      ValueError: a decoder that the family has not, that needs a second network, or a request beyond the model.
    """
    family = family_of(config)
    if name not in family.decoders or family.decoders[name].further_networks:
        known = [other for other, one in family.decoders.items() if not one.further_networks]
        raise ValueError(f"decode must be one of {', '.join(known)} for {family.name}, not {name!r}")
    network = network_of(config)
    decoder = family.decoders[name].bind(network, length + new, spec_of(config))
    tokens = np.zeros((rows, length), np.int32)
    request = make_request(tokens, max_new_tokens=new)
    decoder.check(request)
    knobs = jax.tree.map(np.asarray, decoder.knobs(None))
    params = jax.eval_shape(decoder.prepare, parameter_shapes(config))
    params = placed_shapes(params, shardings(params, mesh))
    request = placed_shapes(request, row_shardings(request, mesh))
    context = {} if network.visibility == "full" else {"work": int(network.work(rows, length, 0).flops)}
    with on(mesh):
        start = drive.start.trace(decoder, params, request, knobs)

    def advance(where: Any) -> Program:
        state = placed_shapes(jax.eval_shape(drive.start, decoder, params, request, knobs), where)
        with on(mesh):
            return Program(drive.advance.trace(decoder, params, state, knobs, np.int32(1)), None)

    return Program(start, context.get("work")), advance
