"""Training of a denoiser on text, by the bound of MDLM (Sahoo et al. 2024, arXiv 2406.07524)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from paradec_jax.config.bounds import Ranged
from paradec_jax.data.endless import Endless
from paradec_jax.data.jsonl import Examples
from paradec_jax.data.text import WindowMaker
from paradec_jax.losses import BoundRules, masked_diffusion_loss
from paradec_jax.models import batch_flops
from paradec_jax.objectives.run import Bare, Job, length_of
from paradec_jax.store.model import Model


@dataclasses.dataclass(frozen=True)
class Masked(Ranged):
    """Trains a denoiser on its data, read as one text: rows are windows of `--length` tokens from
    anywhere in it.

    What the loss does not count, such as a prompt, is never hidden.

    Attributes:
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
      rules: noise of the bound.
    """

    chunk: int | None = 256
    rules: Bare[BoundRules] = BoundRules()  # noqa: RUF009

    families: ClassVar[tuple[str, ...]] = ("masked_diffusion",)
    without: ClassVar[tuple[str, ...]] = ("packed",)
    windows: ClassVar[bool] = True

    def train(self, job: Job) -> Model:
        """One part: as many updates as the run has."""
        if job.held_out is not None:
            windows(job, job.held_out)  # one that is too short is refused before the training
        data = windows(job, job.examples)
        network = job.model.network
        loss = masked_diffusion_loss(network, job.model.token_spec, self.rules, chunk=self.chunk)
        flops = batch_flops(network)
        return job.fit("masked", job.model, loss, data, updates=job.updates(data), flops=flops)

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """The bound in nats a token, and the share of hidden tokens that are guessed, without
        dropout.
        """
        assert job.held_out is not None
        options: Any = {"dropout": False, "chunk": self.chunk}
        loss = masked_diffusion_loss(model.network, model.token_spec, self.rules, **options)
        found = job.means(loss, model, windows(job, job.held_out))
        return {"nats a token": found["loss"], "accuracy": found["accuracy"]}


def windows(job: Job, examples: Examples) -> Endless:
    """Batches of windows of all examples, one after the other; an epoch has as many tokens as they
    have.
    """
    length = length_of(job.run, job.model)
    rows = max(job.run.batch_tokens // length // job.multiple, 1) * job.multiple
    make = WindowMaker(examples.ids, job.run.seed, rows, length, counted=examples.counted)
    return Endless(make, digest=examples.digest)
