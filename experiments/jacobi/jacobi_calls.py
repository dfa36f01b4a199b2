"""Network calls of Jacobi decoders at equal output, on a recorded model.

`python -m experiments.jacobi.jacobi_calls`. The model has memorised twelve texts and accepts two to four
tokens a call; four prompts, 344 tokens. Random guesses are drawn from the seed of a request, so the figure is
a mean over seeds, with the least and the most. Calls that read prompts do not count, as in the recorded runs.
Every output is compared with the recorded greedy one.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from convert import qwen2
from convert.engine import in_memory, read_json
from experiments.common.record import write_record
from paradec_jax import Jacobi, Lookahead, PromptLookup, facts, make_request, run

BUDGET = 200  # of the recorded runs


@dataclasses.dataclass(frozen=True)
class Options:
    """What to count.

    Attributes:
      golden: folder of the recorded arrays.
      blocks: block sizes n.
      seeds: of the random guesses, from 0 on.
      out: where the JSON goes.
    """

    golden: Path = Path("tests/golden/jacobi")
    blocks: tuple[int, ...] = (16, 32)
    seeds: int = 20
    out: Path = Path("experiments/jacobi/results/jacobi_calls.json")


def decoders(n: int) -> list[tuple[str, Any, Any]]:
    """Name, decoder and knobs of each row at block size n."""

    def spawn(share: float) -> Any:
        return Jacobi.Knobs(spawn=share)

    return [
        ("block", Jacobi(block=n), None),
        ("block, pool 4", Jacobi(block=n, pool=4), None),
        ("block, 3 alternatives", Jacobi(block=n, candidates=4), None),
        ("running window", Jacobi(block=n, running=True), None),
        ("running window, pool 4", Jacobi(block=n, running=True, pool=4), None),
        ("running window, 3 alternatives", Jacobi(block=n, running=True, candidates=4), None),
        ("2 blocks, spawn 0.85, pool 4", Jacobi(block=n, blocks=2, pool=4), spawn(0.85)),
        ("2 blocks, spawn 0.5, pool 4", Jacobi(block=n, blocks=2, pool=4), spawn(0.5)),
        ("2 blocks, spawn 0, pool 4", Jacobi(block=n, blocks=2, pool=4), spawn(0.0)),
        ("2 blocks, spawn 0, 3 alternatives", Jacobi(block=n, blocks=2, candidates=4), spawn(0.0)),
        ("4 blocks, spawn 0, 3 alternatives", Jacobi(block=n, blocks=4, candidates=4), spawn(0.0)),
    ]


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the mean number of calls of each decoder."""
    folder = options.golden / "overfit"
    fields = read_json(folder / "config.json")
    model = in_memory(qwen2.read(folder, fields, "float32"))
    recorded = np.load(options.golden / "overfit_greedy.npz", allow_pickle=False)
    prompts, outputs = (
        [row[:count].tolist() for row, count in zip(recorded[name], recorded[length], strict=True)]
        for name, length in (("prompts", "prompt_len"), ("outputs", "output_len"))
    )
    network, size = model.network, max(map(len, prompts)) + BUDGET
    tokens, params = sum(map(len, outputs)), network.prepare(model.params)
    rows: list[dict[str, Any]] = []
    plain = [("prompt lookup", PromptLookup(), None), ("lookahead 5, 7, 7", Lookahead(), None)]
    cases = [(0, *case) for case in plain]
    cases += [(n, *case) for n in options.blocks for case in decoders(n)]
    for n, name, decoder, knobs in cases:
        calls, bound = [], decoder.bind(network, size, model.token_spec)
        for seed in range(options.seeds):
            stop = model.token_spec.stop
            request = make_request(prompts, max_new_tokens=BUDGET, stop=stop, seed=seed)
            result = run(bound, params, request, knobs)
            if result.completions() != outputs:
                raise SystemExit(f"{name} at n = {n}, seed {seed} differs from the recorded greedy output")
            calls.append(int(np.sum(np.asarray(result.network_calls) - 1)))
        row: dict[str, Any] = {"block": n, "decoder": name, "seeds": options.seeds, "tokens": tokens}
        rows.append(row | {"calls": float(np.mean(calls)), "least": min(calls), "most": max(calls)})
    write_record(options.out, options, {"rows": rows}, dtypes=facts.dtypes(params))
    table = Table("n", "decoder", "calls", "least to most", "tokens a call")
    for row in rows:
        figures = f"{row['calls']:.1f}", f"{row['least']} to {row['most']}", f"{tokens / row['calls']:.2f}"
        table.add_row(str(row["block"] or ""), row["decoder"], *figures)
    Console(width=100).print(table)


if __name__ == "__main__":
    tyro.cli(main)
