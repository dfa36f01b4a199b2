"""Memory and compilations of a process that decodes for half an hour.

`python -m experiments.systems.soak --minutes 30`. Batches of random sizes and prompts of random lengths, half of them
by `generate` (the driver `run`), half by `stream` until its end, a callback looking for a stop string after each
call. The first pass decodes once with every driver, decoder, size of batch and bucket of lengths; whatever is
compiled after it is counted. Memory is what the system says that the process holds (VmRSS of /proc/self/status); its
growth is the slope of a line through the readings after the warm-up.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.common.record import write_record
from experiments.systems.memory import reading
from paradec_jax import AutoRegressive, Jacobi, facts, generate, load
from paradec_jax.data import problem
from paradec_jax.store import Model

COMPILED = "/jax/core/compile/backend_compile_duration"
BUCKET = 32
DECODERS = {"autoregressive": AutoRegressive(), "jacobi": Jacobi(block=8)}
DRIVERS = {"run": (), "stream": ("\n\n\n",)}  # a text to stop at is what makes `generate` stream


@dataclasses.dataclass(frozen=True)
class Options:
    """How long, and on what.

    Attributes:
      minutes: of decoding after the first pass.
      warm_up: minutes of them whose readings do not count.
      every: seconds between two readings.
      model: a folder, or the name of a bundled causal model.
      batches: sizes of batches.
      buckets: lengths of prompts are 1 to so many times 32 tokens.
      max_new_tokens: tokens of a row.
      seed: of sizes, lengths and drivers.
      out: where the JSON goes, and a CSV of the readings.
    """

    minutes: float = 30.0
    warm_up: float = 5.0
    every: float = 10.0
    model: str = "tiny-causal"
    batches: tuple[int, ...] = (1, 2, 5)
    buckets: int = 2
    max_new_tokens: int = 24
    seed: int = 0
    out: Path = Path("experiments/systems/results/soak.json")


Call = tuple[str, str, list[str]]


def text_of(model: Model, length: int, rng: np.random.Generator) -> str:
    """A text of about so many tokens."""
    assert model.tokenizer is not None
    ids: list[int] = []
    while len(ids) < length:
        ids += model.tokenizer.encode(problem(0, int(rng.integers(10**6)), "train", 3).prompt)
    return model.tokenizer.decode(ids[:length])


def first_pass(model: Model, options: Options, rng: np.random.Generator) -> Iterator[Call]:
    """A call of every kind."""
    for bucket in range(1, options.buckets + 1):
        for driver, decoder, size in itertools.product(DRIVERS, DECODERS, options.batches):
            yield driver, decoder, [text_of(model, bucket * BUCKET - BUCKET // 2, rng) for _ in range(size)]


def calls(model: Model, options: Options, rng: np.random.Generator) -> Iterator[Call]:
    """Calls without end."""
    longest = options.buckets * BUCKET - BUCKET // 4  # a text may be a few tokens longer when encoded again
    while True:
        size = int(rng.choice(options.batches))
        texts = [text_of(model, int(n), rng) for n in rng.integers(1, longest, size)]
        yield str(rng.choice(list(DRIVERS))), str(rng.choice(list(DECODERS))), texts


def decode(model: Model, options: Options, call: Call) -> int:
    """Runs a call; its tokens."""
    driver, decoder, texts = call
    found = generate(
        model,
        texts,
        DECODERS[decoder],
        max_new_tokens=options.max_new_tokens,
        bucket=BUCKET,
        stop_strings=DRIVERS[driver],
    )
    return sum(map(len, found.tokens))


def slope(rows: list[dict[str, Any]]) -> float:
    """MiB a minute, by least squares."""
    minutes, mebibytes = ([row[name] for row in rows] for name in ("minutes", "mebibytes"))
    return float(np.polyfit(minutes, mebibytes, 1)[0])


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints the readings and writes them."""
    if not 0 <= options.warm_up < options.minutes:
        raise SystemExit(f"warm_up must be less than the {options.minutes} minutes, not {options.warm_up}")
    model, rng = load(options.model), np.random.default_rng(options.seed)
    counts: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: counts.update(compiled=event == COMPILED)
    )
    for call in first_pass(model, options, rng):
        decode(model, options, call)
    before, begun = counts["compiled"], time.monotonic()
    rows: list[dict[str, Any]] = []
    print(f"{before} programs compiled or read from the cache in the first pass", flush=True)
    for call in calls(model, options, rng):
        counts.update({call[0]: 1, "tokens": decode(model, options, call)})
        passed = time.monotonic() - begun
        if passed >= len(rows) * options.every:
            row = {"minutes": passed / 60, "mebibytes": reading("VmRSS"), "arrays": len(jax.live_arrays())}
            rows.append(
                row | {"compiled": counts["compiled"] - before, "calls": counts["run"] + counts["stream"]}
            )
            print(" ".join(f"{name} {value:.6g}" for name, value in rows[-1].items()), flush=True)
        if passed >= options.minutes * 60:
            break
    after = [row for row in rows if row["minutes"] >= options.warm_up]
    found = {
        "growth": slope(after) if len(after) > 2 else None,
        "compiled": {"first pass": before, "after": counts["compiled"] - before},
        "calls": {driver: counts[driver] for driver in DRIVERS},
        "tokens": counts["tokens"],
    }
    print(found)
    dtypes = facts.dtypes(model.params)
    write_record(options.out, options, found | {"rows": rows}, dtypes=dtypes, lines=rows)


if __name__ == "__main__":
    tyro.cli(main)
