"""The report of what was measured: report.json, report.md, and pictures where matplotlib is installed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paradec_jax import facts
from paradec_jax.io import atomic_write_text
from paradec_jax.report.parts import Part, Table, duration

NO_PICTURES = "No pictures: matplotlib is missing (pip install 'paradec-jax[eval]')."


def write_report(
    out: Path, parts: Mapping[str, Part], records: Mapping[str, Any], claims: Sequence[Mapping[str, Any]]
) -> None:
    """Writes the report of the parts that there are.

    Args:
      out: the folder.
      parts: all parts by name.
      records: the file of each part that was measured, by its name.
      claims: judged claims.
    """
    told = {"claims": list(claims), "parts": dict(records)}
    atomic_write_text(out / "report.json", json.dumps(told, indent=1) + "\n")
    pictures, note = _pictures(out, parts, records)
    lines = ["# Speed on this device", ""]
    lines += [_facts(records), "", "## Claims", "", *_claims(claims)]
    for name, part in parts.items():
        if name in records:
            lines += ["", f"## {part.title}", "", *_part(part, records[name], pictures.get(name))]
    missing = [name for name in parts if name not in records]
    if missing:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    if note:
        lines += ["", note]
    atomic_write_text(out / "report.md", "\n".join(lines) + "\n")


def markdown(table: Table) -> list[str]:
    """A table as lines of Markdown."""
    lines = [f"**{table.title}**", ""]
    lines += [_line(table.columns), _line(["---"] * len(table.columns))]
    lines += [_line(row) for row in table.rows] or ["", "(nothing was measured)"]
    return [*lines, *(["", table.note] if table.note else [])]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _facts(records: Mapping[str, Any]) -> str:
    if not records:
        return "Nothing was measured."
    first = min((record["facts"] for record in records.values()), key=lambda found: found["date"])
    return f"Measured by `paradec report` on: {facts.told(first)}."


def _claims(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for claim in claims:
        figure, low_high = "", ""
        if claim["figure"] is not None:
            figure, low_high = f"{claim['figure']:.2f}", "{:.2f} to {:.2f}".format(*claim["range"])
        line = [claim["sentence"], claim["source"], claim["where"], bounds(claim)]
        rows.append([*line, figure, low_high, claim["verdict"]])
    columns = ("claim", "stands in", "measured there on", "claimed", "here", "95% range", "verdict")
    note = (
        "A claim holds where the whole range lies inside what is claimed, does not where all of it lies outside, and "
        "is open between. A speed is a property of a device: what was claimed of one processor need not hold on "
        "another, and the claims are not all of one. What is not measured had no time or did not fit the memory; the "
        "parts below say what was left out."
    )
    return markdown(Table("What the project claims about speed", columns, rows, note))


def bounds(claim: Mapping[str, Any]) -> str:
    """The bounds of a claim in words."""
    least, most = claim["least"], claim["most"]
    if least is not None and most is not None:
        return f"{least:g} to {most:g}"
    return f"at least {least:g}" if most is None else f"at most {most:g}"


def _part(part: Part, record: Mapping[str, Any], picture: str | None) -> list[str]:
    lines: list[str] = []
    for table in part.tables(record["result"]):
        lines += [*markdown(table), ""]
    if picture:
        lines += [f"![{part.title}]({picture})", ""]
    arrays = f"Arrays: {', '.join(record['dtypes'])}. " if record["dtypes"] else ""
    lines += [f"{arrays}Took {duration(record['seconds'])}; {duration(record['given'])} were given to it."]
    return lines + left_out(record["cut"])


def left_out(cut: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines for each reason why something was left out: what, by the model or shape that it is of."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for one in cut:
        reasons.setdefault(one["why"], {}).setdefault(one["of"], []).append(one["what"])
    lines = []
    for why, groups in reasons.items():
        lines += ["", f"Left out, {why}:", ""]
        lines += [f"- {of + ': ' if of else ''}{'; '.join(what)}" for of, what in groups.items()]
    return lines


def _pictures(out: Path, parts: Mapping[str, Part], records: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """File names of the pictures by part, and a sentence where there are none."""
    try:
        import matplotlib
    except ImportError:
        return {}, NO_PICTURES
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {}
    for name, part in parts.items():
        if part.picture is None or name not in records:
            continue
        figure = part.picture(plt, records[name]["result"])
        if figure is not None:
            found[name] = f"{name}.png"
            figure.savefig(out / found[name], dpi=110)
            plt.close(figure)
    return found, ""
