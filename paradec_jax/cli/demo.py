"""`paradec demo`: the four families in one table, each one by one and with its best parallel
decoder.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paradec_jax import store
from paradec_jax.cli.output import print_table, progress
from paradec_jax.data.problems import Problem, exact_answers, read_problems
from paradec_jax.evaluate.cases import Prompts, Source, case_of, empty_prompts, prompts_of
from paradec_jax.evaluate.intervals import ends, speedup
from paradec_jax.evaluate.judge import judge_answers
from paradec_jax.evaluate.likelihood import prefix
from paradec_jax.evaluate.timing import Speed, compile_all, measure
from paradec_jax.families import choose
from paradec_jax.generate import tokenizer_of

PROBLEMS, TEXTS, LENGTH, PASSES, SEED, JUDGE = 20, 16, 64, 5, 1, "tiny-judge"
WAVE = (
    "wavefront --inner-recurrence 1 --window 8 --headway 8 --no-warm-start --prefill-recurrence 1"
)

# By family, one by one and in parallel: the model, its decoder as the table calls it, and as a
# command line does.
ROWS = {
    "recurrent depth": (
        ("tiny-recurrent-distilled", "one by one, 1 recurrence", "autoregressive --recurrence 1"),
        (
            "tiny-recurrent-distilled",
            "wavefront of 8 positions",
            f"{WAVE} --exit-threshold inf --momentum 0",
        ),
    ),
    "causal": (
        ("tiny-jacobi", "one by one", "autoregressive"),
        ("tiny-jacobi", "Jacobi, window of 8", "jacobi --block 8 --running"),
    ),
    "masked diffusion": (
        ("tiny-mdlm", "one by one, any order", "masked --order single"),
        ("tiny-mdlm-distilled", "8 steps", "masked --steps 8"),
    ),
    "block diffusion": (
        ("tiny-sdar", "one by one, surest first", "block --rule static"),
        ("tiny-sdar", "all above 0.98", "block --threshold 0.98"),
    ),
}
FAMILIES = {
    family: [
        (name, dataclasses.replace(choose(family.replace(" ", "_"), text), name=title))
        for name, title, text in rows
    ]
    for family, rows in ROWS.items()
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
    tokenizer = tokenizer_of(source.model)
    if source.model.family == "masked_diffusion":
        judge = store.load(JUDGE)
        begun = [[prefix(judge.token_spec)]] * len(ids)
        nats, count = judge_answers(judge, tokenizer, begun, ids).sum(axis=0)
        return row | {"perplexity": math.exp(-nats / count)}
    texts = prompts.texts(tokenizer, ids)
    return row | {"exact": int(exact_answers(problems, texts).sum())}
