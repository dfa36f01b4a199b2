"""The one table that the commands print, and its columns for answers and for texts."""

import string
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from paradec_jax.cli.output import console_of
from paradec_jax.evaluate.intervals import times

LEFT = ("family", "model", "decoder", "settings")  # columns of words

ANSWERS = {  # columns and the fields in them
    "decoder": "{decoder}",
    "settings": "{label}",
    "exact": "{share:.1%}",
    "95%": "{low:.1f}-{high:.1f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "speed-up": "{times}",
    "w/o prompt": "{decode_speedup:.2f}x",
    "calls/token": "{network_calls_per_token:.2f}",
}
RECURRENT = {"recurrences/token": "{recurrences_per_token:.2f}"}
CALLS = {"tokens/call": "{tokens_per_network_call:.2f}"}
BLOCKS = {
    **CALLS,
    "positions/token": "{positions_per_token:.2f}",
    "head calls/token": "{head_calls_per_token:.2f}",
    "MFLOP/token": "{megaflops:.2f}",
}
EQUAL = {"= greedy": "{equals_greedy:.1%}"}
TEXTS = {
    "model": "{model}",
    "decoder": "{decoder}",
    "settings": "{label}",
    "judge": "{judge_perplexity:.2f}",
    "95%": "{low:.2f}-{high:.2f}",
    "unigrams": "{unigram_entropy:.3f}",
    "4-grams": "{fourgram_entropy:.3f}",
    "distinct-4": "{distinct_4:.3f}",
    "self-BLEU": "{self_bleu:.1f}",
    "reverse": "{reverse_perplexity:.2f}",
    "calls": "{network_calls:.1f}",
    "ms/text": "{milliseconds:.1f}",
}


def answers_columns(family: str) -> dict[str, str]:
    """The columns of a table of answers."""
    work = {"recurrent_depth": RECURRENT, "block_diffusion": BLOCKS}.get(family, CALLS)
    return ANSWERS | work | EQUAL


def answers_values(row: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A row of `compare` with the values that its table shows beside its fields."""
    low, high = (100 * end for end in row["interval"])
    flops = row["flops_per_token"]
    return {
        **row,
        "label": label,
        "share": row["exact"] / row["problems"],
        "low": low,
        "high": high,
        "times": times(row["speedup"], None if row["baseline"] else row["speedup_interval"]),
        "megaflops": None if flops is None else flops / 1e6,
    }


def texts_values(row: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A row of `compare_texts` with the values that its table shows beside its fields."""
    (low, high), seconds = row["interval"], row["seconds_per_sample"]
    more = {"label": label, "low": low, "high": high}
    return {**row, **more, "milliseconds": None if seconds is None else 1e3 * seconds}


def print_table(
    title: str,
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str] = (),
    bold: int | None = None,
    width: int = 160,
) -> None:
    """Prints rows of values and notes below them.

    Args:
      title: of the table.
      columns: a format of fields by the column's title; a cell stays empty where one of its fields is None.
      rows: values by field.
      notes: sentences, a line each.
      bold: index of the row in bold.
      width: characters of a line where the output is no terminal.
    """
    table = Table(title=title)
    for name in columns:
        table.add_column(
            name,
            justify="left" if name in LEFT else "right",
            min_width=len(name.split("/")[0]),
            max_width=32 if name == "settings" else None,
            no_wrap=name in ("decoder", "speed-up"),
        )
    for i, row in enumerate(rows):
        cells = (_cell(form, row) for form in columns.values())
        table.add_row(*cells, style="bold" if i == bold else None)
    console = console_of(width)
    console.print(table)
    for note in notes:
        console.print(note)


def _cell(form: str, row: Mapping[str, Any]) -> str:
    fields = (name for _, name, _, _ in string.Formatter().parse(form) if name)
    return "" if any(row[name] is None for name in fields) else form.format(**row)
