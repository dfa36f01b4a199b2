"""Training of block diffusion, by SDAR's bound: from a causal model, or on from a model that writes
blocks.

A causal model's weights know the words, but a position of it predicts the next one. A model of
alignment "next" goes on so. One of alignment "own" has to look back one position; `look_back` puts
a layer for that below the others, which passes everything through until it has learned.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.config import BlockDiffusionConfig, TransformerConfig
from paradec_jax.decode import AutoRegressive, BlockDenoising
from paradec_jax.families import init_params
from paradec_jax.losses import BlockRules, block_diffusion_loss, next_token_loss
from paradec_jax.models import batch_flops
from paradec_jax.noise import BlockNoise
from paradec_jax.objective import Objective
from paradec_jax.objectives.answers import speed
from paradec_jax.objectives.folder import say
from paradec_jax.objectives.job import Job, Training
from paradec_jax.records import choices
from paradec_jax.store import Model
from paradec_jax.text.chat import conversation

BLOCK = 8  # tokens of a block where a causal model begins to write them


@choices
class Blocks(Training):
    """Trains a model to write blocks by denoising them; what the loss does not count, such as a
    prompt, stays clean.

    Attributes:
      blocks: lengths of blocks, one of them drawn for each row; the first is the model's. By
        default those of the model, or 8 where it is causal.
      noise: what draws a level of noise, each sample or each block, or exact counts of each block.
      alignment: which token a position predicts, its own or the next one; as before by default, so
        next of a causal model.
      look_back: whether a layer is put below those of a causal model, which adds nothing at first.
      mask: the mask of a causal model, a token or its id; by default one that tokenizer, template
        and data do not use.
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
    """

    blocks: tuple[int, ...] | None = None
    noise: Literal["sample", "block", "count"] = "sample"
    alignment: Literal["own", "next"] | None = None
    look_back: bool = False
    mask: str | None = None
    chunk: int | None = 256

    families = ("causal", "block_diffusion")

    def train(self, job: Job) -> Model:
        """One part: as many updates as the run has."""
        model, blocks = self.begun(job)
        data = job.batches(job.examples, block=math.lcm(*blocks), filler=model.token_spec.pad)
        loss = self.loss(model, self.noise, blocks)
        return job.fit("blocks", model, loss, data, flops=batch_flops(model.network))

    def loss(self, model: Model, noise: str, blocks: tuple[int, ...]) -> Objective:
        """SDAR's bound."""
        rules = BlockRules(BlockNoise(noise), blocks)
        return block_diffusion_loss(model.network, model.token_spec, rules, chunk=self.chunk)

    def begun(self, job: Job) -> tuple[Model, tuple[int, ...]]:
        """The model that the training begins with, and the lengths of its blocks.

        Raises:
          ValueError: options that the model has no use for, sliding windows, or no token for the
            mask.
        """
        model, name = job.model, job.run.model
        config: Any = model.config
        causal = config.family == "causal"
        if not causal and (self.look_back or self.mask is not None):
            raise ValueError(
                f"look_back and mask are options of a causal model, and {name} writes blocks"
            )
        if self.look_back and job.run.lora is not None:
            raise ValueError(f"look_back adds a layer, which an adapter of {name} cannot have")
        if config.windows:
            raise ValueError(f"{name} has sliding windows, which no model of blocks has")
        usual = (BLOCK,) if causal else (config.block, *(config.blocks or ()))
        blocks = self.blocks or tuple(dict.fromkeys(usual))
        fields = dataclasses.fields(TransformerConfig)
        shape = {field.name: getattr(config, field.name) for field in fields}
        shape |= {"layers": config.layers + self.look_back, "block": blocks[0]}
        lengths = tuple(sorted({*blocks}))
        config = BlockDiffusionConfig(**shape, blocks=lengths if len(lengths) > 1 else None)
        params = dict(model.params)
        if self.look_back:
            key = jax.random.fold_in(job.run.key, 0)
            params = above(params, jax.jit(lambda key: init_params(config, key)["layer_0"])(key))
        mask = self.unused(job) if causal else model.token_spec.mask
        alignment = self.alignment or model.token_spec.alignment
        spec = dataclasses.replace(model.token_spec, mask=mask, alignment=alignment)
        model = dataclasses.replace(model, config=config, params=params, token_spec=spec, head=None)
        return model, blocks

    def unused(self, job: Job) -> int:
        """Id of the mask: of the option, else a row of the embedding or a special token that
        nothing uses.

        Raises:
          ValueError: there is none.
        """
        spec, words, size = job.model.token_spec, job.model.tokenizer, job.model.config.vocab_size
        assert words is not None  # which has read the data
        used = {spec.bos, spec.pad, *spec.stop, *np.unique(job.examples.ids).tolist()}
        if job.model.chat_template:
            used.update(words.encode(job.model.chat_template))
            asked = {"role": "user", "content": "?"}
            for role in ("system", "assistant", "tool"):
                with contextlib.suppress(ValueError):  # of a role that the template refuses
                    talk = conversation(job.model, [asked, {**asked, "role": role}])
                    used.update(words.encode(talk))
        special = filter(words.is_special, reversed(range(words.vocab_size)))
        candidates: Iterable[int] = itertools.chain(range(words.vocab_size, size), special)
        if self.mask is not None:
            given = int(self.mask) if self.mask.isdecimal() else words.id_of(self.mask)
            candidates = [] if given is None or given >= size else [given]
        mask = next((token for token in candidates if token not in used), None)
        if mask is None:
            raise ValueError(
                f"mask must be a token that neither {job.run.model} nor its chat template nor the data use, "
                f"not {self.mask}"
            )
        say(f"the mask is token {mask} ({words.token_text(mask) or 'which has no text'})")
        return mask

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
