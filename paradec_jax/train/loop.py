"""The training loop: steps, logs, checkpoints, resumption."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import optax

from paradec_jax.train.checkpoint import Checkpoints
from paradec_jax.train.log import Log
from paradec_jax.train.place import create_state
from paradec_jax.train.rounds import Rounds, next_round
from paradec_jax.train.state import TrainState
from paradec_jax.train.step import Loss, Metrics, make_train_step

PyTree = Any


class NonFiniteLoss(RuntimeError):
    """The loss or a gradient of an update was NaN or infinite.

    Attributes:
      step: the update, counted from 1 as in the log.
      checkpoint: folder of the last checkpoint, saved before that update, or None.
    """

    def __init__(self, step: int, loss: float, grad_norm: float, checkpoint: Path | None) -> None:
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
        super().__init__(
            f"update {step} had loss {loss} and gradient norm {grad_norm} and was not applied; {kept}"
        )
        self.step = step
        self.checkpoint = checkpoint


@runtime_checkable
class DataIterator(Protocol):
    """What `fit` asks of its data; Grain's iterators fulfil it. The state is bytes or what JSON can hold."""

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


def fit(
    loss: Loss,
    params: PyTree,
    data: DataIterator,
    *,
    frozen: PyTree = None,
    teacher: PyTree = None,
    rounds: Rounds | None = None,
    optimizer: optax.GradientTransformation,
    steps: int,
    key: jax.Array,
    folder: str | Path | None = None,
    checkpoint_every: int = 1000,
    keep: int = 2,
    log_every: int = 100,
    ema_decay: float | None = None,
    ema_warmup: bool = True,
    accumulate: int = 1,
    evaluate: Callable[[TrainState], Mapping[str, float]] | None = None,
    evaluate_every: int = 1000,
    limit_s: float | None = None,
    resume: bool = True,
    progress: bool = True,
    mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
    """Trains to `steps` updates, from scratch or from the newest readable checkpoint in `folder`.

    A run that is killed and called again with the same arguments ends as the run that was not, to the bit
    where the device's arithmetic is deterministic: parameters, randomness, place in the data, logged losses.
    The host waits for the device only to log, evaluate, save, and once to compile.

    Args:
      loss: `(params, frozen, batch, key) -> (scalar, metrics)`, see `make_train_step`.
      params: initial parameters; copied, never donated.
      data: batches, dicts of arrays.
      frozen: second argument of the loss (a backbone); not trained, not saved.
      teacher: parameters of a teacher, copied and saved with the state; the loss finds them and the round in its
        second argument, as {"teacher": ..., "round": ...}, in place of `frozen`.
      rounds: after how many updates the student becomes the teacher, and how; one round for ever when None. What ends
        a round is its last update, its log, evaluation and checkpoint; the first update after it begins the next.
      optimizer: an optax chain, such as `adamw`.
      steps: updates of the whole run, those before a resumption included.
      key: typed PRNG key of the run; ignored on resumption.
      folder: holds `checkpoints/` and `metrics.jsonl`; None saves and logs nothing on disk.
      checkpoint_every: updates between checkpoints; the last update is always saved.
      keep: checkpoints to keep.
      log_every: updates between lines of the log. A line holds the means since the line before it, `step_s`
        (seconds an update), `tokens_per_s` (size of `batch["tokens"]`, else `batch["weights"]`, padding
        included) and, on the first line of a process, `compile_s`, whose update is left out of the rates.
      ema_decay: decay of the moving average of parameters, or None for none.
      ema_warmup: whether that decay is warmed up (`update_ema`).
      accumulate: micro-batches an update.
      evaluate: called with the state every `evaluate_every` updates and at the end, logged as `eval/NAME`;
        must not keep the state, whose arrays are donated to the next update.
      evaluate_every: updates between evaluations.
      limit_s: seconds after which this call saves and returns, before `steps`; needs a folder to go on from. None for
        no limit.
      resume: whether to go on from a checkpoint in `folder`.
      progress: whether to show progress on the terminal, on a mesh first where the parameters lie.
      mesh: of `make_mesh`, on which the state lies by the rules of `sharding`, and every batch by rows; that on which
        `params` lie already, or none, when None. A run may be resumed on another one.

    Returns:
      The state after `steps` updates, or after fewer where `limit_s` ended the call.

    Raises:
      NonFiniteLoss: at the first line of the log after such an update; the checkpoints stay as they were.
      ValueError: if a count is not positive, if `rounds` come without a teacher or `limit_s` without a folder, if
        `folder` has checkpoints and `resume` is false, if its newest is beyond `steps`, if the data ends early, or
        from `make_train_step`, `create_state`, `next_round` and `Checkpoints.restore`.
      RuntimeError: if `folder` has checkpoints and none can be read.
    """
    counts = {
        "steps": steps,
        "checkpoint_every": checkpoint_every,
        "log_every": log_every,
        "evaluate_every": evaluate_every,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    if rounds is not None and teacher is None:
        raise ValueError("rounds need a teacher to begin with")
    if limit_s is not None and folder is None:
        raise ValueError("limit_s ends a run that a later call goes on with: give a folder")
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    folder = None if folder is None else Path(folder)
    train_step = make_train_step(
        loss, optimizer, ema_decay=ema_decay, ema_warmup=ema_warmup, accumulate=accumulate
    )
    state, place = create_state(mesh, params, optimizer, key, ema=ema_decay is not None, teacher=teacher)
    train_step, frozen = place.step(train_step), place.frozen(frozen)

    with contextlib.ExitStack() as stack:
        checkpoints = None
        if folder is not None:
            checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", keep))
            state = place.put(_resume(state, data, checkpoints, resume, steps))
        start, which = int(state.step), 0 if state.round is None else int(state.round)
        path = None if folder is None else folder / "metrics.jsonl"
        primary = jax.process_index() == 0
        if place.mesh is not None and progress and primary:
            print(place.layout(state), flush=True)
        log = stack.enter_context(Log(path, step=start, steps=steps, progress=progress, primary=primary))
        window = _Window()
        for step in range(start + 1, steps + 1):
            try:
                batch = next(data)
            except StopIteration:
                raise ValueError(f"the data ended after {step - 1} batches; steps is {steps}") from None
            if rounds is not None and (step - 1) // rounds.updates > which:
                which = (step - 1) // rounds.updates
                state = place.put(next_round(state, rounds, which, optimizer))
            state, metrics = train_step(state, frozen, place.batch(batch))
            window.add(step, metrics, batch)

            late = time.monotonic() > deadline
            test = evaluate if _due(step, evaluate_every, steps) else None
            save = checkpoints if late or _due(step, checkpoint_every, steps) else None
            if not (test or save or _due(step, log_every, steps)):
                continue
            log.write(step, window.flush(checkpoints))
            if test:
                log.write(step, {f"eval/{name}": float(value) for name, value in test(state).items()})
            if save:
                save.save(state, data.get_state())
            if late:
                break
            window.restart_clock()
    return state


def _due(step: int, every: int, steps: int) -> bool:
    return step % every == 0 or step == steps


def _resume(
    state: TrainState, data: DataIterator, checkpoints: Checkpoints, resume: bool, steps: int
) -> TrainState:
    if not checkpoints.steps():
        return state
    if not resume:
        raise ValueError(f"{checkpoints.folder} has checkpoints and resume is false; choose another folder")
    state, data_state = checkpoints.restore(state)
    if int(state.step) > steps:
        raise ValueError(f"{checkpoints.path(int(state.step))} is beyond steps={steps}")
    data.set_state(data_state)
    return state


class _Window:
    """Metrics since the last line of the log, left on the device until `flush`, and their clock."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, Metrics]] = []
        self._compile_s: float | None = None
        self._first = True
        self.restart_clock()

    def restart_clock(self) -> None:
        self._start, self._timed, self._tokens = time.perf_counter(), 0, 0

    def add(self, step: int, metrics: Metrics, batch: Mapping[str, Any]) -> None:
        self._pending.append((step, metrics))
        if self._first:  # compiled just now: wait for its result and keep it out of the rates
            jax.block_until_ready(metrics)
            self._compile_s, self._first = time.perf_counter() - self._start, False
            self.restart_clock()
            return
        self._timed += 1
        self._tokens += next((np.size(batch[name]) for name in ("tokens", "weights") if name in batch), 0)

    def flush(self, checkpoints: Checkpoints | None) -> dict[str, float]:
        """Means over the window, its rates; raises NonFiniteLoss if an update was not applied."""
        fetched = jax.device_get(self._pending)
        elapsed = time.perf_counter() - self._start
        self._pending = []
        for step, metrics in fetched:
            if not metrics["finite"]:
                saved = [checkpoints.path(s) for s in checkpoints.steps()] if checkpoints else []
                last = saved[-1] if saved else None
                raise NonFiniteLoss(step, float(metrics["loss"]), float(metrics["grad_norm"]), last)
        names = [name for name in fetched[0][1] if name != "finite"]
        line = {name: float(np.mean([m[name] for _, m in fetched], dtype=np.float64)) for name in names}
        if self._timed:
            line["step_s"] = elapsed / self._timed
            if self._tokens:
                line["tokens_per_s"] = self._tokens / elapsed
        if self._compile_s is not None:
            line["compile_s"], self._compile_s = self._compile_s, None
        return line
