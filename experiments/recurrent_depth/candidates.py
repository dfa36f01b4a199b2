"""Schedules of a sampler's knobs: learned, searched, chosen on tuning problems, measured on unseen
ones.

Each is a candidate. Of each method the one of greatest utility is chosen,

    utility = share of exact answers - call_price * network calls a token
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from rich.progress import track

from experiments.recurrent_depth.pool import Pool, batch_of
from experiments.tasks import word_problems
from paradec_jax import Model, run
from paradec_jax.data.problems import exact_answers
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.compare import compare
from paradec_jax.evaluate.intervals import paired, wilson

GRADIENT = 4  # forward passes that a gradient through a checkpointed rollout costs
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Learning:
    """How knobs are learned, searched, chosen and measured.

    Attributes:
      call_price: share of exact answers that one more network call a token is worth, in the choice
        of candidates.
      updates: gradient steps.
      learning_rate: of Adam.
      rows: training problems of an update.
      pool: training problems in all.
      problem_steps: fewest and most steps of a problem's solution.
      trial_rows: training problems of a trial of the random search.
      candidates: candidates of learning and of search that are tried on the tuning problems.
      tuning: tuning problems.
      problems: unseen problems.
      seed: of training problems and draws; unseen problems are drawn from seed + 1.
    """

    call_price: float = 0.1
    updates: int = 200
    learning_rate: float = 0.05
    rows: int = 8
    pool: int = 512
    problem_steps: tuple[int, int] = (2, 4)
    trial_rows: int = 64
    candidates: int = 4
    tuning: int = 200
    problems: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pool < self.rows or min(self.rows, self.updates, self.candidates) < 1:
            raise ValueError(
                f"pool {self.pool} must hold the {self.rows} rows of an update, and rows, updates "
                f"{self.updates} and candidates {self.candidates} must be at least 1"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Contest:
    """Where candidates meet: one discrete sampler, on word problems.

    Attributes:
      model: whose network, tokens and problems.
      sampler: the decoder that everything is measured in.
      knobs_of: candidate -> knobs.
      options: numbers of problems, seeds and prices.
    """

    model: Model
    sampler: Any
    knobs_of: Callable[[Any], Any]
    options: Learning

    def utility(self, exact: float, calls_per_token: float) -> float:
        """What candidates are chosen by; `exact` is a share."""
        return exact - self.options.call_price * calls_per_token

    def measure(
        self, named: Sequence[tuple[str, Any]], split: str, count: int, seed: int
    ) -> tuple[list[Row], np.ndarray]:
        """A row for each named candidate, all compared with the first, and what each got right,
        [candidates, N].
        """
        steps = self.options.problem_steps
        problems = word_problems(count, seed=seed, steps=steps, split=split)
        settings = [
            Setting(name, self.sampler, self.knobs_of(candidate), baseline=i == 0)
            for i, (name, candidate) in enumerate(named)
        ]
        sources = [Source("", self.model, setting) for setting in settings]
        result = compare(sources, problems, seed=seed, timed=0)
        return result.rows, result.exact

    def choose(self, methods: Mapping[str, Sequence[Any]], seed: int) -> dict[str, Row]:
        """Of each method the candidate of greatest utility on tuning problems, the first of equal
        ones.
        """
        named = [(method, candidate) for method, some in methods.items() for candidate in some]
        rows, _ = self.measure(named, "tune", self.options.tuning, seed)
        chosen: dict[str, Row] = {}
        for (method, candidate), row in zip(named, rows, strict=True):
            share = row["exact"] / row["problems"]
            value = self.utility(share, row["network_calls_per_token"])
            if method not in chosen or value > chosen[method]["utility"]:
                chosen[method] = {"utility": value, "schedule": candidate}
        return chosen

    def result(
        self,
        methods: Mapping[str, Sequence[Any]],
        by_hand: Sequence[tuple[str, Any]],
        tuning_seed: int,
    ) -> Row:
        """What is chosen of each method, measured on unseen problems beside candidates by hand, and
        the first method less the others; rows are printed.
        """
        chosen = self.choose(methods, tuning_seed)
        named = [*by_hand, *((method, of["schedule"]) for method, of in chosen.items())]
        rows, exact = self.measure(named, "test", self.options.problems, self.options.seed + 1)
        for row in rows:
            low, high = wilson(row["exact"], row["problems"])
            less, more = row["difference_interval"]
            print(
                f"{row['decoder']:26s} exact {row['exact']}/{row['problems']} [{low:.1%}, "
                f"{high:.1%}]  to the first {row['difference']:+.1%} [{less:+.1%}, {more:+.1%}]  "
                f"calls/token {row['network_calls_per_token']:.3f}"
            )
        mine, *others = exact[len(by_hand) :]
        first, *names = chosen
        pairs = {
            name: paired(mine, other)._asdict() for name, other in zip(names, others, strict=True)
        }
        print(f"{first} less the others: {pairs}")
        return {"chosen": chosen, "rows": rows, "learned_less": pairs}

    def search(
        self,
        pool: Pool,
        draw: Callable[[np.random.Generator], Any],
        cost_of: Callable[[Any], float],
        budget: float,
    ) -> Row:
        """Random candidates, each tried greedily on training problems, until the budget is used.

        Args:
          pool: training problems.
          draw: generator -> a candidate.
          cost_of: what a trial's `Decoded` cost, in the unit of the budget.
          budget: the trial that reaches it is the last one.

        Returns:
          How many `trials` there were, their `cost`, and the best `candidates`.
        """
        assert self.model.tokenizer is not None
        options, count = self.options, len(pool.problems)
        decoder = dataclasses.replace(self.sampler, greedy=True)
        decoder = decoder.bind(self.model.network, pool.texts.shape[1], self.model.token_spec)
        params = decoder.prepare(self.model.params)
        generator = np.random.default_rng([options.seed, 1])
        trials: list[tuple[float, Any]] = []
        cost = 0.0
        while cost < budget:
            some = generator.choice(count, min(options.trial_rows, count), replace=False)
            candidate = draw(generator)
            request = batch_of(self.model, pool, options.seed, some)["request"]
            decoded = run(decoder, params, request, self.knobs_of(candidate))
            texts = [
                self.model.tokenizer.decode_after(
                    pool.prompts[i, : pool.lengths[i]].tolist(), ids, skip_special=True
                )
                for i, ids in zip(some, decoded.completions(), strict=True)
            ]
            exact = exact_answers([pool.problems[i] for i in some], texts)
            calls = int(decoded.network_calls.sum()) / int(decoded.generated.sum())
            trials.append((self.utility(float(exact.mean()), calls), candidate))
            cost += cost_of(decoded)
        best = sorted(trials, key=lambda trial: -trial[0])[: options.candidates]
        print(f"random search: {len(trials)} trials, cost {cost:.2e} (learner {budget:.2e})")
        candidates = [candidate for _, candidate in best]
        return {"trials": len(trials), "cost": cost, "candidates": candidates}


def listed(tree: Any) -> Any:
    """Arrays as lists, for JSON."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), tree)


def descend(
    loss: Callable[..., Any],
    model: Model,
    pool: Pool,
    theta: Any,
    constrained: Callable[[Any], Any],
    options: Learning,
) -> Row:
    """Moves parameters along the gradient of a loss by Adam, after gradients longer than 1 were
    made as long as that.

    Args:
      loss: (theta, params, batch) -> loss and what it is made of.
      model, pool: network and training problems.
      theta: parameters at the beginning.
      constrained: theta -> the candidate that it stands for.
      options: updates, their rows, learning rate, seed, and how many evenly spaced updates leave a
        candidate, the last one among them.

    Returns:
      `history`, of loss, gradient and parts of the loss of each update, as JSON values, and the
      `candidates`.

    Raises:
      SystemExit: a loss or a gradient that is not finite.
    """
    value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.learning_rate))
    adam, updates = optimizer.init(theta), options.updates
    marks = set(np.linspace(0, updates, options.candidates + 1, dtype=int)[1:].tolist())
    history: list[Row] = []
    candidates: list[Any] = []
    for i in track(range(updates), "learning"):
        rng = np.random.default_rng([options.seed, i])
        some = rng.choice(len(pool.problems), options.rows, replace=False)
        batch = batch_of(model, pool, options.seed, some)
        (value, parts), gradient = value_and_grad(theta, model.params, batch)
        entry: Row = {"loss": float(value), "gradient": listed(gradient)}
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(entry)):
            raise SystemExit(f"update {i}: the loss or its gradient is not finite: {entry}")
        entry |= {name: float(x) for name, x in parts.items()}
        changes, adam = optimizer.update(gradient, adam, theta)
        theta = optax.apply_updates(theta, changes)
        history.append(entry)
        if i + 1 in marks:
            candidates.append(listed(constrained(theta)))
    return {"history": history, "candidates": candidates}
