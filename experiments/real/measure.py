"""Decoders of SmolLM2-135M-Instruct on this machine, beside transformers on the same cores: `make
real`.

    python -m experiments.real.measure SmolLM2-135M-Instruct.Q4_1.gguf --peers
    .cache/peers/bin/python

Ten chats, each alone in a buffer of its own size, at most 48 new tokens, greedy. The file's
matrices were rounded to four bits, for transformers too. Decoders, transformers' among them, take
turns at every chat in every pass; seconds hold the prompt's call and no compilation, which is told
of the first chat's size. A speed-up's 95% range is a bootstrap over chats and passes. Predicted is
tokens a call over the price of a call, which is that of as many positions with random weights
(`systems.calls.call_cost`). A first answer is that of a new process, by the clock from its start,
with its peak memory, which would be this process' if that were larger.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import paradec_jax as pd
from experiments.common.command import run as run_command
from experiments.common.ratios import times
from experiments.common.record import write_record
from experiments.real.settings import HERE, SETTINGS, chats
from experiments.systems.calls import SEED, call_cost
from experiments.systems.machine import Clock, in_turns
from paradec_jax.decode.machine.rows import POSITIONS
from paradec_jax.evaluate.cases import case_of, prompts_of
from paradec_jax.evaluate.intervals import ends, speedup
from paradec_jax.evaluate.timing import compile_all

COPIES = 5  # chats at the beginning whose answers repeat much of the question
LOOKUP = 10  # tokens that prompt lookup drafts at most, ours and transformers'
WIDTHS = (1, 1 + LOOKUP, 56, 8, 16, 16)  # positions of a call of each setting
COLUMNS = "dtype|decoder|tokens a call|tokens/s|times one by one|copying chats|predicted|equal|compilation, s"
FIRST = """
import sys
import paradec_jax as pd
from paradec_jax.text.chat import conversation
model = pd.load(sys.argv[1], dtype=sys.argv[2])
text = conversation(model, [{"role": "user", "content": "What is the capital of France?"}])
print(pd.generate(model, [text], pd.AutoRegressive(), max_new_tokens=32).text[0])
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
      file: path of the GGUF file.
      peers: Python that has torch and transformers, which are left out when None.
      dtypes: dtypes of weights and computation.
      tokens: new tokens of a chat, at most.
      passes: timings of each decoder.
      limit: chats, the first ones.
      decoders: decoders, the first ones; one by one is the first, prompt lookup the second.
      out: path of the JSON.
    """

    file: tyro.conf.Positional[Path]
    peers: Path | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    tokens: int = 48
    passes: int = 3
    limit: int = 10
    decoders: int = len(SETTINGS)
    out: Path = HERE / "results" / "smollm2-135m.json"


def first_answers(file: Path, dtype: str) -> list[dict[str, Any]]:
    """A first answer with an empty cache of programs, and one with what the first has left there."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "warm"):
            start, words = time.monotonic(), [sys.executable, "-c", FIRST, str(file), dtype]
            environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
            process: Any = subprocess.Popen(
                words, env=environment, stdout=subprocess.PIPE, text=True
            )
            text = process.stdout.read().strip()
            usage = os.wait4(process.pid, 0)[2]
            row = {
                "dtype": dtype,
                "cache": state,
                "seconds": time.monotonic() - start,
                "answer": text,
            }
            rows.append(row | {"peak_mib": usage.ru_maxrss / 1024})
            print(rows[-1], flush=True)
    return rows


def ours(case: Any, request: Any) -> tuple[list[int], int, int]:
    """New tokens of a chat, network calls, and positions."""
    done = pd.run(case.decoder, case.params, request, case.knobs)
    return done.completions()[0], int(done.network_calls[0]), int(done.counts[POSITIONS][0])


def theirs(process: Any, asked: Mapping[str, Any]) -> tuple[list[int], int, int]:
    """The same by transformers, which counts no positions."""
    print(json.dumps(asked), file=process.stdin, flush=True)
    found = json.loads(process.stdout.readline())
    return found["ids"], found["calls"], 0


def measure(options: Options, dtype: str, peer: Any) -> list[dict[str, Any]]:
    """A row for each decoder, and for both of transformers where there is its process."""
    model = pd.load(str(options.file), dtype=dtype)
    texts = list(chats(model).values())[: options.limit]
    prompts = [prompts_of(model, [text], SEED, options.tokens) for text in texts]
    params, every, calls, compilation = (
        model.network.prepare(model.params),
        range(len(texts)),
        {},
        [],
    )
    requests, lengths = (
        [one.request([0]) for one in prompts],
        [int(one.lengths[0]) for one in prompts],
    )
    for setting in SETTINGS[: options.decoders]:
        cases = [case_of(setting, model, one.size, params) for one in prompts]
        compilation += compile_all([(cases[0], requests[0])])
        calls[setting.name] = [
            functools.partial(ours, *both) for both in zip(cases, requests, strict=True)
        ]
    for name, lookup in (
        (("transformers", 0), ("transformers, prompt lookup", LOOKUP)) if peer else ()
    ):
        asked = {"new": options.tokens, "stop": list(model.token_spec.stop), "lookup": lookup}
        rows = [{"ids": prompts[i].tokens[0, : lengths[i]].tolist(), **asked} for i in every]
        calls[name] = [functools.partial(theirs, peer, row) for row in rows]
    jobs = {(name, i): calls[name][i] for i in every for name in calls}
    results = {place: call() for place, call in jobs.items()}
    timings = in_turns(jobs, Clock(), options.passes)
    costs, _ = call_cost(model.config, sorted(set(WIDTHS)))
    made = {name: [results[name, i] for i in every] for name in calls}
    each = {name: np.transpose([timings[name, i].wall for i in every]) for name in calls}
    table = [row_of(name, made, each) | {"dtype": dtype} for name in calls]
    for row, width, seconds in zip(table, WIDTHS, compilation, strict=False):
        # Prompt lookup's calls differ in width: the price of their mean width, on a line between
        # both ends.
        after = sum(steps - 1 for _, steps, _ in made[row["decoder"]])
        positions = sum(positions for *_, positions in made[row["decoder"]]) - sum(lengths)
        wide = (positions - after) / (LOOKUP * after) if row["decoder"] == "prompt lookup" else 1.0
        price = 1 + wide * (costs[width].seconds / costs[1].seconds - 1)
        busy = sum(float(np.median(timings[row["decoder"], i].busy)) for i in every)
        row |= {"call_price": price, "predicted": row["tokens_per_network_call"] / price}
        row |= {"compile_seconds": seconds, "processor_seconds_per_token": busy / row["tokens"]}
    return table


def row_of(name: str, made: Mapping[str, Any], each: Mapping[str, Any]) -> dict[str, Any]:
    """What was made and timed of one decoder, beside one by one: `each` are seconds [passes,
    chats].
    """
    first = SETTINGS[0].name
    work, base = ([len(tokens) for tokens, *_ in made[of]] for of in (name, first))
    row: dict[str, Any] = {
        "decoder": name,
        "tokens": sum(work),
        "each": each[name].tolist(),
        "generated": work,
    }
    row["tokens_per_network_call"] = sum(work) / sum(steps for _, steps, _ in made[name])
    row["tokens_per_second"] = sum(work) / float(np.median(each[name].sum(1)))
    for key, n in (("speedup", len(work)), ("copying_speedup", COPIES)):
        row[key], interval = speedup(work[:n], each[name][:, :n], base[:n], each[first][:, :n])
        row[f"{key}_interval"] = ends(interval)
    row["equals_one_by_one"] = sum(
        a[0] == b[0] for a, b in zip(made[name], made[first], strict=True)
    )
    return row


def cells(row: Mapping[str, Any]) -> Sequence[str]:
    """A line of the table."""
    told = [
        row["dtype"],
        row["decoder"],
        f"{row['tokens_per_network_call']:.2f}",
        f"{row['tokens_per_second']:.1f}",
    ]
    told += [times(row[key], row[f"{key}_interval"]) for key in ("speedup", "copying_speedup")]
    more = (
        [f"{row['predicted']:.2f}", f"{row['compile_seconds']:.0f}"]
        if "predicted" in row
        else ["", ""]
    )
    return [*told, more[0], f"{row['equals_one_by_one']} of {len(row['generated'])}", more[1]]


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Measures, writes the JSON after each dtype and prints the table."""
    firsts = [row for dtype in options.dtypes for row in first_answers(options.file, dtype)]
    results: dict[str, Any] = {"rows": [], "first": firsts, "peers": None}
    for dtype in options.dtypes:
        words = [str(options.peers), str(HERE / "peer.py"), str(options.file), dtype]
        if options.peers is None:
            results["rows"] += measure(options, dtype, None)
        else:
            with subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as peer:
                results["peers"] = json.loads(peer.stdout.readline())  # type: ignore[union-attr]
                results["rows"] += measure(options, dtype, peer)
        write_record(options.out, options, results, dtypes=options.dtypes)
    lines = [COLUMNS.split("|"), ["---"] * len(COLUMNS.split("|")), *map(cells, results["rows"])]
    print("Matrices were rounded to four bits, for transformers too.\n")
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    run_command(main)
