"""Where depth is needed: names right by recurrence, `python -m
experiments.recurrent_depth.pointers_depth`.

How many names of an answer are right after r recurrences, by how many look-ups they are away from
the end of their chain? The model is one that `pointers.py` has trained. How fast decoders are on
this task: `tune` and `rivals`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.common.command import run
from experiments.common.plots import if_possible, picture
from experiments.common.record import write_record
from experiments.recurrent_depth.rival_settings import static
from experiments.tasks.pointers import PointerProblem, PointerTask, pointer_problems
from paradec_jax import facts, load
from paradec_jax.data.problems import encode_prompts
from paradec_jax.decode import make_request
from paradec_jax.decode import run as run_decoder
from paradec_jax.store import Model, names_of

RECURRENCES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 24, 32)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: a model folder or the name of a bundled model.
      problems: unseen problems.
      queries: names that a problem asks about.
      seed: of problems and initial states.
      out: path of the JSON.
      figure: path of the picture, None for none.
    """

    model: str = "runs/tiny-pointers/model"
    problems: int = 500
    queries: int = 16
    seed: int = 1
    out: Path = Path("experiments/recurrent_depth/results/pointers_depth.json")
    figure: Path | None = Path("experiments/recurrent_depth/figures/pointers.png")


def by_distance(
    model: Model, problems: Sequence[PointerProblem], seed: int
) -> list[dict[str, Any]]:
    """Share of right names after each number of recurrences, for each number of look-ups."""
    assert model.tokenizer is not None
    prompts = [item.prompt for item in problems]
    tokens, lengths = encode_prompts(model.tokenizer, prompts, spec=model.token_spec)
    wanted = np.asarray(model.tokenizer.encode_batch([item.solution for item in problems]))[:, 1:]
    distance = np.asarray([item.distance for item in problems])
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        jax.random.key(seed), np.arange(len(problems))
    )
    # Answers have a known length here, and a row that says too little is wrong in what it does not
    # say.
    count = wanted.shape[1] + 1
    request = make_request(tokens, lengths, max_new_tokens=count, stop=(), keys=keys)
    rows, params = [], model.network.prepare(model.params)
    for r in RECURRENCES:
        decoder = static(r).decoder.bind(model.network, tokens.shape[1] + count, model.token_spec)
        found = np.asarray(run_decoder(decoder, params, request).completions())[:, 1:]
        right = found == wanted
        shares = [
            float(right[distance == d].mean()) if (distance == d).any() else None
            for d in range(distance.max() + 1)
        ]
        rows.append(
            {
                "recurrence": r,
                "names_right": float(right.mean()),
                "lists_right": float(right.all(1).mean()),
            }
            | {"by_distance": shares}
        )
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Share of right names over look-ups and recurrences."""
    grid = np.asarray([row["by_distance"] for row in rows], float).T
    with picture(path, (6.5, 3.6)) as figure:
        axes = figure.subplots()
        image = axes.imshow(grid, origin="lower", aspect="auto", vmin=0, vmax=1)
        axes.set_xticks(range(len(rows)), [row["recurrence"] for row in rows])
        axes.set_yticks(range(len(grid)))
        axes.set_xlabel("recurrences a token")
        axes.set_ylabel("look-ups to the end of the chain")
        figure.colorbar(image, label="share of right names")


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints, writes and draws the table."""
    model = load(options.model)
    if model.family != "recurrent_depth" or model.tokenizer is None:
        raise SystemExit(f"{options.model} must be a recurrent-depth model with a tokenizer")
    task = PointerTask(queries=options.queries)
    rows = by_distance(
        model, pointer_problems(options.problems, seed=options.seed, task=task), options.seed
    )
    for row in rows:
        print(
            f"r {row['recurrence']:2d}: {row['names_right']:.1%} of names, {row['lists_right']:.1%} of lists right"
        )
    if options.figure is not None:
        if_possible(draw, rows, options.figure)
    told = dataclasses.asdict(options) | {"model": names_of([options.model])[0]}
    write_record(options.out, told, {"by_recurrence": rows}, dtypes=facts.dtypes(model.params))


if __name__ == "__main__":
    run(main)
