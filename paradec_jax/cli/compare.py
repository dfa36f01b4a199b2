"""`paradec compare`: every decoder on the same problems with exact answers, or on texts drawn from nothing."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from paradec_jax import store
from paradec_jax.cli.output import JsonPath, check_place, print_table, progress, write_json
from paradec_jax.data.problems import read_problems
from paradec_jax.data.text import read_text
from paradec_jax.disk.folders import bundled
from paradec_jax.evaluate.compare import TIMED, Comparison, compare
from paradec_jax.evaluate.compare_texts import SAMPLES, Source, compare_texts, write_texts
from paradec_jax.evaluate.intervals import paired
from paradec_jax.evaluate.text_measures import NO_SACREBLEU, has_sacrebleu
from paradec_jax.families import FAMILIES, Family
from paradec_jax.generate import lacks_head, tokenizer_of

OF_ANSWERS = ("data", "problems", "timed")  # options; the others are of texts

ANSWERS = {  # columns and the fields in them
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
MORE = {  # of a family
    "recurrent_depth": {"recurrences a token": "{recurrences_per_token:.2f}"},
    "block_diffusion": {
        "positions a token": "{positions_per_token:.2f}",
        "head calls a token": "{head_calls_per_token:.2f}",
        "FLOP a token": "{flops_per_token:.3g}",
    },
}
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


def compare_command(
    model: Positional[Annotated[tuple[str, ...], arg(metavar="DIR|NAME")]] = ("recurrent_depth",),
    data: Annotated[str | None, arg(metavar="FILE|NAME")] = None,
    problems: int | None = None,
    seed: int = 1,
    timed: int | None = None,
    judge: Annotated[str | None, arg(metavar="DIR|NAME")] = None,
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
      model: model folders, names of bundled models, or a family (recurrent_depth, causal, masked_diffusion,
        block_diffusion), which stands for its bundled models.
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
    families = list(dict.fromkeys(one.family for one in loaded.values()))
    family = next((FAMILIES[name] for name in families if FAMILIES[name].texts), FAMILIES[families[0]])
    options: dict[str, Any] = {"data": data, "problems": problems, "timed": timed, "judge": judge}
    options |= {"real": real, "samples": samples, "length": length, "texts": texts}
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if (name in OF_ANSWERS) == bool(family.texts):
            raise ValueError(f"--{name} is no option of family {family.name}")
    if len(families) > 1 and not family.texts:
        raise ValueError(f"models of one family are compared, not of {' and '.join(families)}")
    run: Callable[..., int] = _texts if family.texts else _answers
    return run(family, loaded, seed, json, **given)


def _models(word: str) -> tuple[str, ...]:
    """The models that a word stands for: itself, or the bundled ones of a family and those beside them."""
    if word not in FAMILIES:
        return (word,)
    family = FAMILIES[word]
    if not family.bundled:
        raise ValueError(
            f"no model of family {word} is bundled yet: name a folder that was trained or converted"
        )
    return (
        *family.bundled,
        *(name for name in (family.texts.rivals if family.texts else ()) if name in bundled()),
    )


def _answers(
    family: Family,
    models: Mapping[str, store.Model],
    seed: int,
    json: str | None,
    *,
    data: str = "unseen",
    problems: int = 200,
    timed: int = TIMED,
) -> int:
    """A table of answers for each model."""
    for name, value in (("problems", problems), ("timed", timed)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, not {value}")
    items = read_problems(data)[:problems]
    short = dict(zip(models, store.names_of(list(models)), strict=True))
    results: dict[str, Comparison] = {}
    for name, loaded in models.items():
        settings = [one for one in family.settings if not lacks_head(loaded, one.decoder)]
        if len(settings) < len(family.settings):
            print(f"{short[name]} has no residual head: decoders that ask one are left out", file=sys.stderr)
        with progress() as report:
            results[short[name]] = compare(
                loaded, items, settings, name=short[name], seed=seed, timed=timed, report=report
            )
    if json is not None:
        drawing = {"data": data, "seed": seed}
        write_json([row | drawing | {"facts": of.facts} for of in results.values() for row in of.rows], json)
    if json != "-":
        for result in results.values():
            _print_answers(result, data, seed)
        _print_pairs(results)
    return 0


def _print_answers(result: Comparison, data: str, seed: int) -> None:
    """Answers, speed and work of every decoder."""
    base = result.rows[result.baseline]
    notes = [
        f"exact: right answers, and the 95% range of their share. Speed: batch {base['batch']}, the first "
        f"{base['timed_problems']} problems one by one, median of {len(base['passes'])} passes, {base['dtype']}, "
        f"{base['device']}; speed-up over the row in bold, with and without the seconds that read the prompts, its "
        f"95% range by bootstrap over problems and passes."
    ]
    if base["family"] == "block_diffusion":
        notes.append("Positions with those of prompts; FLOP: an estimate, the head's share included.")
    print_table(
        f"{base['model']}: {base['problems']} problems ({data}), seed {seed}",
        ANSWERS | MORE.get(base["family"], {}),
        result.labelled(),
        notes,
        bold=result.baseline,
    )


def _print_pairs(results: Mapping[str, Comparison]) -> None:
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


def _texts(
    family: Family,
    models: Mapping[str, store.Model],
    seed: int,
    json: str | None,
    *,
    judge: str | None = None,
    real: str | None = None,
    samples: int = SAMPLES,
    length: int | None = None,
    texts: str | None = None,
) -> int:
    """One table of the texts of every model and setting."""
    assert family.texts is not None
    judge = judge or family.texts.judge
    if judge is None:
        raise ValueError(f"no judge of family {family.name} is bundled yet: give --judge, a folder")
    sources = _sources(family, models)
    pieces: list[str] = []
    if real is not None:
        tokenizer = tokenizer_of(sources[0].model)
        pieces = [tokenizer.decode(ids) for ids in read_text(real, tokenizer)[0].held_out]
    # Tokens of the longest text that every model can draw, begin-of-text left out.
    room = min(one.network.max_length - (one.network.visibility == "causal") for one in models.values())
    with progress() as report:
        compared = compare_texts(
            sources,
            store.load(judge),
            pieces,
            length=room if length is None else length,
            samples=samples,
            judge_name=store.names_of([judge])[0],
            seed=seed,
            report=report,
        )
    if texts is not None:
        write_texts(Path(texts), compared)
    if json is not None:
        write_json([row | {"seed": seed, "facts": compared.facts} for row in compared.rows], json)
    if json != "-":
        _print_texts(compared, seed)
    return 0


def _sources(family: Family, models: Mapping[str, store.Model]) -> list[Source]:
    """Each model with the settings of the table, the first with the tempered ones too, and rivals with theirs."""
    table = family.texts
    assert table is not None
    own = [name for name, model in models.items() if model.family == family.name]
    short = dict(zip(models, store.names_of(list(models)), strict=True))
    found = []
    for name, model in models.items():
        settings = (*table.settings, *(table.tempered if name == own[0] else ()))
        if name not in own:
            if model.network.visibility != "causal":
                raise ValueError(
                    f"{name} is of family {model.family}, which draws no texts beside {family.name}"
                )
            settings = (table.rival,)
        found += [Source(short[name], model, setting) for setting in settings]
    return found


def _print_texts(compared: Comparison, seed: int) -> None:
    """What a judge says of the texts of every model and sampler, how varied they are, and what they cost."""
    first, rows = compared.rows[0], compared.rows
    begin = ", after begin-of-text" if first["judge_begin_of_text"] else ""
    notes = [
        f"judge: generative perplexity as {first['judge_definition'].upper()} defines it, of {first['judge_reads']}"
        f"{begin}. Entropies in nats, of all texts of a row together. Seconds: in batches of {first['batch']}, "
        f"{first['dtype']}, {first['device']}."
    ]
    if first["reverse_perplexity"] is not None:
        notes.append(
            f"reverse: perplexity of real text under {first['reverse_order']}-grams of a row's texts; the row of "
            f"real text has {rows[-1]['samples']} of them, and half against half."
        )
    if not has_sacrebleu():
        notes.append(f"{NO_SACREBLEU}.")
    print_table(
        f"{first['samples']} texts of {first['length']} tokens, judged by {first['judge']}, seed {seed}",
        TEXTS,
        compared.labelled(),
        notes,
    )
