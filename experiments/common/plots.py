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
FIELDS = {
    "recurrences_per_token": "recurrences / token",
    "tokens_per_network_call": "tokens / network call",
    # Rows are timed in groups, and a machine drifts: only the ratio to the baseline of a row's
    # group compares rows.
    "speedup": "speed over the baseline, batch 1",
}


@contextlib.contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A figure of that size in inches, which is written to a PNG when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    figure = plt.figure(figsize=size, layout="constrained")
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a quarter of the bytes
    plt.close(figure)


def if_possible(draw: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Draws, or says that matplotlib is missing."""
    try:
        draw(*arguments, **options)
    except ImportError:
        print("no picture: matplotlib is missing (pip install -e '.[eval]')", file=sys.stderr)


def draw(study: Study, rows: Sequence[Row], path: Path) -> None:
    """Draws the rows of a study over its choice `x` to a PNG, a panel a measure, a line a value of
    the other choices. Rows that lack a choice, as the baseline, are left out.
    """
    names = study.lines.split()
    panels: dict[str, dict[str, list[Any]]] = {"exact answers (%)": {}}
    for row in rows:
        settings = row["settings"]
        if settings.get(study.x) is None or not set(names) <= settings.keys():
            continue
        share, ends = 100 * row["exact"] / row["problems"], [100 * end for end in row["interval"]]
        values: dict[str, Any] = {"exact answers (%)": (share, ends)}
        for field, title in FIELDS.items():
            if row.get(field) is not None:
                values[title] = row[field], row.get(f"{field}_interval") or [row[field]] * 2
        line = ", ".join(f"{name.replace('_', ' ')} {settings[name]}" for name in names)
        for title, value in values.items():
            panels.setdefault(title, {}).setdefault(line, []).append((settings[study.x], *value))
    draw_panels(panels, path, x=str(study.x).replace("_", " "), log_x=False)


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
                at, middle, ranges = zip(*points, strict=True)
                errors = zip(*map(_distances, middle, ranges), strict=True)
                style = {"marker": "o", "markersize": 4, "capsize": 2, "color": f"C{color % 10}"}
                panel.errorbar(at, middle, yerr=list(errors), label=name, **style)
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


def _distances(value: float, ends: Sequence[float | None]) -> tuple[float, float]:
    """From a value to both ends of its range; none where it has none."""
    low, high = (value if end is None else end for end in ends)
    return max(value - low, 0.0), max(high - value, 0.0)
