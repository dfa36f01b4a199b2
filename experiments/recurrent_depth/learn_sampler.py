"""Learns the wavefront's schedules by gradient through the sampler.

`python -m experiments.recurrent_depth.learn_sampler`. Momentum, noise and exit threshold get one
value for each age of a position. Adam moves them along the gradient of a soft rollout on training
problems, where

    loss = mean over positions of (loss of the state that leaves) + price * (expected steps of the
    position)

The first term is the distance to the state after r = 16 recurrences along the right text, or minus
the log-likelihood of the right next token. Positions after a wrong committed token do not count.
The rival is a random search of equal cost that decodes training problems in the discrete sampler.
Both choose among a few candidates on tuning problems by their utility, exact answers less a price
of network calls; then everything is measured once in the discrete sampler on unseen problems,
beside the paper's hand-set values and those that were tuned by hand.

Cost counts passes of the core over a position. A gradient costs four forward passes: the rollout,
the same again where segments are recomputed, and two for the backward pass; the teacher's pass is
the learner's as well.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tyro

from experiments.common.candidates import GRADIENT, Contest, descend, listed
from experiments.common.pool import Pool, draw_pool
from experiments.common.record import write_record
from experiments.recurrent_depth.sampler_loss import (
    HAND,
    Options,
    constrained,
    make_loss,
    start,
)
from paradec_jax import Decoded, Model, Wavefront, facts, load
from paradec_jax.evaluate.intervals import paired, wilson

TUNED = (
    {**HAND, "momentum": 0.0, "exit_threshold": 0.1},
    {**HAND, "momentum": 0.0, "exit_threshold": 0.4},
)


def learn(model: Model, pool: Pool, options: Options) -> dict[str, Any]:
    """Adam on the schedules, from the paper's.

    Returns:
      The history, `candidates` schedules on the way (the last one among them), and the cost.
    """
    history, candidates = descend(
        make_loss(model, pool, options),
        model,
        pool,
        start(options),
        constrained,
        learning_rate=options.learning_rate,
        rows=options.rows,
        updates=options.updates,
        candidates=options.candidates,
        seed=options.seed,
    )
    prefill = pool.prompts.shape[1] * options.prefill_recurrence
    step = options.steps * options.width * options.inner_recurrence
    taught = (
        pool.texts.shape[1] * model.network.recurrence if options.objective == "distance" else 0
    )
    cost = options.updates * options.rows * (GRADIENT * (prefill + step) + taught)
    return {"history": history, "candidates": candidates, "cost": cost}


def draw_schedule(generator: np.random.Generator, ages: int) -> dict[str, list[float]]:
    """A random schedule: each knob constant or, as often, drawn anew for each age."""

    def draw(low: float, high: float) -> np.ndarray:
        return np.broadcast_to(
            generator.uniform(low, high, 1 if generator.random() < 0.5 else ages), ages
        )

    noise = draw(0, 0.3) * (generator.random() < 0.5)
    return listed(
        {"momentum": draw(0, 0.6), "noise": noise, "exit_threshold": np.exp(draw(-4.6, 0.7))}
    )


def cost_of(decoded: Decoded, pool: Pool, options: Options) -> float:
    """Passes of the core over a position.

    A batch goes on until its last row has stopped, but a row's own calls are what its sampler
    needs.
    """
    rows = len(decoded.generated)
    steps = (int(decoded.network_calls.sum()) - rows) * options.width * options.inner_recurrence
    return steps + rows * pool.prompts.shape[1] * options.prefill_recurrence


def sampler(options: Options) -> Wavefront:
    """The discrete sampler that everything is measured in."""
    return Wavefront(
        inner_recurrence=options.inner_recurrence,
        window=options.width,
        prefill_recurrence=options.prefill_recurrence,
    )


def knobs_of(schedule: dict[str, Any]) -> Any:
    """A schedule as the discrete sampler's knobs."""
    return Wavefront.Knobs(**{name: np.asarray(x, np.float32) for name, x in schedule.items()})


def constant(values: dict[str, float], options: Options) -> dict[str, list[float]]:
    """Numbers as schedules, so that all settings share one program."""
    return {name: [value] * options.ages for name, value in values.items()}


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Learns, searches, chooses, measures; prints and writes the result."""
    if options.pool < options.rows or min(options.ages, options.updates, options.candidates) < 1:
        raise SystemExit(
            f"pool {options.pool} must hold the {options.rows} rows of an update, and ages {options.ages}, "
            f"updates {options.updates} and candidates {options.candidates} must be at least 1"
        )
    model = load(options.model)
    pool = draw_pool(model, options.pool, options.seed, options.problem_steps)
    learned = learn(model, pool, options)
    informative(learned["history"])
    contest = Contest(model, sampler(options), knobs_of, options.problem_steps, options.call_price)
    found = contest.search(
        pool,
        lambda generator: draw_schedule(generator, options.ages),
        lambda decoded: cost_of(decoded, pool, options),
        budget=learned["cost"],
        rows=options.trial_rows,
        kept=options.candidates,
        seed=options.seed,
    )
    print(
        f"random search: {found['trials']} trials, cost {found['cost']:.2e} (learner {learned['cost']:.2e})"
    )
    candidates = {"learned": learned["candidates"], "random search": found["candidates"]}
    chosen = contest.choose(candidates, options.tuning, options.seed + 1)

    hand = [("hand-set (paper)", constant(HAND, options))]
    hand += [(f"tuned by hand, exit {x['exit_threshold']}", constant(x, options)) for x in TUNED]
    final = [*hand, *((method, best) for method, (_, best) in chosen.items())]
    rows, exact = contest.measure(final, "test", options.problems, options.seed + 1)
    for row in rows:
        print(table_line(row))
    by_name = [name for name, _ in final]
    rival = paired(exact[by_name.index("learned")], exact[by_name.index("random search")])
    print(
        f"learned less random search: {rival.difference:+.1%} [{rival.interval[0]:+.1%}, {rival.interval[1]:+.1%}]"
    )
    result = {
        "learner": learned,
        "random_search": found,
        "chosen": {
            method: {"utility": x, "schedule": best} for method, (x, best) in chosen.items()
        },
        "rows": rows,
        "learned_less_random_search": rival._asdict(),
    }
    write_record(options.out, options, result, dtypes=facts.dtypes(model.params))


def informative(history: Sequence[dict[str, Any]]) -> None:
    """Prints how large each knob's gradient was, and how much of it pointed the same way in all
    updates.

    The agreement `|mean g| / mean |g|` is 1 where all gradients are equal and about 1 /
    sqrt(updates) for noise.
    """
    for name in HAND:
        gradients = np.asarray([entry["gradient"][name] for entry in history])
        norms = np.linalg.norm(gradients, axis=1)
        agreement = np.linalg.norm(gradients.mean(axis=0)) / max(float(norms.mean()), 1e-30)
        print(
            f"gradient of {name:15s} norm: median {np.median(norms):.2e}, largest {norms.max():.2e}, "
            f"agreement {agreement:.2f} (noise: {len(norms) ** -0.5:.2f})"
        )


def table_line(row: dict[str, Any]) -> str:
    low, high = wilson(row["exact"], row["problems"])
    less, more = row["difference_interval"]
    return (
        f"{row['decoder']:26s} exact {row['exact']}/{row['problems']} [{low:.1%}, {high:.1%}]  "
        f"to hand-set {row['difference']:+.1%} [{less:+.1%}, {more:+.1%}]  "
        f"calls/token {row['network_calls_per_token']:.3f}  recurrences/token {row['recurrences_per_token']:.3f}"
    )


if __name__ == "__main__":
    tyro.cli(main)
