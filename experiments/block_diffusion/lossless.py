"""Whether speculative decoding writes what its base writes: `python -m experiments.block_diffusion.lossless MODEL`.

MODEL holds a backbone and its head. The same unseen problems are decoded for every number of candidates, rule and
temperature, with the next block riding along and without, drafted by the head and by none, in batches of several
sizes. A text counts as equal if all of its tokens are those of `BlockDenoising` with the same rule, temperature, keys
and batch. Finished rows are kept, so that a run that was stopped goes on.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from experiments.block_diffusion.problems import Asked
from experiments.common.command import run as run_command
from experiments.common.record import rows_begun, write_record
from paradec_jax import BlockDenoising, Model, ResidualSpeculative, facts, load, run, store
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.compare import Prompts, case_of, prompts_of, with_parameters
from paradec_jax.evaluate.options import choose


@dataclasses.dataclass(frozen=True)
class Options:
    """What to decode.

    Attributes:
      model: folder of a backbone and its head.
      ground: "words" or "chains".
      count: problems.
      steps: fewest and most steps of word problems.
      candidates: K, states that a call verifies.
      threshold: of the dynamic rule.
      temperatures: of the decoders.
      batches: batch sizes.
      seed: of problems and draws.
      out: where the JSON goes.
    """

    model: tyro.conf.Positional[str]
    ground: Literal["words", "chains"] = "words"
    count: int = 500
    steps: tuple[int, int] = (2, 4)
    candidates: tuple[int, ...] = (2, 3, 4)
    threshold: float = 0.9
    temperatures: tuple[float, ...] = (0.0, 0.7)
    batches: tuple[int, ...] = (8, 1)
    seed: int = 5
    out: Path = Path("experiments/block_diffusion/results/lossless.json")

    def __post_init__(self) -> None:
        if min(self.batches, default=0) < 1 or self.count < 1:
            raise ValueError(f"batches and count must be at least 1, not {self.batches}, {self.count}")


def settings_of(options: Options, rule: str, temperature: float) -> list[Setting]:
    """The base, then what must write the same."""
    asked: dict[str, Any] = {"temperature": temperature}
    if rule == "dynamic":
        asked["threshold"] = options.threshold
    found: list[tuple[str, Any]] = [("block", BlockDenoising(rule=rule))]
    for k, ride, head in itertools.product(options.candidates, (True, False), ("zero", None)):
        decoder = ResidualSpeculative(head=head, candidates=k, rule=rule, ride=ride)
        found.append(("residual_speculative", decoder))
    return [Setting(name, *choose(name, decoder, options=asked)) for name, decoder in found]


def decode(
    model: Model, params: Any, setting: Setting, prompts: Prompts, batch: int
) -> tuple[list[Any], np.ndarray]:
    """Tokens and network calls of all problems; the last batch is filled with the first ones."""
    case = with_parameters(case_of(setting, setting.decoder, model, prompts.size), model, params)
    count = len(prompts.lengths)
    of_batches = np.resize(np.arange(count), (-(-count // batch), batch)).tolist()
    found = [run(case.decoder, case.parameters(params), prompts.request(at), case.knobs) for at in of_batches]
    calls = np.concatenate([np.asarray(decoded.network_calls) for decoded in found])
    return [text for decoded in found for text in decoded.completions()][:count], calls[:count]


def rows_of(options: Options, model: Model, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that are not done, the base's first; each tells its facts, for a stopped run may go on elsewhere."""
    asked = Asked(ground=options.ground, count=options.count, steps=options.steps, seed=options.seed)
    problems, params = asked.read(model), model.network.prepare(model.params)
    prompts = prompts_of(model, problems.prompts, options.seed, problems.budget)
    kinds = itertools.product(options.batches, options.temperatures, ("static", "dynamic"))
    for batch, temperature, rule in kinds:
        base, *others = settings_of(options, rule, temperature)
        expected: tuple[list[Any], np.ndarray] | None = None
        for setting in (base, *others):
            start = {"batch": batch, "temperature": temperature, "rule": rule, "settings": setting.settings()}
            start["decoder"] = setting.name
            if any(row.items() >= start.items() for row in done):
                continue
            if expected is None:
                expected = decode(model, params, base, prompts, batch)
            clock = time.perf_counter()
            texts, calls = decode(model, params, setting, prompts, batch)
            yield start | {
                "label": f"{setting.name}, {setting.label()}".removesuffix(", "),
                "problems": len(texts),
                "equal": sum(a == b for a, b in zip(texts, expected[0], strict=True)),
                "more_calls_than_base": int(np.sum(calls > expected[1])),
                "fewer_calls": float(expected[1].sum() / calls.sum()),
                "seconds": time.perf_counter() - clock,
                "facts": facts.facts() | {"dtypes": facts.dtypes(model.params)},
            }
            jax.clear_caches()  # with all rows' programs kept, LLVM ran out of memory to map after 57 rows


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the rows; ends with an error if a text differs."""
    model = load(options.model, dtype="float32")
    if model.family != "block_diffusion" or model.head is None:
        raise SystemExit(f"{options.model} has no residual head beside a model of block diffusion")
    kept = dataclasses.asdict(options) | {
        "model": store.names_of([options.model])[0],
        "model_sha256": store.fingerprint(options.model),
    }
    done: list[dict[str, Any]] = rows_begun(options.out, kept) or []
    for row in rows_of(options, model, done):
        done.append(row)
        write_record(options.out, kept, {"rows": done}, dtypes=row["facts"]["dtypes"])
        print(
            f"batch {row['batch']}, temperature {row['temperature']:g}: {row['label']}: {row['equal']} of "
            f"{row['problems']} equal, {row['fewer_calls']:.2f}x fewer calls, {row['seconds']:.0f} s",
            flush=True,
        )
    if wrong := [row for row in done if row["equal"] < row["problems"]]:
        raise SystemExit(f"{len(wrong)} of {len(done)} rows have a text that differs from that of their base")


if __name__ == "__main__":
    run_command(main)
