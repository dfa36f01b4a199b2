"""`paradec demo`: the four families in one table, each one by one and with its best parallel decoder."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp

from paradec_jax import store
from paradec_jax.cli.output import print_table, progress
from paradec_jax.data.problems import Problem, exact_answers, read_problems
from paradec_jax.decode import AutoRegressive, BlockDenoising, Jacobi, Masked, Static, Wavefront
from paradec_jax.evaluate.cases import Prompts, Source, case_of, empty_prompts, prompts_of
from paradec_jax.evaluate.intervals import ends, speedup
from paradec_jax.evaluate.judge import judge_ids
from paradec_jax.evaluate.setting import Setting
from paradec_jax.generate import tokenizer_of
from paradec_jax.timing import Speed, compile_all, measure

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


def demo_command() -> int:
    """Prints one table of the four families: what each decoder writes, in how many calls, how fast."""
    problems = read_problems("unseen")[:PROBLEMS]
    runs, rows = [], []
    for family, settings in FAMILIES.items():
        sources = [Source(name, store.load(name), setting) for name, setting in settings]
        model = sources[0].model
        if model.family == "masked_diffusion":  # writes texts from nothing
            prompts = empty_prompts(model, TEXTS, LENGTH, SEED)
        else:
            prompts = prompts_of(model, problems, SEED, None)
        requests = [prompts.request([i]) for i in range(len(prompts.lengths))]
        cases = [case_of(source.setting, source.model, prompts.size) for source in sources]
        runs.append((family, sources, prompts, cases, requests))
    programs = [(case, requests[0]) for *_, cases, requests in runs for case in cases]
    with progress() as report:
        advance = report("compiling", len(programs))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda program: compile_all([program], advance), programs))
        advance = report("decoding", len(programs) * (PASSES + 1))
        for family, sources, prompts, cases, requests in runs:
            speeds = measure(cases, requests, passes=PASSES, advance=advance)
            for source, speed in zip(sources, speeds, strict=True):
                rows.append({"family": family} | _row(source, prompts, problems, speed, speeds[0]))
    print_table("Four families, one by one and in parallel", COLUMNS, rows, [LEGEND])
    return 0


def _row(
    source: Source, prompts: Prompts, problems: Sequence[Problem], speed: Speed, one_by_one: Speed
) -> dict[str, Any]:
    """What a decoder wrote and what it took, beside the family's first one."""
    ratio, interval = speedup(speed.generated, speed.each, one_by_one.generated, one_by_one.each)
    row = {
        "model": source.name,
        "decoder": source.setting.name,
        "problems": len(problems),
        "exact": None,
        "perplexity": None,
        "tokens_per_call": speed.tokens / speed.counts["network_calls"],
        "tokens_per_second": speed.tokens_per_second,
        "ratio": ratio,
        "interval": ends(interval),
    }
    ids = [decoded.completions()[0] for decoded in speed.decoded]
    if source.model.family == "masked_diffusion":
        judged = judge_ids(store.load(JUDGE), ids, begin=True, batch=TEXTS)
        return row | {"perplexity": judged.perplexity}
    texts = prompts.texts(tokenizer_of(source.model), ids)
    return row | {"exact": int(exact_answers(problems, texts).sum())}
