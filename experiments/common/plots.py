"""Pictures of the studies."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.study import Study

Row = dict[str, Any]
Lines = Mapping[str, Sequence[tuple[float, float, Sequence[float | None]]]]
"""By name: points (x, y, ends of the range of y, None of none)."""
# Rows are timed in groups, and a machine drifts: only the ratio to the own group's baseline
# compares rows.
SPEED = "speed over the baseline, batch 1"


@contextlib.contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A figure of that size in inches, which is written to a PNG when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=size, layout="constrained")
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def if_possible(draw: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Draws, or says that matplotlib is missing."""
    try:
        draw(*arguments, **options)
    except ImportError:
        print("no picture: matplotlib is missing (pip install -e '.[eval]')", file=sys.stderr)


def draw(study: Study, rows: Sequence[Row], path: Path) -> None:
    """Draws a study's rows, the first of which is static decoding, to a PNG."""
    model, problems = rows[0]["model"], rows[0]["problems"]
    with picture(path, (9, 3.6)) as figure:
        if study.kind == "bars":
            _bars(figure, rows)
        else:
            {"curves": _curves, "heat": _heat, "grid": _grid}[study.kind](figure, study, rows)
        figure.suptitle(f"{study.title}: {model}, {problems} problems", fontsize=11)


def draw_lines(lines: Lines, path: Path, *, x: str, y: str, log_x: bool = True) -> None:
    """Draws named lines to a PNG, y on a scale of powers of two, and x too unless told otherwise."""
    draw_panels({y: lines}, path, x=x, logarithmic=(y,), log_x=log_x)


def draw_panels(
    panels: Mapping[str, Lines],
    path: Path,
    *,
    x: str,
    logarithmic: Sequence[str] = (),
    log_x: bool = True,
) -> None:
    """Draws panels of named lines to a PNG, side by side over one x; those named `logarithmic` in
    powers of two.
    """
    with picture(path, (2 + 4.5 * len(panels), 3.8)) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, (y, lines) in zip(axes, panels.items(), strict=True):
            for color, (name, points) in enumerate(lines.items()):
                at, middle = [point[0] for point in points], [point[1] for point in points]
                errors = list(
                    zip(*(_distances(value, *ends) for _, value, ends in points), strict=True)
                )
                style = {"marker": "o", "markersize": 4, "capsize": 2, "color": f"C{color % 10}"}
                panel.errorbar(at, middle, yerr=errors, label=name, **style)
            if log_x:
                ticks = sorted({point[0] for points in lines.values() for point in points})
                panel.set_xscale("log", base=2)
                panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            if y in logarithmic:
                panel.set_yscale("log", base=2)
                panel.yaxis.set_major_formatter("{x:g}")
            panel.set_xlabel(x)
            panel.set_ylabel(y)
        axes[0].legend(fontsize=8)


def _distances(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    """From a value to both ends of its range; none where it has none."""
    return (
        (0.0, 0.0)
        if low is None or high is None
        else (max(value - low, 0.0), max(high - value, 0.0))
    )


def _share(row: Row) -> float:
    return 100 * row["exact"] / row["problems"]


def _errors(rows: Sequence[Row]) -> list[list[float]]:
    """Distances from each share to both ends of its interval, in percent."""
    return [
        [_share(row) - 100 * row["interval"][0] for row in rows],
        [100 * row["interval"][1] - _share(row) for row in rows],
    ]


def _speed_errors(rows: Sequence[Row]) -> list[list[float]] | None:
    """Distances from each speed-up to both ends of its range; None where a row has none, as in
    older tables.
    """
    ranges = [row.get("speedup_interval") or [None, None] for row in rows]
    if any(end is None for ends in ranges for end in ends):
        return None
    pairs = list(zip(rows, ranges, strict=True))
    return [
        [max(row["speedup"] - low, 0) for row, (low, _) in pairs],
        [max(high - row["speedup"], 0) for row, (_, high) in pairs],
    ]


def _groups(study: Study, rows: Sequence[Row]) -> dict[Any, list[Row]]:
    """Rows by the choice that tells lines apart; those without one are static decoding, and left
    out.
    """
    groups: dict[Any, list[Row]] = {}
    for row in _compared(study, rows):
        groups.setdefault(_choice(row, study.lines), []).append(row)
    return groups


def _compared(study: Study, rows: Sequence[Row]) -> list[Row]:
    """The rows that have the choices of both axes; what is not set has no place on an axis of
    numbers.
    """
    wanted = {*_names(study.x), *_names(study.lines)}
    found = [row for row in rows[1:] if wanted <= row["settings"].keys()]
    return [
        row for row in found if isinstance(study.x, tuple) or row["settings"][study.x] is not None
    ]


def _choice(row: Row, names: str | tuple[str, ...] | None) -> Any:
    """A row's value of one choice, or its values of several."""
    return (
        tuple(row["settings"][name] for name in names)
        if isinstance(names, tuple)
        else row["settings"][names]
    )


def _work(rows: Sequence[Row]) -> tuple[str, str]:
    """What says how much a network of the rows' family has done: its field and its name."""
    if rows[0]["family"] == "recurrent_depth":
        return "recurrences_per_token", "recurrences / token"
    return "tokens_per_network_call", "tokens / network call"


def _curves(figure: Any, study: Study, rows: Sequence[Row]) -> None:
    """Exact answers, speed where it was measured, and the network's work against one choice."""
    work, name = _work(rows)
    fields = {"exact": "exact answers (%)", "speedup": SPEED, work: name}
    fields = {field: label for field, label in fields.items() if field in rows[0]}
    panels = figure.subplots(1, len(fields))

    def values_of(field: str, rows: Sequence[Row]) -> list[Any]:
        return [_share(row) if field == "exact" else row.get(field) for row in rows]

    for line, (value, group) in enumerate(_groups(study, rows).items()):
        x = [row["settings"][study.x] for row in group]
        label = f"{_name(study.lines)} {value}"
        style = {"color": f"C{line}", "marker": "o", "markersize": 4, "label": label}
        for panel, field in zip(panels, fields, strict=True):
            errors = {"exact": _errors, "speedup": _speed_errors}.get(field, lambda rows: None)(
                group
            )
            panel.errorbar(x, values_of(field, group), yerr=errors, capsize=2, **style)
    for panel, (field, label) in zip(panels, fields.items(), strict=True):
        panel.axhline(
            *values_of(field, rows[:1]), color="0.5", linestyle="--", linewidth=1, label="static"
        )
        panel.set_xlabel(_name(study.x))
        panel.set_ylabel(label)
        values = sorted({row["settings"][study.x] for row in _compared(study, rows)})
        if values[0] > 0 and values[-1] / values[0] >= 8:
            panel.set_xscale("log", base=2)
            panel.set_xticks(values, [f"{value:g}" for value in values])
            panel.minorticks_off()
    panels[0].legend(fontsize=8)


def _heat(figure: Any, study: Study, rows: Sequence[Row]) -> None:
    """Exact answers over two choices, and the front of accuracy against speed."""
    heat, front = figure.subplots(1, 2)
    groups = _groups(study, rows)
    xs = list(dict.fromkeys(row["settings"][study.x] for row in _compared(study, rows)))
    shares = [[_share(row) for row in group] for group in groups.values()]
    image = heat.imshow(shares, aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=heat, label="exact answers (%)")
    middle = (min(map(min, shares)) + max(map(max, shares))) / 2
    for i, line in enumerate(shares):
        for j, share in enumerate(line):
            heat.text(
                j, i, f"{share:.1f}", ha="center", va="center", color="w" if share < middle else "k"
            )
    heat.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    heat.set_yticks(range(len(groups)), [str(value) for value in groups])
    heat.set_xlabel(_name(study.x))
    heat.set_ylabel(_name(study.lines))
    for color, (value, group) in enumerate(groups.items()):
        speeds = [row.get("speedup") or 1 / row["recurrences_per_token"] for row in group]
        label = f"{_name(study.lines)} {value}"
        front.plot(speeds, [_share(row) for row in group], "o-", color=f"C{color}", label=label)
        for speed, row in zip(speeds, group, strict=True):
            text = f"{row['settings'][study.x]:g}"
            front.annotate(
                text, (speed, _share(row)), textcoords="offset points", xytext=(4, 4), fontsize=7
            )
    front.set_xlabel(SPEED if rows[0].get("speedup") else "tokens / recurrence")
    front.set_ylabel("exact answers (%)")
    front.legend(fontsize=8)


def _grid(figure: Any, study: Study, rows: Sequence[Row]) -> None:
    """Tokens a network call over two groups of choices."""
    groups = _groups(study, rows)
    xs = list(dict.fromkeys(_choice(row, study.x) for row in _compared(study, rows)))
    figure.set_size_inches(2.5 + 0.75 * len(xs), 1.8 + 0.4 * len(groups))
    panel = figure.subplots()
    found = {
        (value, _choice(row, study.x)): row for value, group in groups.items() for row in group
    }
    values = [
        [
            found[value, x]["tokens_per_network_call"] if (value, x) in found else float("nan")
            for x in xs
        ]
        for value in groups
    ]
    known = [value for line in values for value in line if value == value]
    middle = (min(known) + max(known)) / 2
    image = panel.imshow(values, aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=panel, label="tokens / network call")
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            if value == value:
                color = "w" if value < middle else "k"
                panel.text(j, i, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
    panel.set_xticks(range(len(xs)), [_told(x) for x in xs])
    panel.set_yticks(range(len(groups)), [_told(value) for value in groups])
    panel.set_xlabel(_name(study.x))
    panel.set_ylabel(_name(study.lines))


def _bars(figure: Any, rows: Sequence[Row]) -> None:
    """Exact answers with intervals, a row each; of causal models tokens a call, and speed where
    timed.
    """
    fields = {"tokens_per_network_call": "tokens / network call", "speedup": SPEED}
    if rows[0]["family"] != "causal":
        del fields["tokens_per_network_call"]
    fields = {field: label for field, label in fields.items() if field in rows[0]}
    figure.set_size_inches((6, 9, 12)[len(fields)], 1.2 + 0.28 * len(rows))
    left, *others = figure.subplots(1, 1 + len(fields), sharey=True, squeeze=False)[0]
    at = range(len(rows))
    left.errorbar(
        [_share(row) for row in rows], at, xerr=_errors(rows), fmt="o", markersize=4, capsize=2
    )
    for panel, (field, label) in zip(others, fields.items(), strict=True):
        errors = _speed_errors(rows) if field == "speedup" else None
        panel.barh(
            at, [row[field] for row in rows], height=0.6, xerr=errors, ecolor="0.3", capsize=2
        )
        panel.set_xlabel(label)
    left.set_yticks(at, [row["label"] for row in rows], fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("exact answers (%)")


def _name(choice: str | tuple[str, ...] | None) -> str:
    return ", ".join(_names(choice)).replace("_", " ")


def _names(choice: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return choice if isinstance(choice, tuple) else (choice,) if choice else ()


def _told(value: Any) -> str:
    """A value of a choice, or values of several, as text."""
    values = value if isinstance(value, tuple) else (value,)
    return ", ".join(
        "-" if x is None else f"{x:g}" if isinstance(x, float) else f"{x}" for x in values
    )
