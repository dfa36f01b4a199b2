"""Runs studies: many settings of the decoders on the same unseen problems.

A paper's own `study.py` lists its studies and hands them to `command`. What a setting gave is written down as
soon as it is known; a study that was stopped goes on with the settings that are missing. Pictures are those
of `plots.py`.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress, TaskID

from experiments.common import plots
from experiments.common.study import Depth, Study
from paradec_jax import load, store
from paradec_jax.data.word_problems import WordProblem
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate import (
    compare,
    exact_answers,
    exact_lists,
    pointer_problems,
    word_problems,
)
from paradec_jax.evaluate.benchmarks import gsm8k
from paradec_jax.evaluate.results import write_csv
from paradec_jax.io import atomic_write_text

GROUP = 6  # settings that are timed in turns, next to the baseline


@dataclasses.dataclass(frozen=True)
class Options:
    """What to study.

    Attributes:
      study: names of studies; "all" for every one of the paper.
      folder: where tables go; pictures go to `figures` beside it.
      model: a model folder or the name of a bundled one.
      task: of generated problems, "words" or, for a model of `pointers.py`, "pointers".
      nearest: fewest look-ups that a query of the pointers is from the end of its chain.
      needed: recurrences after which the slowest tokens of the model have settled, which says how wide waves are.
      problems: unseen problems; of a file, the first ones.
      file: GSM8K problems in place of generated ones, judged by flexible extraction.
      shots: solved examples before each problem of a file.
      examples: file whose first rows are the solved examples; eight of our own when None.
      steps: fewest and most steps of generated problems.
      budget: new tokens of a problem; when None 256 for a file, else room for the longest reference solution.
      seed: of problems and initial states.
      timed: problems of the speed measurement, at batch 1.
      passes: timings of each setting.
      rows: problems decoded together when only answers count.
    """

    study: tyro.conf.Positional[tuple[str, ...]]
    folder: Path
    model: str = "tiny-recurrent"
    task: Literal["words", "pointers"] = "words"
    nearest: int = 0
    needed: int = 6
    problems: int = 500
    file: Path | None = None
    shots: int = gsm8k.SHOTS
    examples: Path | None = None
    steps: tuple[int, int] = (2, 4)
    budget: int | None = None
    seed: int = 2
    timed: int = 8
    passes: int = 5
    rows: int = 50

    def __post_init__(self) -> None:
        if self.task == "pointers" and self.file is not None:
            raise ValueError(f"a file of problems ({self.file}) is no task of pointers: name one of both")
        if self.task != "pointers" and self.nearest:
            raise ValueError(f"nearest ({self.nearest}) is a matter of --task pointers")

    @property
    def name(self) -> str:
        """The model's, as it stands in tables."""
        return store.names_of([self.model])[0]

    def facts(self) -> dict[str, Any]:
        """What must be the same for two rows to stand in one table."""
        facts = dataclasses.asdict(self) | {"model": self.name, "model_sha256": store.fingerprint(self.model)}
        for name in ("study", "folder", "rows"):
            del facts[name]
        for name in ("task", "nearest", "needed"):  # older tables lack them
            if facts[name] == getattr(Options, name):
                del facts[name]
        for name in ("file", "examples"):
            facts[name] = None if facts[name] is None else facts[name].name
        return facts | {"steps": list(self.steps)}


def command(studies: Mapping[str, Study], folder: Path, model: str) -> None:
    """The command line of a paper's studies, with the folder and the model that are its defaults."""
    try:
        main(studies, tyro.cli(Options, default=Options(tyro.MISSING, folder, model)))
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


def main(studies: Mapping[str, Study], options: Options) -> None:
    """Runs studies, writes their tables and draws them."""
    if unknown := [name for name in options.study if name not in (*studies, "all")]:
        raise SystemExit(f"no study {', '.join(unknown)}: choose of {', '.join(studies)} or all")
    model = load(options.model)
    names = tuple(studies) if "all" in options.study else options.study
    if unsuited := [name for name in names if studies[name].family != model.family]:
        raise SystemExit(f"{', '.join(unsuited)} does not suit {options.model} of family {model.family}")
    problems = draw(options)
    for name in names:
        run(studies[name], name, model, problems, options)


@dataclasses.dataclass(frozen=True)
class Problems:
    """Prompts, tokens that an answer may take (None for those of the longest reference), and what judges answers."""

    prompts: Sequence[WordProblem | str]
    budget: int | None
    score: Any


def draw(options: Options) -> Problems:
    """The problems of a run."""
    if options.task == "pointers":
        items = pointer_problems(options.problems, seed=options.seed, nearest=options.nearest)
        # " =", a name for each query, and the stop token.
        budget = options.budget or 2 + len(items[0].distance)
        return Problems([item.prompt for item in items], budget, exact_lists(items))
    if options.file is None:
        drawn = word_problems(options.problems, seed=options.seed, steps=options.steps)
        return Problems(drawn, options.budget, exact_answers)
    read = gsm8k.read(options.file, shots=options.shots, examples=options.examples).items[: options.problems]

    def score(prompts: Sequence[WordProblem | str], texts: Sequence[str]) -> np.ndarray:
        cut = [text.split(gsm8k.STOP[0])[0] for text in texts]
        return np.asarray([gsm8k.score(*pair).flexible for pair in zip(read, cut, strict=True)], bool)

    return Problems([item.prompt for item in read], options.budget or 256, score)


def run(study: Study, name: str, model: Any, problems: Problems, options: Options) -> list[dict[str, Any]]:
    """Decodes what is missing of a study, writes and draws the whole of it, and returns its rows."""
    stem = f"{name}-{options.name}".replace("/", "-")
    path = options.folder / f"{stem}.json"
    rows = _read(path, options.facts())
    recurrence = model.network.recurrence if study.family == "recurrent_depth" else 1
    settings = study.settings(Depth(recurrence, options.needed))
    baseline = next(setting for setting in settings if setting.baseline)
    missing = [setting for setting in settings if _key(setting) not in rows and not setting.baseline]
    groups = [missing[i : i + GROUP] for i in range(0, len(missing), GROUP)]
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(stem, total=len(groups))
        inner = bar.add_task("")
        for group in groups:
            rows = _decode([baseline, *group], model, problems, options, bar, inner) | rows
            _write(path, options.facts(), rows)
            bar.advance(task)
    ordered = [rows[_key(setting)] for setting in settings]
    _write_csv(path.with_suffix(".csv"), ordered)
    try:
        plots.draw(study, ordered, options.folder.parent / "figures" / f"{stem}.png")
    except ImportError:
        console.print("no picture: matplotlib is missing (pip install -e '.[eval]')")
    console.print(f"{stem}: {len(ordered)} rows of {len(problems.prompts)} problems")
    return ordered


def _key(setting: Setting) -> str:
    """What tells settings of a study apart."""
    return f"{setting.name}, {setting.label()}".removesuffix(", ")


def _decode(
    settings: Sequence[Setting],
    model: Any,
    problems: Problems,
    options: Options,
    bar: Progress,
    task: TaskID,
) -> dict[str, dict[str, Any]]:
    found = compare(
        model,
        problems.prompts,
        settings,
        name=options.name,
        seed=options.seed,
        budget=problems.budget,
        score=problems.score,
        timed=options.timed,
        passes=options.passes,
        rows=options.rows,
        report=lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total),
    )
    keys = [_key(setting) for setting in settings]
    return {key: {"label": key} | row for key, row in zip(keys, found.rows, strict=True)}


def _read(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Rows by label, of a table that was begun under the same facts."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
        written, rows = table["facts"], table["rows"]
    except (ValueError, KeyError) as error:
        raise SystemExit(f"{path} is not a table of this script ({error}): move it away") from None
    if written != facts:
        differing = [key for key in facts if written.get(key) != facts[key]]
        raise SystemExit(f"{path} was made with other {', '.join(differing)}: move it away to begin anew")
    return rows


def _write(path: Path, facts: dict[str, Any], rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0].device_kind
    atomic_write_text(path, json.dumps({"facts": facts, "device": device, "rows": rows}, indent=1) + "\n")


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One line a setting, its choices as columns of their own."""
    lines = []
    for row in rows:
        line = {"decoder": row["decoder"], **row["settings"]}
        line |= {k: v for k, v in row.items() if not isinstance(v, dict | list) and k not in line}
        line["interval_low"], line["interval_high"] = row["interval"]
        line["difference_low"], line["difference_high"] = row["difference_interval"]
        calls = row.get("tokens_per_network_call_interval", (None, None))  # older tables lack it
        line["tokens_per_call_low"], line["tokens_per_call_high"] = calls
        lines.append(line)
    write_csv(path, lines)
