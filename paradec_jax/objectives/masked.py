"""Training of models that fill a canvas, by the bound of MDLM (Sahoo et al. 2024, arXiv 2406.07524):
of denoisers, of models of full attention as LLaDA (arXiv 2502.09992) and Dream (arXiv 2508.15487)
are trained, and from a causal model on.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from paradec_jax.config import FullAttentionConfig
from paradec_jax.data.endless import Endless
from paradec_jax.data.jsonl import Examples
from paradec_jax.data.text import WindowMaker
from paradec_jax.losses import BoundRules, ForcingRules, forcing_loss, masked_diffusion_loss
from paradec_jax.models import batch_flops
from paradec_jax.objective import Objective
from paradec_jax.objectives.filling import filling, say_mask
from paradec_jax.objectives.job import Job, Training
from paradec_jax.objectives.options import Bare
from paradec_jax.records import choices
from paradec_jax.store import Model


@choices
class Masked(Training):
    """Trains a model to fill a canvas. Its data are read as one text: rows are windows of `--length`
    tokens from anywhere in it.

    What the loss does not count, such as a prompt, is never hidden.

    Attributes:
      sft: each row is an example instead, filled up with stop tokens that count, and all rows count
        alike, whatever the lengths of their answers (LLaDA's finetuning).
      alignment: which token a position predicts in a model that was causal, its own or the next
        one, which is the default.
      mask: the mask of a causal model, a token or its id; by default one that tokenizer, template
        and data do not use.
      forcing: length of blocks that the model learns to write with several in flight, each of which
        sees those before it alone (D2F); its teacher is the model that the run begins with.
      labels: with forcing, what hidden tokens are drawn to: the distributions of the teacher, or the
        tokens of the data.
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
      rules: noise of the bound.
    """

    sft: bool = False
    alignment: Literal["own", "next"] | None = None
    mask: str | None = None
    forcing: int | None = None
    labels: Literal["teacher", "data"] = "teacher"
    chunk: int | None = 256
    rules: Bare[BoundRules] = BoundRules()

    families = ("masked_diffusion", "full_attention", "causal")
    without = ("packed",)

    @property
    def windows(self) -> bool:
        """As of the base."""
        return not self.sft

    def train(self, job: Job) -> Model:
        """One part: as many updates as the run has."""
        model = self.begun(job)
        if job.model.family == "causal":
            say_mask(model)
        if job.held_out is not None:
            self.rows(job, job.held_out)  # one that is too short is refused before the training
        data = self.rows(job, job.examples)
        flops = batch_flops(model.network)
        if self.forcing is not None:
            words = f"in_flight --length {self.forcing}"
            model = dataclasses.replace(model, decoder=words)
            teacher = dict(model.params) if self.labels == "teacher" else None
            loss = self.forced(model, self.labels)
            return job.fit("forcing", model, loss, data, frozen=teacher, flops=flops)
        loss = masked_diffusion_loss(model.network, model.token_spec, self.rules, chunk=self.chunk)
        return job.fit("masked", model, loss, data, flops=flops)

    def forced(self, model: Model, labels: str) -> Objective:
        """The loss of discrete diffusion forcing.

        Raises:
          ValueError: a model of another family than full attention.
        """
        if not isinstance(model.config, FullAttentionConfig):
            raise ValueError(f"forcing needs a model of full attention, not of {model.family}")
        rules = ForcingRules(self.forcing or 1, labels=labels, certainty=self.rules.certainty)
        return forcing_loss(model.network, model.token_spec, rules, chunk=self.chunk)

    def begun(self, job: Job) -> Model:
        """The model that the training begins with.

        Raises:
          ValueError: options that the model has no use for, sliding windows, or no token for the
            mask.
        """
        if job.model.family == "causal":
            return filling(job, FullAttentionConfig, self.mask, self.alignment)
        if self.mask is not None or self.alignment is not None:
            raise ValueError(
                f"alignment and mask are options of a causal model, and {job.run.model} fills masks"
            )
        return job.model

    def rows(self, job: Job, examples: Examples) -> Endless:
        """Batches of windows, or of examples."""
        if not self.sft:
            return windows(job, examples)
        spec = job.model.token_spec
        return job.batches(examples, filled=True, filler=(*spec.stop, spec.pad)[0])

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """The bound in nats a token, and the share of hidden tokens that are guessed, without
        dropout; of a causal model as one that fills masks.
        """
        model = self.begun(job) if model.family == "causal" else model
        if self.forcing is not None:
            means = job.means(self.forced(model, "data"), model, self.rows(job, job.measured))
            return {"nats a hidden token": means["loss"], "accuracy": means["accuracy"]}
        rules = dataclasses.replace(self.rules, cart=None, certainty=0.0)
        loss = masked_diffusion_loss(
            model.network, model.token_spec, rules, dropout=False, chunk=self.chunk
        )
        means = job.means(loss, model, self.rows(job, job.measured))
        return {"nats a token": means["loss"], "accuracy": means["accuracy"]}


def windows(job: Job, examples: Examples) -> Endless:
    """Batches of windows of all examples, one after the other; an epoch has as many tokens as they
    have.
    """
    rows = max(job.run.batch_tokens // job.length // job.multiple, 1) * job.multiple
    make = WindowMaker(examples.ids, job.run.seed, rows, job.length, counted=examples.counted)
    return Endless(make, digest=examples.digest)
