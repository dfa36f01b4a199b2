"""Distillation of a causal model into one that Jacobi decoding reads several tokens a call from.

::

    FOLDER/round-0/trajectories    the model's own greedy answers to the prompts, with every Jacobi iterate
    FOLDER/round-0                 training to say at any iterate of a block what stands at the end of it

Progressive consistency distillation (Jacobi Forcing, Hu et al. 2025, arXiv 2512.14681), or CLLM's
(arXiv 2403.00835). A model that gains tokens a call can lose what it knew, so the held-out line has
both.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from paradec_jax import decode
from paradec_jax.data.collect import collect
from paradec_jax.data.endless import Endless
from paradec_jax.data.pairs import Selection, pair_batches, worth_training
from paradec_jax.data.trajectories import Trajectories
from paradec_jax.decode.machine import Setting
from paradec_jax.evaluate.likelihood import Span, log_likelihoods
from paradec_jax.losses import ConsistencyRules, cllm_loss, consistency_loss, next_token_loss
from paradec_jax.objective import Metrics, Objective, Sums
from paradec_jax.objectives.answers import MEASURED, answers, asked, collected, ending, gain, here
from paradec_jax.objectives.folder import say
from paradec_jax.objectives.job import Job, Training
from paradec_jax.objectives.options import Bare
from paradec_jax.records import choices
from paradec_jax.store import Model

RULES = ConsistencyRules(
    context="clean",
    window=4,
    divide_by_pairs=False,
    prompt_weight=0.0,
    after_eos="drop",
    over="batch",
)


@choices
class Jacobi(Training):
    """Makes a causal model faster under Jacobi decoding: it learns from its own greedy answers to
    the prompts.

    Attributes:
      block: tokens of a block, of each round one number; later rounds start from the model of the
        one before.
      new_tokens: most tokens of an answer.
      problems: prompts of a round; all of them by default.
      rows: prompts that are decoded together.
      order: how noise is spread over the blocks of a window: linear, reverse, random, or uniform
        (any iterate), which teaches most in the clean context of the default rules
        (experiments/jacobi/RESULTS.md).
      rehearse: share of a batch that are examples of the data, responses and all, whose next-token
        loss weighs `ar_weight` too. What a small model knows is soon forgotten without it. At 0
        lines may be prompts alone.
      cllm: whether the loss is CLLM's, of single blocks; of the rules it reads `ar_weight` alone.
      chunk: positions of a row whose scores are made at a time; all when None, which takes more
        memory.
      rules: rules of the loss. Their window is that of the noise too.
    """

    block: tuple[int, ...] = (16,)
    new_tokens: int = 256
    problems: int | None = None
    rows: int = 32
    order: Literal["linear", "reverse", "random", "uniform"] = "uniform"
    rehearse: float = 0.2
    cllm: bool = False
    chunk: int | None = 256
    rules: Bare[ConsistencyRules] = RULES

    BOUNDS = {"block": (2, 65536), "rehearse": (0, 0.99)}  # noqa: RUF012
    families = ("causal",)
    without = ("packed",)  # examples that are rehearsed always are, answers never

    @property
    def prompts(self) -> bool:
        """Whether lines of data may be prompts alone."""
        return not self.rehearse

    def train(self, job: Job) -> Model:
        """A collection and a part for each round."""
        model = job.model
        if job.held_out is not None:  # refused before anything is collected
            asked(job.held_out, model, 0, None, self.new_tokens, max(self.block))
        for which, block in enumerate(self.block):
            answered = self.collected(job, model, which, block)
            indices = worth_training(answered, stop=ending(model).stop)
            say(
                f"round {which}: {len(indices)} answers to {len(answered.decoded)} prompts "
                "to learn from"
            )
            data, updates = self.data(job, answered, indices, job.run.seed + which)
            teacher = dict(model.params) if self.rules.teacher == "frozen" else None
            loss = self.objective(model)
            model = job.fit(f"round-{which}", model, loss, data, updates=updates, frozen=teacher)
        return dataclasses.replace(model, decoder=f"jacobi --block {self.block[-1]} --running")

    def collected(self, job: Job, model: Model, which: int, block: int) -> Trajectories:
        """The trajectories of a round."""

        def items(case: Any, request: Any, of: list[int]) -> Any:
            return collect(case.decoder, case.params, request, of)

        return collected(
            job,
            model,
            self,
            items,
            part=f"round-{which}",
            setting=Setting("", decode.Jacobi(block=block)),
            block=block,
            seed=job.run.seed + which,
            window=max(self.block),
        )

    def data(
        self, job: Job, answered: Trajectories, indices: np.ndarray, seed: int
    ) -> tuple[Endless, int]:
        """Batches of pairs, of examples beside them where some are rehearsed, and how many updates
        a round has.
        """
        again = round(self.rehearse * job.run.batch_tokens)
        pairs = pair_batches(
            answered,
            seed=seed,
            batch_tokens=job.run.batch_tokens - again,
            indices=indices,
            selection=Selection(order=self.order, window=self.rules.window),
            alone=self.cllm,
            multiple=job.multiple,
        )
        if not self.rehearse:
            return pairs, job.updates(pairs)
        longest = int(np.diff(job.examples.starts).max())
        # One shape: each of both kinds would be a program.
        room = min(job.length, max(longest, again // job.multiple))
        fresh = job.batches(job.examples, seed=seed, batch_tokens=again, packed=True, length=room)
        both: Any = lambda index: {"pairs": pairs.make(index), "fresh": fresh.make(index)}  # noqa: E731
        return Endless(both, digest=fresh.digest), job.updates(pairs)

    def objective(self, model: Model) -> Objective:
        """The loss of a round, whose second argument is its teacher."""
        network, rules, spec = model.network, self.rules, ending(model)
        loss = consistency_loss(network, spec, rules, chunk=self.chunk)
        if self.cllm:
            # Without stop tokens, after which it reads no prompt: turns of a chat end in them.
            spec = dataclasses.replace(spec, stop=())
            loss = cllm_loss(network, spec, ar_weight=rules.ar_weight, chunk=self.chunk)
        if not self.rehearse:
            return loss
        return rehearsing(loss, next_token_loss(network, chunk=self.chunk), rules.ar_weight)

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """What decoding gains on held-out prompts, and beside it what the model is worth.

        Nats a token of the held-out responses, and of the model's own greedy answers under the
        model that the run started from; then of the decoders tokens a call, and the share of
        answers equal to those one by one.
        """
        numbers = {}
        if job.measured.counted.any():
            loss = next_token_loss(model.network, chunk=self.chunk)
            numbers["nats a token"] = job.means(loss, model)["loss"]
        model, start, n = here(model), here(job.model), self.block[-1]
        _, prompts = asked(
            job.measured, model, job.run.seed, MEASURED, self.new_tokens, max(self.block)
        )
        alone, _ = answers(prompts, model, decode.AutoRegressive(), self.rows)
        texts = zip(prompts.tokens, prompts.lengths.tolist(), alone, strict=True)
        spans = [Span((*row[:size].tolist(), *answer), size) for row, size, answer in texts]
        scores = np.concatenate(
            [score for score, _ in log_likelihoods(start.network, start.params, spans)]
        )
        numbers["nats of its answers at the start"] = -float(scores.mean())
        for name, running in ((f"block {n}", False), (f"running window {n}", True)):
            decoder = decode.Jacobi(block=n, running=running)
            numbers |= gain(*answers(prompts, model, decoder, self.rows), alone, f", {name}")
        return numbers


def rehearsing(loss: Objective, next_token: Objective, weight: float) -> Objective:
    """A loss of `pairs`, and beside it a next-token loss of `fresh` with a weight."""

    def sums(params: Any, frozen: Any, batch: Any, key: jax.Array) -> Sums:
        first, second = jax.random.split(key)
        step = {"step": batch["step"]}
        again = next_token.sums(params, frozen, batch["fresh"] | step, second)
        pairs = loss.sums(params, frozen, batch["pairs"] | step, first)
        return pairs | {f"rehearsal_{name}": part for name, part in again.items()}

    def value(sums: Sums) -> tuple[jax.Array, Metrics]:
        again = {name: part.mean for name, part in sums.items() if name.startswith("rehearsal_")}
        pairs = {name: part for name, part in sums.items() if name not in again}
        value, metrics = loss.value(pairs)
        return value + weight * again["rehearsal_loss"], metrics | again

    return Objective(sums, value)
