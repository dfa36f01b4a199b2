"""Finetuning: the next token of what the loss counts, such as an assistant's turns."""

from collections.abc import Mapping

from paradec_jax.losses import next_token_loss
from paradec_jax.models import batch_flops
from paradec_jax.objectives.job import Job, Training
from paradec_jax.records import choices
from paradec_jax.store import Model


@choices
class Sft(Training):
    """Finetunes a causal model on its data: the cross-entropy of the next token.

    Attributes:
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
    """

    chunk: int | None = 256

    families = ("causal",)

    def train(self, job: Job) -> Model:
        """One part: as many updates as the run has."""
        data = job.batches(job.examples)
        loss = next_token_loss(job.model.network, chunk=self.chunk)
        return job.fit("sft", job.model, loss, data, flops=batch_flops(job.model.network))

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """Loss in nats a token, and the share of tokens that the model would have chosen."""
        return job.means(next_token_loss(model.network, chunk=self.chunk), model)
