"""One run of an objective: its folder, its data, its parts, the model that it ends in, the held-out
line.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tyro.conf import OmitArgPrefixes, arg

from paradec_jax import store
from paradec_jax.config.bounds import Ranged, check_number
from paradec_jax.data.endless import Endless
from paradec_jax.data.jsonl import Examples, example_batches, read_examples
from paradec_jax.decode.machine.request import key_of, seed_words
from paradec_jax.families import matrix_axes
from paradec_jax.io import atomic_write_text
from paradec_jax.models.work import Flops
from paradec_jax.objective import Objective
from paradec_jax.objectives.cluster import Cluster
from paradec_jax.objectives.folder import by_first, claim, name_of
from paradec_jax.objectives.hooks import Forecast, Limit
from paradec_jax.sharding.batches import batch_on
from paradec_jax.sharding.mesh import on
from paradec_jax.sharding.processes import gathered
from paradec_jax.store.lora import SCALE, init_lora, merge
from paradec_jax.store.model import Model
from paradec_jax.train import (
    Checkpoint,
    Hook,
    Log,
    Preempt,
    Rounds,
    TrainState,
    adamw,
    fit,
    make_train_step,
    muon,
)

LENGTH = 1024  # positions of the longest row where nothing is given
# Options that may differ between calls of one run.
MAY_DIFFER = {"out", "held_out", "blend", "base", "minutes", "checkpoint_every"}
MAY_DIFFER |= {"allow", "cluster", "rows"}
DTYPES = {
    "float32": ("float32",) * 2,
    "mixed": ("bfloat16", "float32"),
    "bfloat16": ("bfloat16",) * 2,
}

T = TypeVar("T")
# Options of a part that have no prefix, and whose errors tyro passes on.
Bare = OmitArgPrefixes[Annotated[T, arg(name="")]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Ranged):
    """What every objective is told.

    A call that ends early, by --minutes or a signal, goes on when the same command is given again.

    Attributes:
      model: a model folder, the name of a bundled model, a Hugging Face folder, a .gguf file or
        org/name[@revision].
      data: JSON lines with "messages", "prompt" and "response", or "text": a file, a folder or a
        pattern.
      held_out: lines of the same form that the model is measured on before and after.
      out: folder of the run; runs/OBJECTIVE-MODEL by default, of a run's model runs/OBJECTIVE-RUN.
      minutes: after so many the call ends, before its run is done.
      updates: length of the run, instead of epochs.
      epochs: length of the run in passes over the data.
      batch_tokens: positions of an update, padding included.
      length: tokens of the longest example; 1024, or as many as the model has room for, by default.
      long: longer examples are left out (drop) or lose their end (cut).
      packed: rows hold several examples, which do not see each other.
      skip_bad: lines that cannot be used are counted and left out, instead of ending the run.
      learning_rate: peak of the schedule, of the matrices with muon.
      optimizer: adamw or muon.
      adam_learning_rate: peak for what is no matrix, with muon.
      weight_decay: decoupled decay.
      warmup: share of the updates in which the rate climbs.
      cooldown: share of the updates, the last ones, in which it falls.
      ema: decay of a moving average of the parameters, which then is what the run ends in.
      blend: share of what training changed that the run's model has: base + blend (trained - base).
        Below 1 more stays of what it knew (Wortsman et al., 2022, arXiv 2109.01903). A finished run
        is given another at once.
      base: the model that is blended with where it is not `model`, such as that before several
        runs.
      layers: share of the layers that train, the upper ones, one at least; below 1 embedding and
        output matrix stay.
      lora: rank of the adapters that train in the place of these layers' matrices; the run's folder
        then has `adapter`, in PEFT's layout, beside the merged `model`.
      precision: of parameters and activations; mixed has parameters in float32, bfloat16 rounds
        updates away that are far below a number's size. The model is written as it was read.
      products: jax's precision of products, such as BF16_BF16_F32.
      remat: what a backward pass computes anew, as of the model's config.
      accumulate: parts of a batch that are computed one after the other.
      seed: of all draws.
      checkpoint_every: updates between checkpoints.
      allow: parts in which the call may differ from the run that it goes on with, such as steps.
      cluster: processes and their devices.
    """

    model: str
    data: str
    held_out: str | None = None
    out: Path | None = None
    minutes: float | None = None
    updates: int | None = None
    epochs: float = 1.0
    batch_tokens: int = 4096
    length: int | None = None
    long: Literal["drop", "cut"] = "drop"
    packed: bool = False
    skip_bad: bool = False
    learning_rate: float = 2e-5
    optimizer: Literal["adamw", "muon"] = "adamw"
    adam_learning_rate: float = 2e-5
    weight_decay: float = 0.0
    warmup: float = 0.05
    cooldown: float = 0.5
    ema: float | None = None
    blend: float = 1.0
    base: str | None = None
    layers: float = 1.0
    lora: int | None = None
    precision: Literal["float32", "mixed", "bfloat16"] = "float32"
    products: str | None = None
    remat: str = "none"
    accumulate: int = 1
    seed: int = 0
    checkpoint_every: int = 50
    allow: tuple[str, ...] = ()
    cluster: Cluster = Cluster()  # noqa: RUF009

    BOUNDS = {  # noqa: RUF012
        **dict.fromkeys(("warmup", "cooldown", "layers", "blend"), (0, 1)),
        **dict.fromkeys(("learning_rate", "adam_learning_rate", "weight_decay"), (0, 10)),
        "ema": (0, 0.999999),
        "batch_tokens": (1, 2**26),
    }

    @property
    def key(self) -> jax.Array:
        """The key that all keys of the run are folded from."""
        return key_of(seed_words(self.seed))


class Stopped(SystemExit):
    """A call that ended before its run: code 0, and the same command goes on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A run that has begun.

    Attributes:
      run: its options.
      folder: its folder.
      model: where it starts, in the precision of training.
      examples: its data.
      held_out: what the model is measured on, or None.
      mesh: devices, or None for one.
      until: when the call is to end, in seconds of `time.monotonic`; infinity for never.
      mark: what tells the run from others, of process 0; what it writes is marked with it.
      adapters: with LoRA, after each part the adapter, and the parameters that it changes: those of
        the first part.
    """

    run: Run
    folder: Path
    model: Model
    examples: Examples
    held_out: Examples | None
    mesh: jax.sharding.Mesh | None
    until: float
    mark: str
    adapters: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def batches(self, examples: Examples, **options: Any) -> Endless:
        """Batches of examples as the run wants them."""
        told = {name: getattr(self.run, name) for name in ("seed", "packed", "batch_tokens")}
        told |= {"multiple": self.multiple, "length": length_of(self.run, self.model), **options}
        return example_batches(examples, **told)

    @property
    def multiple(self) -> int:
        """What the rows of a batch must be a multiple of."""
        sizes = {} if self.mesh is None else dict(self.mesh.shape)
        return self.run.accumulate * sizes.get("data", 1) * sizes.get("fsdp", 1)

    def updates(self, data: Any) -> int:
        """Updates of a run over these batches."""
        if self.run.updates is not None:
            return self.run.updates
        return max(math.ceil(self.run.epochs * data.make.batches), 1)

    def fit(
        self,
        part: str,
        model: Any,
        loss: Objective,
        data: Any,
        *,
        updates: int,
        frozen: Any = None,
        flops: Flops | None = None,
        rounds: Rounds | None = None,
        hooks: Sequence[Hook] = (),
    ) -> Any:
        """The model after so many updates, whose checkpoints and log lie in FOLDER/PART; a finished
        part is read.

        Args:
          part: name of the part; its folder.
          model: where it starts, perhaps a residual head; with LoRA a later part goes on with the
            adapter before it.
          loss: of whole parameters, whatever part of them trains; `frozen` is its second argument.
          data: batches.
          updates: length of the part.
          frozen: what the loss needs and does not train.
          flops: operations of an update in which all parameters train, for the log.
          rounds: when the student becomes the teacher, which the model is at first; all parameters
            train.
          hooks: further ones, which act before a checkpoint is written.

        Raises:
          Stopped: the time is over before the part is done.
        """
        run, folder = self.run, self.folder / part
        trained, kept = split(model, run.layers)
        whole = join if run.lora is None else adapted
        if run.lora is not None:
            draws = jax.random.fold_in(run.key, 2)
            fresh = init_lora(trained, matrix_axes(model.config), run.lora, draws)
            trained, kept = self.adapters[-1] if self.adapters else (fresh, dict(model.params))
        optimizer = optimizer_of(run, model, updates)
        key = jax.random.fold_in(run.key, 1)
        options: Any = {"ema": run.ema is not None, "teacher": None if rounds is None else trained}
        state = TrainState.create(trained, optimizer, key, mesh=self.mesh, **options)
        step = make_train_step(
            loss if not kept else joined(loss, whole),
            optimizer,
            frozen=frozen if not kept else {"kept": kept, "given": frozen},
            rounds=rounds,
            ema_decay=run.ema,
            accumulate=run.accumulate,
        )
        log = Log(folder, every=20, flops=None if kept else flops)
        saves = Checkpoint(folder, every=run.checkpoint_every, allow=run.allow)
        hooks = [log, Forecast(), *hooks, saves, Limit(self.until), Preempt()]
        state = fit(step, state, data, steps=updates, hooks=hooks, mesh=self.mesh)
        if (done := int(state.step)) < updates:
            if jax.process_index() == 0:
                print(
                    f"{run.minutes:g} minutes are over after {done} of {updates} updates of {part}: "
                    "the same command goes on from there",
                    flush=True,
                )
            raise Stopped(0)
        after = averaged(state)
        if run.lora is not None:
            self.adapters.append((after, kept))
        return dataclasses.replace(model, params=whole(after, kept))

    def means(
        self, loss: Objective, model: Any, data: Any = None, frozen: Any = None
    ) -> dict[str, float]:
        """The loss and its metrics over an epoch of batches, by default of the held-out examples,
        each once.
        """
        assert self.held_out is not None
        data = data or self.batches(self.held_out, packed=False, seed=0, prefetch=0)
        sums, total = jax.jit(loss.sums), None
        for i in range(data.make.batches):
            key = jax.random.fold_in(jax.random.key(0), i)
            with on(self.mesh):
                batch = batch_on(self.mesh, next(data)) | {"step": np.int32(0)}
                found = sums(model.params, frozen, batch, key)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        assert total is not None
        value, metrics = loss.value(total)
        return {name: float(x) for name, x in {"loss": value, **metrics}.items()}


def split(model: Any, share: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters that train, and those that stay: below the upper layers, and of the vocabulary.

    Raises:
      ValueError: a share below 1 of a model whose layers are not in one row.
    """
    params = dict(model.params)
    if share == 1:
        return params, {}
    count = getattr(model.config, "layers", 0)
    if not count:
        raise ValueError(
            f"layers are no option of a model of {model.family}, whose layers are not in one row"
        )
    upper = {f"layer_{i}" for i in range(count - max(round(share * count), 1), count)}
    trained = {name for name in params if name in upper or name.startswith("final")}
    return tuple(
        {n: p for n, p in params.items() if (n in trained) == one} for one in (True, False)
    )  # type: ignore


def averaged(state: TrainState) -> Any:
    """The average of a state in the types of its parameters; the parameters where it has none."""
    if state.ema is None:
        return state.params
    return jax.tree.map(lambda e, p: e.astype(p.dtype), state.ema, state.params)


def blended(base: Any, trained: Any, share: float) -> Any:
    """base + share (trained - base), in float32 before it is rounded; what the base lacks is as
    trained.
    """
    if isinstance(trained, Mapping):
        return {name: blended(base.get(name, x), x, share) for name, x in trained.items()}
    mean = (1 - share) * base.astype(jnp.float32) + share * trained.astype(jnp.float32)
    return mean.astype(trained.dtype)


def join(trained: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters."""
    return {**kept, **trained}


def adapted(adapter: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters, of an adapter that trains and whole parameters that stay."""
    return merge(kept, adapter, SCALE)


def joined(loss: Objective, join: Any) -> Objective:
    """The loss as one of the parameters that train; `frozen` has the others as `kept` beside its
    own, `given`.
    """

    def sums(trained: Any, frozen: Any, batch: Any, key: Any) -> Any:
        return loss.sums(join(trained, frozen["kept"]), frozen["given"], batch, key)

    return Objective(sums, loss.value)


def optimizer_of(run: Run, model: Any, updates: int) -> optax.GradientTransformation:
    """The run's optimizer on a schedule of so many updates."""
    warmup = min(round(run.warmup * updates), updates)
    ramps: dict[str, Any] = {"warmup": warmup, "weight_decay": run.weight_decay}
    ramps["cooldown"] = min(round(run.cooldown * updates), updates - warmup)
    if run.optimizer == "adamw":
        return adamw(run.learning_rate, updates, **ramps)
    ramps["adam_learning_rate"] = run.adam_learning_rate
    return muon(run.learning_rate, updates, axes=matrix_axes(model.config), **ramps)


def length_of(run: Run, model: Model) -> int:
    """Positions of the longest row. Raises ValueError where the model has no room for it."""
    most = model.network.max_length
    if run.length is not None and not 1 < run.length <= most:
        raise ValueError(
            f"length must be from 2 to the {most} positions of the model, not {run.length}"
        )
    return min(LENGTH, most) if run.length is None else run.length


def in_training(model: Model, run: Run) -> Model:
    """The model in the precision of training."""
    dtype, param_dtype = DTYPES[run.precision]
    config = dataclasses.replace(
        model.config, dtype=dtype, param_dtype=param_dtype, remat=run.remat
    )
    params = jax.tree.map(lambda x: x.astype(param_dtype), dict(model.params))
    # Head and decoder suit the model as it was.
    return dataclasses.replace(model, config=config, params=params, head=None, decoder=None)


def train(objective: Any, run: Run) -> None:
    """Runs an objective: reads the data, claims the folder, trains, and writes the model and what
    it is worth.

    Raises:
      ValueError, OSError: options, data or a folder that do not fit; one sentence.
      NonFiniteLoss: a loss was not finite.
      Stopped, Preempted: the call ends before its run.
    """
    begun = time.monotonic()
    if run.base is not None and (run.blend == 1 or run.lora is not None):
        raise ValueError("--base wants --blend below 1, and no --lora")
    mesh = run.cluster.join()
    name = type(objective).__name__.lower()
    folder = run.out or Path("runs") / f"{name}-{name_of(run.model)}"
    options = {"objective": name, **dataclasses.asdict(objective), **dataclasses.asdict(run)}
    options["weights"] = {model: store.digest_of(model) for model in (run.model, run.base) if model}
    options = {k: v for k, v in options.items() if k not in MAY_DIFFER}
    claim(folder, options, run.allow, begin=False)  # refused before anything is read or computed
    if run.products is not None:
        jax.config.update("jax_default_matmul_precision", run.products)
    stored = store.load(run.model, mesh=mesh)
    if stored.family not in objective.families:
        raise ValueError(
            f"{name} trains models of family {' and '.join(objective.families)}, "
            f"and {run.model} is of {stored.family}"
        )
    for option in getattr(objective, "without", ()):
        if getattr(run, option) != getattr(Run, option):
            raise ValueError(f"{option} is no option of {name}")
    model, own = in_training(stored, run), stored.config
    del stored

    def base() -> Model:
        found = model if run.base is None else in_training(store.load(run.base, mesh=mesh), run)
        if found.config != model.config:
            raise ValueError(
                f"base must be a model of one shape with {run.model}, which {run.base} is not"
            )
        return found

    base()  # refused before anything is trained

    def read(source: str) -> Examples:
        most = sys.maxsize if getattr(objective, "windows", False) else length_of(run, model)
        return read_examples(
            source,
            model,
            folder=folder / "data",
            length=most,
            long=run.long,
            skip_bad=run.skip_bad,
            prompts=getattr(objective, "prompts", False),
        )

    sources = [source for source in (run.data, run.held_out) if source is not None]
    by_first("data", lambda: [print(f"{source}: {read(source)}", flush=True) for source in sources])
    examples, *rest = map(read, sources)
    rows = run.batch_tokens // min(np.diff(examples.starts).max(), length_of(run, model))
    check_number(
        "accumulate", run.accumulate, 1, max(rows, 1)
    )  # parts of an update, of a row at least
    mark = claim(folder, options, run.allow)
    until = math.inf if run.minutes is None else begun + 60 * run.minutes
    job = Job(run, folder, model, examples, rest[0] if rest else None, mesh, until, mark)
    after = objective.train(job)
    if run.blend < 1:
        after = dataclasses.replace(after, params=blended(base().params, after.params, run.blend))

    def as_read(part: Any) -> Any:
        kinds = {name: getattr(own, name) for name in ("dtype", "param_dtype", "remat")}
        params = gathered(jax.tree.map(lambda x: x.astype(own.param_dtype), part.params))
        return dataclasses.replace(
            part, config=dataclasses.replace(part.config, **kinds), params=params
        )

    model = as_read(after)
    if after.head is not None:
        model = dataclasses.replace(model, head=as_read(after.head))
    if job.adapters:
        from paradec_jax.convert.peft import write  # which other runs do not wait for

        adapter = gathered(job.adapters[-1][0])
        by_first(
            "adapter",
            lambda: write(folder / "adapter", own, adapter, run.blend * SCALE, run.model, mark),
        )
    by_first("model", lambda: store.save(folder / "model", model, overwrite=True, run=mark))
    both = [
        dict(objective.held_out(job, one)) for one in (job.model, after) if job.held_out is not None
    ]
    about = {"examples": len(examples), **examples.counts, "blend": run.blend, "base": run.base}
    by_first("end", lambda: finish(folder, about, *(both or ({}, {}))))


def finish(
    folder: Path, about: dict[str, Any], before: Mapping[str, float], after: Mapping[str, float]
) -> None:
    """Writes FOLDER/metrics.jsonl, the logs of all parts and what came out, and says where the
    model lies.
    """
    lines = []
    for path in sorted(folder.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text(encoding="utf-8").splitlines():
            lines.append({"part": path.parent.name, **json.loads(line)})
    lines.append(about | {"before": dict(before), "after": dict(after)})
    atomic_write_text(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    if after:
        pairs = (f"{name} {before[name]:.4g} before, {after[name]:.4g} after" for name in after)
        print(f"held out: {'; '.join(pairs)}")
    print(f"the model is {folder / 'model'}", flush=True)
