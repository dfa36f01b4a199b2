"""Texts drawn by several models and samplers side by side: what a judge says of them, their variety, their cost.

Every row draws as many texts of as many tokens, from nothing (a model that predicts the next token from its
begin-of-text), and no stop token ends one. Sample i draws with `fold_in(key(seed), i)` whatever row or batch it is
in. A last row holds real text that was cut into pieces of the same length, where the caller brings some.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paradec_jax import facts
from paradec_jax.decode import Request, make_request
from paradec_jax.decode import run as run_decoder
from paradec_jax.decode.machine.request import keys_of
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.compare import Comparison, Report, case_of, device_name
from paradec_jax.evaluate.intervals import ends
from paradec_jax.evaluate.judge import Judgement, check_judge, judge_ids, judge_texts
from paradec_jax.evaluate.likelihood import prefix
from paradec_jax.evaluate.ngrams import ORDER, SMOOTHING, reverse_perplexity
from paradec_jax.evaluate.text_measures import has_sacrebleu, self_bleu
from paradec_jax.generate import tokenizer_of
from paradec_jax.io import atomic_write_text
from paradec_jax.store import Model
from paradec_jax.timing import Case
from paradec_jax.tokenizer import Tokenizer

Ids = list[list[int]]

SAMPLES = 64  # of a row by default: minutes on a few cores; the more, the narrower the intervals
ROWS = 64  # samples drawn together
BLEU_TEXTS = 100  # texts of the group that self-BLEU compares


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Where the texts of a row come from.

    Attributes:
      name: of the model.
      model: with a tokenizer.
      setting: the decoder that draws from it.
    """

    name: str
    model: Model
    setting: Setting


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """What all rows are measured with.

    Attributes:
      judge, judge_name: a model that predicts the next token.
      definition: of its perplexity, see `judge`.
      tokenizer: of the texts.
      vocab_size: ids that a text may hold.
      held_out: ids of real texts, for reverse perplexity.
      batch: samples that the judge reads together.
    """

    judge: Model
    judge_name: str
    definition: str
    tokenizer: Tokenizer
    vocab_size: int
    held_out: Ids
    batch: int

    @property
    def reads_ids(self) -> bool:
        """Whether the judge reads ids as they were drawn: it has the tokenizer that they come from."""
        return self.judge.tokenizer is not None and self.judge.tokenizer.same_as(self.tokenizer)

    def texts(self, ids: Ids) -> list[str]:
        """Texts without special tokens."""
        return [self.tokenizer.decode(row, skip_special=True) for row in ids]

    def judgement(self, ids: Ids) -> Judgement:
        """What the judge says; the texts that it reads keep end-of-text only where its definition counts one."""
        options: dict[str, Any] = {"definition": self.definition, "batch": self.batch}
        if self.reads_ids:
            return judge_ids(self.judge, ids, begin=self.judge.token_spec.bos is not None, **options)
        if self.definition == "mdlm":
            return judge_texts(self.judge, [self.tokenizer.decode(row) for row in ids], **options)
        return judge_texts(self.judge, [text.strip() for text in self.texts(ids)], **options)

    def measures(self, ids: Ids, judged: Judgement | None = None) -> dict[str, Any]:
        """All measures of a row's texts that do not need real ones; `judged` is what `judgement` has said of them."""
        judged = self.judgement(ids) if judged is None else judged
        variety, group = judged.variety, self.texts(ids)[:BLEU_TEXTS]
        bleu = self_bleu([group]) if has_sacrebleu() and len(group) > 1 else None
        return {
            "samples": len(ids),
            "tokens": sum(map(len, ids)),
            "judge": self.judge_name,
            "judge_definition": judged.definition,
            "judge_reads": "ids" if self.reads_ids else "texts",
            "judge_begin_of_text": self.judge.token_spec.bos is not None,
            "judge_cut": judged.cut,
            "judge_perplexity": judged.perplexity,
            "interval": ends(judged.interval),
            "unigram_entropy": variety.unigram_entropy,
            "unigram_entropy_interval": ends(variety.unigram_interval),
            "fourgram_entropy": variety.fourgram_entropy,
            "fourgram_entropy_interval": ends(variety.fourgram_interval),
            "sample_entropy": variety.sample_entropy,
            **{f"distinct_{n}": share for n, share in enumerate(variety.distinct, 1)},
            "self_bleu": bleu,
            "self_bleu_texts": None if bleu is None else len(group),
        }

    def reverse(self, ids: Ids) -> dict[str, Any]:
        """Reverse perplexity of a row's texts, and what it was computed with."""
        found = reverse_perplexity(ids, self.held_out, self.vocab_size) if self.held_out else None
        return self._reverse(found, sum(map(len, ids)))

    def reverse_of_real(self, pieces: Ids) -> dict[str, Any]:
        """That of real text, one half of its pieces against the other and the other way round."""
        halves = pieces[::2], pieces[1::2]
        if not halves[1]:
            return self._reverse(None, 0)
        each = [
            (sum(map(len, judged)), reverse_perplexity(fitted, judged, self.vocab_size))
            for fitted, judged in (halves, halves[::-1])
        ]
        nats = math.fsum(count * math.log(value) for count, value in each) / sum(count for count, _ in each)
        return self._reverse(math.exp(nats), sum(map(len, pieces)) // 2)

    def _reverse(self, value: float | None, tokens: int) -> dict[str, Any]:
        model = {"order": ORDER, "smoothing": SMOOTHING, "fitted_tokens": tokens}
        return {"reverse_perplexity": value} | {
            f"reverse_{name}": of if value is not None else None for name, of in model.items()
        }


def compare_texts(
    sources: Sequence[Source],
    judge: Model,
    texts: Sequence[str] = (),
    *,
    length: int,
    samples: int = SAMPLES,
    judge_name: str = "",
    definition: str = "sdtt",
    rows: int = ROWS,
    seed: int = 0,
    report: Report = lambda stage, done, total: None,
) -> Comparison:
    """Draws texts from every source and measures them all alike.

    Args:
      sources: models with one tokenizer and their samplers, in the order of the rows.
      judge: any model that predicts the next token; one with the same tokenizer reads ids, another one the texts.
      texts: real texts that neither a source nor the judge was trained on; without them there is no row of real text
        and no reverse perplexity.
      length: tokens of a text.
      samples: texts of a row.
      judge_name: for the rows.
      definition: of the judge's perplexity, see `judge`.
      rows: texts drawn together, and judged together.
      seed: of all draws.
      report: told the stage, the units done and their total.

    Raises:
      ValueError: no source, sources of several tokenizers, a number below its least, texts shorter than one piece or
        with characters that the models do not know, or what decoder, model or judge refuse.
    """
    if not sources:
        raise ValueError("need at least one model and sampler to draw texts from")
    for name, value, least in (("length", length, 4), ("samples", samples, 1), ("rows", rows, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    check_judge(judge, definition)
    for source in sources:
        _program(source, 1, length)
    tokenizer, held_out = _read(texts, sources)
    real = _spread(_pieces(held_out, length), samples)
    if texts and not real:
        raise ValueError(f"the real texts hold no piece of {length} tokens")
    vocab_size = max(tokenizer.vocab_size, *(source.model.network.vocab_size for source in sources))
    bench = Bench(judge, judge_name, definition, tokenizer, vocab_size, held_out, rows)
    if bench.reads_ids and length > judge.network.max_length:
        raise ValueError(
            f"texts of {length} tokens are longer than the {judge.network.max_length} positions of the judge"
        )
    found, drawn_texts = [], []
    for i, source in enumerate(sources):
        ids, row = draw(source, samples, length, rows=rows, seed=seed)
        found.append(row | bench.measures(ids) | bench.reverse(ids))
        drawn_texts.append(bench.texts(ids))
        report("drawing texts", i + 1, len(sources))
    if real:
        found.append(real_row(length) | bench.measures(real) | bench.reverse_of_real(real))
        drawn_texts.append(bench.texts(real))
    labels = [source.setting.label() for source in sources] + [""] * bool(real)
    return Comparison(found, labels, facts.facts(), drawn_texts)


def _read(texts: Sequence[str], sources: Sequence[Source]) -> tuple[Tokenizer, Ids]:
    """The tokenizer of all sources, and the ids of real texts.

    Raises:
      ValueError: sources of several tokenizers, or texts with characters that are the mask to a source.
    """
    tokenizer = tokenizer_of(sources[0].model)
    for source in sources:
        if not tokenizer_of(source.model).same_as(tokenizer):
            raise ValueError(
                f"{source.name} has another tokenizer than {sources[0].name}: compare them apart"
            )
    found = tokenizer.encode_batch(texts)
    masks = {source.model.token_spec.mask for source in sources}
    if any(not masks.isdisjoint(ids) for ids in found):
        raise ValueError("the real texts hold characters that the models do not know")
    return tokenizer, found


def draw(
    source: Source, samples: int, length: int, *, rows: int = ROWS, seed: int = 0
) -> tuple[Ids, dict[str, Any]]:
    """Draws texts of `length` tokens from nothing, in batches of one shape.

    Args:
      source: a model and its sampler.
      samples: how many.
      length: tokens of a text, for which the model must have room beside what it starts from.
      rows: texts of a batch.
      seed: of all draws.

    Returns:
      The ids of each text, and what a row says of where they come from and what they cost: network calls a text,
      and the median seconds of a batch over the texts in it.

    Raises:
      ValueError: what the decoder refuses, or a model that cannot start a text.
    """
    rows = min(rows, samples)
    case, request = _program(source, rows, length)
    params = case.decoder.prepare(source.model.params)

    def decode(first: int, max_steps: int | None = None) -> tuple[Any, float]:
        asked, start = request(seed, first), time.perf_counter()
        decoded = run_decoder(case.decoder, params, asked, case.knobs, max_steps=max_steps)
        return jax.block_until_ready(decoded), time.perf_counter() - start

    compiling = decode(0, 0)[1] - decode(0, 0)[1]
    ids: Ids = []
    calls: list[int] = []
    seconds: list[float] = []
    for first in range(0, samples, rows):
        decoded, took = decode(first)
        ids += decoded.completions()
        calls += np.asarray(decoded.network_calls).tolist()
        seconds.append(took / rows)
    settings = source.setting.settings()
    return ids[:samples], {
        "family": source.model.family,
        "model": source.name,
        "decoder": source.setting.name,
        "length": length,
        "settings": settings,
        "steps": settings.get("steps"),
        "temperature": settings["temperature"],
        "network_calls": statistics.fmean(calls[:samples]),
        "seconds_per_sample": statistics.median(seconds),
        "compile_seconds": max(compiling, 0.0),
        "batch": rows,
        "dtype": source.model.config.dtype,
        "device": device_name(facts.device()),
    }


def real_row(length: int) -> dict[str, Any]:
    """A row of real text, which no decoder drew: None for what it has none of."""
    names = ("settings", "steps", "temperature", "network_calls", "seconds_per_sample", "compile_seconds")
    empty = dict.fromkeys((*names, "batch", "dtype", "device"))
    return {"family": None, "model": "real text", "decoder": None, "length": length} | empty


def _program(source: Source, rows: int, length: int) -> tuple[Case, Callable[[int, int], Request]]:
    """A source's decoder for batches of texts, and the request of the batch from (seed, number of its first text).

    Raises:
      ValueError: what the decoder refuses, or a model that cannot start a text.
    """
    model, setting = source.model, source.setting
    begin = [] if model.network.visibility == "full" else [prefix(model.token_spec)]
    case = case_of(setting, setting.decoder, model, len(begin) + length)

    def request(seed: int, first: int) -> Request:
        keys = keys_of(np.int64(seed), np.arange(first, first + rows, dtype=np.int32))
        return make_request([begin] * rows, max_new_tokens=length, keys=keys)

    case.decoder.check(request(0, 0))
    return case, request


def write_texts(folder: Path, compared: Comparison) -> None:
    """Writes the texts of each row as JSON lines {"text": ...} and names the file in the row, under "texts".

    The folder is made where there is none; files of the same names are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for i, (row, texts) in enumerate(zip(compared.rows, compared.texts, strict=True)):
        words = [row["model"], row["decoder"], "" if row["steps"] is None else f"{row['steps']}-steps"]
        name = "-".join([f"{i:02d}", *(word.replace("/", "_").replace(" ", "-") for word in words if word)])
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        atomic_write_text(folder / f"{name}.jsonl", "".join(lines))
        row["texts"] = f"{name}.jsonl"


def _pieces(texts: Ids, length: int) -> Ids:
    """Pieces of `length` tokens that do not overlap; what is left at the end of a text is left out."""
    return [text[at : at + length] for text in texts for at in range(0, len(text) - length + 1, length)]


def _spread(pieces: Ids, count: int) -> Ids:
    """At most `count` of the pieces, evenly spread."""
    count = min(count, len(pieces))
    return [pieces[i * len(pieces) // count] for i in range(count)]
