"""The same unseen problems through every decoder: answers, speed and work side by side."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

from paradec_jax import facts
from paradec_jax.data.problems import Problem, encode_prompts, exact_answers
from paradec_jax.decode import Decoded, Request, make_request
from paradec_jax.decode import run as run_decoder
from paradec_jax.decode.machine.request import keys_of
from paradec_jax.decode.machine.rows import NETWORK_CALLS, POSITIONS
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.intervals import ends, paired, ratio, speedup, wilson
from paradec_jax.generate import equipped, parameters_for
from paradec_jax.store import Model
from paradec_jax.timing import Case, Speed, measure

Report = Callable[[str, int, int], None]
Score = Callable[[Sequence[Any], Sequence[str]], Bool[np.ndarray, "N"]]

ROWS = 50  # problems decoded together when only their answers count
TIMED = 5  # problems of the speed measurement, each in a call of its own
BUCKET = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` and `compare_texts` return.

    Attributes:
      rows: one dictionary a setting, as `paradec compare --json` prints them.
      labels: short descriptions of the settings.
      facts: machine and program (`facts.facts`); for answers the dtypes of the parameters too.
      texts: what each setting wrote.
      baseline: index of the row that others are compared with.
      exact: which problems each setting got right, bool [settings, N]; None of texts, which have no right answer.
      calls: network calls of each, int [settings, N]; None of texts.
    """

    rows: list[dict[str, Any]]
    labels: list[str]
    facts: dict[str, Any]
    texts: Sequence[Sequence[str]] = ()
    baseline: int = 0
    exact: Any = None
    calls: Any = None

    def labelled(self) -> list[dict[str, Any]]:
        """The rows, each with the label of its setting."""
        return [row | {"label": label} for row, label in zip(self.rows, self.labels, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Encoded problems, all in one shape: tokens [N, P], lengths [N], one key each, budget of each."""

    tokens: Any
    lengths: Any
    keys: Any
    budget: int
    stop: tuple[int, ...]

    @property
    def size(self) -> int:
        """Positions that a problem and its answer need."""
        return self.tokens.shape[1] + self.budget

    def request(self, rows: Sequence[int]) -> Request:
        """Some of the problems as one request."""
        at = np.asarray(rows)
        return make_request(
            self.tokens[at], self.lengths[at], max_new_tokens=self.budget, stop=self.stop, keys=self.keys[at]
        )


def compare(
    model: Model,
    problems: Sequence[Problem | str],
    settings: Sequence[Setting],
    *,
    name: str = "",
    seed: int = 0,
    budget: int | None = None,
    score: Score = exact_answers,
    timed: int = TIMED,
    passes: int = 5,
    rows: int = ROWS,
    report: Report = lambda stage, done, total: None,
    models: Sequence[Model] | None = None,
) -> Comparison:
    """Decodes problems with every setting: all of them in batches for answers, some one by one for speed.

    Problem i draws with `fold_in(key(seed), i)` whatever decoder, batch or call it is in. Token and network
    counts come from all problems, seconds from the first `timed` ones.

    Args:
      model: a model with a tokenizer.
      problems: at least one; texts need a `budget` and a `score`.
      settings: rows of the table, exactly one of them the baseline.
      name: of the model, for the rows.
      seed: of the initial states.
      budget: new tokens of a problem at most; room for the longest reference solution when None.
      score: which of the generated texts are right.
      timed: problems of the speed measurement; 0 leaves speed out.
      passes: timings of each setting.
      rows: problems of a batch, at most.
      report: told the stage, the units done and their total.
      models: that of each setting, where they differ in their residual heads; the network is that of `model`.

    Raises:
      ValueError: no problem, no tokenizer, not one baseline, or problems too long for the model.
    """
    settings = tuple(settings)
    baselines = [i for i, setting in enumerate(settings) if setting.baseline]
    if len(baselines) != 1:
        raise ValueError(f"settings must hold exactly one baseline, not {len(baselines)}")
    prompts = prompts_of(model, problems, seed, budget)
    params = model.network.prepare(model.params)
    of_settings = [model] * len(settings) if models is None else models
    cases = [
        with_parameters(case_of(setting, setting.decoder, of, prompts.size), of, params)
        for setting, of in zip(settings, of_settings, strict=True)
    ]
    decoded = _answers(params, cases, prompts, rows, report)
    requests = [prompts.request([i]) for i in range(min(timed, len(problems)))]
    advance = counter(report, "timing one by one", len(cases) * (passes + 1))
    speeds = measure(cases, params, requests, passes=passes, advance=advance) if timed else []
    found = facts.facts() | {"dtypes": facts.dtypes(params)}
    machine = {"dtype": model.config.dtype, "device": device_name(found["device"])}
    texts = [_texts(model, prompts, of) for of in decoded]
    exact = np.stack([score(problems, of) for of in texts])
    results = []
    for i, setting in enumerate(settings):
        row = _row(setting, decoded[i], exact[i], decoded[baselines[0]], exact[baselines[0]])
        row |= _work(cases[i].decoder, decoded[i], prompts.lengths)
        if speeds:
            row |= _speed(speeds[i], speeds[baselines[0]])
        results.append({"family": model.family, "model": name} | row | machine)
    labels = [setting.label() for setting in settings]
    calls = np.asarray([[row.counts[NETWORK_CALLS] for row in of] for of in decoded])
    return Comparison(results, labels, found, texts, baselines[0], exact, calls)


def case_of(setting: Setting, decoder: Any, model: Model, size: int) -> Case:
    """A decoder of a setting bound to a model, greedy where it does not sample."""
    network = model.network
    if setting.cache is not None:
        network = dataclasses.replace(network, cache=setting.cache)
    decoder = dataclasses.replace(equipped(model, decoder), greedy=not setting.sampled)
    return Case(decoder.bind(network, size, model.token_spec), setting.knobs)


def with_parameters(case: Case, model: Model, params: Any) -> Case:
    """A case with parameters of its own where it has several networks; `params` are the prepared ones of one."""
    if not case.decoder.further_networks:
        return case
    given = parameters_for(model, case.decoder) | {"network": params}
    return dataclasses.replace(case, params=case.decoder.prepare(given))


def counter(report: Report, stage: str, total: int) -> Callable[[int], None]:
    """Counts the units of a stage and reports them."""
    done = itertools.count(1)

    def advance(units: int) -> None:
        for _ in range(units):
            report(stage, next(done), total)

    report(stage, 0, total)
    return advance


def prompts_of(model: Model, problems: Sequence[Problem | str], seed: int, budget: int | None) -> Prompts:
    """Prompts in one buffer; without a budget there is room for the longest reference solution and its end.

    Raises:
      ValueError: no tokenizer, no problem, texts without a budget, or more positions than the model has.
    """
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer: put a tokenizer.json into its folder")
    if not problems:
        raise ValueError("need at least one problem")
    tokens, lengths = encode_prompts(model.tokenizer, problems, spec=model.token_spec, bucket=BUCKET)
    wanted = budget
    if wanted is None:
        told = [item.solution for item in problems if isinstance(item, Problem)]
        if len(told) < len(problems):
            raise ValueError("problems that are texts have no reference solution: give a budget")
        wanted = max(len(ids) for ids in model.tokenizer.encode_batch(told)) + 1
    room = model.network.max_length - tokens.shape[1]
    if wanted > room:
        raise ValueError(
            f"problems need {tokens.shape[1]} positions for prompts and {wanted} for solutions, more than "
            f"the {model.network.max_length} that the model was built for"
        )
    keys = keys_of(np.int64(seed), np.arange(len(problems), dtype=np.int32))
    if budget is None:
        budget = min(-(-wanted // BUCKET) * BUCKET, room)
    return Prompts(tokens, lengths, keys, budget, model.token_spec.stop)


@dataclasses.dataclass(frozen=True, eq=False)
class _Answer:
    """One problem's tokens and counts."""

    ids: list[int]
    counts: dict[str, int]


def _answers(
    params: Any, cases: Sequence[Case], prompts: Prompts, rows: int, report: Report
) -> list[list[_Answer]]:
    """Every problem through every case, in batches of equal shape whose rows are about equally long."""
    count = len(prompts.lengths)
    groups = -(-count // rows)
    rows = -(-count // groups)
    order = np.argsort(prompts.lengths, kind="stable").tolist()
    batches = [order[start : start + rows] for start in range(0, count, rows)]
    advance = counter(report, "decoding in batches", len(cases) * len(batches))

    def decode(case: Case) -> list[_Answer]:
        found: dict[int, _Answer] = {}
        for batch in batches:
            filled = batch + [batch[-1]] * (rows - len(batch))
            given = case.parameters(params)
            result = run_decoder(case.decoder, given, prompts.request(filled), case.knobs)
            found |= dict(zip(batch, _split(result), strict=False))
            advance(1)
        return [found[i] for i in range(count)]

    # Nothing is timed here, and a small program keeps one core busy: as many at once as there are.
    at_once = (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(decode, cases))


def _split(decoded: Decoded) -> list[_Answer]:
    counts = {name: np.asarray(count).tolist() for name, count in decoded.counts.items()}
    return [
        _Answer(ids, {name: count[row] for name, count in counts.items()})
        for row, ids in enumerate(decoded.completions())
    ]


def _texts(model: Model, prompts: Prompts, answers: Sequence[_Answer]) -> list[str]:
    assert model.tokenizer is not None
    read = zip(prompts.tokens.tolist(), prompts.lengths.tolist(), strict=True)
    return [
        model.tokenizer.decode_after(prompt[:length], answer.ids, skip_special=True)
        for (prompt, length), answer in zip(read, answers, strict=True)
    ]


def _row(
    setting: Setting, answers: list[_Answer], exact: Any, greedy: list[_Answer], right: Any
) -> dict[str, Any]:
    """What the batched pass over all problems says of one setting."""
    each = np.array([(len(answer.ids), answer.counts[NETWORK_CALLS]) for answer in answers])
    tokens, calls = each.sum(axis=0).tolist()
    difference = paired(exact, right)
    equal = np.mean([a.ids == b.ids for a, b in zip(answers, greedy, strict=True)])
    return {
        "decoder": setting.name,
        "settings": setting.settings(),
        "baseline": setting.baseline,
        "problems": len(answers),
        "exact": int(exact.sum()),
        "interval": list(wilson(int(exact.sum()), len(answers))),
        "difference": difference.difference,
        "difference_interval": list(difference.interval),
        "only_here_exact": difference.only_first,
        "only_baseline_exact": difference.only_second,
        "network_calls_per_token": calls / tokens,
        "tokens_per_network_call": tokens / calls,
        "tokens_per_network_call_interval": ends(ratio(each[:, 0], each[:, 1])),
        # A network without recurrences passes its layers once a call.
        "recurrences_per_token": sum(a.counts.get("recurrences", a.counts[NETWORK_CALLS]) for a in answers)
        / tokens,
        "equals_greedy": None if setting.sampled else float(equal),
    }


def _work(decoder: Any, answers: list[_Answer], lengths: Any) -> dict[str, Any]:
    """Positions, calls of a residual head and floating-point operations per token.

    Operations are estimated (`work` of the networks): every position sees the prompt and half of the answer. A call
    of the head reads one block and asks the output matrix for its scores; the first one reads the prompt's whole
    blocks too. None of networks with recurrences, or that do not say what a call costs.
    """
    network, tokens = decoder.network, sum(len(answer.ids) for answer in answers)
    positions, heads = (sum(a.counts.get(name, 0) for a in answers) for name in (POSITIONS, "head_calls"))
    found = {"positions_per_token": positions / tokens, "head_calls_per_token": heads / tokens}
    if "recurrences" in network.counters or not hasattr(network, "work"):
        return found | {"flops_per_token": None}
    flops = 0
    for answer, length in zip(answers, lengths, strict=True):
        context = int(length) + len(answer.ids) // 2
        flops += answer.counts[POSITIONS] * network.work(1, 1, context).flops
        if calls := answer.counts.get("head_calls", 0):
            head, block = decoder.head, decoder.head.block
            scores = 2 * network.vocab_size * network.config.width * block
            flops += calls * (head.work(1, block, context).flops + scores)
            flops += head.work(1, int(length) // block * block, 0).flops
    return found | {"flops_per_token": flops / tokens}


def _speed(speed: Speed, baseline: Speed) -> dict[str, Any]:
    """What the timed calls say of one setting, and the ratios to the baseline that was timed in turns with it."""
    ratio, interval = speedup(speed.generated, speed.each, baseline.generated, baseline.each)
    alone, of_base = (np.subtract(of.generated, of.batch) for of in (speed, baseline))
    reading, of_base_reading = speed.each_reading, baseline.each_reading
    decode_ratio, decode_interval = speedup(
        alone, speed.each, of_base, baseline.each, less=reading, base_less=of_base_reading
    )
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
        "speedup": ratio,
        "speedup_interval": ends(interval),
        "decode_tokens_per_second": speed.decode_tokens_per_second,
        "decode_speedup": decode_ratio,
        "decode_speedup_interval": ends(decode_interval),
        "batch": speed.batch,
        "timed_problems": len(speed.decoded),
        "compile_seconds": speed.compile_seconds,
    }


def device_name(of: Mapping[str, Any]) -> str:
    """The device in a few words; the facts say more."""
    return f"cpu, {of['threads']} cores" if of["platform"] == "cpu" else of["kind"]
