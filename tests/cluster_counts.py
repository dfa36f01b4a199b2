"""A plugin of pytest for `make cluster`: one table of what tests count, and a JSON file with all of
it.

A test hands over a row with `count`: of so many cases so many came out as they must. Further
entries of a row are its own. Rows of tests that fail are there too, and so are, from the file as it
was, those of tests that were not
run: each row says of which commit it is.
"""

import json
from pathlib import Path
from typing import Any

import pytest

OUT = Path(__file__).parents[1] / "experiments" / "systems" / "results" / "cluster.json"
COLUMNS = ("part", "what", "cases", "held")


def count(record_property, part: str, what: str, cases: int, held: int, **more):
    record_property("cluster", {"part": part, "what": what, "cases": cases, "held": held, **more})
    assert cases == held > 0


def pytest_addoption(parser: pytest.Parser):
    parser.addoption("--counts", type=Path, default=OUT, help="where the counts go as JSON")


def rows_of(reporter) -> list[dict[str, Any]]:
    """The rows of all tests, each with the outcome of its test."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in reporter.stats.get(outcome, [])
        if getattr(report, "when", None) == "call"
    ]
    rows = [
        {**row, "test": report.nodeid, "passed": report.passed}
        for report in reports
        for name, row in report.user_properties
        if name == "cluster"
    ]
    return sorted(rows, key=lambda row: (row["part"], row["what"]))


def joined(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows, and those of other tests that the file holds."""
    former = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    run = {row["test"] for row in rows}
    return sorted(
        [*rows, *(row for row in former if row["test"] not in run)],
        key=lambda row: (row["part"], row["what"]),
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"| {' | '.join(COLUMNS)} | besides |", "|" + "---|" * (len(COLUMNS) + 1)]
    for row in rows:
        others = [
            f"{name} {row[name]}"
            for name in row
            if name not in (*COLUMNS, "test", "passed", "commit")
        ]
        lines.append(f"| {' | '.join(str(row[name]) for name in COLUMNS)} | {', '.join(others)} |")
    return lines


def pytest_terminal_summary(terminalreporter, config: pytest.Config):
    rows = rows_of(terminalreporter)
    if not rows:
        return
    from experiments.common.record import PROGRAMS, write_record
    from paradec_jax import facts

    commit = facts.commit(parts=PROGRAMS)
    rows = joined([{**row, "commit": commit} for row in rows], config.getoption("--counts"))
    terminalreporter.section("counts")
    for line in table(rows):
        terminalreporter.line(line)
    write_record(config.getoption("--counts"), {}, {"rows": rows})
