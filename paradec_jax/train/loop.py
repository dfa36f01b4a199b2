"""The training loop, and the hooks by which it is logged, saved, evaluated and ended."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from paradec_jax.objective import Metrics
from paradec_jax.sharding.batches import batch_on, mesh_for, rows_here
from paradec_jax.train.identity import identity_of
from paradec_jax.train.processes import PeerLost, check_same, telling_of_lost_peers
from paradec_jax.train.step import Step, TrainState, TrainStep, spread, state_shardings


def fit(
    step: TrainStep | Step,
    state: TrainState,
    data: Any,
    *,
    steps: int,
    hooks: Sequence["Hook"] = (),
    mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
    """Trains to `steps` updates, those before a resumption included, or fewer where a hook ends the
    call.

    With a hook `Checkpoint`, a run that is killed and called again with the same arguments ends
    with bitwise the same weights and log, where the device's arithmetic is deterministic. The host
    waits for the device where a hook reads numbers, to compile, and every hundred updates. Over
    several processes (`initialize`) each calls it alike.

    Args:
      step: update of `make_train_step`, or a jitted function of your own, `(state, batch) ->
        (state, metrics)`.
      state: state of `TrainState.create`; its arrays are given away.
      data: iterator over batches, dicts of arrays, of Grain or with its `get_state` (bytes or JSON
        values) and `set_state`; `digest` and `take` mean what they do in `data.endless.Endless`.
      steps: updates of the whole run.
      hooks: in the order in which they act, as a rule `Log`, `Evaluate`, `Checkpoint`, `Preempt`.
      mesh: mesh of `make_mesh`; by default that of the state. A run may go on on another.

    Raises:
      NonFiniteLoss: a loss or gradient was not finite.
      ValueError: `steps` is below the state's, the data ends early, or processes or a resumed run
        differ.
      PeerLost: a collective failed because another process is gone.
    """
    mesh = mesh_for(mesh, state)
    if mesh is not None:
        state = spread(state, state_shardings(state, mesh))
    run = Call(step, state, data, steps, hooks, mesh)
    with closing(hooks):
        for hook in hooks:
            state = hook.begin(run, state)
        start = int(state.step)
        if start > steps:
            raise ValueError(f"the state has {start} updates, which is beyond steps={steps}")
        update = step.on(mesh, state) if isinstance(step, TrainStep) and mesh is not None else step
        if mesh is not None and jax.process_count() > 1 and hasattr(data, "take"):
            data.take(functools.partial(rows_here, mesh))
        for number in range(start + 1, steps + 1):
            for hook in hooks:
                hook.before(number)
            batch = run.batch(number)
            state, metrics = run.update(number, update, state, batch)
            ends = [hook.after(number, state, metrics) for hook in hooks]
            if any(ends):
                break
        run.check()
        for hook in hooks if start < steps else ():
            hook.end(number, state)
    return state


class Hook:
    """What is done around updates: override what you need."""

    run: "Call"  # from `begin` on

    def begin(self, run: "Call", state: TrainState) -> TrainState:
        """Before the first update; returns the state to go on from. Call `super().begin(run,
        state)`.
        """
        self.run = run
        return state

    def before(self, step: int) -> None:
        """Before update `step`, counted from 1."""

    def after(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        """After the update was handed to the device; True ends the call.

        The next update takes the arrays of `state`: copy what is to be kept. Reading a number waits
        for the device.
        """
        return False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes a line that another hook gave to `run.write`; on process 0 alone."""

    def end(self, step: int, state: TrainState) -> None:
        """After the last update of a call that ends without an error."""

    def close(self) -> None:
        """At the end of every call, also where an error ended it before `begin`."""


@dataclasses.dataclass(eq=False)
class Call:
    """A call of `fit` as hooks see it.

    Attributes:
      step, initial, data, steps, hooks, mesh: arguments of `fit`; no array of the state `initial`
        is there any more after the first update.
      shapes, compiles: shapes of the arrays of the batch, and whether it is the first of these.
      compile_s: seconds that updates on such batches took so far.
      saved: folder of the newest checkpoint, or None.
    """

    step: TrainStep | Step
    initial: TrainState
    data: Any
    steps: int
    hooks: Sequence[Hook]
    mesh: jax.sharding.Mesh | None
    shapes: Any = None
    compiles: bool = False
    compile_s: float = 0.0
    saved: Path | None = None
    _seen: set[str] = dataclasses.field(default_factory=set)
    _unchecked: list[tuple[int, Metrics]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for hook in self.hooks:
            if getattr(hook, "every", 1) < 1:
                raise ValueError(f"every of {type(hook).__name__} must be at least 1")
        if jax.process_count() > 1:
            check_same(self.identity)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What a run must share with the one that it goes on from, as JSON values; only before the
        first update.
        """
        return identity_of(self.step, self.initial, self.data, self.steps)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hands a line of the log to all hooks, on process 0."""
        for hook in self.hooks if jax.process_index() == 0 else ():
            hook.write(step, values)

    def check(self) -> None:
        """Waits for the updates so far; raises NonFiniteLoss at the first that was not applied."""
        unchecked, self._unchecked = jax.device_get(self._unchecked), []
        for number, metrics in unchecked:
            if not metrics.get("finite", True):
                had = f"loss {metrics['loss']} and gradient norm {metrics['grad_norm']}"
                good = f"the last good one is {self.saved}"
                last = good if self.saved else "there is no checkpoint"
                raise NonFiniteLoss(f"update {number} had {had} and was not applied; {last}")

    def batch(self, number: int) -> Any:
        """The batch of an update, where it is to lie."""
        try:
            batch = batch_on(self.mesh, next(self.data))
        except StopIteration:
            raise ValueError(
                f"the data ended after {number - 1} batches; steps is {self.steps}"
            ) from None
        self.shapes = jax.tree.map(jax.typeof, batch)
        kind = str(self.shapes)
        self.compiles = kind not in self._seen
        self._seen.add(kind)
        if self.compiles or len(self._unchecked) == 100:
            self.check()
        return batch

    def update(
        self, number: int, update: Step, state: TrainState, batch: Any
    ) -> tuple[TrainState, Metrics]:
        """An update; waits for one that compiles, so that its time can be told from that of others."""
        begun = time.perf_counter()
        state, metrics = update(state, batch)
        if self.compiles:
            jax.block_until_ready(metrics)
            self.compile_s += time.perf_counter() - begun
        self._unchecked.append((number, metrics))
        return state, metrics


class NonFiniteLoss(RuntimeError):
    """The loss or a gradient of an update was NaN or infinite, so that it was not applied."""


@contextlib.contextmanager
def closing(hooks: Sequence[Hook]) -> Iterator[None]:
    """Closes all hooks at the end, the last one first; not where a process is gone, for which they
    would wait.
    """
    with contextlib.ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.close)
        try:
            with telling_of_lost_peers():
                yield
        except PeerLost:
            stack.pop_all()
            raise
