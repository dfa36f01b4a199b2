"""What the first answer waits for: fresh processes of one or several checkouts, by parts, in turns.

`python -m experiments.systems.first_answer [ROOT ...]`. Each pass starts a process for every way (the command
`paradec generate`, the library's `load` and `generate`), checkout and state of the compilation cache. A cold cache is
an empty folder; the warm one holds what the cold process before it left. Old and new checkout:

    python -m experiments.systems.first_answer ../old . --passes 5

The parts: `python`, the interpreter up to its first line; `imports`; `load`, the model; `trace`, `lower` and
`compile` (or reading a program from the cache), as JAX tells of them, wherever they happen; `rest`, that is parsing
the command line, encoding, running and decoding. `wall` is the whole process as its caller sees it, `cpu` the time of
all its threads, which other work on the machine disturbs least.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from experiments.common.record import write_record
from paradec_jax import facts, load

CHILD = Path(__file__).with_name("first_answer_child.py")
WAYS = ("command", "library")
QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
PARTS = ("python", "imports", "load", "trace", "lower", "compile", "rest")
COLUMNS = (*PARTS, "wall", "cpu")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time.

    Attributes:
      roots: checkouts, the old one first.
      decoder: as `paradec generate` names it.
      model: a model folder or the name of a bundled one.
      prompt: what to continue.
      max_new_tokens: tokens at most.
      passes: processes of each kind, of which the median counts.
      out: where the JSON goes, and the CSV beside it.
    """

    roots: tyro.conf.Positional[tuple[Path, ...]] = (Path("."),)
    decoder: str = "wavefront"
    model: str = "tiny-recurrent-distilled"
    prompt: str = f"Question: {QUESTION}\nAnswer:\n"
    max_new_tokens: int = 200
    passes: int = 5
    out: Path = Path("experiments/systems/results/first_answer.json")

    def __post_init__(self) -> None:
        if self.passes < 1 or not self.roots:
            raise ValueError(f"need a checkout and passes of at least 1, not {self.passes}")
        for root in self.roots:
            if not (root / "paradec_jax").is_dir():
                raise ValueError(f"{root} is no checkout: it has no folder paradec_jax")

    def words(self, way: str) -> list[str]:
        """What the child is told."""
        budget = str(self.max_new_tokens)
        if way == "library":
            return [self.decoder, self.prompt, self.model, budget]
        return [
            *("generate", self.decoder, self.prompt),
            *("--model", self.model, "--max-new-tokens", budget),
        ]


def first_answer(root: Path, way: str, words: list[str], cache: Path) -> dict[str, Any]:
    """Seconds and programs of one process in the folder `root`, and the text that it printed.

    Raises:
      RuntimeError: when the process fails; its last line of errors is the message.
    """
    environment = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    environment |= {"XDG_CACHE_HOME": str(cache)}
    if way == "library":  # which leaves the cache to its user
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache / "library")}
    with tempfile.TemporaryDirectory() as folder:
        out, printed, errors = (Path(folder) / name for name in ("out", "printed", "errors"))
        with printed.open("w") as stdout, errors.open("w") as stderr:
            started = time.monotonic()
            command = [sys.executable, str(CHILD), str(started), way, str(out), *words]
            process = subprocess.Popen(command, cwd=root, env=environment, stdout=stdout, stderr=stderr)
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            told = errors.read_text().strip().splitlines() or [f"exit code {process.returncode}"]
            raise RuntimeError(f"the {way} of {root} failed: {told[-1]}")
        found = json.loads(out.read_text())
        text = printed.read_text()
    seconds = found["seconds"]
    seconds |= {"rest": wall - sum(seconds.values()), "wall": wall, "cpu": usage.ru_utime + usage.ru_stime}
    return {"seconds": seconds, "programs": found["programs"], "cached": found["cached"], "text": text}


def measure(options: Options) -> Iterator[tuple[str, Path, str, dict[str, Any]]]:
    """(way, root, state of the cache, what was found) of every process, checkouts in turns."""
    for _ in range(options.passes):
        for way in WAYS:
            for root in options.roots:
                with tempfile.TemporaryDirectory() as folder:
                    for state in ("cold", "warm"):
                        yield way, root, state, first_answer(root, way, options.words(way), Path(folder))


def row_of(way: str, root: Path, state: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the passes, and the range of the whole."""
    walls = [one["seconds"]["wall"] for one in found]
    row: dict[str, Any] = {"way": way, "commit": facts.commit(root), "cache": state}
    row |= {name: statistics.median(one["seconds"][name] for one in found) for name in COLUMNS}
    row |= {"wall_least": min(walls), "wall_most": max(walls)}
    row |= {name: found[-1][name] for name in ("programs", "cached")}
    return row | {
        "passes": [one["seconds"] for one in found],
        "texts": sorted({one["text"] for one in found}),
    }


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table."""
    found: dict[tuple[str, Path, str], list[dict[str, Any]]] = {}
    for way, root, state, one in measure(options):
        found.setdefault((way, root, state), []).append(one)
        seconds = "  ".join(f"{name} {one['seconds'][name]:.2f}" for name in COLUMNS)
        print(f"{way:8s} {root!s:12s} {state:5s} {seconds}  programs {one['programs']}", flush=True)
    rows = [row_of(*key, passes) for key, passes in found.items()]
    dtypes = facts.dtypes(load(options.model).params)
    write_record(options.out, options, {"rows": rows}, dtypes=dtypes, lines=rows)
    print(f"\n| way | checkout | cache | {' | '.join(COLUMNS)} | wall, range | programs |")
    print("|" + "---|" * (5 + len(COLUMNS)))
    for (_, root, _), row in zip(found, rows, strict=True):
        cells = " | ".join(f"{row[name]:.2f}" for name in COLUMNS)
        span = f"{row['wall_least']:.2f} to {row['wall_most']:.2f}"
        print(f"| {row['way']} | {root} | {row['cache']} | {cells} | {span} | {row['programs']} |")


if __name__ == "__main__":
    try:
        main(tyro.cli(tyro.conf.OmitArgPrefixes[Options]))
    except (ValueError, RuntimeError, OSError) as error:
        raise SystemExit(str(error)) from None
