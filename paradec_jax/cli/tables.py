"""The tables that the commands print."""

import string
from collections.abc import Mapping

from rich.table import Table

from paradec_jax.cli.output import console_of
from paradec_jax.evaluate.compare import Comparison
from paradec_jax.evaluate.compare_texts import TextComparison
from paradec_jax.evaluate.intervals import paired, times
from paradec_jax.evaluate.text_measures import NO_SACREBLEU, has_sacrebleu

IN_BLOCKS = {  # further columns of block diffusion: fields and scales
    "positions/token": ("positions_per_token", 1),
    "head calls/token": ("head_calls_per_token", 1),
    "MFLOP/token": ("flops_per_token", 1e6),
}


def print_table(result: Comparison, steps: tuple[int, int], seed: int, split: str) -> None:
    """Answers, speed and work of every decoder on problems of `steps` steps of one split."""
    first, base = result.rows[0], result.rows[result.baseline]
    count = first["problems"]
    kind = "unseen" if split == "test" else "tuning"
    table = Table(
        title=f"{first['model']}: {count} {kind} problems of {steps[0]} to {steps[1]} steps, seed {seed}"
    )
    table.add_column("decoder", no_wrap=True)
    table.add_column("settings", max_width=32)
    recurrent = first["family"] == "recurrent_depth"
    more = IN_BLOCKS if first["family"] == "block_diffusion" else {}
    work = "recurrences/token" if recurrent else "tokens/call"
    for title in (
        "exact",
        "95%",
        "tokens/s",
        "speed-up",
        "w/o prompt",
        "calls/token",
        work,
        *more,
        "= greedy",
    ):
        table.add_column(
            title, justify="right", min_width=len(title.split("/")[0]), no_wrap=title == "speed-up"
        )
    for row, label in zip(result.rows, result.labels, strict=True):
        interval = "-".join(f"{100 * end:.1f}" for end in row["interval"])
        table.add_row(
            row["decoder"],
            label,
            f"{100 * row['exact'] / count:.1f}%",
            interval,
            f"{row['tokens_per_second']:.0f}",
            times(row["speedup"], None if row is base else row["speedup_interval"]),
            f"{row['decode_speedup']:.2f}x",
            f"{row['network_calls_per_token']:.2f}",
            f"{row['recurrences_per_token' if recurrent else 'tokens_per_network_call']:.2f}",
            *("" if row[field] is None else f"{row[field] / scale:.2f}" for field, scale in more.values()),
            "" if row["equals_greedy"] is None else f"{100 * row['equals_greedy']:.1f}%",
            style="bold" if row is base else None,
        )
    console = console_of(170 if more else 140)
    console.print(table)
    if more:
        console.print(
            "positions/token, prompts included; MFLOP/token: an estimate, the head's share included."
        )
    console.print(
        f"Speed: batch {base['batch']}, the first {base['timed_problems']} problems one by one, median of "
        f"{len(base['passes'])} passes, {base['dtype']}, {base['device']}; speed-up over {base['decoder']} "
        f"{result.labels[result.baseline] or 'decoding'}, with and without the seconds that read the prompts, and "
        f"its 95% range by bootstrap over problems and passes."
    )
    costs = [
        f"{row['decoder']} ({label}) {row['core_pass_microseconds']:.0f} microseconds"
        for row, label in zip(result.rows, result.labels, strict=True)
        if row["core_pass_microseconds"] is not None
    ]
    if costs:
        console.print("One pass of the core: " + "; ".join(costs) + ".")


def print_pairs(results: Mapping[str, Comparison]) -> None:
    """One line for each model but the first: its answers beside the first one's, problem by problem."""
    (name, first), *others = results.items()
    for other, result in others:
        pair = paired(result.exact[result.baseline], first.exact[first.baseline])
        low, high = pair.interval
        print(
            f"{other} against {name}, static decoding, same problems: {100 * pair.difference:+.1f} points "
            f"({100 * low:+.1f} to {100 * high:+.1f}); only {other} right {pair.only_first}, "
            f"only {name} {pair.only_second}."
        )


TEXT_COLUMNS = {
    "model": None,
    "decoder": None,
    "settings": None,
    "judge": "{judge_perplexity:.2f}",
    "unigrams": "{unigram_entropy:.3f}",
    "4-grams": "{fourgram_entropy:.3f}",
    "distinct-4": "{distinct_4:.3f}",
    "self-BLEU": "{self_bleu:.1f}",
    "reverse": "{reverse_perplexity:.2f}",
    "calls": "{network_calls:.1f}",
    "ms/text": "{milliseconds:.1f}",
}


def print_texts(compared: TextComparison, seed: int) -> None:
    """What a judge says of the texts of every model and sampler, how varied they are, and what they cost."""
    first, rows = compared.rows[0], compared.rows
    table = Table(
        title=f"{first['samples']} texts of {first['length']} tokens, judged by {first['judge']}, seed {seed}"
    )
    for title in TEXT_COLUMNS:
        table.add_column(title, justify="left" if TEXT_COLUMNS[title] is None else "right")
        if title == "judge":
            table.add_column("95%", justify="right")
    for row, label in zip(rows, compared.labels, strict=True):
        seconds = row["seconds_per_sample"]
        values = row | {"milliseconds": None if seconds is None else 1e3 * seconds}
        told = [
            "" if any(values[name] is None for name in _fields(form)) else form.format(**values)
            for form in TEXT_COLUMNS.values()
            if form is not None
        ]
        interval = "-".join("" if end is None else f"{end:.2f}" for end in row["interval"])
        table.add_row(row["model"], row["decoder"] or "", label, told[0], interval, *told[1:])
    console = console_of(160)
    console.print(table)
    begin = ", after begin-of-text" if first["judge_begin_of_text"] else ""
    console.print(
        f"judge: generative perplexity as {first['judge_definition'].upper()} defines it, of {first['judge_reads']}"
        f"{begin}. Entropies in nats, of all texts of a row together. ms/text: in batches of {first['batch']}, "
        f"{first['dtype']}, {first['device']}."
    )
    if first["reverse_perplexity"] is not None:
        console.print(
            f"reverse: perplexity of real text under {first['reverse_order']}-grams of a row's texts; the row of "
            f"real text has {rows[-1]['samples']} of them, and half against half."
        )
    if not has_sacrebleu():
        console.print(f"{NO_SACREBLEU}.")


def _fields(form: str) -> list[str]:
    """Names in a format."""
    return [name for _, name, _, _ in string.Formatter().parse(form) if name]
