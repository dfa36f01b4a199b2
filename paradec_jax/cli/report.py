"""`paradec report`: what the project claims about speed, measured on this device."""

from pathlib import Path

from rich.table import Table

from paradec_jax.cli.output import console_of, progress


def report_command(out: Path = Path("report"), minutes: float = 20.0, parts: tuple[str, ...] = ()) -> int:
    """Measures all that the project claims about speed on this device and writes one folder.

    The folder holds report.md (tables, pictures, a verdict on every claim), report.json, and a file for each part.
    The same command goes on where it stopped and measures nothing twice; what was measured on another device or at
    another commit is refused.

    Args:
      out: the folder.
      minutes: time for all parts together; what it does not suffice for is a line of the report.
      parts: names of the parts to measure; all of them by default.
    """
    # Here, because other commands would wait for what these import (losses, optimizers).
    from paradec_jax.report.run import report
    from paradec_jax.report.write import bounds

    with progress() as bars:
        claims = report(out, minutes=minutes, names=parts, progress=bars)
    table = Table(title="What the project claims about speed")
    for title in ("claim", "measured there on", "claimed", "here", "95% range", "verdict"):
        table.add_column(title, max_width=70)
    for claim in claims:
        figure = [""] * 2
        if claim["figure"] is not None:
            figure = [f"{claim['figure']:.2f}", "{:.2f} to {:.2f}".format(*claim["range"])]
        table.add_row(claim["sentence"], claim["where"], bounds(claim), *figure, claim["verdict"])
    console = console_of(140)
    console.print(table)
    console.print(f"The report is {out / 'report.md'}.")
    return 0
