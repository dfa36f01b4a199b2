"""Laws and decoders on this machine's own jax, for an accelerator that is lent for minutes (`slot.sh`).

    python -m experiments.systems.slot laws --out slot
    python -m experiments.systems.slot decoders --out slot --minutes 2 --real SmolLM2-135M.gguf

`laws`: on a bundled model of each family parallel decoding of a batch gives the tokens of plain decoding of each
prompt alone, and those recorded on a CPU. `decoders`: SmolLM2-135M in bfloat16, whole texts less their prompts. Real
weights are measured. Random ones accept few drafts: seconds of a call are measured, and tokens a second are
batch x tokens a call / seconds a call, with the tokens a call of the real model at batch 1 on a CPU (`TABLE`).
"""

import argparse
import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import paradec_jax as pd
from experiments.common.record import write_record
from experiments.real.settings import SETTINGS, chats
from experiments.systems import report
from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine.rows import POSITIONS
from paradec_jax.evaluate.cases import Prompts, case_of, prompts_of
from paradec_jax.evaluate.setting import Setting

BLOCKS, ALONE = pd.BlockDenoising(rule="factor"), {"fuse_store": False, "fuse_prompt": False}
LAWS = {  # plain decoding, parallel decoding, knobs, digest of the tokens; a masked canvas has no plain decoding
    "tiny-jacobi": (pd.AutoRegressive(), pd.Jacobi(running=True), None, ""),
    "tiny-recurrent-distilled": (pd.Static(recurrence=1), pd.Jacobi(block=8, recurrence=1), None, ""),
    "tiny-sdar": (dataclasses.replace(BLOCKS, **ALONE), BLOCKS, None, ""),
    "tiny-mdlm-distilled": (pd.Masked(), pd.Masked(), pd.Masked.Knobs(steps=16), ""),
}
TOKENS, BATCHES = 64, (1, 8, 64)  # new tokens of a text, and prompt tokens of a random one
TABLE = Path(__file__).parents[1] / "real" / "results" / "smollm2-135m.json"


def answers(name: str, parallel: bool) -> list[list[int]]:
    """The tokens of four prompts by a bundled model, products in full float32."""
    model, knobs = pd.load(name), LAWS[name][2]
    prompts = report.prompts_here(model, 4)
    case = case_of(Setting(name, LAWS[name][parallel], knobs), model, prompts.size)
    requests = [prompts.request(rows) for rows in ([range(4)] if parallel else [[0], [1], [2], [3]])]
    with jax.default_matmul_precision("highest"):
        return [ids for one in decode(case, requests) for ids in one.completions()]


def laws(out: Path, clock: report.Clock) -> None:
    """Writes for each family whether the tokens are equal, and those that were recorded."""
    jobs = {f"{name} {way}": functools.partial(answers, name, bool(way)) for name in LAWS for way in (0, 1)}
    (done, left), rows = report.compiled(jobs, clock), []
    for name, (*_, recorded) in LAWS.items():
        plain, parallel = (done.get(f"{name} {way}") for way in (0, 1))
        digest = hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
        found = {"equal": plain is not None and plain == parallel, "recorded": digest == recorded}
        rows.append({"model": name, "digest": digest, **found})
        print(rows[-1], flush=True)
    write_record(out / "laws.json", {}, {"rows": rows, "left_out": left})


def model_here(real: Path | None, toy: bool) -> Any:
    """SmolLM2-135M in bfloat16: the weights of a file, or random ones; a tiny shape in a dry run."""
    if real is not None:
        return pd.load(str(real), dtype="bfloat16")
    config = pd.PRESETS["test-causal" if toy else "smollm2-135m"]
    config = dataclasses.replace(config, dtype="bfloat16", param_dtype="bfloat16")
    return pd.Model(config, report.random_params(config), TokenSpec())


def prompts_here(model: Any, count: int) -> Prompts:
    """The ten chats over and over, or random tokens for a model without a tokenizer."""
    if model.tokenizer is not None:
        texts = list(chats(model).values()) * -(-count // 10)
        return prompts_of(model, texts[:count], report.SEED, TOKENS)
    drawn = np.random.default_rng(report.SEED).integers(0, model.network.vocab_size, (count, TOKENS))
    keys = jax.random.split(jax.random.key(report.SEED), count)
    return Prompts(drawn.astype(np.int32), np.full(count, TOKENS, np.int32), keys, TOKENS)


def decode(case: Any, requests: Any, most: int | None = None) -> Any:
    """The results of all requests, one after the other."""
    done = [pd.run(case.decoder, case.params, one, case.knobs, max_steps=most) for one in requests]
    return jax.block_until_ready(done)


def decoders(out: Path, clock: report.Clock, real: Path | None, toy: bool) -> None:
    """A row for every decoder at every batch; all programs are compiled first, several at once."""
    model = model_here(real, toy)
    found = report.Report(out, {"real": real is not None, "toy": toy, "tokens": TOKENS})
    params, jobs = model.network.prepare(model.params), {}
    for batch in BATCHES[: 2 if toy else None]:
        prompts = prompts_here(model, batch if real is None else max(batch, 5))
        requests = [prompts.request(range(at, at + batch)) for at in range(0, len(prompts.lengths), batch)]
        for setting in SETTINGS:
            case = case_of(setting, model, prompts.size, params)
            jobs[f"batch {batch}, {setting.name}"] = functools.partial(decode, case, requests)
    reading = {name: functools.partial(job, 0) for name, job in jobs.items()}
    prompt, left = report.compiled(reading, report.Clock(0.6 * clock.left()))
    for name, why in left.items():
        found.leave("decoders", name, why)
    for batch in BATCHES:
        here = [name for name in prompt if name.startswith(f"batch {batch},")]
        whole = {name: jobs[name]() for name in here}
        timings = report.in_turns(
            {(name, of[name]): of[name] for name in here for of in (jobs, reading)}, clock
        )
        times = {name: (timings[name, jobs[name]], timings[name, reading[name]]) for name in here}
        rows_of(found, model, batch, {name: (whole[name], prompt[name], *times[name]) for name in here})
        found.write()
    print((out / "report.md").read_text(encoding="utf-8"))


def rows_of(found: report.Report, model: Any, batch: int, made: Any) -> None:
    """Rows of one batch: `made` are the results of each decoder, whole and of the prompt alone, and their timings."""
    known, real, first = {}, model.tokenizer is not None, next(iter(made), "")
    if not real and TABLE.exists():
        rows = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
        known = {row["decoder"]: row["tokens_per_network_call"] for row in rows if row["dtype"] == "bfloat16"}
    one_by_one: Any = None
    for name, (whole, prompt, timing, reading) in made.items():
        steps = sum(
            int(np.max(one.network_calls)) - 1 for one in whole
        )  # a batch calls as its slowest row does
        sums = [sum(int(np.sum(one.counts[POSITIONS])) for one in of) for of in (whole, prompt)]
        here = sum(int(np.sum(one.generated - 1)) for one in whole) / (batch * steps)
        call, tokens = timing.each(steps, reading), here if real else known.get(name.split(", ", 1)[1])
        more: dict[str, Any] = {"tokens_per_call_here": here, "tokens_per_call": tokens, "calls": steps}
        more["positions_per_call"] = (sums[0] - sums[1]) / (batch * steps)
        figures = (
            [f"{tokens:.2f} tokens a call, {batch * tokens / call.seconds:,.0f} tokens/s"] if tokens else []
        )
        if one_by_one is None:
            one_by_one = call
            moved = model.network.work(batch, 1, int(np.max(whole[0].lengths))).bytes
            more["share"] = moved / report.rates("bfloat16").read / call.seconds
            figures.append(f"{100 * more['share']:.0f}% of the read rate")
        else:
            more["costs"] = call.seconds / one_by_one.seconds
            figures.append(f"a call costs {more['costs']:.2f}")
        if real:
            pairs = zip(whole, made[first][0], strict=True)
            same = [a == b for x, y in pairs for a, b in zip(x.completions(), y.completions(), strict=True)]
            more["equals_one_by_one"] = float(np.mean(same))
            figures.append(f"{100 * more['equals_one_by_one']:.0f}% equal")
        base = (first, one_by_one, tokens, 1.0) if tokens and name != first else None
        what, setting = name.split(", ", 1)
        found.add(("decoders", what, setting), call, ", ".join(figures), base, **more)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=("laws", "decoders"))
    parser.add_argument("--out", type=Path, default=Path("slot"), help="folder (default slot)")
    parser.add_argument("--minutes", type=float, default=2.0, help="time of the part (default 2)")
    parser.add_argument("--real", type=Path, help="a GGUF file of SmolLM2-135M; random weights without it")
    parser.add_argument("--toy", action="store_true", help="a tiny shape, at batch 1 and 8")
    options = parser.parse_args()
    clock = report.Clock(60 * options.minutes)
    if options.part == "laws":
        laws(options.out, clock)
    else:
        decoders(options.out / "decoders", clock, options.real, options.toy)
    report.leave(f"written: {options.out}")


if __name__ == "__main__":
    main()
