"""What a run does from its options to its model: `train`."""

import dataclasses
import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paradec_jax import store
from paradec_jax.config import check_number
from paradec_jax.data.jsonl import Examples, read_examples
from paradec_jax.io import atomic_write_text, json_lines
from paradec_jax.objectives.folder import by_first, claim, name_of
from paradec_jax.objectives.job import Job, Training
from paradec_jax.objectives.options import Run
from paradec_jax.objectives.weights import blended, cast
from paradec_jax.sharding.processes import gathered
from paradec_jax.store import Model
from paradec_jax.store.lora import SCALE

# Options that may differ between calls of one run.
MAY_DIFFER = {
    "out",
    "held_out",
    "blend",
    "base",
    "minutes",
    "checkpoint_every",
    "allow",
    "cluster",
    "rows",
}


# Of activations and of parameters while they train.
DTYPES = {
    "float32": ("float32", "float32"),
    "mixed": ("bfloat16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
}


def train(objective: Training, run: Run) -> None:
    """Runs an objective: reads the data, claims the folder, trains, and writes the model and what
    it is worth.

    Raises:
      ValueError, OSError: options, data or a folder that do not fit; one sentence.
      NonFiniteLoss: a loss was not finite.
      Stopped, Preempted: the call ends before its run.
    """
    until = math.inf if run.minutes is None else time.monotonic() + 60 * run.minutes
    mesh = run.cluster.join()
    folder, options = claimed_by(objective, run)
    claim(folder, options, run.allow, begin=False)  # refused before anything is read or computed
    model, config = start_of(objective, run, mesh)
    examples, held_out = data_of(objective, run, model, folder)
    mark = claim(folder, options, run.allow)
    job = Job(run, folder, model, config, examples, held_out, mesh, until, mark)
    trained = objective.train(job)
    if run.blend < 1:
        params = blended(base_of(run, model, mesh).params, trained.params, run.blend)
        trained = dataclasses.replace(trained, params=params)
    write_model(job, trained)
    write_worth(objective, job, trained)


def claimed_by(objective: Training, run: Run) -> tuple[Path, dict[str, Any]]:
    """The folder of a run, and all options that it is known by there.

    Raises:
      ValueError: options that do not go together.
    """
    if run.base is not None and (run.blend == 1 or run.lora is not None):
        raise ValueError("--base wants --blend below 1, and no --lora")
    name = type(objective).__name__.lower()
    for option in objective.without:
        if getattr(run, option) != getattr(Run, option):
            raise ValueError(f"{option} is no option of {name}")
    options = {"objective": name, **dataclasses.asdict(objective), **dataclasses.asdict(run)}
    options["weights"] = {model: store.digest_of(model) for model in (run.model, run.base) if model}
    folder = run.out or Path("runs") / f"{name}-{name_of(run.model)}"
    return folder, {name: x for name, x in options.items() if name not in MAY_DIFFER}


def start_of(objective: Training, run: Run, mesh: jax.sharding.Mesh | None) -> tuple[Model, Any]:
    """The model that a run starts from, in the precision of training, and its config as it was
    read.

    Raises:
      ValueError: a model that the objective does not train, or a base of another shape.
    """
    if run.products is not None:
        jax.config.update("jax_default_matmul_precision", run.products)
    stored = store.load(run.model, mesh=mesh)
    if stored.family not in objective.families:
        raise ValueError(
            f"{type(objective).__name__.lower()} trains models of family "
            f"{' and '.join(objective.families)}, and {run.model} is of {stored.family}"
        )
    config, model = stored.config, in_training(stored, run)
    del stored
    base_of(run, model, mesh)  # refused before anything is trained
    return model, config


def in_training(model: Model, run: Run) -> Model:
    """The model in the precision of training, without head and decoder, which suit it as it was."""
    model = cast(model, *DTYPES[run.precision], run.remat)
    return dataclasses.replace(model, head=None, decoder=None)


def base_of(run: Run, model: Model, mesh: jax.sharding.Mesh | None) -> Model:
    """The model that is blended with. Raises ValueError for one of another shape."""
    if run.base is None:
        return model
    base = in_training(store.load(run.base, mesh=mesh), run)
    if base.config != model.config:
        raise ValueError(
            f"base must be a model of one shape with {run.model}, which {run.base} is not"
        )
    return base


def data_of(
    objective: Training, run: Run, model: Model, folder: Path
) -> tuple[Examples, Examples | None]:
    """The examples of a run, and those that the model is measured on, tokenised in FOLDER/data.

    Raises:
      ValueError, OSError: a file that cannot be used, or more parts of an update than rows.
    """
    length = run.row_length(model)
    read = functools.partial(
        read_examples,
        model=model,
        folder=folder / "data",
        length=sys.maxsize if objective.windows else length,
        long=run.long,
        skip_bad=run.skip_bad,
        prompts=objective.prompts,
    )
    sources = [source for source in (run.data, run.held_out) if source]
    by_first("data", lambda: [print(f"{source}: {read(source)}", flush=True) for source in sources])
    examples, *held_out = map(read, sources)
    rows = run.batch_tokens // min(np.diff(examples.starts).max(), length)
    check_number("accumulate", run.accumulate, 1, max(rows, 1))  # a row at least in each part
    return examples, held_out[0] if held_out else None


def write_model(job: Job, trained: Model) -> None:
    """Writes FOLDER/model in the precision in which the model was read, and with LoRA
    FOLDER/adapter; FOLDER/adapter alone where what was trained leaves the model as it is.
    """
    config, run, folder = job.config, job.run, job.folder
    if trained.drafter is not None:
        import paradec_jax.convert.drafts as drafts

        drafter = dataclasses.replace(trained.drafter, params=gathered(trained.drafter.params))
        by_first("adapter", lambda: drafts.write(folder / "adapter", drafter, run.model, job.mark))
        return

    def as_read(part: Any) -> Any:
        part = cast(part, config.dtype, config.param_dtype, config.remat)
        return dataclasses.replace(part, params=gathered(part.params))

    head = None if trained.head is None else as_read(trained.head)
    model = dataclasses.replace(as_read(trained), head=head)
    if job.adapters:
        from paradec_jax.convert.peft import write  # which other runs do not wait for

        adapter, scale = gathered(job.adapters[-1][0]), run.blend * SCALE
        place = folder / "adapter"
        by_first("adapter", lambda: write(place, config, adapter, scale, run.model, job.mark))
    by_first("model", lambda: store.save(folder / "model", model, overwrite=True, run=job.mark))


def write_worth(objective: Training, job: Job, trained: Model) -> None:
    """Writes FOLDER/metrics.jsonl, the logs of all parts and what came out, and says where the
    model lies.
    """
    run, examples, folder = job.run, job.examples, job.folder
    models = (job.model, trained) if job.held_out is not None else ()
    before, after = [dict(objective.held_out(job, model)) for model in models] or ({}, {})

    def write() -> None:
        logs = sorted(folder.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        lines = [
            {"part": path.parent.name, **line} for path in logs for _, line in json_lines(path)
        ]
        worth = {"examples": len(examples), **examples.counts, "blend": run.blend, "base": run.base}
        lines.append(worth | {"before": before, "after": after})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        atomic_write_text(folder / "metrics.jsonl", text)
        if after:
            pairs = (f"{name} {before[name]:.4g} before, {after[name]:.4g} after" for name in after)
            print(f"held out: {'; '.join(pairs)}")
        what = "model" if trained.drafter is None else "adapter"
        print(f"the {what} is {folder / what}", flush=True)

    by_first("end", write)
