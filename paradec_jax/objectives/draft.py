"""Masks that guess beside a causal model, which stays as it is: the same texts, in fewer calls.

::

    FOLDER/answers    the model's own answers to the prompts
    FOLDER/adapter    masks, adapters of their rows in PEFT's layout, and a sampler head

Masks after a place of an answer learn what the model will say there (`losses.drafts`). Nothing of
the model is trained, so nothing of it is lost; `pd.load(MODEL, adapter=FOLDER/adapter)` decodes with
the drafts. (I-DLM, arXiv 2604.11035.)
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from paradec_jax import decode
from paradec_jax.config import CausalConfig, DraftConfig
from paradec_jax.data.jsonl import Examples
from paradec_jax.data.trajectories import Generation, Trajectories
from paradec_jax.decode.machine import RepetitionKnobs, Setting
from paradec_jax.evaluate.cases import Prompts, case_of
from paradec_jax.losses import DraftRules, draft_loss
from paradec_jax.models.drafts import DraftNetwork
from paradec_jax.objectives.answers import MEASURED, answers, asked, collected, gain, here
from paradec_jax.objectives.folder import say
from paradec_jax.objectives.job import Job, Training
from paradec_jax.objectives.options import Bare
from paradec_jax.records import choices
from paradec_jax.store.model import Drafter, Model

PIECE = 16  # tokens of an answer that are stored together
TIMED = 4  # held-out prompts whose answers are timed


@choices
class Draft(Training):
    """Trains masks, adapters and a sampler head that draft what a causal model will say.

    Attributes:
      masks: tokens that are drafted, k.
      rank: rank of the adapters, which rows of masks alone pass.
      inner: inner width of the sampler head; twice the model's when None.
      new_tokens: most tokens of an answer.
      problems: prompts that are answered; all of them by default.
      rows: prompts that are decoded together.
      temperature: temperature of the answers; 0 takes the most probable token.
      chunk: anchors of a text whose masks are computed at a time; all when None, which takes more
        memory.
      rules: rules of the loss.
    """

    masks: int = 3
    rank: int = 32
    inner: int | None = None
    new_tokens: int = 256
    problems: int | None = None
    rows: int = 32
    temperature: float = 0.0
    chunk: int | None = None
    rules: Bare[DraftRules] = DraftRules()

    families = ("causal",)
    without = ("packed", "lora", "layers", "blend")
    prompts = True

    def train(self, job: Job) -> Model:
        """A collection of answers and one part."""
        model, shape = job.model, cast(CausalConfig, job.model.config)
        if job.held_out is not None:  # refused before anything is collected
            asked(job.held_out, model, 0, None, self.new_tokens, self.masks)
        inner = self.inner or 2 * shape.width
        config = DraftConfig(base=shape, count=self.masks, rank=self.rank, inner=inner)
        mean = jnp.mean(jnp.asarray(here(model).params["embedding"], jnp.float32), axis=0)
        drafter = Drafter(config, DraftNetwork.init_params(config, job.run.key, mean))
        data = job.batches(self.answered(job))
        loss = draft_loss(model.network, drafter.network, self.rules, chunk=self.chunk)
        drafter = job.fit("draft", drafter, loss, data, frozen=dict(model.params))
        return dataclasses.replace(model, drafter=drafter, decoder="drafted")

    def answered(self, job: Job) -> Examples:
        """The model's answers to the prompts of the data, as examples whose answers count."""

        def items(case: Any, request: Any, of: list[int]) -> Any:
            decoded = case.run(request)
            rows = zip(np.asarray(request.tokens), np.asarray(request.lengths), strict=True)
            prompts = [row[:length] for row, length in rows]
            return [*map(generation, of, prompts, decoded.completions())]

        greedy = self.temperature == 0
        answered = collected(
            job,
            job.model,
            self,
            items,
            part="answers",
            setting=Setting(
                "", decode.AutoRegressive(greedy=greedy), RepetitionKnobs(self.temperature)
            ),
            block=PIECE,
            seed=job.run.seed,
            window=self.masks,
        )
        return examples_of(answered, job.examples.digest, job.length)

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """Tokens a call on held-out prompts and seconds a token of one row, before and after; the
        share of answers that are those one by one.
        """
        model = here(model)
        _, prompts = asked(job.measured, model, job.run.seed, MEASURED, self.new_tokens, self.masks)
        slow = decode.AutoRegressive(greedy=True)
        wanted, calls = answers(prompts, model, slow, self.rows)
        if model.drafter is None:
            return gain(wanted, calls, wanted) | seconds(prompts, model, slow)
        model = dataclasses.replace(model, drafter=here(model.drafter))
        drafted = decode.Drafted(greedy=True)
        texts = answers(prompts, model, drafted, self.rows)
        return gain(*texts, wanted) | seconds(prompts, model, drafted)


def generation(number: int, prompt: np.ndarray, text: list[int]) -> Generation:
    """An answer as trajectories are stored: pieces of `PIECE` tokens, of one iterate each."""
    pieces = np.pad(np.asarray(text, np.int32), (0, -len(text) % PIECE)).reshape(-1, 1, PIECE)
    return Generation(number, prompt, list(pieces), len(text))


def examples_of(answered: Trajectories, digest: str, length: int) -> Examples:
    """Prompts and answers as examples of which the answers count, up to a length.

    Raises:
      ValueError: no answer of three tokens.
    """
    rows = [(item.prompt, item.fixed.reshape(-1)[: item.length]) for item in answered]
    rows = [row for row in rows if len(row[1]) > 2]
    if not rows:
        raise ValueError("no answer to the prompts of the data has three tokens to learn from")
    texts = [np.concatenate(row)[:length] for row in rows]
    counted = [np.arange(len(text)) >= len(row[0]) for text, row in zip(texts, rows, strict=True)]
    starts = np.cumsum([0, *map(len, texts)])
    say(f"{len(rows)} answers to {len(answered.decoded)} prompts, {starts[-1]:,} tokens")
    return Examples(
        np.concatenate(texts), np.concatenate(counted), starts, digest, {"lines": len(rows)}, ""
    )


def seconds(prompts: Prompts, model: Model, decoder: Any) -> dict[str, float]:
    """Seconds a token of one row, over a few prompts, after one that compiles."""
    case = case_of(Setting("", decoder), model, prompts.size)
    took, tokens = 0.0, 0
    for row in range(min(TIMED + 1, len(prompts.lengths))):
        begun = time.monotonic()
        count = int(np.asarray(case.run(prompts.request([row])).generated)[0])
        if row:
            took, tokens = took + time.monotonic() - begun, tokens + count
    return {"seconds a token": took / max(tokens, 1)}
