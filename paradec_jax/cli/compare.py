"""`paradec compare`: every decoder on the same problems with exact answers, or on texts drawn from nothing."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from paradec_jax import store
from paradec_jax.cli.output import JsonPath, check_place, print_table, progress, write_json
from paradec_jax.data.problems import read_problems
from paradec_jax.data.text import read_text
from paradec_jax.disk.folders import bundled
from paradec_jax.evaluate.cases import Source
from paradec_jax.evaluate.compare import SAMPLES, TIMED, Comparison, compare, compare_texts, write_texts
from paradec_jax.evaluate.intervals import paired
from paradec_jax.evaluate.text_measures import NO_SACREBLEU, has_sacrebleu
from paradec_jax.families import FAMILIES, Family
from paradec_jax.generate import check_positive, lacks_head, tokenizer_of

OF_ANSWERS = ("data", "problems", "timed")  # options; the others are of texts

# Titles and notes are formats of the fields of the row in bold or else the first, columns those of each row.
TITLE = "{model}: {problems} problems ({data}), seed {seed}"
ANSWERS = {
    "decoder": "{decoder}",
    "settings": "{label}",
    "exact": "{exact}",
    "95%": "{interval[0]:.1%}-{interval[1]:.1%}",
    "tokens a second": "{tokens_per_second:.0f}",
    "speed-up": "{speedup:.2f}x",
    "its 95%": "{speedup_interval[0]:.2f}-{speedup_interval[1]:.2f}",
    "without prompt": "{decode_speedup:.2f}x",
    "tokens a call": "{tokens_per_network_call:.2f}",
    "equal to greedy": "{equals_greedy:.1%}",
}
MORE = {  # columns of a family
    "recurrent_depth": {"recurrences a token": "{recurrences_per_token:.2f}"},
    "block_diffusion": {
        "positions a token": "{positions_per_token:.2f}",
        "head calls a token": "{head_calls_per_token:.2f}",
        "FLOP a token": "{flops_per_token:.3g}",
    },
}
NOTES = {
    "": "exact: right answers, and the 95% range of their share. Speed: batch {batch}, the first {timed_problems} "
    "problems one by one, median of {timed_passes} passes, {dtype}, {device}; speed-up over the row in bold, with "
    "and without the seconds that read the prompts, its 95% range by bootstrap over problems and passes.",
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
    judge: Annotated[str | None, arg(metavar="SOURCE")] = None,
    real: Annotated[str | None, arg(metavar="FILE")] = None,
    samples: int | None = None,
    length: int | None = None,
    texts: Annotated[str | None, arg(metavar="DIR")] = None,
    json: JsonPath = None,
) -> int:
    """Decodes the same problems with every decoder of a model's family and prints one table.

    Exact answers are counted over all problems, decoded in batches; speed is measured on the first of them,
    one at a time, decoders in turns. Each model has a table of its own.

    Models of masked diffusion draw texts from nothing instead, and causal models draw beside them: what a judge
    says of the texts, how varied they are, what they cost. They take judge, real, samples, length and texts,
    and the other families data, problems and timed.

    Args:
      model: model folders, names of bundled models, or what else `paradec_jax.load` takes; or a family
        (recurrent_depth, causal, masked_diffusion, block_diffusion), which stands for its bundled models.
      data: JSON lines with a prompt, an answer and, where they are known, steps. A text is right that has the
        number of the answer after its last "####". "unseen" (the default) and "tuning" are word problems of the
        package: 1,000 that nothing was chosen on, and 200 for choosing settings.
      problems: number of problems, the first of the file; 200 by default.
      seed: of all draws.
      timed: problems of the speed measurement, 5 by default.
      judge: model that judges texts, a folder or the name of a bundled one; the family's own by default.
      real: a text whose last tenth is real text that no model here was trained on: it gets a row, and texts are held
        against it.
      samples: texts of a row, 64 by default; 512 or more for figures that are to be reported.
      length: tokens of a text; as many as all models have room for by default.
      texts: folder that the texts of each row are written into, as JSON lines.
      json: print nothing but a list of JSON objects, one a row; with a PATH that ends in .json, write the list
        there as well as printing the table.
    """
    check_place("json", json)
    check_place("texts", texts)
    loaded = {name: store.load(name) for word in model for name in _models(word)}
    models = dict(zip(store.names_of(list(loaded)), loaded.values(), strict=True))
    families = list(dict.fromkeys(one.family for one in models.values()))
    family = next((FAMILIES[name] for name in families if FAMILIES[name].texts), FAMILIES[families[0]])
    options: dict[str, Any] = {"data": data, "problems": problems, "timed": timed, "judge": judge}
    options |= {"real": real, "samples": samples, "length": length, "texts": texts}
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if (name in OF_ANSWERS) == bool(family.texts):
            raise ValueError(f"--{name} is no option of family {family.name}")
    if len(families) > 1 and not family.texts:
        raise ValueError(f"models of one family are compared, not of {' and '.join(families)}")
    results: list[Comparison] = (_texts if family.texts else _answers)(family, models, seed, **given)
    if json is not None:
        write_json([row | {"facts": of.facts} for of in results for row in of.rows], json)
    if json == "-":
        return 0
    if family.texts:
        missing = () if has_sacrebleu() else (f"{NO_SACREBLEU}.",)
        print_table(TEXTS_TITLE, TEXTS, results[0].rows, (*TEXTS_NOTES, *missing))
        return 0
    notes = [note for name, note in NOTES.items() if name in ("", family.name)]
    for result in results:
        print_table(TITLE, ANSWERS | MORE.get(family.name, {}), result.rows, notes)
    _print_pairs(results)
    return 0


def _models(word: str) -> tuple[str, ...]:
    """The models that a word stands for: itself, or the bundled ones of a family and those beside them."""
    if word not in FAMILIES:
        return (word,)
    family = FAMILIES[word]
    rivals = family.texts.rivals if family.texts else ()
    return (*family.bundled, *(name for name in rivals if name in bundled()))


def _answers(
    family: Family,
    models: Mapping[str, store.Model],
    seed: int,
    *,
    data: str = "unseen",
    problems: int = 200,
    timed: int = TIMED,
) -> list[Comparison]:
    """The decoders of each model on the same problems."""
    check_positive(problems=problems, timed=timed)
    items = read_problems(data)[:problems]
    results = []
    for name, model in models.items():
        sources = [Source(name, model, of) for of in family.settings if not lacks_head(model, of.decoder)]
        if len(sources) < len(family.settings):
            print(f"{name} has no residual head: decoders that ask one are left out", file=sys.stderr)
        with progress() as report:
            results.append(compare(sources, items, seed=seed, timed=timed, report=report))
        for row in results[-1].rows:
            row |= {"data": data, "seed": seed}
    return results


def _print_pairs(results: Sequence[Comparison]) -> None:
    """One line for each model but the first: its answers beside the first one's, problem by problem."""
    baselines = [
        (row["model"], exact)
        for result in results
        for row, exact in zip(result.rows, result.exact, strict=True)
        if row["baseline"]
    ]
    first, base = baselines[0]
    for other, exact in baselines[1:]:
        pair = paired(exact, base)
        low, high = pair.interval
        print(
            f"{other} against {first}, static decoding, same problems: {100 * pair.difference:+.1f} points "
            f"({100 * low:+.1f} to {100 * high:+.1f}); only {other} right {pair.only_first}, "
            f"only {first} {pair.only_second}."
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
) -> list[Comparison]:
    """The texts of every model and setting, in one table."""
    assert family.texts is not None
    judge = judge or family.texts.judge
    sources = _sources(family, models)
    held_out: list[list[int]] = []
    if real is not None:
        held_out = [ids.tolist() for ids in read_text(real, tokenizer_of(sources[0].model))[0].held_out]
    # Tokens of the longest text that every model can draw, begin-of-text left out.
    room = min(one.network.max_length - (one.network.visibility == "causal") for one in models.values())
    length, name = room if length is None else length, store.names_of([judge])[0]
    with progress() as report:
        options: dict[str, Any] = {"length": length, "samples": samples, "seed": seed, "report": report}
        result = compare_texts(sources, store.load(judge), name, held_out, **options)
    if texts is not None:
        write_texts(Path(texts), result)
    for row in result.rows:
        row["seed"] = seed
    return [result]


def _sources(family: Family, models: Mapping[str, store.Model]) -> list[Source]:
    """Each model with the settings of the table, the first with the tempered ones too, and rivals with theirs."""
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
