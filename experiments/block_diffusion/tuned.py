"""Settings chosen on tuning problems and measured on unseen ones: `python -m
experiments.block_diffusion.tuned`.

On tuning problems every group below is decoded with all thresholds; a group's candidates share one
program. Of each group the setting of fewest calls is taken whose right answers are at most `points`
below those of one token a step, or, where none is, the one of most right answers. What was taken is
measured on unseen problems, beside one token a step and two:

    dynamic         the backbone alone
    direct K        K steps of a head after each call, with the backbone's threshold
    adaptive        steps of a head while it is surer than a threshold of its own, none after a call that reveals much

each of the last two with the trained head and with none (`head` "zero").
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from experiments.block_diffusion.chosen import HEAD, Options, Shop
from experiments.block_diffusion.lines import Line, Row, Rows
from experiments.block_diffusion.study import draw, told
from experiments.common.command import run as run_command
from experiments.common.plots import if_possible
from experiments.common.record import write_record
from paradec_jax import load, store

ENOUGH = 2  # positions of a call after which a head of adaptive K does nothing


@dataclasses.dataclass(frozen=True)
class Choice:
    """How settings are chosen.

    Attributes:
      tuning: problems that they are chosen on.
      points: right answers of a hundred that a setting may lose against one token a step.
      head_thresholds: confidences from which a head of adaptive K goes on.
    """

    tuning: int = 200
    points: float = 1.0
    head_thresholds: tuple[float, ...] = (0.5, 0.7, 0.9)

    def __post_init__(self) -> None:
        if self.tuning < 1 or self.points < 0 or not self.head_thresholds:
            raise ValueError(
                f"tuning {self.tuning} must be at least 1, points {self.points} at least 0, and head_thresholds "
                "at least one number"
            )


Group = tuple[str, list[Line]]


def groups_of(shop: Shop, head_thresholds: Sequence[float]) -> list[Group]:
    """Lines by the name of their group, of which one is chosen; none where the head is missing."""
    options = shop.options
    found = [("dynamic", [shop.base("dynamic", threshold=tau) for tau in options.thresholds])]
    for head in (None, HEAD):
        name = "no head" if head is None else "head"
        for k in options.steps_ahead:
            lines = [
                line
                for tau in options.thresholds
                for line in shop.direct(k, head, rule="dynamic", threshold=tau)
            ]
            found.append((f"direct {k}, {name}", lines))
        most = max(options.steps_ahead)
        lines = [
            line
            for tau in options.thresholds
            for own in head_thresholds
            for line in shop.direct(
                most, head, rule="dynamic", threshold=tau, head_threshold=own, enough=ENOUGH
            )
        ]
        found.append((f"adaptive, {name}", lines))
    return [(name, lines) for name, lines in found if lines]


def right_of(row: Row) -> float:
    """Share of right blocks where these can be told, else of right answers."""
    return float(row["block_share"] if "block_share" in row else row["exact"] / row["problems"])


def best_of(rows: Sequence[Row], base: Row, points: float) -> int:
    """The row of fewest calls that is right often enough; the one that is right most often where
    none is.
    """
    enough = [i for i, row in enumerate(rows) if right_of(row) >= right_of(base) - points / 100]
    if not enough:
        return max(range(len(rows)), key=lambda i: right_of(rows[i]))
    return min(enough, key=lambda i: rows[i]["network_calls_per_token"])


def tuning_of(options: Options, choice: Choice) -> Options:
    """The options with tuning problems: those of the split, or other texts of a chain.

    Raises:
      ValueError: a split that was chosen already.
    """
    if options.asked.split != "test":
        raise ValueError("split says where a study's problems come from; here they come from both")
    if options.chains:
        asked = dataclasses.replace(options.asked, count=choice.tuning, seed=options.asked.seed + 1)
    else:
        asked = dataclasses.replace(options.asked, count=choice.tuning, split="tune")
    return dataclasses.replace(options, asked=asked, timed=0)


def main(
    options: tyro.conf.OmitArgPrefixes[Options] = Options(()),  # noqa: B008
    choice: tyro.conf.OmitArgPrefixes[Choice] = Choice(),
) -> None:
    """Chooses, measures; writes, draws and prints the table."""
    if options.study:
        raise ValueError(
            f"{options.study[0]} is a study: see python -m experiments.block_diffusion.study"
        )
    before, model = tuning_of(options, choice), load(options.first)
    dtype = None if options.dtype == "stored" else options.dtype
    problems = options.asked.read(model)
    shop = Shop(options, problems.temperature, model.network.block)
    stem = f"rows-{options.asked.ground}"
    tune = Rows(
        options.folder / f"{stem}-tuning.json", before.asked.read(model), before.kept(), dtype
    )
    unseen = Rows(options.folder / f"{stem}.json", problems, options.kept(), dtype)
    groups = groups_of(shop, choice.head_thresholds)
    base, *tried = tune.of([shop.baseline(), *(line for _, lines in groups for line in lines)])
    chosen: dict[str, Line] = {}
    for name, lines in groups:
        own, tried = tried[: len(lines)], tried[len(lines) :]
        chosen[name] = lines[best_of(own, base, choice.points)]
        print(f"{name}: {chosen[name].setting.label()}", file=sys.stderr)
    lines = [*shop.static(1, 2), *chosen.values()]
    found = unseen.of(list({line.label: line for line in lines}.values()))
    write(options, choice, {name: line.label for name, line in chosen.items()}, found)


def write(options: Options, choice: Choice, chosen: dict[str, str], found: list[Row]) -> None:
    """Writes the table with what was chosen, draws and prints it."""
    without = ("right", "calls", "texts", "facts")
    table = [{name: value for name, value in row.items() if name not in without} for row in found]
    shown: dict[str, Any] = options.kept() | dataclasses.asdict(choice)
    shown["backbone_sha256"] = store.fingerprint(options.first)
    path = options.folder / f"tuned-{options.asked.ground}.json"
    dtypes = [dtype for row in found for dtype in row["facts"]["dtypes"]]
    write_record(path, shown, {"chosen": chosen, "rows": table}, dtypes=dtypes)
    if_possible(draw, found, options.folder.parent / "figures" / f"{path.stem}.png")
    for row in found:
        less = f"  {100 * row['difference']:+.1f} points" if row is not found[0] else ""
        print(told(row) + less)


if __name__ == "__main__":
    run_command(main)
