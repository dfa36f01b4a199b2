"""Runs studies: many settings of the decoders on the same unseen problems.

A paper's own `study.py` lists its studies and hands them to `command`. What a setting gave is
written down as soon as it is known; a study that was stopped goes on with the settings that are
missing. A row's speed-up is over the baseline that was timed in turns with it, whose own speed
stands beside. Pictures are those of `plots.py`.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from experiments.common import plots
from experiments.common.problems import Problems, of_pointers, of_words
from experiments.common.record import difference, rows_begun, write_record
from experiments.common.study import Depth, Study
from paradec_jax import facts, load, store
from paradec_jax.cli.output import progress
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.compare import compare

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
      needed: recurrences after which the slowest tokens of the model have settled, which says how
        wide waves are.
      problems: unseen problems.
      steps: fewest and most steps of word problems.
      budget: new tokens of a problem; room for the longest reference solution when None.
      seed: of problems and initial states.
      split: of generated problems, "test" for those that nothing was chosen on, and "tune" for
        those that settings are chosen on, whose tables have names of their own and no picture.
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
    steps: tuple[int, int] = (2, 4)
    budget: int | None = None
    seed: int = 2
    split: Literal["test", "tune"] = "test"
    timed: int = 8
    passes: int = 5
    rows: int = 50

    def __post_init__(self) -> None:
        if self.task != "pointers" and self.nearest:
            raise ValueError(f"nearest ({self.nearest}) is a matter of --task pointers")

    @property
    def name(self) -> str:
        """The model's, as it stands in tables."""
        return store.names_of([self.model])[0]

    def kept(self) -> dict[str, Any]:
        """What must be the same for two rows to stand in one table."""
        fields = dataclasses.asdict(self) | {
            "model": self.name,
            "model_sha256": store.fingerprint(self.model),
        }
        for name in ("study", "folder", "rows"):
            del fields[name]
        return fields | {"steps": list(self.steps)}


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
        raise SystemExit(
            f"{', '.join(unsuited)} does not suit {options.model} of family {model.family}"
        )
    problems = draw(options)
    for name in names:
        run(studies[name], name, model, problems, options)


def draw(options: Options) -> Problems:
    """The problems of a run."""
    asked = options.problems, options.seed, options.split
    drawn = (
        of_pointers(*asked, options.nearest)
        if options.task == "pointers"
        else of_words(*asked, options.steps)
    )
    return dataclasses.replace(drawn, budget=options.budget or drawn.budget)


def run(
    study: Study, name: str, model: Any, problems: Problems, options: Options
) -> list[dict[str, Any]]:
    """Decodes what is missing of a study, writes and draws the whole of it, and returns its rows."""
    parts = [name, options.name, *([] if options.split == "test" else [options.split])]
    stem = "-".join(parts).replace("/", "-")
    path = options.folder / f"{stem}.json"
    try:
        rows: dict[str, Any] = rows_begun(path, options.kept()) or {}
    except ValueError as error:
        raise SystemExit(str(error)) from None
    recurrence = model.network.recurrence if study.family == "recurrent_depth" else 1
    settings = study.settings(Depth(recurrence, options.needed))
    baseline = next(setting for setting in settings if setting.baseline)
    missing = [
        setting for setting in settings if _key(setting) not in rows and not setting.baseline
    ]
    if missing and rows and options.timed and (other := _other_machine(path)):
        raise SystemExit(
            f"{path} was timed under other conditions: {other}; move it away to begin anew"
        )
    groups = [missing[i : i + GROUP] for i in range(0, len(missing), GROUP)]
    for group in groups:
        decoded = _decode([baseline, *group], model, problems, options)
        rows = decoded | rows
        dtypes = decoded[_key(baseline)]["facts"]["dtypes"]
        write_record(path, options.kept(), {"rows": rows}, dtypes=dtypes)
    ordered = [rows[_key(setting)] for setting in settings]
    if options.split == "test" and study.x is not None:
        figure = options.folder.parent / "figures" / f"{stem}.png"
        plots.if_possible(plots.draw, study, ordered, figure)
    print(f"{stem}: {len(ordered)} rows of {len(problems.prompts)} problems", file=sys.stderr)
    return ordered


def _key(setting: Setting) -> str:
    """What tells settings of a study apart."""
    return f"{setting.name}, {setting.label()}".removesuffix(", ")


def _decode(
    settings: Sequence[Setting], model: Any, problems: Problems, options: Options
) -> dict[str, dict[str, Any]]:
    with progress() as report:
        compared = compare(
            [Source(options.name, model, setting) for setting in settings],
            problems.prompts,
            seed=options.seed,
            budget=problems.budget,
            score=problems.score,
            timed=options.timed,
            passes=options.passes,
            rows=options.rows,
            report=report,
        )
    keys = [_key(setting) for setting in settings]
    return {
        key: row | {"label": key, "facts": compared.facts}
        for key, row in zip(keys, compared.rows, strict=True)
    }


def _other_machine(path: Path) -> str | None:
    """What of the machine and its libraries differs from when a table was begun; each row tells its
    own commit.
    """
    made = json.loads(path.read_text())["facts"]
    before, now = ({k: v for k, v in of.items() if k != "commit"} for of in (made, facts.facts()))
    return difference(before, now)
