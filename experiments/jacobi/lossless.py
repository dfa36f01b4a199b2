"""Whether Jacobi decoders write what autoregressive decoding writes, in no more calls.

`python -m experiments.jacobi.lossless tiny-jacobi`. Every setting of a covering set (block size, blocks in
flight, pool, candidates, window) decodes the same unseen problems at several batch sizes. A text counts as
equal if all of its tokens are those of `AutoRegressive` in the largest batch. Finished rows are kept, so that
a run that was stopped goes on.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.common.command import run as run_command
from experiments.common.record import rows_begun, write_record
from experiments.jacobi.study import jacobi, multiblock
from experiments.tasks import word_problems
from paradec_jax import AutoRegressive, Model, facts, load, make_request, run
from paradec_jax.data.problems import encode_prompts
from paradec_jax.decode import Request
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.store import fingerprint, names_of


@dataclasses.dataclass(frozen=True)
class Options:
    """What to decode.

    Attributes:
      models: model folders or names of bundled models.
      problems: unseen problems.
      steps: fewest and most written steps of a problem.
      budget: new tokens of a problem.
      batches: batch sizes.
      seed: of the problems and of the random drafts.
      out: where the JSON goes.
    """

    models: tyro.conf.Positional[tuple[str, ...]] = ("tiny-causal", "tiny-jacobi")
    problems: int = 500
    steps: tuple[int, int] = (2, 3)
    budget: int = 96
    batches: tuple[int, ...] = (8, 1)
    seed: int = 5
    out: Path = Path("experiments/jacobi/results/lossless.json")


def covering() -> list[Setting]:
    """Block sizes 4 to 64, one to four blocks, pools of 0 to 4, both kinds of window."""
    return [  # the cheapest first
        Setting("autoregressive", AutoRegressive(), baseline=True),
        jacobi(4),
        jacobi(8, running=True, pool=3),
        multiblock(8, 4, 0.0),
        jacobi(64),
        jacobi(32, pool=1),
        jacobi(16, running=True, candidates=4),
        multiblock(32, 2, 0.5),
        multiblock(8, 3, 0.5, pool=2),
        jacobi(16, pool=4),
        multiblock(4, 4, 0.85, pool=4),
        jacobi(32, running=True, pool=2),
        multiblock(16, 2, 0.85, pool=4),
        multiblock(16, 3, 0.0, candidates=4),
        multiblock(64, 2, 0.5, pool=1),
    ]


def requests_of(model: Model, options: Options, batch: int) -> list[Request]:
    """The problems in batches, each with the key of its place among all; the last batch is filled with the first."""
    if model.tokenizer is None:
        raise SystemExit("the model has no tokenizer, without which problems cannot be read")
    problems = word_problems(options.problems, seed=options.seed, steps=options.steps)
    tokens, lengths = encode_prompts(model.tokenizer, problems, spec=model.token_spec)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(options.seed), np.arange(len(problems)))
    return [
        make_request(
            tokens[at],
            lengths[at],
            max_new_tokens=options.budget,
            stop=model.token_spec.stop,
            keys=keys[at],
        )
        for at in np.resize(np.arange(len(problems)), (-(-len(problems) // batch), batch))
    ]


def decode(
    model: Model, setting: Setting, requests: list[Request], options: Options
) -> tuple[list[Any], np.ndarray]:
    """Texts (tokens) and network calls of all problems."""
    size, count = requests[0].tokens.shape[1] + options.budget, options.problems
    decoder = dataclasses.replace(setting.decoder, greedy=True).bind(model.network, size, model.token_spec)
    params = decoder.prepare(model.params)
    found = [run(decoder, params, request, setting.knobs) for request in requests]
    texts = [text for decoded in found for text in decoded.completions()]
    calls = np.concatenate([np.asarray(decoded.network_calls) for decoded in found])
    return texts[:count], calls[:count]


def rows_of(place: str, name: str, options: Options, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of one model that are not done; each tells its facts, for a stopped run may go on elsewhere."""
    model, settings, weights = load(place), covering(), fingerprint(place)
    if model.family != "causal":
        raise SystemExit(f"{place} is of family {model.family}; Jacobi decoding needs a causal model")
    requests = {batch: requests_of(model, options, batch) for batch in options.batches}
    expected, calls = decode(model, settings[0], requests[max(options.batches)], options)
    for batch in options.batches:
        for setting in settings:
            label = f"{setting.name}, {setting.label()}".removesuffix(", ")
            start = {"model": name, "model_sha256": weights, "label": label, "batch": batch}
            if any(row.items() >= start.items() for row in done):
                continue
            clock = time.perf_counter()
            texts, taken = decode(model, setting, requests[batch], options)
            tokens = sum(map(len, texts))
            yield start | {
                "settings": setting.settings(),
                "problems": len(texts),
                "equal": sum(a == b for a, b in zip(texts, expected, strict=True)),
                "more_calls_than_greedy": int(np.sum(taken > calls)),
                "tokens": tokens,
                "tokens_per_call": tokens / int(taken.sum()),
                "seconds": time.perf_counter() - clock,
                "facts": facts.facts() | {"dtypes": facts.dtypes(model.params)},
            }


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the rows; ends with an error if a text differs or took more calls."""
    if min(*options.batches, options.problems) < 1:
        raise SystemExit(
            f"batches and problems must be at least 1, not {options.batches}, {options.problems}"
        )
    kept = dataclasses.asdict(options) | {"models": None}
    done: list[dict[str, Any]] = rows_begun(options.out, kept) or []
    for place, name in zip(options.models, names_of(options.models), strict=True):
        for row in rows_of(place, name, options, done):
            done.append(row)
            write_record(options.out, kept, {"rows": done}, dtypes=row["facts"]["dtypes"])
            print(
                f"{row['model']:14s} batch {row['batch']}  {row['label']:45s} {row['equal']}/{row['problems']} "
                f"equal  {row['more_calls_than_greedy']} with more calls  "
                f"{row['tokens_per_call']:.2f} tokens a call  {row['seconds']:.0f} s",
                flush=True,
            )
    wrong = [row for row in done if row["equal"] < row["problems"] or row["more_calls_than_greedy"]]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(done)} rows have a text that differs or took more calls")


if __name__ == "__main__":
    run_command(main)
