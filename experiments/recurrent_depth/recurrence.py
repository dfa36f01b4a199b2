"""Accuracy and latent distance of a recurrent-depth model against the number of recurrences.

`python -m experiments.recurrent_depth.recurrence --problems 1000` prints two tables and writes them as JSON.
The distance curve is teacher-forced: |s_r - s_{r-1}| / |s_r| averaged over the answer positions of reference
solutions, and the distance to the state after the most recurrences. Samplers that stop early rely on both
going to zero.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

from experiments.common.record import write_record
from experiments.tasks import word_problems
from paradec_jax import Static, facts, load
from paradec_jax.data.problems import encode_prompts
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.decode.rules import score
from paradec_jax.evaluate import compare, wilson

RECURRENCES = (1, 2, 3, 4, 6, 8, 16, 32)


def accuracy(model, problems, seed: int) -> list[dict]:
    """Exact answers of static decoding at each r, batched."""
    settings = [Setting(f"r{r}", Static(recurrence=r), baseline=r == 16) for r in RECURRENCES]
    rows = compare(model, problems, settings, seed=seed, timed=0).rows
    keys = ("problems", "exact", "interval", "difference", "difference_interval", "equals_greedy")
    return [
        {"recurrence": r} | {key: row[key] for key in keys} for r, row in zip(RECURRENCES, rows, strict=True)
    ]


def distances(model, problems, steps: int, seed: int) -> list[dict]:
    """Mean relative change of a recurrence, and mean distance to the last state, on answer positions."""
    texts = [item.prompt + item.solution for item in problems]
    tokens, lengths = encode_prompts(model.tokenizer, texts, spec=model.token_spec)
    starts = encode_prompts(model.tokenizer, problems, spec=model.token_spec)[1]
    at = np.arange(tokens.shape[1])
    answer = (at >= starts[:, None]) & (at < lengths[:, None])
    network = model.network

    @jax.jit
    def curve(params, tokens, answer, key):
        view = network.view(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
        window = network.empty_window(*tokens.shape)
        e, window = network.embed(params, tokens, view, window)
        state = network.initial_state(jax.random.split(key, tokens.shape))

        def iterate(state, _):
            new, _ = network.iterate(params, state, e, view, window, 0)
            return new, new

        _, states = lax.scan(iterate, state, length=steps)
        before = jnp.concatenate([state[None], states[:-1]])

        def mean(x):
            return jnp.sum(x * answer, axis=(1, 2)) / jnp.sum(answer)

        return mean(score.latent_change(states, before)), mean(score.latent_change(states, states[-1:]))

    change, remaining = curve(model.params, tokens, answer, jax.random.key(seed))
    return [
        {"recurrence": r + 1, "change": float(change[r]), "distance_to_last": float(remaining[r])}
        for r in range(steps)
    ]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: a model folder or the name of a bundled one.
      problems: unseen problems of each length class.
      seed: of problems and initial states.
      out: where the JSON goes.
    """

    model: str = "tiny-recurrent"
    problems: int = 1000
    seed: int = 1
    out: Path = Path("experiments/recurrent_depth/results/recurrence.json")


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the tables."""
    model = load(options.model)
    result: dict = {}
    for low, high in ((2, 4), (5, 8)):
        problems = word_problems(options.problems, seed=options.seed, steps=(low, high))
        rows = accuracy(model, problems, options.seed)
        result[f"steps_{low}_{high}"] = rows
        for row in rows:
            lower, upper = wilson(row["exact"], row["problems"])
            share = row["exact"] / row["problems"]
            print(
                f"steps {low}-{high}  r {row['recurrence']:2d}  exact {share:.1%} [{lower:.1%}, {upper:.1%}]  "
                f"as r 16 {row['equals_greedy']:.1%}",
                flush=True,
            )
    problems = word_problems(64, seed=options.seed, steps=(2, 4))
    result["distance"] = distances(model, problems, 32, options.seed)
    for row in result["distance"]:
        print(f"r {row['recurrence']:2d}  change {row['change']:.2e}  to r 32 {row['distance_to_last']:.2e}")
    write_record(options.out, options, result, dtypes=facts.dtypes(model.params))


if __name__ == "__main__":
    tyro.cli(main)
