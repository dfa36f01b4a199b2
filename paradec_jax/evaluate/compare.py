"""Decoders side by side: their answers to the same problems, as rows of one table."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from paradec_jax import facts
from paradec_jax.data.problems import Problem, encode_prompts, exact_answers
from paradec_jax.decode.machine import NETWORK_CALLS
from paradec_jax.evaluate.answers import Answers, answer, batches, judged
from paradec_jax.evaluate.cases import Prompts, Source, case_of, prompts_of
from paradec_jax.evaluate.fields import (
    Row,
    answer_fields,
    right_fields,
    source_fields,
    speed_fields,
    work_fields,
)
from paradec_jax.evaluate.judge import check_judge
from paradec_jax.evaluate.timing import Advance, Case, Speed, measure, planned_bytes
from paradec_jax.generate import BUCKET, tokenizer_of
from paradec_jax.records import record
from paradec_jax.store import Model

# Begins a stage of so many units; what it returns counts those that are done.
Report = Callable[[str, int], Advance]
SILENT: Report = lambda stage, units: lambda done: None  # noqa: E731
Score = Callable[[Sequence[Any], Sequence[str]], Bool[np.ndarray, "N"]]

ROWS = 50  # problems decoded together when only their answers count
TIMED = 5  # problems of the speed measurement, each in a call of its own


@record
class Comparison:
    """What `compare` returns.

    Attributes:
      rows: one dictionary a source, as `paradec compare --json` prints them.
      texts: texts of each row.
      facts: machine, program and dtypes of the parameters (`facts.facts`).
      exact: which problems each source got right, bool [sources, N]; None where no answer is right.
      calls: network calls of each problem.
      baseline: what the baseline wrote, for a further `compare` of the same problems.
    """

    rows: list[Row]
    texts: Sequence[Sequence[str]]
    facts: dict[str, Any]
    exact: Any
    calls: Int[np.ndarray, "sources N"]
    baseline: Answers


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
    wide: int = 0,
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
      wide: rows of one more timing, the first problems in a single call; 0 leaves it out.
      rows: problems of a batch, at most.
      before: earlier comparison with the same baseline, whose answers are not decoded again.
      report: function that shows how far each stage is.

    Raises:
      ValueError: no problem, no tokenizer or several, not one baseline, or problems too long for
        the model.
    """
    baselines = [source.setting.baseline for source in sources]
    if sum(baselines) != 1:
        raise ValueError(f"settings must hold exactly one baseline, not {sum(baselines)}")
    base = baselines.index(True)
    model = sources[base].model
    prompts = prompts_of(model, problems, seed, budget)
    others = {id(of.model): of for of in sources if of.model is not model}
    for other in others.values():
        tokens, _ = encode_prompts(
            tokenizer_of(other.model), problems, spec=other.model.token_spec, bucket=BUCKET
        )
        if not np.array_equal(tokens, prompts.tokens):
            raise ValueError(
                f"{other.name} reads the problems as other tokens than {sources[base].name}: "
                "compare models of one tokenizer"
            )
    if judge is not None:
        check_judge(judge)
        if prompts.budget > judge.network.max_length:  # refused before minutes of decoding
            raise ValueError(
                f"the judge has {judge.network.max_length} positions, and an answer may have "
                f"{prompts.budget} tokens"
            )
    # Sources of one network share its prepared parameters, whatever heads they have beside it.
    models = {id(source.model.params): source.model for source in sources}
    params = {key: of.network.prepare(of.params) for key, of in models.items()}
    cases = [
        case_of(source.setting, source.model, prompts.size, params[id(source.model.params)])
        for source in sources
    ]

    new = [case for i, case in enumerate(cases) if i != base or before is None]
    answers = _answers(new, prompts, rows, report)
    if before is not None:
        answers.insert(base, before.baseline)
    if judge is not None:
        answers = judged(judge, tokenizer_of(model), prompts, answers, answers[base])
    texts = [prompts.texts(tokenizer_of(model), one.ids) for one in answers]
    exact = None if score is None else np.stack([score(problems, each) for each in texts])

    requests = [prompts.request([i]) for i in range(min(timed, len(problems)))]
    speeds: list[Speed] = []
    if requests:
        advance = report("timing one by one", len(cases) * (passes + 1))
        speeds = measure(cases, requests, passes=passes, advance=advance)
    widely: list[Speed] = []
    if wide:
        some = [prompts.request(range(min(wide, len(problems))))]
        advance = report(f"timing {wide} at once", len(cases) * (passes + 1))
        widely = measure(cases, some, passes=passes, advance=advance)
    program = facts.facts() | {"dtypes": facts.dtypes(params)}
    table = []
    for i, (source, case) in enumerate(zip(sources, cases, strict=True)):
        row = source_fields(source, program["device"]) | {"baseline": i == base}
        row |= right_fields(exact, i, base) | answer_fields(answers[i], answers[base])
        row |= work_fields(case.decoder, answers[i], prompts.lengths)
        if speeds:
            row |= speed_fields(speeds[i], speeds[base])
            row["megabytes"] = planned_bytes(case, requests[0]) / 1e6
        row["wide"] = speed_fields(widely[i], widely[base]) if widely else None
        if source.setting.sampled:
            row["equals_greedy"] = None
        table.append(row)
    calls = np.stack([one.counts[NETWORK_CALLS] for one in answers])
    return Comparison(table, texts, program, exact, calls, answers[base])


def _answers(cases: Sequence[Case], prompts: Prompts, rows: int, report: Report) -> list[Answers]:
    """What each case answers; nothing is timed, so a CPU runs as many of them at once as it has
    cores.
    """
    advance = report("decoding in batches", len(cases) * len(batches(prompts, rows)))
    at_once = (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda case: answer(case, prompts, rows, advance), cases))
