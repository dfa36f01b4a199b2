"""Decoders side by side: their answers to the same problems, or the texts that they draw, as rows
of one table.

Problem or text i draws with `fold_in(key(seed), i)` whatever row, batch or call it is in.
"""

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

from paradec_jax import facts
from paradec_jax.config.bounds import check_number
from paradec_jax.data.problems import Problem, exact_answers
from paradec_jax.decode import run as run_decoder
from paradec_jax.decode.machine.rows import NETWORK_CALLS, POSITIONS
from paradec_jax.evaluate.cases import Prompts, Source, case_of, empty_prompts, prompts_of
from paradec_jax.evaluate.intervals import bootstrap, ends, paired, ratio, speedup, wilson
from paradec_jax.evaluate.judge import TextJudge, check_judge, judge_answers
from paradec_jax.evaluate.text_measures import Samples
from paradec_jax.evaluate.timing import Advance, Case, Speed, compile_all, measure, planned_bytes
from paradec_jax.generate import tokenizer_of
from paradec_jax.io import atomic_write_text
from paradec_jax.store import Model
from paradec_jax.text.tokenizer import Tokenizer

Row = dict[str, Any]
# Begins a stage of so many units; what it returns counts those that are done.
Report = Callable[[str, int], Advance]
SILENT: Report = lambda stage, units: lambda done: None  # noqa: E731
Score = Callable[[Sequence[Any], Sequence[str]], Bool[np.ndarray, "N"]]

ROWS = 50  # problems decoded together when only their answers count
TIMED = 5  # problems of the speed measurement, each in a call of its own
SAMPLES = 64  # texts of a row: minutes on a few cores; the more, the narrower the intervals
TEXT_ROWS = 64  # texts drawn and judged together


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` and `compare_texts` return.

    Attributes:
      rows: one dictionary a source, as `paradec compare --json` prints them, and last one of real
        text.
      texts: texts of each row.
      facts: machine and program (`facts.facts`); for answers the dtypes of the parameters too.
      exact: which problems each source got right, bool [sources, N]; None of what has no right
        answer.
      calls: network calls of each problem, int [sources, N]; None of texts.
      baseline: what the baseline wrote, for a further `compare` of the same problems; None of
        texts.
    """

    rows: list[Row]
    texts: Sequence[Sequence[str]]
    facts: dict[str, Any]
    exact: Any = None
    calls: Any = None
    baseline: Any = None


def compare(
    sources: Sequence[Source],
    problems: Sequence[Problem | str],
    *,
    seed: int = 0,
    budget: int | None = None,
    score: Score | None = exact_answers,
    judge: Model | None = None,
    timed: int = TIMED,
    passes: int = 5,
    rows: int = ROWS,
    before: Comparison | None = None,
    report: Report = SILENT,
) -> Comparison:
    """Decodes problems with every source: all of them in batches for answers, some one by one for
    speed.

    Args:
      sources: rows of the table, exactly one of them the baseline; their models share tokenizer and
        shape.
      problems: at least one; texts need a `budget`, and a `score` of their own or None.
      seed: seed of all draws.
      budget: new tokens of a problem at most; room for the longest reference solution when None.
      score: function that says which of the generated texts are right; None where none is.
      judge: model that says how probable the texts are after their prompts (`judge_answers`), or
        None.
      timed: problems of the speed measurement; 0 leaves speed out.
      passes: timings of each source.
      rows: problems of a batch, at most.
      before: earlier comparison with the same baseline, whose answers are not decoded again.
      report: function that shows how far each stage is.

    Raises:
      ValueError: no problem, no tokenizer, not one baseline, or problems too long for the model.
    """
    baselines = [i for i, source in enumerate(sources) if source.setting.baseline]
    if len(baselines) != 1:
        raise ValueError(f"settings must hold exactly one baseline, not {len(baselines)}")
    base, model = baselines[0], sources[baselines[0]].model
    if judge is not None:
        check_judge(judge, "sdtt")  # before minutes of decoding
    prompts = prompts_of(model, problems, seed, budget)
    if judge is not None and prompts.budget > (most := judge.network.max_length):
        raise ValueError(
            f"the judge has {most} positions, and an answer may have {prompts.budget} tokens"
        )
    # Sources of one network share its prepared parameters, whatever heads they have beside it.
    prepared = {id(of.model.params): of.model for of in sources}
    params = {key: of.network.prepare(of.params) for key, of in prepared.items()}
    cases = [
        case_of(of.setting, of.model, prompts.size, params[id(of.model.params)]) for of in sources
    ]

    new = [i for i in range(len(cases)) if i != base or before is None]
    advance = report("decoding in batches", len(new) * len(_batches(prompts, rows)))
    # Nothing is timed here, and a small program keeps one core busy: as many at once as there are.
    at_once = (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda i: _decode(cases[i], prompts, rows, advance), new))
    if before is not None:
        answers.insert(base, before.baseline)
    if judge is not None:
        answers = _judged(judge, tokenizer_of(model), prompts, answers, answers[base])
    requests = [prompts.request([i]) for i in range(min(timed, len(problems)))]
    speeds: list[Speed] = []
    if requests:
        advance = report("timing one by one", len(cases) * (passes + 1))
        speeds = measure(cases, requests, passes=passes, advance=advance)
    texts = [prompts.texts(tokenizer_of(model), of.ids) for of in answers]
    exact: list[Any] = [None if score is None else score(problems, of) for of in texts]
    program = facts.facts() | {"dtypes": facts.dtypes(params)}
    table = []
    for i, source in enumerate(sources):
        row = _source_fields(source, program["device"]) | {"baseline": i == base}
        row |= _right_fields(exact[i], exact[base]) | _answer_fields(answers[i], answers[base])
        row |= _work_fields(cases[i].decoder, answers[i], prompts.lengths)
        if speeds:
            row |= _speed_fields(speeds[i], speeds[base])
            row["megabytes"] = planned_bytes(cases[i], requests[0]) / 1e6
        table.append(row | ({"equals_greedy": None} if source.setting.sampled else {}))
    calls = np.stack([of.counts[NETWORK_CALLS] for of in answers])
    return Comparison(table, texts, program, score and np.stack(exact), calls, answers[base])


def compare_texts(
    sources: Sequence[Source],
    judge: Model,
    judge_name: str,
    held_out: Samples = (),
    *,
    length: int,
    samples: int = SAMPLES,
    seed: int = 0,
    report: Report = SILENT,
) -> Comparison:
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
      seed, report: see `compare`.

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
    # Pieces do not overlap, and what is left at the end of a text is left out; those kept are
    # evenly spread.
    pieces = [
        ids[at : at + length] for ids in held_out for at in range(0, len(ids) - length + 1, length)
    ]
    if held_out and not pieces:
        raise ValueError(f"the real texts hold no piece of {length} tokens")
    count = min(samples, len(pieces))
    real = [pieces[i * len(pieces) // count] for i in range(count)]
    vocab_size = max(tokenizer.vocab_size, *(source.model.network.vocab_size for source in sources))
    measured = TextJudge(judge, judge_name, "sdtt", tokenizer, vocab_size, held_out, TEXT_ROWS)
    measured.check(length)

    rows, texts = [], []
    advance = report("drawing texts", len(sources))
    for source in sources:
        ids, row = draw(source, samples, length, seed=seed)
        rows.append(row | measured.measures(ids) | measured.reverse(ids))
        texts.append(measured.texts(ids))
        advance(1)
    if real:
        rows.append(real_row(length) | measured.measures(real) | measured.reverse_of_real(real))
        texts.append(measured.texts(real))
    return Comparison(rows, texts, facts.facts())


def draw(
    source: Source, samples: int, length: int, *, rows: int = TEXT_ROWS, seed: int = 0
) -> tuple[list[list[int]], Row]:
    """Draws texts of `length` tokens from nothing, at most `rows` in a batch.

    Returns:
      The ids of each text, and a row of where they come from and what they cost: network calls of a
      text, and the median seconds of a batch over the texts in it.

    Raises:
      ValueError: what the decoder refuses, or a model that cannot start a text.
    """
    prompts = empty_prompts(source.model, samples, length, seed)
    case, batch = case_of(source.setting, source.model, prompts.size), _batches(prompts, rows)[0]
    compile_seconds = compile_all([(case, prompts.request(batch))])[0]
    drawn = _decode(case, prompts, rows)
    settings = source.setting.settings()
    return drawn.ids, _source_fields(source, facts.device()) | {
        "length": length,
        "steps": settings.get("steps"),
        "temperature": settings["temperature"],
        "network_calls": float(drawn.counts[NETWORK_CALLS].mean()),
        "seconds_per_sample": statistics.median(drawn.seconds) / len(batch),
        "compile_seconds": compile_seconds,
        "batch": len(batch),
    }


def real_row(length: int) -> Row:
    """A row of real text, which no decoder drew: None for what it has none of."""
    names = (
        "family",
        "decoder",
        "settings",
        "steps",
        "temperature",
        "network_calls",
        "seconds_per_sample",
    )
    empty = dict.fromkeys((*names, "compile_seconds", "batch", "dtype", "device"))
    return empty | {"model": "real text", "label": "", "length": length}


def write_texts(folder: Path, compared: Comparison) -> None:
    """Writes the texts of each row as JSON lines {"text": ...} and names the file in the row, under
    "texts".
    """
    folder.mkdir(parents=True, exist_ok=True)
    for i, (row, texts) in enumerate(zip(compared.rows, compared.texts, strict=True)):
        words = [
            row["model"],
            row["decoder"],
            "" if row["steps"] is None else f"{row['steps']}-steps",
        ]
        name = "-".join(
            [f"{i:02d}", *(word.replace("/", "_").replace(" ", "-") for word in words if word)]
        )
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        atomic_write_text(folder / f"{name}.jsonl", "".join(lines))
        row["texts"] = f"{name}.jsonl"


@dataclasses.dataclass(frozen=True, eq=False)
class _Decoded:
    """Ids of N texts, what each cost [N], the seconds of each batch, and what a judge says
    (`judge_answers`).
    """

    ids: list[list[int]]
    counts: dict[str, np.ndarray]
    seconds: list[float]
    judged: Any = None


def _batches(prompts: Prompts, rows: int) -> list[np.ndarray]:
    """Numbers of the prompts of each batch: equally many, about equally long, the last batch filled
    up.
    """
    order = np.argsort(prompts.lengths, kind="stable")
    count = -(-len(order) // rows)
    rows = -(-len(order) // count)
    return list(np.pad(order, (0, count * rows - len(order)), mode="edge").reshape(count, rows))


def _decode(
    case: Case, prompts: Prompts, rows: int, advance: Advance = lambda units: None
) -> _Decoded:
    """Every prompt through a case, in batches of equal shape."""
    ids: list[list[int]] = [[]] * len(prompts.lengths)
    counts: dict[str, np.ndarray] = {}
    seconds = []
    for batch in _batches(prompts, rows):
        request, start = prompts.request(batch), time.perf_counter()
        decoded = jax.block_until_ready(run_decoder(case.decoder, case.params, request, case.knobs))
        seconds.append(time.perf_counter() - start)
        for i, row in zip(batch, decoded.completions(), strict=True):
            ids[i] = row
        for name, values in decoded.counts.items():
            counts.setdefault(name, np.zeros(len(ids), np.int64))[batch] = np.asarray(values)
        advance(1)
    return _Decoded(ids, counts, seconds)


def _judged(
    judge: Model,
    tokenizer: Tokenizer,
    prompts: Prompts,
    answers: Sequence[_Decoded],
    base: _Decoded,
) -> list[_Decoded]:
    """Answers with what a judge says of them; no text is judged twice, and what was said of the
    baseline's stays.
    """
    before = [row[:n].tolist() for row, n in zip(prompts.tokens, prompts.lengths, strict=True)]
    known: dict[Any, Any] = {}
    if base.judged is not None:
        known |= zip(enumerate(map(tuple, base.ids)), base.judged, strict=True)
    results = []
    for of in answers:
        texts = [*enumerate(map(tuple, of.ids))]
        new = [text for text in texts if text not in known]
        scores = judge_answers(
            judge, tokenizer, [before[i] for i, _ in new], [ids for _, ids in new]
        )
        known |= zip(new, scores, strict=True)
        results.append(dataclasses.replace(of, judged=np.stack([known[text] for text in texts])))
    return results


def _source_fields(source: Source, device: Mapping[str, Any]) -> Row:
    """Names and choices of a row, its dtype, and the device in a few words; the facts say more."""
    cpu = f"cpu, {device['threads']} cores"
    return {
        "family": source.model.family,
        "model": source.name,
        "decoder": source.setting.name,
        "label": source.setting.label(),
        "settings": source.setting.settings(),
        "dtype": source.model.config.dtype,
        "device": cpu if device["platform"] == "cpu" else device["kind"],
    }


def _right_fields(exact: Any, base_exact: Any) -> Row:
    """Right answers of one setting, and how they differ from the baseline's; None each where none
    is right.
    """
    names = ["exact", "interval", "difference", "difference_interval"]
    names += ["only_here_exact", "only_baseline_exact"]
    if exact is None:
        return dict.fromkeys(names)
    right, pair = int(exact.sum()), paired(exact, base_exact)
    shares = right, list(wilson(right, len(exact))), pair.difference, list(pair.interval)
    return dict(zip(names, (*shares, pair.only_first, pair.only_second), strict=True))


def _answer_fields(answers: _Decoded, base: _Decoded) -> Row:
    """What the batched pass over all problems says of one setting."""
    lengths, each = np.asarray([len(row) for row in answers.ids]), answers.counts[NETWORK_CALLS]
    tokens, calls, judged = int(lengths.sum()), int(each.sum()), answers.judged
    return {
        "problems": len(answers.ids),
        "log_prob": None if judged is None else float(judged[:, 0].sum() / judged[:, 1].sum()),
        "log_prob_interval": None
        if judged is None
        else ends(bootstrap(judged[:, 0], judged[:, 1])),
        "network_calls_per_token": calls / tokens,
        "tokens_per_network_call": tokens / calls,
        "tokens_per_network_call_interval": ends(ratio(lengths, each)),
        # A network without recurrences passes its layers once a call.
        "recurrences_per_token": int(answers.counts.get("recurrences", each).sum()) / tokens,
        "equals_greedy": float(
            np.mean([a == b for a, b in zip(answers.ids, base.ids, strict=True)])
        ),
    }


def _work_fields(decoder: Any, answers: _Decoded, lengths: Any) -> Row:
    """Positions, calls of a residual head and floating-point operations per token.

    Operations are estimated (`work` of the networks): every position sees the prompt and half of
    the answer. A call of the head reads one block and asks the output matrix for its scores; the
    first one reads the prompt's whole blocks too. None of networks with recurrences, or that do not
    say what a call costs.
    """
    network, tokens = decoder.network, sum(map(len, answers.ids))
    positions = answers.counts[POSITIONS]
    head_calls = answers.counts.get("head_calls", np.zeros_like(positions))
    row: Row = {"positions_per_token": int(positions.sum()) / tokens}
    row["head_calls_per_token"] = int(head_calls.sum()) / tokens
    if "recurrences" in network.counters or not hasattr(network, "work"):
        return row | {"flops_per_token": None}
    flops = 0
    for ids, length, count, calls in zip(answers.ids, lengths, positions, head_calls, strict=True):
        context = int(length) + len(ids) // 2
        flops += int(count) * network.work(1, 1, context).flops
        if calls:
            head, block = decoder.head, decoder.head.block
            scores = 2 * network.vocab_size * network.config.width * block
            flops += int(calls) * (head.work(1, block, context).flops + scores)
            flops += head.work(1, int(length) // block * block, 0).flops
    return row | {"flops_per_token": flops / tokens}


def _speed_fields(speed: Speed, baseline: Speed) -> Row:
    """What the timed calls say of one setting, and the ratios to the baseline that was timed in
    turns with it.
    """
    whole, interval = speedup(speed.generated, speed.each, baseline.generated, baseline.each)
    # Without the prompts, and without the token that each of them predicts.
    later, base_later = (np.subtract(of.generated, of.batch) for of in (speed, baseline))
    reading = {"less": speed.each_reading, "base_less": baseline.each_reading}
    decoding, decoding_interval = speedup(later, speed.each, base_later, baseline.each, **reading)
    return {
        "tokens": speed.tokens,
        "seconds": speed.seconds,
        "quickest_seconds": min(speed.passes),
        "slowest_seconds": max(speed.passes),
        "prompt_seconds": speed.init_seconds,
        "passes": list(speed.passes),
        "generated": list(speed.generated),
        "each": [list(seconds) for seconds in speed.each],
        "tokens_per_second": speed.tokens_per_second,
        "baseline_tokens_per_second": baseline.tokens_per_second,
        "speedup": whole,
        "speedup_interval": ends(interval),
        "decode_tokens_per_second": speed.decode_tokens_per_second,
        "decode_speedup": decoding,
        "decode_speedup_interval": ends(decoding_interval),
        "batch": speed.batch,
        "timed_problems": len(speed.decoded),
        "timed_passes": len(speed.passes),
        "compile_seconds": speed.compile_seconds,
    }
