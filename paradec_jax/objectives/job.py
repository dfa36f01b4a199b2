"""A run that has begun: its batches, its parts, and what its models are measured by."""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from paradec_jax.config import Ranged
from paradec_jax.data.batches import example_batches
from paradec_jax.data.endless import Endless
from paradec_jax.data.jsonl import Examples
from paradec_jax.families import matrix_axes
from paradec_jax.models.work import Flops
from paradec_jax.nn.adapters import init_lora
from paradec_jax.objective import Objective
from paradec_jax.objectives.folder import say
from paradec_jax.objectives.options import Run
from paradec_jax.objectives.weights import Whole, joined, split
from paradec_jax.records import choices, record
from paradec_jax.sharding.batches import batch_on
from paradec_jax.sharding.mesh import on
from paradec_jax.store import Model
from paradec_jax.store.lora import SCALE, merge
from paradec_jax.train import (
    Checkpoint,
    Hook,
    Log,
    Preempt,
    Rounds,
    TrainState,
    averaged,
    fit,
    make_train_step,
)
from paradec_jax.train.hooks import Limit


class Stopped(SystemExit):
    """A call that ended before its run: code 0, and the same command goes on."""


@record
class Job:
    """A run that has begun.

    Attributes:
      run: its options.
      folder: its folder.
      model: where it starts, in the precision of training.
      config: that of the model as it was read.
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
    config: Any
    examples: Examples
    held_out: Examples | None
    mesh: jax.sharding.Mesh | None
    until: float
    mark: str
    adapters: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        """Positions of the longest row."""
        return self.run.row_length(self.model)

    @property
    def multiple(self) -> int:
        """What the rows of a batch must be a multiple of."""
        sizes = {} if self.mesh is None else dict(self.mesh.shape)
        return self.run.accumulate * sizes.get("data", 1) * sizes.get("fsdp", 1)

    @property
    def measured(self) -> Examples:
        """The held-out examples, of a run that has some."""
        assert self.held_out is not None
        return self.held_out

    def batches(self, examples: Examples, **options: Any) -> Endless:
        """Batches of examples as the run wants them, but for `options` of `example_batches`."""
        run = self.run
        usual = {"seed": run.seed, "packed": run.packed, "batch_tokens": run.batch_tokens}
        usual |= {"multiple": self.multiple, "length": self.length}
        return example_batches(examples, **usual | options)

    def updates(self, data: Endless) -> int:
        """Updates of a run over these batches."""
        return self.run.updates or max(math.ceil(self.run.epochs * data.make.batches), 1)

    def fit(
        self,
        part: str,
        model: Any,
        loss: Objective,
        data: Endless,
        *,
        updates: int | None = None,
        frozen: Any = None,
        flops: Flops | None = None,
        rounds: Rounds | None = None,
        hooks: Sequence[Hook] = (),
    ) -> Any:
        """A trained model; a part that is finished is read.

        Args:
          part: name of the part; its checkpoints and log lie in FOLDER/PART.
          model: model that it starts from, or residual head; with LoRA a later part goes on with
            the adapter of the one before.
          loss: loss of whole parameters, whatever part of them trains.
          data: batches.
          updates: length of the part, by default that of the run.
          frozen: second argument of the loss, which does not train.
          flops: operations of an update in which all parameters train, for the log.
          rounds: when the student becomes the teacher, which at first is the model.
          hooks: hooks that act before a checkpoint is written.

        Raises:
          Stopped: the time is over before the part is done.
        """
        run, folder = self.run, self.folder / part
        updates = updates or self.updates(data)
        trained, fixed, whole = self.parameters(model)
        if fixed:
            loss, frozen, flops = joined(loss, whole), {"fixed": fixed, "frozen": frozen}, None
        optimizer, key = run.optimizer_for(model.config, updates), jax.random.fold_in(run.key, 1)
        ema, teacher = run.ema is not None, trained if rounds else None
        state = TrainState.create(trained, optimizer, key, ema=ema, teacher=teacher, mesh=self.mesh)
        step = make_train_step(
            loss,
            optimizer,
            frozen=frozen,
            rounds=rounds,
            ema_decay=run.ema,
            accumulate=run.accumulate,
        )
        saves = Checkpoint(folder, every=run.checkpoint_every, allow=run.allow)
        hooks = [Log(folder, every=20, flops=flops), *hooks, saves, Limit(self.until), Preempt()]
        state = fit(step, state, data, steps=updates, hooks=hooks, mesh=self.mesh)
        if (done := int(state.step)) < updates:
            say(
                f"{run.minutes:g} minutes are over after {done} of {updates} updates of {part}: "
                "the same command goes on from there"
            )
            raise Stopped(0)
        after = averaged(state)
        if run.lora is not None:
            self.adapters.append((after, fixed))
        return dataclasses.replace(model, params=whole(fixed, after))

    def parameters(self, model: Any) -> tuple[Any, Any, Whole]:
        """What trains of a model, what stays, and what makes whole parameters of both."""
        trained, fixed = split(model, self.run.layers)
        if self.run.lora is None:
            return trained, fixed, operator.or_
        merged = functools.partial(merge, scale=SCALE)
        if self.adapters:
            return *self.adapters[-1], merged
        key = jax.random.fold_in(self.run.key, 2)
        adapter = init_lora(trained, matrix_axes(model.config), self.run.lora, key)
        return adapter, dict(model.params), merged

    def means(
        self, loss: Objective, model: Any, data: Endless | None = None, frozen: Any = None
    ) -> dict[str, float]:
        """The loss and its metrics over an epoch of batches, by default of `once`."""
        data = data or self.once()
        sums, parts = jax.jit(loss.sums), []
        for i in range(data.make.batches):
            key = jax.random.fold_in(jax.random.key(0), i)
            with on(self.mesh):
                batch = batch_on(self.mesh, next(data)) | {"step": np.int32(0)}
                parts.append(sums(model.params, frozen, batch, key))
        value, metrics = loss.value(jax.tree.map(lambda *each: sum(each), *parts))
        return {name: float(x) for name, x in {"loss": value, **metrics}.items()}

    def once(self, **options: Any) -> Endless:
        """Batches of the held-out examples, in rows of their own, each once in an epoch."""
        return self.batches(self.measured, packed=False, seed=0, **options)


@choices
class Training(Ranged):
    """What `paradec train NAME` does; the fields of a subclass are the options of NAME.

    Attributes:
      families: families of the models that it trains.
      without: options of a run that it has no use for.
    """

    families: ClassVar[tuple[str, ...]] = ()
    without: ClassVar[tuple[str, ...]] = ()

    @property
    def windows(self) -> bool:
        """Whether all examples are read as one text, so that none is too long."""
        return False

    @property
    def prompts(self) -> bool:
        """Whether lines of data may be prompts alone."""
        return False

    def train(self, job: Job) -> Model:
        """The model that the run ends in, after one part or several (`Job.fit`)."""
        raise NotImplementedError

    def held_out(self, job: Job, model: Model) -> Mapping[str, float]:
        """What a model is worth on `job.measured`, by name."""
        raise NotImplementedError
