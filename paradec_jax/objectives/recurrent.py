"""Training of a recurrent-depth model at random depth, so that it serves any number of recurrences.

::

    r ~ draw(M(t)),    M(t) = first_mean + t / T (mean - first_mean)

for update t of T. Only the last recurrences carry gradient (Geiping et al. 2025, arXiv 2502.05171,
section 3).
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from paradec_jax.config import MOST_RECURRENCES
from paradec_jax.decode import Static, Wavefront
from paradec_jax.losses import exponential, poisson_lognormal, recurrent_loss
from paradec_jax.models import batch_flops
from paradec_jax.objectives.answers import speed
from paradec_jax.objectives.job import Job, Training
from paradec_jax.records import choices
from paradec_jax.store import Model

DRAWS = {"poisson_lognormal": poisson_lognormal, "exponential": exponential}


@choices
class Recurrent(Training):
    """Trains a recurrent-depth model at random depth: each update draws its number of recurrences.

    Attributes:
      draw: distribution of the recurrences, of mean M + 1 (poisson_lognormal) or M (exponential).
      mean: M; the recurrences of the model's config by default.
      first_mean: M before it grows; `mean` by default.
      backprop_depth: last recurrences that carry gradient; as the model's config by default.
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
    """

    draw: Literal["poisson_lognormal", "exponential"] = "poisson_lognormal"
    mean: float | None = None
    first_mean: float | None = None
    backprop_depth: int | None = None
    chunk: int | None = 256

    BOUNDS = dict.fromkeys(("mean", "first_mean"), (0.001, MOST_RECURRENCES))
    families = ("recurrent_depth",)

    def train(self, job: Job) -> Model:
        """One part: as many updates as the run has."""
        network, data = job.model.network, job.batches(job.examples)
        updates = job.updates(data)
        last = self.mean or network.config.mean_recurrence
        first = self.first_mean or last

        def mean(step: jax.Array) -> jax.Array:
            return jnp.float32(first + step / updates * (last - first))

        loss = recurrent_loss(
            network, DRAWS[self.draw](mean), self.backprop_depth, chunk=self.chunk
        )
        flops = batch_flops(network, self.backprop_depth)
        decoder = f"autoregressive --recurrence {round(last)}"
        model = dataclasses.replace(job.model, decoder=decoder)
        return job.fit("recurrent", model, loss, data, updates=updates, flops=flops)

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """Nats a token at the config's recurrences; tokens a call of a wave, and whether it writes
        the same.
        """
        r = model.network.config.mean_recurrence
        loss = recurrent_loss(model.network, lambda key, step: jnp.int32(r), chunk=self.chunk)
        wave, nats = Wavefront(), job.means(loss, model)["loss"]
        return {"nats a token": nats, **speed(job, model, wave, Static(), wave.window)}
