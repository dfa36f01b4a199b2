"""Laws and decoders on this machine's own jax, for an accelerator that is lent for minutes
(`slot.sh`).

    python -m experiments.systems.slot laws --out slot
    python -m experiments.systems.slot decoders --out slot --minutes 2 --real SmolLM2-135M.gguf

`laws`: on a bundled model of each family parallel decoding of a batch gives the tokens of plain
decoding of each prompt alone, and those recorded on a CPU. `decoders`: SmolLM2-135M in bfloat16,
seconds of a call, prompts left out. With real weights tokens are those it writes. Random ones
accept few drafts: tokens a second are then batch x tokens a call / seconds a call, with the tokens
a call of the real model at batch 1 on a CPU (`TABLE`; one where there is no table). `share` is that
of the read rate, of decoding one by one.
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
from experiments.common.ratios import quicker
from experiments.common.record import write_record
from experiments.real.settings import SETTINGS, chats
from experiments.systems.calls import SEED, random_params
from experiments.systems.machine import Clock, compiled, rates
from experiments.systems.report import leave
from experiments.tasks import word_problems
from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine.rows import NETWORK_CALLS, POSITIONS
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.cases import Prompts, case_of, prompts_of
from paradec_jax.evaluate.intervals import ends
from paradec_jax.evaluate.timing import Speed, compile_all, measure

BLOCKS = pd.BlockDenoising(rule="factor")
ALONE = dataclasses.replace(BLOCKS, fuse_store=False, fuse_prompt=False)
# plain decoding, parallel decoding, knobs, digest of the tokens; a masked canvas has no plain
# decoding
LAWS = {
    "tiny-jacobi": (pd.AutoRegressive(), pd.Jacobi(running=True), None, "58eda7cce9ea4b3a"),
    "tiny-recurrent-distilled": (
        pd.Static(recurrence=1),
        pd.Jacobi(block=8, recurrence=1),
        None,
        "58eda7cce9ea4b3a",
    ),
    "tiny-sdar": (ALONE, BLOCKS, None, "58eda7cce9ea4b3a"),
    "tiny-mdlm-distilled": (
        pd.Masked(),
        pd.Masked(),
        pd.Masked.Knobs(steps=16),
        "35b333d02c5172fc",
    ),
}
# new tokens of a text, and prompt tokens of a random one
TOKENS, BATCHES, PASSES = (
    64,
    (1, 8, 64),
    3,
)
TABLE = Path(__file__).parents[1] / "real" / "results" / "smollm2-135m-bfloat16.json"


def prompts_of_laws(model: Any) -> Prompts:
    """Prompts of four unseen word problems; of a model that writes texts, nothing to begin with."""
    if model.family == "masked_diffusion":
        keys = jax.random.split(jax.random.key(SEED), 4)
        nothing, stop = np.zeros((4, 0), np.int32), model.token_spec.stop
        return Prompts(nothing, np.zeros(4, np.int32), keys, 64, stop)
    texts = [problem.prompt for problem in word_problems(4, seed=SEED, steps=(2, 4))]
    return prompts_of(model, texts, SEED, 96)


def answers(name: str, parallel: bool) -> list[list[int]]:
    """The tokens of four prompts by a bundled model, products in full float32."""
    model, knobs = pd.load(name), LAWS[name][2]
    prompts = prompts_of_laws(model)
    case = case_of(Setting(name, LAWS[name][parallel], knobs), model, prompts.size)
    requests = [
        prompts.request(rows) for rows in ([range(4)] if parallel else [[0], [1], [2], [3]])
    ]
    with jax.default_matmul_precision("highest"):
        done = [pd.run(case.decoder, case.params, one, case.knobs) for one in requests]
    return [ids for one in done for ids in one.completions()]


def laws(out: Path, clock: Clock) -> None:
    """Writes for each family whether the tokens are equal, and those that were recorded."""
    jobs = {
        f"{name} {way}": functools.partial(answers, name, bool(way))
        for name in LAWS
        for way in (0, 1)
    }
    (done, left), rows = compiled(jobs, clock), []
    for name, (*_, recorded) in LAWS.items():
        plain, parallel = (done.get(f"{name} {way}") for way in (0, 1))
        digest = hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
        equal = plain is not None and plain == parallel
        rows.append(
            {"model": name, "digest": digest, "equal": equal, "recorded": digest == recorded}
        )
        print(rows[-1], left, flush=True)
    write_record(out / "laws.json", {}, {"rows": rows, "left_out": left})


def model_here(real: Path | None, toy: bool) -> Any:
    """SmolLM2-135M in bfloat16: the weights of a file, or random ones; a tiny shape in a dry run."""
    if real is not None:
        return pd.load(str(real), dtype="bfloat16")
    config = pd.PRESETS["test-causal" if toy else "smollm2-135m"]
    config = dataclasses.replace(config, dtype="bfloat16", param_dtype="bfloat16")
    return pd.Model(config, random_params(config), TokenSpec())


def prompts_here(model: Any, count: int) -> Prompts:
    """The ten chats over and over, or random tokens for a model without a tokenizer."""
    if model.tokenizer is not None:
        texts = list(chats(model).values()) * -(-count // 10)
        return prompts_of(model, texts[:count], SEED, TOKENS)
    drawn = np.random.default_rng(SEED).integers(0, model.network.vocab_size, (count, TOKENS))
    keys = jax.random.split(jax.random.key(SEED), count)
    return Prompts(drawn.astype(np.int32), np.full(count, TOKENS, np.int32), keys, TOKENS)


def decoders(out: Path, clock: Clock, real: Path | None, toy: bool) -> None:
    """A row for every decoder at every batch; all programs are compiled first, several at once."""
    model, rows, groups, jobs = model_here(real, toy), [], {}, {}
    params = model.network.prepare(model.params)
    for batch in BATCHES[: 2 if toy else None]:
        prompts = prompts_here(model, batch if real is None else max(batch, 4))
        requests = [
            prompts.request(range(at, at + batch)) for at in range(0, len(prompts.lengths), batch)
        ]
        cases = {one.name: case_of(one, model, prompts.size, params) for one in SETTINGS}
        groups[batch] = cases, requests
        for name, case in cases.items():
            jobs[f"{name}, batch {batch}"] = functools.partial(compile_all, [(case, requests[0])])
    _, left = compiled(jobs, Clock(0.6 * clock.left()))
    for batch, (cases, requests) in groups.items():
        ready = [name for name in cases if f"{name}, batch {batch}" not in left]
        if ready[:1] != [SETTINGS[0].name]:
            continue  # nothing to compare with
        speeds = measure([cases[name] for name in ready], requests, passes=PASSES)
        for name, speed in zip(ready, speeds, strict=True):
            rows.append(
                {"decoder": name, "batch": batch} | row_of(model, name, batch, speed, speeds[0])
            )
            shown = {
                key: rows[-1][key]
                for key in ("milliseconds", "tokens_per_second", "speedup", "share")
            }
            print(f"{name}, batch {batch}:", shown, flush=True)
        options = {"real": real, "toy": toy, "tokens": TOKENS, "passes": PASSES}
        write_record(
            out / "decoders.json", options, {"rows": rows, "left_out": left}, dtypes=["bfloat16"]
        )
    print("left out:", left)


def row_of(model: Any, name: str, batch: int, speed: Speed, base: Speed) -> dict[str, Any]:
    """Seconds and tokens of a call, tokens a second, and the ratio to one by one at the same batch."""
    reading = [np.sum(of.each_reading, axis=1) for of in (speed, base)]
    call, base_call = (
        np.maximum(of.passes - read, 1e-6) / of.calls
        for of, read in zip((speed, base), reading, strict=True)
    )
    tokens, one = (
        (of.tokens - batch * len(of.decoded)) / (batch * of.calls) for of in (speed, base)
    )
    if model.tokenizer is None:
        rows = json.loads(TABLE.read_text(encoding="utf-8"))["rows"] if TABLE.exists() else []
        known = {
            row["decoder"]: row["tokens_per_network_call"]
            for row in rows
            if row["dtype"] == "bfloat16"
        }
        tokens, one = known.get(name, 1.0), 1.0
    ratio, interval = quicker(call, base_call, tokens, one)
    same = [
        a.completions() == b.completions() for a, b in zip(speed.decoded, base.decoded, strict=True)
    ]
    seconds, moved = (
        float(np.median(call)),
        model.network.work(batch, 1, int(speed.decoded[0].lengths.max())),
    )
    return {
        "milliseconds": 1e3 * seconds,
        "milliseconds_of_passes": (1e3 * call).tolist(),
        "calls": speed.calls,
        "positions_per_call": speed.counts[POSITIONS]
        / speed.counts[NETWORK_CALLS],  # the prompt's among them
        "tokens_per_call": tokens,
        "tokens_per_second": batch * tokens / seconds,
        "speedup": ratio,
        "speedup_interval": ends(interval),
        "equal_requests": sum(same) / len(same),
        "share": moved.bytes / rates("bfloat16").read / seconds if speed is base else None,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=("laws", "decoders"))
    parser.add_argument("--out", type=Path, default=Path("slot"), help="folder (default slot)")
    parser.add_argument("--minutes", type=float, default=2.0, help="time of the part (default 2)")
    parser.add_argument(
        "--real", type=Path, help="a GGUF file of SmolLM2-135M; random weights without it"
    )
    parser.add_argument("--toy", action="store_true", help="a tiny shape, at batch 1 and 8")
    options = parser.parse_args()
    clock = Clock(60 * options.minutes)
    if options.part == "laws":
        laws(options.out, clock)
    else:
        decoders(options.out, clock, options.real, options.toy)
    leave(f"written: {options.out}")


if __name__ == "__main__":
    main()
