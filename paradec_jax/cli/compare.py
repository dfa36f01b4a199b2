"""`paradec compare`: every decoder on the same problems or prompts."""

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from tyro.conf import arg

from paradec_jax import store
from paradec_jax.cli.answers import Options, answers
from paradec_jax.cli.output import check_place, print_table, write_json
from paradec_jax.evaluate.fields import Row
from paradec_jax.evaluate.intervals import paired
from paradec_jax.evaluate.tables import SHORT, TABLES
from paradec_jax.families import FAMILIES, MASKED_DIFFUSION

# Titles and notes are formats of the fields of the row in bold or else the first, columns those of
# each row.
TITLE = "{model}: {problems} problems ({data}), seed {seed}"
ANSWERS = {
    "decoder": "{decoder}",
    "settings": "{label}",
    "exact": "{exact}",
    "95%": "{interval[0]:.1%}-{interval[1]:.1%}",
    "difference 95%": "{difference_interval[0]:+.1%} to {difference_interval[1]:+.1%}",
    "log p a token": "{log_prob:.3f}",
    "log p 95%": "{log_prob_interval[0]:.3f} to {log_prob_interval[1]:.3f}",
    "tokens a second": "{tokens_per_second:.1f}",
    "speed-up": "{speedup:.2f}x",
    "its 95%": "{speedup_interval[0]:.2f}-{speedup_interval[1]:.2f}",
    "without prompt": "{decode_speedup:.2f}x",
    "memory MB": "{megabytes:.1f}",
    "tokens a second together": "{wide[tokens_per_second]:.1f}",
    "tokens a call": "{tokens_per_network_call:.2f}",
    "equal to one by one": "{equals_greedy:.1%}",
}
ACROSS = {  # columns of one table of several families
    "model": "{model}",
    **{name: ANSWERS[name] for name in ANSWERS if name not in ("its 95%", "without prompt")},
    "recurrences a token": "{recurrences_per_token:.2f}",
    "head calls a token": "{head_calls_per_token:.2f}",
    "FLOP a token": "{flops_per_token:.3g}",
}
MORE = {  # columns of a family
    "recurrent_depth": {
        "recurrences a token": "{recurrences_per_token:.2f}",
        "FLOP a token": "{flops_per_token:.3g}",
    },
    "block_diffusion": {
        "positions a token": "{positions_per_token:.2f}",
        "head calls a token": "{head_calls_per_token:.2f}",
        "FLOP a token": "{flops_per_token:.3g}",
    },
}
ABSENT = {  # families that answer no problems
    MASKED_DIFFUSION.name: "draw texts that have no right answer: compare these by "
    "python -m experiments.masked_diffusion.compare_texts in a checkout"
}
SEVERAL = "{problems} problems ({data}), seed {seed}"  # title where models are of several families
NOTES = {  # of all families, or of one
    "exact": "exact: right answers, judged by {rule}; the 95% ranges of their share and of its difference to the "
    "row in bold on the same problems.",
    "judge": "log p: mean log-probability, in nats, of a token of the texts after their prompts under {judge}; its "
    "95% range by bootstrap over problems.",
    "speed": "equal to one by one: texts that the row's model also writes one by one. Speed: batch {batch}, the "
    "first {timed_problems} problems, median of {timed_passes} passes, {dtype}, {device}; speed-up over the row in "
    "bold, with and without the seconds that read the prompts, its 95% range by bootstrap over problems and passes. "
    "memory: 10^6 bytes that XLA plans for the program, parameters, caches and other temporaries.",
    "wide": "together: the first {wide[batch]} problems in one call.",
    "block_diffusion": "Positions with those of prompts; FLOP: an estimate, the head's share included.",
}


def compare_command(options: Annotated[Options, arg(name="")]) -> int:
    """Decodes the same problems with every decoder of a model's family and prints one table.

    Exact answers and texts equal to one by one are counted over all problems, decoded in batches;
    speed is measured on the first of them, one at a time, decoders in turns. Each model has a table
    of its own; models of several families share one.
    """
    check_place("json", options.json)
    sources = list(dict.fromkeys(itertools.chain(*map(_models, options.model))))
    places = dict(zip(store.names_of(sources), sources, strict=True))
    models = {
        name: store.load(place, dtype=options.dtype, adapter=options.adapter)
        for name, place in places.items()
    }
    families = _families(models.values())
    tables = answers(options, places, models, TABLES if len(families) == 1 else SHORT)
    if options.json == "-":
        write_json(list(itertools.chain(*tables)), options.json)
        return 0
    notes = [note for name, note in NOTES.items() if name not in FAMILIES or name in families]
    title, columns = TITLE, ANSWERS | MORE.get(families[0], {})
    if len(families) > 1:
        title, columns = SEVERAL, ACROSS
    for rows in tables:
        # The baseline has no difference to itself.
        rows = [row | ({"difference_interval": None} if row["baseline"] else {}) for row in rows]
        print_table(title, columns, rows, notes)
    _print_pairs([next(row for row in rows if row["baseline"]) for rows in tables])
    return 0


def _models(word: str) -> tuple[str, ...]:
    """The models that a word stands for: itself, or the bundled ones of a family. Raises ValueError
    where it has none.

    "all" stands for those of every family that answers problems, the causal ones first; a line
    tells why a family has no row.
    """
    if word == "all":
        for name in FAMILIES:
            if why := ABSENT.get(name, "" if FAMILIES[name].bundled else "no model is bundled"):
                print(f"no row of {name}: {why}", file=sys.stderr)
        names = sorted(FAMILIES.keys() - ABSENT, key=lambda name: (name != "causal", name))
        return tuple(itertools.chain(*(FAMILIES[name].bundled for name in names)))
    if word in FAMILIES and not FAMILIES[word].bundled:
        raise ValueError(f"no model of {word} is bundled: --model takes a folder of one")
    return FAMILIES[word].bundled if word in FAMILIES else (word,)


def _families(models: Iterable[store.Model]) -> list[str]:
    """The families of models. Raises ValueError for one that answers no problems."""
    families = list(dict.fromkeys(model.family for model in models))
    if MASKED_DIFFUSION.name in families:
        raise ValueError(f"models of masked diffusion {ABSENT[MASKED_DIFFUSION.name]}")
    return families


def _print_pairs(rows: Sequence[Row]) -> None:
    """One line for each model but the first: its answers one by one beside the first one's, problem
    by problem.
    """
    first, *others = rows
    for row in others if first["right"] else ():
        pair = paired(*(np.asarray(list(of["right"])) == "1" for of in (row, first)))
        (low, high), name, other = pair.interval, row["model"], first["model"]
        print(
            f"{name} against {other}, one by one, same problems: {100 * pair.difference:+.1f} points "
            f"({100 * low:+.1f} to {100 * high:+.1f}); only {name} right {pair.only_first}, "
            f"only {other} {pair.only_second}."
        )
