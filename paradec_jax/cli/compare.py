"""`paradec compare`: every decoder on the same problems or prompts, or on texts drawn from nothing."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import Positional, UseAppendAction, arg

from paradec_jax import store
from paradec_jax.cli.answers import answers
from paradec_jax.cli.output import JsonPath, check_place, print_table, progress, write_json
from paradec_jax.config.bounds import check_numbers
from paradec_jax.data.text import read_text
from paradec_jax.disk.folders import bundled
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.compare import SAMPLES, Row, compare_texts, write_texts
from paradec_jax.evaluate.intervals import paired
from paradec_jax.evaluate.text_measures import NO_SACREBLEU, has_sacrebleu
from paradec_jax.families import FAMILIES, Family
from paradec_jax.generate import tokenizer_of

# Options of answers alone, and of texts alone.
OF_ANSWERS = ("data", "problems", "timed", "new_tokens", "batch", "decoder")
OF_TEXTS = ("real", "samples", "length", "texts")
OPTIONS = ("judge", *OF_ANSWERS, *OF_TEXTS)

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
    "tokens a call": "{tokens_per_network_call:.2f}",
    "equal to one by one": "{equals_greedy:.1%}",
}
MORE = {  # columns of a family
    "recurrent_depth": {"recurrences a token": "{recurrences_per_token:.2f}"},
    "block_diffusion": {
        "positions a token": "{positions_per_token:.2f}",
        "head calls a token": "{head_calls_per_token:.2f}",
        "FLOP a token": "{flops_per_token:.3g}",
    },
}
NOTES = {  # of all families, or of one
    "exact": "exact: right answers, judged by {rule}; the 95% ranges of their share and of its difference to the "
    "row in bold on the same problems.",
    "judge": "log p: mean log-probability, in nats, of a token of the texts after their prompts under {judge}; its "
    "95% range by bootstrap over problems.",
    "speed": "equal to one by one: texts that are those of the row in bold. Speed: batch {batch}, the first "
    "{timed_problems} problems, median of {timed_passes} passes, {dtype}, {device}; speed-up over the row in bold, "
    "with and without the seconds that read the prompts, its 95% range by bootstrap over problems and passes. "
    "memory: 10^6 bytes that XLA plans for the program, parameters, caches and other temporaries.",
    "block_diffusion": "Positions with those of prompts; FLOP: an estimate, the head's share included.",
}

TEXTS_TITLE = "{samples} texts of {length} tokens, judged by {judge}, seed {seed}"
TEXTS = {
    "model": "{model}",
    "decoder": "{decoder}",
    "settings": "{label}",
    "judge": "{judge_perplexity:.2f}",
    "95%": "{interval[0]:.2f}-{interval[1]:.2f}",
    "unigrams": "{unigram_entropy:.3f}",
    "4-grams": "{fourgram_entropy:.3f}",
    "distinct-4": "{distinct_4:.3f}",
    "self-BLEU": "{self_bleu:.1f}",
    "reverse": "{reverse_perplexity:.2f}",
    "calls": "{network_calls:.1f}",
    "seconds a text": "{seconds_per_sample:.4f}",
}
TEXTS_NOTES = (
    "judge: generative perplexity ({judge_definition}) of {judge_reads}, after begin-of-text where there is one. "
    "Entropies in nats, of all texts of a row together. Seconds: in batches of {batch}, {dtype}, {device}.",
    "reverse: perplexity of real text under {reverse_order}-grams of a row's texts, of real text by halves.",
)


def compare_command(
    model: Positional[Annotated[tuple[str, ...], arg(metavar="SOURCE")]] = ("recurrent_depth",),
    data: Annotated[str | None, arg(metavar="FILE|NAME")] = None,
    problems: int | None = None,
    seed: int = 1,
    timed: int | None = None,
    new_tokens: int | None = None,
    batch: int | None = None,
    decoder: UseAppendAction[tuple[str, ...]] = (),
    judge: Annotated[str | None, arg(metavar="SOURCE")] = None,
    real: Annotated[str | None, arg(metavar="FILE")] = None,
    samples: int | None = None,
    length: int | None = None,
    texts: Annotated[str | None, arg(metavar="DIR")] = None,
    dtype: str | None = None,
    adapter: Annotated[str | None, arg(metavar="FOLDER")] = None,
    json: JsonPath = None,
) -> int:
    """Decodes the same problems with every decoder of a model's family and prints one table.

    Exact answers and texts equal to one by one are counted over all problems, decoded in batches;
    speed is measured on the first of them, one at a time, decoders in turns. Each model has a table
    of its own.

    Models of masked diffusion draw texts from nothing instead, and causal models draw beside them:
    what a judge says of the texts, how varied they are, what they cost. They take judge, real,
    samples, length and texts, and the other families data, problems, timed, new-tokens, batch,
    decoder and judge.

    Args:
      model: model folders, names of bundled models, or what else `paradec_jax.load` takes; or a
        family (recurrent_depth, causal, masked_diffusion, block_diffusion), which stands for its
        bundled models. --model may stand before them.
      data: JSON lines with "prompt", and "answer" or "response" where there is one; or with
        "messages", which the model's chat template makes a prompt of, the last one the answer where
        it is an assistant's. A text is right that has the answer's number after the last "####", or
        else content of the last \\boxed{}, or else whole text, as the first answer has it. "unseen"
        (the default) and "tuning" are word problems of the package: 1,000 that nothing was chosen
        on, and 200 for choosing settings.
      problems: number of problems, the first of the file; 200 by default.
      seed: of all draws.
      timed: problems of the speed measurement, 5 by default.
      new_tokens: tokens of an answer at most; room for the longest answer of the file by default,
        or 200 without any.
      batch: problems decoded together where speed is not measured, 50 by default.
      decoder: decoder to compare with one by one, as of `paradec generate`: all rows of a name, or
        one with options, "jacobi --block 8"; may be given several times. The whole table of the
        family by default.
      judge: model that judges texts, a folder or the name of a bundled one; the family's own by
        default where texts are drawn from nothing.
      real: a text whose last tenth is real text that no model here was trained on: it gets a row,
        and texts are held against it.
      samples: texts of a row, 64 by default; 512 or more for figures that are to be reported.
      length: tokens of a text; as many as all models have room for by default.
      texts: folder that the texts of each row are written into, as JSON lines.
      dtype: float32 or bfloat16, of parameters and computation; as stored by default.
      adapter: folder of a LoRA adapter in PEFT's layout, for each of the models.
      json: print nothing but a list of JSON objects, one a row; with a PATH that ends in .json,
        write the list there as well as printing the table. Rows of answers are written as soon as
        they are known, and the same command goes on with those that are missing.
    """
    check_numbers(compare_command, locals(), {})
    given: Any = {
        name: of for name, of in locals().items() if name in OPTIONS and of not in (None, ())
    }
    check_place("json", json)
    check_place("texts", texts)
    sources = list(dict.fromkeys(name for word in model for name in _models(word)))
    places = dict(zip(store.names_of(sources), sources, strict=True))
    models = {
        name: store.load(place, dtype=dtype, adapter=adapter) for name, place in places.items()
    }
    families = list(dict.fromkeys(one.family for one in models.values()))
    family = next(
        (FAMILIES[name] for name in families if FAMILIES[name].texts), FAMILIES[families[0]]
    )
    for name in given:
        if name in (OF_ANSWERS if family.texts else OF_TEXTS):
            raise ValueError(f"--{name.replace('_', '-')} is no option of family {family.name}")
    if len(families) > 1 and not family.texts:
        raise ValueError(f"models of one family are compared, not of {' and '.join(families)}")
    if family.texts:
        rows = _texts(family, models, seed, **given)
        if json is not None:
            write_json(rows, json)
        if json != "-":
            missing = () if has_sacrebleu() else (f"{NO_SACREBLEU}.",)
            print_table(TEXTS_TITLE, TEXTS, rows, (*TEXTS_NOTES, *missing))
        return 0
    tables = answers(family, places, models, seed, json, adapter, **given)
    if json == "-":
        write_json(list(itertools.chain(*tables)), json)
        return 0
    notes = [note for name, note in NOTES.items() if name not in FAMILIES or name == family.name]
    for rows in tables:
        rows = [
            row | ({"difference_interval": None} if row["baseline"] else {}) for row in rows
        ]  # to itself
        print_table(TITLE, ANSWERS | MORE.get(family.name, {}), rows, notes)
    _print_pairs([next(row for row in rows if row["baseline"]) for rows in tables])
    return 0


def _models(word: str) -> tuple[str, ...]:
    """The models that a word stands for: itself, or the bundled ones of a family and those beside
    them.
    """
    if word not in FAMILIES:
        return (word,)
    family = FAMILIES[word]
    rivals = family.texts.rivals if family.texts else ()
    return (*family.bundled, *(name for name in rivals if name in bundled()))


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


def _texts(
    family: Family,
    models: Mapping[str, store.Model],
    seed: int,
    *,
    judge: str | None = None,
    real: str | None = None,
    samples: int = SAMPLES,
    length: int | None = None,
    texts: str | None = None,
) -> list[Row]:
    """The texts of every model and setting, in one table."""
    assert family.texts is not None
    judge = judge or family.texts.judge
    sources = _sources(family, models)
    held_out: list[list[int]] = []
    if real is not None:
        held_out = [
            ids.tolist() for ids in read_text(real, tokenizer_of(sources[0].model))[0].held_out
        ]
    # Tokens of the longest text that every model can draw, begin-of-text left out.
    room = min(
        one.network.max_length - (one.network.visibility == "causal") for one in models.values()
    )
    length, name = room if length is None else length, store.names_of([judge])[0]
    with progress() as report:
        options: dict[str, Any] = {
            "length": length,
            "samples": samples,
            "seed": seed,
            "report": report,
        }
        result = compare_texts(sources, store.load(judge), name, held_out, **options)
    if texts is not None:
        write_texts(Path(texts), result)
    return [row | {"seed": seed, "facts": result.facts} for row in result.rows]


def _sources(family: Family, models: Mapping[str, store.Model]) -> list[Source]:
    """Each model with the settings of the table, the first with the tempered ones too, and rivals
    with theirs.
    """
    table = family.texts
    assert table is not None
    first = next(name for name, model in models.items() if model.family == family.name)
    sources = []
    for name, model in models.items():
        settings = (*table.settings, *(table.tempered if name == first else ()))
        if model.family != family.name:
            settings = (table.rival,)
        sources += [Source(name, model, setting) for setting in settings]
    return sources
