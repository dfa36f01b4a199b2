"""`paradec demo`: the four families in one table, each one by one and with its best parallel decoder."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from paradec_jax import store
from paradec_jax.cli.output import print_table, progress
from paradec_jax.data.problems import exact_answers, read_problems
from paradec_jax.decode import (
    AutoRegressive,
    BlockDenoising,
    Jacobi,
    Masked,
    Request,
    Static,
    Wavefront,
    make_request,
)
from paradec_jax.decode.machine.request import keys_of
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.compare import case_of, counter, prompts_of
from paradec_jax.evaluate.intervals import ends, speedup
from paradec_jax.evaluate.judge import judge_ids
from paradec_jax.generate import tokenizer_of
from paradec_jax.timing import Case, compile_all, measure

PROBLEMS, TEXTS, LENGTH, PASSES, SEED, JUDGE = 20, 16, 64, 5, 1, "tiny-judge"
EVERY_STEP = Wavefront.Knobs(exit_threshold=jnp.inf, momentum=0.0)
WAVE = Wavefront(inner_recurrence=1, window=8, headway=8, warm_start=False, prefill_recurrence=1)

# By family, one by one and in parallel: the model, and its decoder as the table calls it.
FAMILIES = {
    "recurrent depth": (
        ("tiny-recurrent-distilled", Setting("one by one, 1 recurrence", Static(recurrence=1))),
        ("tiny-recurrent-distilled", Setting("wavefront of 8 positions", WAVE, EVERY_STEP)),
    ),
    "causal": (
        ("tiny-jacobi", Setting("one by one", AutoRegressive())),
        ("tiny-jacobi", Setting("Jacobi, window of 8", Jacobi(block=8, running=True))),
    ),
    "masked diffusion": (
        ("tiny-mdlm", Setting("one by one, any order", Masked(order="single"))),
        ("tiny-mdlm-distilled", Setting("8 steps", Masked(), Masked.Knobs(steps=8))),
    ),
    "block diffusion": (
        ("tiny-sdar", Setting("one by one, surest first", BlockDenoising(rule="static"))),
        ("tiny-sdar", Setting("all above 0.98", BlockDenoising(), BlockDenoising.Knobs(threshold=0.98))),
    ),
}
COLUMNS = {
    "family": "{family}",
    "model": "{model}",
    "decoder": "{decoder}",
    "exact": "{exact} of {problems}",
    "perplexity": "{perplexity:.1f}",
    "tokens a call": "{tokens_per_call:.2f}",
    "tokens a second": "{tokens_per_second:.0f}",
    "ratio": "{ratio:.2f}x",
    "95%": "{interval[0]:.2f}-{interval[1]:.2f}",
}
LEGEND = (
    f"exact: right answers of {PROBLEMS} unseen word problems. perplexity: of {TEXTS} texts of {LENGTH} characters "
    f"by {JUDGE}; less is likelier. tokens a call: written tokens over calls of the network. tokens a second: one "
    f"text at a time on this device, without compilation. ratio: to one by one, with its 95% range."
)


class Pair(NamedTuple):
    """Both rows of a family, ready to run.

    Attributes:
      models: the loaded model of each row.
      cases: what is timed in each row: decoder, parameters, knobs.
      requests: a problem or a text each, the same for both rows.
    """

    models: list[store.Model]
    cases: list[Case]
    requests: list[Request]


def demo_command() -> int:
    """Prints one table of the four families: what each decoder writes, in how many calls, how fast."""
    pairs = {name: _pair(rows) for name, rows in FAMILIES.items()}
    programs = [(case, pair.requests[0]) for pair in pairs.values() for case in pair.cases]
    with progress() as report:
        advance = counter(report, "compiling", len(programs))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda program: compile_all([program], None, advance=advance), programs))
        advance = counter(report, "decoding", len(programs) * (PASSES + 1))
        rows = [row for name, pair in pairs.items() for row in _rows(name, pair, advance)]
    print_table("Four families, one by one and in parallel", COLUMNS, rows, [LEGEND])
    return 0


def _pair(rows: Sequence[tuple[str, Setting]]) -> Pair:
    """The models, decoders and requests of a family: unseen problems, or texts from nothing for a denoiser."""
    models = [store.load(name) for name, _ in rows]
    if models[0].family == "masked_diffusion":
        keys, size = keys_of(np.int64(SEED), np.arange(TEXTS, dtype=np.int32)), LENGTH
        requests = [make_request([[]], max_new_tokens=LENGTH, keys=keys[i : i + 1]) for i in range(TEXTS)]
    else:
        prompts = prompts_of(models[0], read_problems("unseen")[:PROBLEMS], SEED, None)
        requests, size = [prompts.request([i]) for i in range(PROBLEMS)], prompts.size
    cases = []
    for model, (_, setting) in zip(models, rows, strict=True):
        case = case_of(setting, setting.decoder, model, size)
        cases.append(dataclasses.replace(case, params=case.decoder.prepare(model.params)))
    return Pair(models, cases, requests)


def _rows(family: str, pair: Pair, advance: Any) -> Iterator[dict[str, Any]]:
    """The table's rows of a family, timed in turns."""
    speeds = measure(pair.cases, None, pair.requests, passes=PASSES, advance=advance)
    for i, (model, speed) in enumerate(zip(pair.models, speeds, strict=True)):
        name, setting = FAMILIES[family][i]
        ratio, interval = speedup(speed.generated, speed.each, speeds[0].generated, speeds[0].each)
        row = {"family": family, "model": name, "decoder": setting.name, "problems": PROBLEMS}
        row |= {"exact": None, "perplexity": None, "ratio": ratio, "interval": ends(interval)}
        calls = sum(int(np.asarray(one.network_calls).sum()) for one in speed.decoded)
        row |= {"tokens_per_call": speed.tokens / calls, "tokens_per_second": speed.tokens_per_second}
        ids = [one.completions()[0] for one in speed.decoded]
        if model.family == "masked_diffusion":  # judged by the texts that it draws
            row["perplexity"] = judge_ids(store.load(JUDGE), ids, begin=True, batch=TEXTS).perplexity
        else:
            texts = [tokenizer_of(model).decode(of, skip_special=True) for of in ids]
            row["exact"] = int(exact_answers(read_problems("unseen")[:PROBLEMS], texts).sum())
        yield row
