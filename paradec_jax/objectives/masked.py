"""Training of a denoiser on text, by the bound of MDLM (Sahoo et al. 2024, arXiv 2406.07524)."""

from collections.abc import Mapping

from paradec_jax.data.endless import Endless
from paradec_jax.data.jsonl import Examples
from paradec_jax.data.text import WindowMaker
from paradec_jax.losses import BoundRules, masked_diffusion_loss
from paradec_jax.models import batch_flops
from paradec_jax.objectives.job import Job, Training
from paradec_jax.objectives.options import Bare
from paradec_jax.records import choices
from paradec_jax.store import Model


@choices
class Masked(Training):
    """Trains a denoiser on its data, read as one text: rows are windows of `--length` tokens from
    anywhere in it.

    What the loss does not count, such as a prompt, is never hidden.

    Attributes:
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
      rules: noise of the bound.
    """

    chunk: int | None = 256
    rules: Bare[BoundRules] = BoundRules()

    families = ("masked_diffusion",)
    without = ("packed",)
    windows = True

    def train(self, job: Job) -> Model:
        """One part: as many updates as the run has."""
        if job.held_out is not None:
            windows(job, job.held_out)  # one that is too short is refused before the training
        data = windows(job, job.examples)
        network = job.model.network
        loss = masked_diffusion_loss(network, job.model.token_spec, self.rules, chunk=self.chunk)
        return job.fit("masked", job.model, loss, data, flops=batch_flops(network))

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """The bound in nats a token, and the share of hidden tokens that are guessed, without
        dropout.
        """
        loss = masked_diffusion_loss(
            model.network, model.token_spec, self.rules, dropout=False, chunk=self.chunk
        )
        means = job.means(loss, model, windows(job, job.measured))
        return {"nats a token": means["loss"], "accuracy": means["accuracy"]}


def windows(job: Job, examples: Examples) -> Endless:
    """Batches of windows of all examples, one after the other; an epoch has as many tokens as they
    have.
    """
    rows = max(job.run.batch_tokens // job.length // job.multiple, 1) * job.multiple
    make = WindowMaker(examples.ids, job.run.seed, rows, job.length, counted=examples.counted)
    return Endless(make, digest=examples.digest)
