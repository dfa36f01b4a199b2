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

MUON = "--optimizer muon --learning-rate 4e-3 --adam-learning-rate 1.6e-3"
REAL = "--learning-rate 1e-4 --rehearse 0"
OWN = """
    --model {model} --data {runs}/problems.jsonl --rows {rows} --problems {problems} --new-tokens {tokens}
"""
ANCHORS, MASKS = 48, 3
TRAININGS = {
    "words": "sft --model {runs}/start --data {runs}/rows.jsonl --packed " + MUON,
    "draft": f"draft {OWN} --rank 16 --anchors {ANCHORS} --masks {MASKS} --learning-rate 2e-3",
    "jacobi": f"jacobi {OWN} {{distil}}",
}
SHARED = """
    --out {runs}/{name} --updates {updates} --batch-tokens {positions} --precision mixed --ema 0.99
    --warmup 0.001 --cooldown 0 --checkpoint-every 500
"""
# No time is long enough for so many updates.
SIZES = {"updates": 50_000, "positions": 32_768, "rows": 256, "problems": 4096, "tokens": 224}
TOY = {"updates": 4, "positions": 1024, "rows": 4, "problems": 4, "tokens": 16}
SHARES = {"words": 0.27, "draft": 0.5, "jacobi": 1.0}  # of the time that is left
FLAT = 0.85  # of a training's time; the rest writes its model
COLUMNS = "model|decoder|exact|log p a token|tokens a second|speed-up|its 95%|tokens a call|equal to one by one"
DECODERS = (
    "words autoregressive",
    "words drafted",
    "jacobi autoregressive",
    "jacobi jacobi --block 16 --running",
)


def fast(options: Options, clock: Clock) -> None:
    """Trains what is not there yet, and writes how fast its updates were."""
    runs, toy, real = options.runs, options.toy, options.real
    rows, peak = [], rates(dtype_here()).flops
    model = real or str(runs / "words" / "model")
    fields = {"runs": runs, "model": model, "distil": REAL if real else MUON}
    for name, words in TRAININGS.items():
        if real and name == "words":
            continue
        command = f"train {words} {SHARED}".format(name=name, **fields, **(TOY if toy else SIZES))
        seconds = FLAT * SHARES[name] * clock.left()
        if toy and name == "words":
            seconds = 1.0  # it is stopped after its first update
        folder = runs / name
        trained(command.split(), folder, seconds)
        rows.append({"run": name} | speed(folder, name, model, peak))
        print(rows[-1], flush=True)
        write_record(options.out / "fast.json", options, {"rows": rows, "peak": peak})
    shutil.copytree(runs / "draft" / "adapter", options.out / "adapter", dirs_exist_ok=True)


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
    runs, dtype = options.runs, dtype_here()
    count, timed, budget = (8, 2, 16) if options.toy else (256, 5, 224)
    base = options.real or runs / "words" / "model"
    models = {"words": store.load(base, dtype=dtype, adapter=runs / "draft" / "adapter")}
    if (runs / "jacobi" / "model").exists():
        models["jacobi"] = store.load(runs / "jacobi" / "model", dtype=dtype)
    first, *others = (
        Source(name, models[name], choose("causal", words))
        for name, _, words in (text.partition(" ") for text in DECODERS)
        if name in models
    )
    first = dataclasses.replace(first, setting=dataclasses.replace(first.setting, baseline=True))
    path, told = options.out / "gain.json", {"real": options.real, "toy": options.toy}
    rows = rows_begun(path, told) or []
    others = others[max(len(rows) - 1, 0) :]
    problems, found = word_problems(count, seed=SEED), None
    prompts = prompts_of(models["words"], problems, SEED, budget)
    cases = [case_of(of.setting, of.model, prompts.size) for of in (first, *others)]
    with ThreadPoolExecutor(device()["threads"]) as pool:
        sizes = [prompts.request(range(size)) for size in (1, count)]
        list(pool.map(compile_all, ([(case, of)] for of in sizes for case in cases)))
    for source in others:
        found = compare(
            [first, source],
            problems,
            seed=SEED,
            budget=budget,
            judge=models["words"],
            timed=timed,
            passes=timed,
            rows=count,
            before=found,
        )
        rows += found.rows[len(rows) > 0 :]
        write_record(path, told, {"rows": rows}, dtypes=[dtype])
    columns = {name: ANSWERS.get(name, "{model}") for name in COLUMNS.split("|")}
    print_table("{problems} unseen problems", columns, rows, [])
