"""Candidates of a sampler's knobs: learned, searched, chosen on tuning problems, measured on unseen
ones.

A candidate is what a script makes knobs of. Of each method the one of greatest utility is chosen,

    utility = share of exact answers - call_price * network calls a token
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from rich.progress import track

from experiments.common.pool import Pool, batch_of
from experiments.tasks import word_problems
from paradec_jax import Model, run
from paradec_jax.data.problems import exact_answers
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.compare import compare

GRADIENT = 4  # forward passes that a gradient through a checkpointed rollout costs


def utility(exact: float, calls_per_token: float, call_price: float) -> float:
    """What candidates are chosen by; `exact` is a share."""
    return exact - call_price * calls_per_token


def best_of(
    groups: Sequence[str], rows: Sequence[Mapping[str, Any]], call_price: float
) -> dict[str, tuple[int, float]]:
    """Which row of each group has the greatest utility, the first of equal ones, and that utility.

    Args:
      groups: of each row.
      rows: of `compare`.
      call_price: see `utility`.
    """
    best: dict[str, tuple[int, float]] = {}
    for i, (group, row) in enumerate(zip(groups, rows, strict=True)):
        found = utility(row["exact"] / row["problems"], row["network_calls_per_token"], call_price)
        if group not in best or found > best[group][1]:
            best[group] = i, found
    return best


@dataclasses.dataclass(frozen=True, eq=False)
class Contest:
    """Where candidates meet: one discrete sampler, on problems of one kind.

    Attributes:
      model: whose network, tokens and problems.
      sampler: the decoder that everything is measured in.
      knobs_of: candidate -> knobs.
      steps: fewest and most steps of a problem's solution.
      call_price: share of exact answers that one more network call a token is worth.
    """

    model: Model
    sampler: Any
    knobs_of: Callable[[Any], Any]
    steps: tuple[int, int]
    call_price: float

    def measure(
        self, named: Sequence[tuple[str, Any]], split: str, count: int, seed: int
    ) -> tuple[list[dict[str, Any]], np.ndarray]:
        """A row for each named candidate, all compared with the first, and what each got right,
        [candidates, N].
        """
        problems = word_problems(count, seed=seed, steps=self.steps, split=split)
        settings = [
            Setting(name, self.sampler, self.knobs_of(candidate), baseline=i == 0)
            for i, (name, candidate) in enumerate(named)
        ]
        sources = [Source("", self.model, setting) for setting in settings]
        result = compare(sources, problems, seed=seed, timed=0)
        return result.rows, result.exact

    def choose(
        self, of: Mapping[str, Sequence[Any]], count: int, seed: int
    ) -> dict[str, tuple[float, Any]]:
        """Of each method the utility and the candidate that is best on tuning problems."""
        named = [(method, candidate) for method, found in of.items() for candidate in found]
        rows, _ = self.measure(named, "tune", count, seed)
        best = best_of([method for method, _ in named], rows, self.call_price)
        return {method: (found, named[i][1]) for method, (i, found) in best.items()}

    def search(
        self,
        pool: Pool,
        draw: Callable[[np.random.Generator], Any],
        cost_of: Callable[[Any], float],
        *,
        budget: float,
        rows: int,
        kept: int,
        seed: int,
    ) -> dict[str, Any]:
        """Random candidates, each tried greedily on training problems, until the budget is used.

        Args:
          pool: training problems.
          draw: generator -> a candidate.
          cost_of: what a trial's `Decoded` cost, in the unit of the budget.
          budget: the trial that reaches it is the last one.
          rows: training problems of a trial, at most.
          kept: best candidates that are returned.
          seed: of the draws.

        Returns:
          How many `trials` there were, their `cost`, and the best `candidates`.
        """
        assert self.model.tokenizer is not None
        decoder = dataclasses.replace(self.sampler, greedy=True)
        decoder = decoder.bind(self.model.network, pool.texts.shape[1], self.model.token_spec)
        params = decoder.prepare(self.model.params)
        generator = np.random.default_rng([seed, 1])
        trials: list[tuple[float, Any]] = []
        cost = 0.0
        while cost < budget:
            some = generator.choice(
                len(pool.problems), min(rows, len(pool.problems)), replace=False
            )
            candidate = draw(generator)
            request = batch_of(self.model, pool, seed, some)["request"]
            decoded = run(decoder, params, request, self.knobs_of(candidate))
            texts = [
                self.model.tokenizer.decode_after(
                    pool.prompts[i, : pool.lengths[i]].tolist(), ids, skip_special=True
                )
                for i, ids in zip(some, decoded.completions(), strict=True)
            ]
            exact = exact_answers([pool.problems[i] for i in some], texts)
            calls, tokens = int(decoded.network_calls.sum()), int(decoded.generated.sum())
            trials.append(
                (utility(float(exact.mean()), calls / tokens, self.call_price), candidate)
            )
            cost += cost_of(decoded)
        best = sorted(trials, key=lambda trial: -trial[0])[:kept]
        return {
            "trials": len(trials),
            "cost": cost,
            "candidates": [candidate for _, candidate in best],
        }


def listed(tree: Any) -> Any:
    """Arrays as lists, for JSON."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), tree)


def descend(
    loss: Callable[..., Any],
    model: Model,
    pool: Pool,
    theta: Any,
    constrained: Callable[[Any], Any],
    *,
    learning_rate: float,
    rows: int,
    updates: int,
    candidates: int,
    seed: int,
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Moves parameters along the gradient of a loss by Adam, after gradients longer than 1 were
    made as long as that.

    Args:
      loss: (theta, params, batch) -> loss and what it is made of.
      model, pool: network and training problems.
      theta: parameters at the beginning.
      constrained: theta -> the candidate that it stands for.
      learning_rate: of Adam.
      rows: training problems of an update.
      updates: number of updates.
      candidates: number of evenly spaced updates that leave a candidate, the last one among them.
      seed: of the draws.

    Returns:
      Loss, gradient and parts of the loss of each update, as JSON values, and the candidates.

    Raises:
      SystemExit: a loss or a gradient that is not finite.
    """
    value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
    adam = optimizer.init(theta)
    marks = set(np.linspace(0, updates, candidates + 1, dtype=int)[1:].tolist())
    history: list[dict[str, Any]] = []
    found: list[Any] = []
    for i in track(range(updates), "learning"):
        some = np.random.default_rng([seed, i]).choice(len(pool.problems), rows, replace=False)
        (value, parts), gradient = value_and_grad(
            theta, model.params, batch_of(model, pool, seed, some)
        )
        entry: dict[str, Any] = {"loss": float(value), "gradient": listed(gradient)}
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(entry)):
            raise SystemExit(f"update {i}: the loss or its gradient is not finite: {entry}")
        entry |= {name: float(x) for name, x in parts.items()}
        changes, adam = optimizer.update(gradient, adam, theta)
        theta = optax.apply_updates(theta, changes)
        history.append(entry)
        if i + 1 in marks:
            found.append(listed(constrained(theta)))
    return history, found
