"""A model made fast within minutes, and what that gained: the parts of `slot.sh` that train.

    python -m experiments.systems.slot fast --out slot --runs runs/slot --seconds 270
    python -m experiments.systems.slot gain --out slot --runs runs/slot --seconds 110

`fast` trains a model of word problems unless a checkpoint is given; then masks beside it and a
distilled one, both on its own answers. Rates stay flat, with a moving average of the parameters, so
that a training can end at whatever update it has reached when its share of the time is over. `gain`
compares the decoders of these models.
"""

import dataclasses
import shutil
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.common.record import rows_begun, write_record
from experiments.systems.calls import SEED
from experiments.systems.machine import Clock, rates
from experiments.systems.report import dtype_here
from experiments.systems.slot import Options, use_quickest
from experiments.tasks import word_problems
from paradec_jax import store
from paradec_jax.cli import main
from paradec_jax.cli.compare import ANSWERS
from paradec_jax.cli.output import print_table
from paradec_jax.data.trajectories import Trajectories
from paradec_jax.evaluate.cases import Source, case_of, prompts_of
from paradec_jax.evaluate.compare import compare
from paradec_jax.evaluate.timing import compile_all
from paradec_jax.facts import device
from paradec_jax.families import choose
from paradec_jax.io import atomic_write_text, json_lines
from paradec_jax.models.work import BACKWARD
from paradec_jax.objectives.job import Stopped

# A training that no time is long enough for; at toy size one of few updates.
TRAIN = """
    train {words} --out {folder} --batch-tokens 32768 --precision mixed --ema 0.99 --cooldown 0 --warmup 0.001
    --checkpoint-every 500 --updates 50000
"""
MUON = "--optimizer muon --learning-rate 4e-3 --adam-learning-rate 1.6e-3"
OWN = "--model {model} --data {runs}/problems.jsonl --rows 256 --problems 4096 --new-tokens 224"
ANCHORS, MASKS = 48, 3
TRAININGS = {
    "words": f"sft --model {{runs}}/start --data {{runs}}/rows.jsonl --packed {MUON}",
    "draft": f"draft {OWN} --rank 16 --anchors {ANCHORS} --masks {MASKS} --learning-rate 2e-3",
    "jacobi": f"jacobi {OWN} {MUON}",
}
SHARES = {"words": 0.27, "draft": 0.5, "jacobi": 1.0}  # of the time that is left
FLAT = 0.85  # of a training's time; the rest writes its model
TOY = "--batch-tokens 1024"
TOYS = {
    "words": TOY,
    "draft": f"{TOY} --rows 16 --problems 16 --new-tokens 16 --updates 6",
    "jacobi": f"{TOY} --rows 16 --problems 16 --new-tokens 16 --updates 6",
}
DECODERS = (
    ("words", "autoregressive"),
    ("words", "drafted"),
    ("jacobi", "autoregressive"),
    ("jacobi", "jacobi --block 16 --running"),
)


def fast(options: Options, clock: Clock) -> None:
    """Trains what is not there yet, and writes how fast its updates were."""
    rows, peak = [], rates(dtype_here()).flops
    model = options.real or str(options.runs / "words" / "model")
    for name, words in TRAININGS.items():
        if name == "words" and options.real:
            continue
        folder, seconds = options.runs / name, FLAT * SHARES[name] * clock.left()
        command = TRAIN.format(words=words, folder=folder).format(runs=options.runs, model=model)
        if options.toy:
            command, seconds = f"{command} {TOYS[name]}", seconds if name != "words" else 1.0
        trained(command.split(), folder, seconds)
        rows.append({"run": name} | speed(folder, name, model, peak))
        print(rows[-1], flush=True)
        write_record(options.out / "fast.json", options, {"rows": rows, "peak": peak})
    adapter = options.runs / "draft" / "adapter"
    shutil.copytree(adapter, options.out / "adapter", dirs_exist_ok=True)


def trained(command: list[str], folder: Path, seconds: float) -> None:
    """Trains until the time is over, or goes on to do so; the run then ends at the update that it
    has reached.

    Raises:
      SystemExit: no update was reached, or the command failed.
    """
    end, log = folder / "end", folder / "metrics.jsonl"
    if not (log.exists() or end.exists()):
        try:
            if main([*command, "--minutes", f"{seconds / 60}"]):
                raise SystemExit(1)
        except Stopped:
            steps = [int(path.name) for path in folder.glob("*/checkpoints/[0-9]*")]
            if not steps:
                raise
            atomic_write_text(end, f"{max(steps)}")
    if not log.exists():
        main([*command, "--updates", end.read_text(), "--allow", "steps", "optimizer"])


def speed(folder: Path, name: str, model: str, peak: float) -> dict[str, Any]:
    """Updates of a run, and medians over its log: seconds of an update, positions a second, and the
    share of the peak that their products reach.
    """
    lines = [line for _, line in json_lines(folder / "metrics.jsonl") if "step" in line]
    found: dict[str, Any] = {"updates": lines[-1]["step"]}
    if not (timed := [line for line in lines if "tokens_per_s" in line]):
        return found
    for figure in ("step_s", "tokens_per_s"):
        found[figure] = statistics.median(line[figure] for line in timed)
    passes = 1.0 + BACKWARD
    if name == "draft":
        # Rows of text go forward alone. Those of masks go backward too, through matrices that stay.
        of = Trajectories(folder / "answers" / "trajectories")
        length = (of.prompt_lengths + of.block * of.block_counts).mean()
        passes = float(1 + 2 * ANCHORS * MASKS / length)
    flops = passes * store.load(model).network.work(1, 256, 0).flops / 256
    return found | {"utilisation": flops * found["tokens_per_s"] / peak}


def gain(options: Options, clock: Clock) -> None:
    """Compares decoders with the first one, each when it is done; all programs are compiled before,
    several at once.
    """
    use_quickest(options.out)
    runs, dtype, (count, timed, budget) = options.runs, dtype_here(), (256, 5, 224)
    if options.toy:
        count, timed, budget = 8, 2, 16
    base, adapter = options.real or str(runs / "words" / "model"), runs / "draft" / "adapter"
    models = {"words": store.load(base, dtype=dtype, adapter=adapter)}
    if (runs / "jacobi" / "model").exists():
        models["jacobi"] = store.load(runs / "jacobi" / "model", dtype=dtype)
    first, *others = (
        Source(name, models[name], choose("causal", words))
        for name, words in DECODERS
        if name in models
    )
    first = dataclasses.replace(first, setting=dataclasses.replace(first.setting, baseline=True))
    path, told = options.out / "gain.json", {"real": options.real, "toy": options.toy}
    rows = rows_begun(path, told) or []
    others = others[max(len(rows) - 1, 0) :]
    problems, found = word_problems(count, seed=SEED), None
    prompts = prompts_of(models["words"], problems, SEED, budget)
    cases = [case_of(of.setting, of.model, prompts.size) for of in (first, *others)]
    requests = [prompts.request(range(size)) for size in (1, count)]
    with ThreadPoolExecutor(device()["threads"]) as pool:
        programs = [[(case, request)] for request in requests for case in cases]
        list(pool.map(compile_all, programs))
    each = {"seed": SEED, "budget": budget, "judge": models["words"], "rows": count}
    each |= {"timed": timed, "passes": timed}
    for source in others:
        found = compare([first, source], problems, before=found, **each)
        rows += found.rows[len(rows) > 0 :]
        write_record(path, told, {"rows": rows}, dtypes=[dtype])
    print_table("{model}: {problems} problems", {"model": "{model}"} | ANSWERS, rows, [])
