"""What a part of a report is: something to measure in its share of the time, and tables of what was found."""

import concurrent.futures
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from paradec_jax import facts
from paradec_jax.report.sizes import Sizes

Result = dict[str, Any]
Progress = Callable[[str, int, int], None]  # stage, units done, their total
Item = TypeVar("Item")

COMPILE = 0.6  # of the time of a model: a program costs seconds, running it far less
MOST_AT_ONCE = 8  # programs that are compiled


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the report: a title, the names of its columns, rows of ready text, and what must be said of it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of the report.

    Attributes:
      name: on the command line and of its file.
      title: its heading.
      share: of the minutes, beside the shares of the other parts; what a part leaves goes to those after it.
      measure: measures inside the task's time and returns JSON values.
      tables: what the report shows of a result.
      picture: draws a result with a given `matplotlib.pyplot` and returns the figure, or None where there is nothing
        to draw; a part may have none.
    """

    name: str
    title: str
    share: float
    measure: Callable[["Task"], Result]
    tables: Callable[[Result], Sequence[Table]]
    picture: Callable[[Any, Result], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Cut:
    """Something that was left out, why, and of which model or shape it is, if of one."""

    what: str
    why: str
    of: str = ""


@dataclasses.dataclass(eq=False)
class Task:
    """What a part has to work with.

    Attributes:
      sizes: how large everything is.
      deadline: on the clock of `time.monotonic`.
      progress: told what is done.
      stage: name of its bar.
      cut: what was left out.
      dtypes: of the arrays that were measured, as found in them.
      late: whether something was left out for want of time, which more minutes would mend.
    """

    sizes: Sizes
    deadline: float
    progress: Progress = lambda stage, done, total: None
    stage: str = ""
    cut: list[Cut] = dataclasses.field(default_factory=list)
    dtypes: set[str] = dataclasses.field(default_factory=set)
    late: bool = False

    def left(self) -> float:
        """Seconds until the deadline, below 0 after it."""
        return self.deadline - time.monotonic()

    def leave(self, what: str, why: str, of: str = "", *, late: bool = False) -> None:
        """Notes that something is left out."""
        self.cut.append(Cut(what, why, of))
        self.late |= late

    def has(self, seconds: float, what: str, of: str = "") -> bool:
        """Whether so many seconds are left; if not, a line of the report says that `what` was left out."""
        left = self.left()
        if left >= seconds:
            return True
        if left <= 0:
            self.leave(what, "no time was left", of, late=True)
        else:
            needs = f"needs about {duration(seconds)}, {duration(left)} were left"
            self.leave(f"{what} ({needs})", "there was too little time", of, late=True)
        return False

    def fits(self, size: float | int, what: str) -> bool:
        """Whether so many bytes can still be had; if not, a line of the report says that `what` was left out."""
        left = facts.memory_left()
        if left is None or size <= left:
            return True
        needs = f"needs about {size / 2**30:.1f} GiB, {left / 2**30:.1f} GiB are left"
        self.leave(f"{what} ({needs})", "it does not fit the memory")
        return False

    def passed(self, done: int, of: str) -> None:
        """Notes which passes there was no time for."""
        wanted = self.sizes.passes
        if done < wanted:
            self.leave(f"passes {done + 1} to {wanted}", "no time was left", of, late=True)

    def saw(self, *trees: Any) -> None:
        """Notes the dtypes of the arrays that are measured."""
        self.dtypes.update(facts.dtypes(*trees))

    def each(
        self, items: Sequence[Item], weights: Sequence[float] | None = None
    ) -> Iterator[tuple[Item, "Task"]]:
        """Items, each with a task whose deadline leaves the later ones their share of what is left, by weight."""
        weights = [1.0] * len(items) if weights is None else weights
        for done, item in enumerate(items):
            self.progress(self.stage, done, len(items))
            share = self.left() * weights[done] / sum(weights[done:])
            own = dataclasses.replace(self, deadline=time.monotonic() + share)
            yield item, own
            self.late |= own.late
        self.progress(self.stage, len(items), len(items))

    def ready(self, jobs: Mapping[str, Callable[[], Any]], what: str) -> dict[str, Any]:
        """What jobs return that compile programs, several at once, inside a share of the time that is left.

        Args:
          jobs: by name, in the order of their importance; the first one is done in any case.
          what: the model that they are about.
        """
        until = time.monotonic() + COMPILE * self.left()
        found: dict[str, Any] = {}
        pool = concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_AT_ONCE))
        try:
            waiting = {name: pool.submit(job) for name, job in jobs.items()}
            try:
                ended = concurrent.futures.as_completed(waiting.values(), max(until - time.monotonic(), 0))
                for done, _ in enumerate(ended, 1):
                    self.progress(f"{what}: programs", done, len(jobs))
            except TimeoutError:
                for future in list(waiting.values())[1:]:
                    future.cancel()  # those that have begun go on
            for name, future in waiting.items():
                if future.cancelled():
                    self.leave(name, "no time was left to compile it", what, late=True)
                    continue
                with self.survives(name, of=what):
                    found[name] = future.result()
            self.progress(f"{what}: programs", len(jobs), len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)
        return found

    @contextlib.contextmanager
    def survives(self, what: str, *others: type[Exception], of: str = "") -> Iterator[None]:
        """Turns an error of the device, such as no memory left, and others into a line of the report."""
        caught: tuple[type[Exception], ...] = (RuntimeError, MemoryError, *others)
        try:
            yield
        except caught as error:
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            self.leave(what, f"the device refused it ({reason})", of)


def rows_of(result: Mapping[str, Any], **choices: Any) -> list[dict[str, Any]]:
    """The rows of a result that have these values."""
    return [row for row in result["rows"] if all(row.get(name) == value for name, value in choices.items())]


def percent(share: float | None) -> str:
    """A share as text."""
    return "" if share is None else f"{100 * share:.0f}%"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
