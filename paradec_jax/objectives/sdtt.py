"""Self-distillation through time (SDTT, Deschenaux and Gulcehre 2024, arXiv 2410.21035) of a
denoiser.

::

    FOLDER/sdtt                  all rounds: in each the student of the round before is the teacher
    FOLDER/round-0/model  ..     the student of each round

The loss hardly falls within a round, since most of it is the variance of targets that are drawn
anew each time. The held-out line therefore has what texts of few steps are worth.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from paradec_jax import decode, store
from paradec_jax.data.text import windows as even
from paradec_jax.evaluate.bound import bounds
from paradec_jax.evaluate.cases import empty_prompts
from paradec_jax.evaluate.entropy import sample_entropy
from paradec_jax.evaluate.likelihood import Span
from paradec_jax.losses.self_distillation import SDTT, DistillationRules, self_distillation_loss
from paradec_jax.objectives.answers import MEASURED, ROWS, answers, here
from paradec_jax.objectives.folder import by_first
from paradec_jax.objectives.job import Job, Training
from paradec_jax.objectives.masked import windows
from paradec_jax.objectives.options import Bare
from paradec_jax.records import choices
from paradec_jax.store import Model
from paradec_jax.train import Evaluate, Rounds, TrainState, averaged

DRAWS = 32  # of the bound of a text


@choices
class Sdtt(Training):
    """Makes a denoiser need fewer steps: in each round it learns to do in one what it did in `jump`
    before.

    Updates and epochs of the run are those of a round.

    Attributes:
      rounds: how many; the student of the last one aims at `first_steps / jump^rounds` steps.
      weights: which weights become the next teacher: the student's (raw) or, with --ema, their
        average (ema).
      reset_optimizer: whether a round begins with a new optimizer and a new schedule.
      reset_ema: whether a round begins a new average.
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
      rules: rules of the loss.
    """

    rounds: int = 7
    weights: Literal["raw", "ema"] = "raw"
    reset_optimizer: bool = False
    reset_ema: bool = False
    chunk: int | None = 32
    rules: Bare[DistillationRules] = SDTT

    BOUNDS = {"rounds": (1, 31)}  # noqa: RUF012  jump^rounds is a number of 32 bits
    families = ("masked_diffusion",)
    without = ("packed", "layers", "lora")
    windows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aim < 1:
            least = f"jump^rounds, {self.rules.jump} to the power of {self.rounds}"
            raise ValueError(f"first_steps must be at least {least}, not {self.rules.first_steps}")

    @property
    def aim(self) -> int:
        """Steps that the last student aims at."""
        return self.rules.first_steps // self.rules.jump**self.rounds

    def train(self, job: Job) -> Model:
        """One part of all rounds; the student of each is written where the round ends."""
        model = dataclasses.replace(job.model, decoder=f"masked --steps {self.aim}")
        if job.held_out is not None:
            windows(job, job.held_out)  # one that is too short is refused before the training
        data = windows(job, job.examples)
        each = job.updates(data)

        def keep(state: TrainState) -> Mapping[str, float]:
            # Before the checkpoint: no kill can lose it.
            which = (int(state.step) - 1) // each
            student = here(dataclasses.replace(model, params=averaged(state)))
            place = job.folder / f"round-{which}" / "model"
            by_first(
                f"round {which}", lambda: store.save(place, student, overwrite=True, run=job.mark)
            )
            return {"round": which}

        loss = self_distillation_loss(model.network, model.token_spec, self.rules, chunk=self.chunk)
        rounds = Rounds(each, self.weights, self.reset_optimizer, self.reset_ema)
        return job.fit(
            "sdtt",
            model,
            loss,
            data,
            updates=self.rounds * each,
            rounds=rounds,
            hooks=[Evaluate(keep, every=each)],
        )

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """What held-out text costs at most; and of texts drawn in few steps their cost at the
        start, and entropy.

        Few steps cost variety, and a text without any costs little, so the two are read together.
        """
        start, model, steps = here(job.model), here(model), self.aim
        ids, length = np.asarray(job.measured.ids), job.length
        count = min(len(ids) // length, MEASURED)
        prompts = empty_prompts(model, MEASURED, length, job.run.seed)
        texts, _ = answers(prompts, model, decode.Masked(), ROWS, decode.Masked.Knobs(steps=steps))
        return {
            "nats a token, at most": cost(model, even(ids, length, count).tolist()),
            f"nats of texts of {steps} steps at the start, at most": cost(start, texts),
            "entropy of these texts": sample_entropy(texts),
        }


def cost(model: Model, rows: Sequence[Sequence[int]]) -> float:
    """Upper bound of the nats a token of texts (`evaluate.bound`)."""
    mask: Any = model.token_spec.mask
    spans = [Span(tuple(row)) for row in rows if row]
    each = bounds(model.network, model.params, spans, mask, draws=DRAWS, batch=ROWS)
    return sum(bound.nats for bound in each) / sum(bound.count for bound in each)
