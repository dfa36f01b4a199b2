"""Speed and equality of answers against the batch size. `python -m experiments.systems.batches`.

The same unseen problems, in their given order and so with unequal prompts, go through each decoder in batches
of several sizes. Every row must come out as it does alone; tokens per second stand beside.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import tyro

from experiments.common.record import write_record
from paradec_jax import facts, load, make_request
from paradec_jax.data.batches import encode_prompts
from paradec_jax.evaluate import word_problems
from paradec_jax.families import FAMILIES
from paradec_jax.timing import Case, measure


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      model: a model folder or the name of a bundled one.
      batches: batch sizes; the first must be 1, the reference.
      problems: problems, a multiple of every batch size.
      seed: of problems and initial states.
      passes: timings of each.
      out: where the JSON goes.
    """

    model: str = "tiny-recurrent"
    batches: tuple[int, ...] = (1, 4, 16)
    problems: int = 32
    seed: int = 1
    passes: int = 5
    out: Path = Path("experiments/systems/results/batches.json")


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table."""
    if options.batches[0] != 1 or any(options.problems % size for size in options.batches):
        raise SystemExit(
            f"batches {options.batches} must start with 1 and divide the {options.problems} problems"
        )
    model = load(options.model)
    assert model.tokenizer is not None
    problems = word_problems(options.problems, seed=options.seed, steps=(2, 4))
    tokens, lengths = encode_prompts(model.tokenizer, problems, spec=model.token_spec)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(options.seed), np.arange(len(problems)))
    budget = 128
    settings = FAMILIES[model.family].settings
    cases = [
        Case(
            dataclasses.replace(setting.decoder, greedy=True).bind(
                model.network, tokens.shape[1] + budget, model.token_spec
            ),
            setting.knobs,
        )
        for setting in settings
    ]
    params = cases[0].decoder.prepare(model.params)
    alone, rows = [], []
    for size in options.batches:
        groups = np.arange(options.problems).reshape(-1, size)
        requests = [
            make_request(
                tokens[at], lengths[at], max_new_tokens=budget, stop=model.token_spec.stop, keys=keys[at]
            )
            for at in groups
        ]
        speeds = measure(cases, params, requests, passes=options.passes)
        for i, (setting, speed) in enumerate(zip(settings, speeds, strict=True)):
            completions = [row for decoded in speed.decoded for row in decoded.completions()]
            if size == 1:
                alone.append(completions)
            equal = sum(a == b for a, b in zip(completions, alone[i], strict=True))
            rows.append(
                {
                    "decoder": setting.name,
                    "settings": setting.settings(),
                    "label": setting.label(),
                    "batch": size,
                    "problems": options.problems,
                    "equal_to_alone": equal,
                    "tokens": speed.tokens,
                    "seconds": speed.seconds,
                    "passes": list(speed.passes),
                    "quickest_seconds": min(speed.passes),
                    "slowest_seconds": max(speed.passes),
                    "tokens_per_second": speed.tokens_per_second,
                    "decode_tokens_per_second": speed.decode_tokens_per_second,
                    "compile_seconds": speed.compile_seconds,
                }
            )
            print(
                f"batch {size:2d}  {setting.name:15s} {setting.label():32s} {speed.tokens_per_second:7.0f} tokens/s  "
                f"{speed.decode_tokens_per_second:7.0f} without prompts  {equal}/{options.problems} as alone",
                flush=True,
            )
    write_record(options.out, options, {"rows": rows}, dtypes=facts.dtypes(params))


if __name__ == "__main__":
    tyro.cli(main)
