"""The training loop: steps, logs, checkpoints, resumption."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from paradec_jax.train.agree import Deadline, all_or_none, check_same, telling_of_lost_peers
from paradec_jax.train.clock import Clock
from paradec_jax.train.folder import RunFolder
from paradec_jax.train.identity import check_allowed, identity, values_of
from paradec_jax.train.iterator import DataIterator
from paradec_jax.train.log import Log
from paradec_jax.train.place import create_state, planned
from paradec_jax.train.preempt import Preemption, leave
from paradec_jax.train.profile import Profile
from paradec_jax.train.rounds import Rounds, next_round
from paradec_jax.train.state import TrainState
from paradec_jax.train.step import Loss, make_train_step
from paradec_jax.train.window import Flops, Window
from paradec_jax.train.writers import Writer

PyTree = Any


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
    allow: Sequence[str] = (),
    recipe: Any = None,
    donate: bool = False,
    profile: tuple[int, int] | None = None,
    flops: Flops | None = None,
    peak_flops: float | None = None,
    writers: Sequence[Writer] = (),
    mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
    """Trains to `steps` updates, from scratch or from the newest readable checkpoint in `folder`.

    A run that is killed and called again with the same arguments ends as the run that was not, to the bit
    where the device's arithmetic is deterministic: parameters, randomness, place in the data, logged losses.
    So does one that SIGTERM or a first SIGINT asked to end: it saves after the update under way (`Preempted`).
    The host waits for the device only to log, evaluate, save, and to compile, once for each shape of batch.

    Over several processes (`initialize`) every one of them calls it alike, with a mesh of the devices of all; arrays
    are what each has on its host, the same on all, or lie on that mesh. Calls that differ are refused on all.

    Args:
      loss: `(params, frozen, batch, key) -> (scalar, metrics)`, see `make_train_step`.
      params: initial parameters; copied, and not donated unless `donate` says so. A run that goes on reads their
        shapes alone.
      data: batches, dicts of arrays.
      frozen: second argument of the loss (a backbone); not trained, not saved.
      teacher: parameters of a teacher, copied and saved with the state; the loss finds them and the round in its
        second argument, as {"teacher": ..., "round": ...}, in place of `frozen`.
      rounds: after how many updates the student becomes the teacher, and how; one round for ever when None. What ends
        a round is its last update, its log, evaluation and checkpoint; the first update after it begins the next.
      optimizer: an optax chain, such as `adamw`.
      steps: updates of the whole run, those before a resumption included.
      key: typed PRNG key of the run; ignored on resumption.
      folder: holds `checkpoints/`, `metrics.jsonl` and `run.json`, which says what makes the run (`identity`); one
        call at a time may have it (`held`). None saves and logs nothing on disk, and takes no signals.
      checkpoint_every: updates between checkpoints; the last update is always saved.
      keep: checkpoints to keep.
      log_every: updates between lines of the log. A line holds the means since the line before it, `step_s`
        (seconds an update), `tokens_per_s` (size of `batch["tokens"]`, else `batch["weights"]`, padding
        included; of a batch of several the sum, and none where one of them has neither), from both of which the
        first update of each shape of batch is left out, which compiles, and `seconds/...`, where the time since the
        line before went (`Clock`). The last line of a call, `wall_s` and `total_seconds/...`, sums them up.
      ema_decay: decay of the moving average of parameters, or None for none.
      ema_warmup: whether that decay is warmed up (`update_ema`).
      accumulate: micro-batches an update, of a loss that is an `Objective`.
      evaluate: called with the state every `evaluate_every` updates and at the end, logged as `eval/NAME`;
        must not keep the state, whose arrays are donated to the next update.
      evaluate_every: updates between evaluations.
      limit_s: seconds after which this call saves and returns, before `steps`; needs a folder to go on from. Several
        processes look at it with each line of the log. None for no limit.
      resume: whether to go on from a checkpoint in `folder`.
      progress: whether to show progress on the terminal, on a mesh first where the parameters lie.
      allow: what may differ from what `run.json` says when a run goes on: names of `identity.NAMES`, as "optimizer".
      recipe: what else makes the run and is to be compared, such as options of the loss: a dataclass or JSON values.
      donate: whether the arrays of `params` and `teacher` are given away: deleted as soon as they are copied or, in a
        run that goes on, not needed, so that the memory holds them and the state only while a new run begins.
      profile: (first, last) of the updates whose trace is kept in `folder/profile` (`Profile`).
      flops: operations of an update, `(batch, metrics) -> float`, by the shapes of its batch and what it logs, such
        as `models.batch_flops(network)`; lines of the log then have `flops_per_s`, model operations a second.
      peak_flops: operations a second that one device can do; lines then have `utilisation`, the share of it, of all
        devices. None where nobody knows.
      writers: called with the step and the values of every line of the log; see `writers`.
      mesh: of `make_mesh`, on which the state lies by the rules of `sharding`, and every batch by rows; that on which
        `params` lie already, or none, when None. A run may be resumed on another one.

    Returns:
      The state after `steps` updates, or after fewer where `limit_s` ended the call.

    Raises:
      NonFiniteLoss: at the first line of the log after such an update; the checkpoints stay as they were.
      Preempted: a signal asked the run to end, and it saved; an exit with code 0 where nobody catches it.
      ValueError: if a count is not positive, if `rounds` come without a teacher, `limit_s` without a folder or
        `peak_flops` without `flops`, if `folder` has checkpoints and `resume` is false, if its newest is beyond
        `steps`, if the run differs from `run.json` there or that is broken, if the data ends early, or from
        `make_train_step`, `planned`, `next_round`, `Profile`, `Checkpoints.restore` and `Checkpoints.save`.
      OSError: if `folder` cannot be written, another call has it, or a process does not see it, before anything else
        is done; if it is full.
      PeerLost: a collective failed because another process is gone.
      NoneReadable: if `folder` has checkpoints and none can be read.
    """
    clock = Clock("restore")
    deadline, several = Deadline(limit_s), jax.process_count() > 1
    update: dict[str, Any] = {"accumulate": accumulate, "ema_decay": ema_decay, "ema_warmup": ema_warmup}
    ema, primary = ema_decay is not None, jax.process_index() == 0
    every = {"checkpoint_every": checkpoint_every, "log_every": log_every, "evaluate_every": evaluate_every}
    with all_or_none():
        for name, count in ({"steps": steps} | every).items():
            if count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        if peak_flops is not None and flops is None:
            raise ValueError("peak_flops is what flops are compared with: give flops")
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ValueError(
                f"peak_flops must be positive operations a second of one device, not {peak_flops}"
            )
        if rounds is not None and teacher is None:
            raise ValueError("rounds need a teacher to begin with")
        if limit_s is not None and folder is None:
            raise ValueError("limit_s ends a run that a later call goes on with: give a folder")
        check_allowed(allow)
        train_step = make_train_step(loss, optimizer, **update)
        shape, place = planned(mesh, params, optimizer, key, ema=ema, teacher=teacher)
        trace = Profile(None if folder is None else Path(folder), profile, clock, primary)
    given = {"keep": keep, "resume": resume, "limit_s": limit_s is None, "evaluate": evaluate is None}
    check_same({"folder": str(folder), "mesh": place.axes, "allow": sorted(allow), **every, **given})

    with telling_of_lost_peers(), contextlib.ExitStack() as stack:
        disk = None if folder is None else stack.enter_context(RunFolder(Path(folder), keep, primary))
        stack.enter_context(telling_of_lost_peers())  # the folder is closed in another way where one is lost
        told = {"frozen": frozen, "recipe": recipe, "steps": steps, "rounds": rounds, **update}
        if disk is not None or several:
            with all_or_none():
                if several and hasattr(data, "take"):
                    data.take(lambda count: (0, count))  # what another call has taken
                run = identity(shape, optimizer, data, key, **told)
                mine = {"parameters": values_of(params, teacher)} if several else {}
            check_same(run | mine)
        if disk is not None:
            check_same({"the newest checkpoint in the folder": disk.newest})
            with all_or_none():
                disk.compare(run, resume, allow)
        if several and hasattr(data, "take"):
            with all_or_none():
                data.take(place.share)
        begins = disk is None or disk.newest is None
        if begins:
            state = create_state(place, params, optimizer, key, ema=ema, teacher=teacher)
        for x in jax.tree.leaves((params, teacher)) if donate else ():
            if isinstance(x, jax.Array) and not x.is_deleted():
                x.delete()
        params = teacher = None  # a run that goes on needs no more than their shapes
        if disk is not None and not begins:
            state = place.put(disk.restore(shape, data, steps))
        train_step, frozen = place.step(train_step), place.frozen(frozen)
        start, which = int(state.step), 0 if state.round is None else int(state.round)
        if disk is not None:
            with all_or_none():
                disk.record(start + 1, place.axes)
        if progress and primary and (table := place.layout(state)):
            print(table, flush=True)
        path, checkpoints = (None, None) if disk is None else (disk.log, disk.checkpoints)
        shown: dict[str, Any] = {"progress": progress, "primary": primary, "writers": writers, "clock": clock}
        with all_or_none():
            log = stack.enter_context(Log(path, step=start, steps=steps, **shown))
        signals = stack.enter_context(Preemption(disk is not None))
        stack.enter_context(trace)
        window, stop = Window(clock, flops, place.peak(peak_flops)), False
        clock.switch("steps")
        for step in range(start + 1, steps + 1):
            with clock.on("data"):
                batch = place.batch(_next(data, step, steps))
            if rounds is not None and (step - 1) // rounds.updates > which:
                which = (step - 1) // rounds.updates
                state = place.put(next_round(state, rounds, which, optimizer))
            trace.begin(step)
            with clock.on(window.purpose(batch)):
                state, metrics = train_step(state, frozen, batch)
                window.add(step, metrics)
            trace.end(step, metrics)

            stop = signals.reached(step)
            last = deadline.over(_due(step, log_every, steps)) or stop
            test = evaluate if _due(step, evaluate_every, steps) else None
            save = checkpoints if last or _due(step, checkpoint_every, steps) else None
            if not (test or save or _due(step, log_every, steps)):
                continue
            log.write(step, window.flush(checkpoints))
            if test:
                with clock.on("evaluate"), all_or_none():
                    values = {f"eval/{name}": float(value) for name, value in test(state).items()}
                log.write(step, values)
            if save:
                with clock.on("save"):
                    save.save(state, data.get_state(), batch)
            if last:
                break
            window.restart_clock()
        if checkpoints is not None:
            with clock.on("save"):
                checkpoints.wait()
        if start < steps:
            log.write(step, clock.total())
    if stop and checkpoints is not None:
        leave(step, checkpoints.path(step), primary)
    return state


def _due(step: int, every: int, steps: int) -> bool:
    return step % every == 0 or step == steps


def _next(data: DataIterator, step: int, steps: int) -> Any:
    try:
        return next(data)
    except StopIteration:
        raise ValueError(f"the data ended after {step - 1} batches; steps is {steps}") from None
