"""Training of a residual head beside a frozen model of blocks: multi-token residual prediction
(MRP, 2605.18817).

The head learns how the model's scores move when tokens of a block are revealed, so that one call of
the model serves several reveals. Fewer calls alone prove nothing, since a lower threshold brings
them without a head: read them beside the share of equal answers and `kl_ratio`, the head's
divergence from the model over that of a head that adds nothing.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from paradec_jax.config import ResidualHeadConfig
from paradec_jax.decode import BlockDenoising
from paradec_jax.families import choose
from paradec_jax.losses import ResidualRules, residual_loss
from paradec_jax.losses.block_diffusion import lengths_of
from paradec_jax.models.residual_head import ResidualHeadNetwork, inherited
from paradec_jax.objective import Objective
from paradec_jax.objectives.answers import here, speed
from paradec_jax.objectives.job import Job, Training
from paradec_jax.objectives.options import Bare
from paradec_jax.records import choices
from paradec_jax.store.model import Model, ResidualHead


@choices
class Head(Training):
    """Trains a residual head beside a model of block diffusion, which stays as it is.

    Attributes:
      depth: blocks of the head, 1 to 8.
      init: how its parameters begin: adding nothing (zero_gain), adding nothing with the model's
        first layers as its blocks (inherited), as the released heads (normal_0.2), or at the size
        of hidden states (ordinary).
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
      rules: rules of the loss.
    """

    depth: int = 3
    init: Literal["zero_gain", "inherited", "normal_0.2", "ordinary"] = "zero_gain"
    chunk: int | None = 32
    rules: Bare[ResidualRules] = ResidualRules(unroll=2)

    families = ("block_diffusion",)
    without = ("lora", "blend")

    def train(self, job: Job) -> Model:
        """One part: as many updates as the run has."""
        model, key = job.model, job.run.key
        config = ResidualHeadConfig.of(model.config, self.depth)
        if self.init == "inherited":
            params = inherited(config, key, here(model).params)
        else:
            params = ResidualHeadNetwork.init_params(config, key, self.init)
        head, data = ResidualHead(config, params), job.batches(job.examples, **self.rows(model))
        head = job.fit("head", head, self.loss(model, head), data, frozen=dict(model.params))
        mix = "none" if self.rules.direct else "sum"
        decoder = f"residual --head-steps {self.rules.unroll} --mix {mix}"
        return dataclasses.replace(model, head=head, decoder=decoder)

    def loss(self, model: Model, head: ResidualHead) -> Objective:
        """The loss of a head's parameters, and of the model's as frozen ones."""
        return residual_loss(
            model.network, head.network, model.token_spec, self.rules, chunk=self.chunk
        )

    def rows(self, model: Model) -> dict[str, int]:
        """Options of batches of whole blocks."""
        block = math.lcm(*lengths_of(model.network, self.rules.blocks))
        return {"block": block, "filler": model.token_spec.pad}

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """`kl_ratio`, and what decoding gains: `Residual` of K steps with a head, `BlockDenoising`
        without one.
        """
        ratio = 1.0
        decoder: Any = BlockDenoising()
        if model.head is not None:
            data, loss = job.once(**self.rows(model)), self.loss(model, model.head)
            ratio = job.means(loss, model.head, data, dict(model.params))["kl_ratio"]
            model = dataclasses.replace(model, head=here(model.head))
            decoder = choose(model.family, model.decoder).decoder
        return {
            "kl_ratio": ratio,
            **speed(job, model, decoder, BlockDenoising(rule="static"), model.network.block),
        }
