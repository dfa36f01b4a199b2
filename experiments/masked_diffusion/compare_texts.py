"""Texts that models draw from nothing, side by side: what a judge makes of them, how varied they
are, what they cost.

    python -m experiments.masked_diffusion.compare_texts --real FILE
    python -m experiments.masked_diffusion.compare_texts TEACHER STUDENT CAUSAL --judge JUDGE

Denoisers and models that predict the next token stand in one table, and real text in its last row.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from experiments.common.command import run as run_command
from experiments.masked_diffusion.drawing import TEXT_ROWS, draw, real_row
from experiments.masked_diffusion.judge import TextJudge
from experiments.masked_diffusion.text_measures import NO_SACREBLEU, has_sacrebleu
from paradec_jax import facts, store
from paradec_jax.cli.output import check_place, print_table, progress, write_json
from paradec_jax.config.bounds import check_number
from paradec_jax.data.text import read_text
from paradec_jax.disk.folders import bundled
from paradec_jax.evaluate.cases import Source, case_of, empty_prompts
from paradec_jax.evaluate.compare import SILENT, Report
from paradec_jax.evaluate.entropy import Samples
from paradec_jax.evaluate.fields import Row
from paradec_jax.families import MASKED_DIFFUSION, choose
from paradec_jax.generate import tokenizer_of
from paradec_jax.io import atomic_write_text

# Decoders of each denoiser, further ones of the first denoiser alone, and that of other models.
STEPS = tuple(f"masked --steps {steps}" for steps in (4, 8, 16, 32, 64, 128))
TEMPERED = tuple(
    f"masked --steps {steps} --temperature {heat}" for steps in (8, 16) for heat in (0.9, 0.8)
)
ONE_BY_ONE = "autoregressive --temperature 1"
BASELINE = "tiny-rival"  # drawn beside the bundled denoisers where it lies beside the package

TITLE = "{samples} texts of {length} tokens, judged by {judge}, seed {seed}"
COLUMNS = {
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
NOTES = (
    "judge: generative perplexity ({judge_definition}) of {judge_reads}, after begin-of-text where there is one. "
    "Entropies in nats, of all texts of a row together. Seconds: in batches of {batch}, {dtype}, {device}.",
    "reverse: perplexity of real text under {reverse_order}-grams of a row's texts, of real text by halves.",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to draw.

    Attributes:
      model: models of one tokenizer, each as `paradec_jax.load` takes one; the bundled denoisers
        and what lies beside them by default.
      judge: model that predicts the next token.
      real: a text whose last tenth no model was trained on: it gets a row, and texts are held
        against it.
      samples: texts of a row; 512 or more for figures that are to be reported.
      length: tokens of a text; as many as all models have room for when None.
      seed: of all draws.
      texts: new folder for the texts of each row, as JSON lines.
      dtype: float32 or bfloat16, of parameters and computation; as stored when None.
      json: file for the rows, a list of JSON objects.
    """

    model: Positional[Annotated[tuple[str, ...], arg(metavar="SOURCE")]] = ()
    judge: str = "tiny-judge"
    real: Path | None = None
    samples: int = 64
    length: int | None = None
    seed: int = 1
    texts: Path | None = None
    dtype: str | None = None
    json: Annotated[str | None, arg(metavar="PATH")] = None


def compare_texts(
    sources: Sequence[Source],
    judge: store.Model,
    judge_name: str,
    held_out: Samples = (),
    *,
    length: int,
    samples: int,
    seed: int = 0,
    report: Report = SILENT,
) -> tuple[list[Row], list[list[str]]]:
    """Draws texts of every source from nothing, measures them all alike, and real texts of the same
    length last.

    Args:
      sources: rows of the table; their models share a tokenizer.
      judge: model that predicts the next token; with the same tokenizer it reads ids, else the
        texts.
      judge_name: name of the judge in the rows.
      held_out: ids of real texts that neither a source nor the judge was trained on; without them
        there is no row of real text and no reverse perplexity.
      length: tokens of a text.
      samples: texts of a row.
      seed, report: see `evaluate.compare.compare`.

    Returns:
      The rows, and the texts of each.

    Raises:
      ValueError: sources of several tokenizers, a number below its least, texts shorter than one
        piece or with characters that the models do not know, or what decoder, model or judge
        refuse.
    """
    check_number("length", length, 4)
    check_number("samples", samples)
    tokenizer = tokenizer_of(sources[0].model)
    for source in sources:
        if not tokenizer_of(source.model).same_as(tokenizer):
            raise ValueError(
                f"{source.name} has another tokenizer than {sources[0].name}: compare them apart"
            )
        prompts = empty_prompts(source.model, 1, length, seed)
        case_of(source.setting, source.model, prompts.size).decoder.check(prompts.request([0]))
    masks = {source.model.token_spec.mask for source in sources}
    if not all(masks.isdisjoint(ids) for ids in held_out):
        raise ValueError("the real texts hold characters that the models do not know")
    pieces = _pieces(held_out, length, samples)
    vocab_size = max(tokenizer.vocab_size, *(source.model.network.vocab_size for source in sources))
    bench = TextJudge(judge, judge_name, tokenizer, vocab_size, held_out, TEXT_ROWS)
    bench.check(length)

    rows, texts = [], []
    advance = report("drawing texts", len(sources))
    for source in sources:
        ids, row = draw(source, samples, length, seed=seed)
        rows.append(row | bench.measures(ids) | bench.reverse(ids))
        texts.append(bench.texts(ids))
        advance(1)
    if pieces:
        rows.append(real_row(length) | bench.measures(pieces) | bench.reverse_of_real(pieces))
        texts.append(bench.texts(pieces))
    return rows, texts


def _pieces(held_out: Samples, length: int, samples: int) -> Samples:
    """Pieces of real texts, evenly spread, that do not overlap; the end of a text is left out."""
    pieces = [
        ids[at : at + length] for ids in held_out for at in range(0, len(ids) - length + 1, length)
    ]
    if held_out and not pieces:
        raise ValueError(f"the real texts hold no piece of {length} tokens")
    count = min(samples, len(pieces))
    return [pieces[i * len(pieces) // count] for i in range(count)]


def write_texts(folder: Path, rows: Sequence[Row], texts: Sequence[Sequence[str]]) -> None:
    """Writes the texts of each row as JSON lines {"text": ...} and names the file in the row, under
    "texts".
    """
    folder.mkdir(parents=True, exist_ok=True)
    for i, (row, written) in enumerate(zip(rows, texts, strict=True)):
        steps = row["steps"] and f"{row['steps']}-steps"
        words = filter(None, (f"{i:02d}", row["model"], row["decoder"], steps))
        row["texts"] = "-".join(words).replace("/", "_").replace(" ", "-") + ".jsonl"
        lines = (json.dumps({"text": text}) + "\n" for text in written)
        atomic_write_text(folder / row["texts"], "".join(lines))


def sources_of(models: Mapping[str, store.Model]) -> list[Source]:
    """Each model with the decoders of the table."""
    sources, tempered = [], TEMPERED
    for name, model in models.items():
        decoders: tuple[str, ...] = (ONE_BY_ONE,)
        if model.family == MASKED_DIFFUSION.name:
            decoders, tempered = (*STEPS, *tempered), ()
        sources += [Source(name, model, choose(model.family, words)) for words in decoders]
    return sources


def main(options: OmitArgPrefixes[Options]) -> None:
    """Draws the texts of every model and decoder, and prints one table."""
    check_place("json", options.json)
    if options.texts is not None and options.texts.exists():
        raise ValueError(f"--texts names a new folder, and {options.texts} exists")
    beside = (BASELINE,) if BASELINE in bundled() else ()
    places = list(dict.fromkeys(options.model or (*MASKED_DIFFUSION.bundled, *beside)))
    names = store.names_of(places)
    loaded = (store.load(place, dtype=options.dtype) for place in places)
    models = dict(zip(names, loaded, strict=True))
    sources = sources_of(models)
    held_out: list[list[int]] = []
    if options.real is not None:
        parts = read_text(options.real, tokenizer_of(sources[0].model))[0].held_out
        held_out = [ids.tolist() for ids in parts]
    # Tokens of the longest text that every model can draw, begin-of-text left out.
    room = min(
        one.network.max_length - (one.network.visibility == "causal") for one in models.values()
    )
    judge, name = store.load(options.judge), store.names_of([options.judge])[0]
    with progress() as report:
        rows, texts = compare_texts(
            sources,
            judge,
            name,
            held_out,
            length=room if options.length is None else options.length,
            samples=options.samples,
            seed=options.seed,
            report=report,
        )
    if options.texts is not None:
        write_texts(options.texts, rows, texts)
    made = {"seed": options.seed, "facts": facts.facts()}
    rows = [row | made for row in rows]
    if options.json is not None:
        write_json(rows, options.json)
    missing = () if has_sacrebleu() else (f"{NO_SACREBLEU}.",)
    print_table(TITLE, COLUMNS, rows, (*NOTES, *missing))


if __name__ == "__main__":
    run_command(main)
