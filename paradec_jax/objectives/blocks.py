"""Training of block diffusion, by SDAR's bound: from a causal model, or on from a model that writes
blocks.

A causal model's weights know the words, but a position of it predicts the next one. A model of
alignment "next" goes on so. One of alignment "own" has to look back one position; `look_back` puts
a layer for that below the others, which passes everything through until it has learned.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from paradec_jax.config import BlockDiffusionConfig
from paradec_jax.decode import AutoRegressive, BlockDenoising
from paradec_jax.families import init_params
from paradec_jax.losses import BlockRules, block_diffusion_loss, next_token_loss
from paradec_jax.models import batch_flops
from paradec_jax.noise import BlockNoise
from paradec_jax.objective import Objective
from paradec_jax.objectives.answers import speed
from paradec_jax.objectives.filling import filling, say_mask
from paradec_jax.objectives.job import Job, Training
from paradec_jax.records import choices
from paradec_jax.store import Model

BLOCK = 8  # tokens of a block where a causal model begins to write them


@choices
class Blocks(Training):
    """Trains a model to write blocks by denoising them; what the loss does not count, such as a
    prompt, stays clean.

    Attributes:
      blocks: lengths of blocks, one of them drawn for each row; the first is the model's. By
        default those of the model, or 8 where it is causal.
      noise: what draws a level of noise, each sample or each block, or exact counts of each block, or
        groups of blocks, for several in flight (MultiTF).
      group: blocks of the largest group.
      certainty: beta of certainty forcing, which makes right guesses surer (dParallel).
      alignment: which token a position predicts, its own or the next one; as before by default, so
        next of a causal model.
      look_back: whether a layer is put below those of a causal model, which adds nothing at first.
      mask: the mask of a causal model, a token or its id; by default one that tokenizer, template
        and data do not use.
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
    """

    blocks: tuple[int, ...] | None = None
    noise: Literal["sample", "block", "count", "group"] = "sample"
    group: int = 4
    certainty: float = 0.0
    alignment: Literal["own", "next"] | None = None
    look_back: bool = False
    mask: str | None = None
    chunk: int | None = 256

    BOUNDS = {"group": (2, 4096)}  # noqa: RUF012
    families = ("causal", "block_diffusion")

    def train(self, job: Job) -> Model:
        """One part: as many updates as the run has."""
        model, blocks = self.begun(job)
        if job.model.family == "causal":
            say_mask(model)
        data = job.batches(job.examples, block=math.lcm(*blocks), filler=model.token_spec.pad)
        loss = self.loss(model, self.noise, blocks, self.certainty)
        return job.fit("blocks", model, loss, data, flops=batch_flops(model.network))

    def loss(
        self, model: Model, noise: str, blocks: tuple[int, ...], certainty: float = 0.0
    ) -> Objective:
        """SDAR's bound, perhaps with certainty forcing."""
        rules = BlockRules(BlockNoise(noise, self.group), blocks, certainty)
        return block_diffusion_loss(model.network, model.token_spec, rules, chunk=self.chunk)

    def begun(self, job: Job) -> tuple[Model, tuple[int, ...]]:
        """The model that the training begins with, and the lengths of its blocks.

        Raises:
          ValueError: options that the model has no use for, sliding windows, or no token for the
            mask.
        """
        config: Any = job.model.config
        name = job.run.model
        causal = config.family == "causal"
        if not causal and (self.look_back or self.mask is not None):
            raise ValueError(
                f"look_back and mask are options of a causal model, and {name} writes blocks"
            )
        if self.look_back and job.run.lora is not None:
            raise ValueError(f"look_back adds a layer, which an adapter of {name} cannot have")
        usual = (BLOCK,) if causal else (config.block, *(config.blocks or ()))
        blocks = self.blocks or tuple(dict.fromkeys(usual))
        lengths = tuple(sorted({*blocks}))
        changes: dict[str, Any] = {"layers": config.layers + self.look_back, "block": blocks[0]}
        changes["blocks"] = lengths if len(lengths) > 1 else None
        model = filling(job, BlockDiffusionConfig, self.mask, self.alignment, **changes)
        if self.look_back:
            key = jax.random.fold_in(job.run.key, 0)
            layer = jax.jit(lambda key: init_params(model.config, key)["layer_0"])(key)
            model = dataclasses.replace(model, params=above(model.params, layer))
        return model, blocks

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """Nats a token, of a model of blocks a bound; tokens a call, and whether the answers are
        those one by one.
        """
        block, pad = getattr(model.config, "block", 1), model.token_spec.pad
        if isinstance(model.config, BlockDiffusionConfig):
            data = job.once(block=block, filler=pad)
            nats = job.means(self.loss(model, "count", (block,)), model, data)["loss"]
            decoders: tuple[Any, Any] = BlockDenoising(), BlockDenoising(rule="static")
        else:
            nats = job.means(next_token_loss(model.network, chunk=self.chunk), model)["loss"]
            decoders = AutoRegressive(), AutoRegressive()
        return {"nats a token": nats, **speed(job, model, *decoders, block)}


def above(params: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with `layer` below their layers; its branches add zero, so that it passes
    everything through.
    """
    names = {f"layer_{i}": f"layer_{i + 1}" for i in range(len(params))}
    moved = {names.get(name, name): tree for name, tree in params.items()}
    attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
    attention["out"], mlp["down"] = jnp.zeros_like(attention["out"]), jnp.zeros_like(mlp["down"])
    return moved | {"layer_0": dict(layer) | {"attention": attention, "mlp": mlp}}
