"""Options of a training that say who else is told of it than its log."""

import dataclasses
import importlib
import math
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from paradec_jax.io import atomic_write_text
from paradec_jax.train import Hook, Profile

MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


@dataclasses.dataclass(frozen=True)
class Watch:
    """A trace and writers.

    Attributes:
      profile: FIRST:LAST, updates whose trace is kept in FOLDER/profile, such as 10:13; none when None.
      writers: who else gets every line of the log: "tensorboard" writes FOLDER/events, "wandb" a run of the project
        "paradec" that goes on with this one. Each needs the extra of its name.

    Raises:
      ValueError: updates that are no range, or a writer whose extra is missing.
    """

    profile: str | None = None
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()

    def __post_init__(self) -> None:
        if self.profile is not None:
            self._updates(self.profile)
        for name in self.writers:
            try:
                importlib.import_module(MODULES[name])
            except ImportError:
                raise ValueError(
                    f"writers {name} needs {MODULES[name]}: pip install 'paradec-jax[{name}]'"
                ) from None

    @staticmethod
    def _updates(profile: str) -> tuple[int, int]:
        found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", profile, re.ASCII)
        first, last = map(int, found.groups()) if found else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(
                f"profile must be FIRST:LAST with 1 <= FIRST <= LAST, such as 10:13, not {profile!r}"
            )
        return first, last

    def hooks(self, folder: Path, steps: int) -> list[Hook]:
        """Hooks of a run in a folder, of so many updates.

        Raises:
          ValueError: a trace of updates that the run does not have.
        """
        found: list[Hook] = [Writer(BEGIN[name], folder) for name in self.writers]
        if self.profile is None:
            return found
        first, last = self._updates(self.profile)
        if last > steps:
            raise ValueError(f"profile asks for updates {self.profile} of a run of {steps}")
        return [*found, Profile(folder / "profile", first, last)]


Write = Callable[[int, Mapping[str, float]], None]


class Writer(Hook):
    """Hands finite numbers of the log on.

    Args:
      begin: makes the function that takes them, with the first line; so in one process, and not for a run that is
        refused.
      folder: folder of the run.
    """

    def __init__(self, begin: Callable[[Path], Write], folder: Path) -> None:
        self._begin, self._folder = begin, folder
        self._write: Write | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if values and self._write is None:
            self._write = self._begin(self._folder)
        if values and self._write is not None:
            self._write(step, {name: float(x) for name, x in values.items() if math.isfinite(x)})


def tensorboard(folder: Path) -> Write:
    """Scalars in FOLDER/events; updates that a resumed run applies again are written again."""
    from tensorboardX import SummaryWriter

    events = SummaryWriter(str(folder / "events"))

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            events.add_scalar(name, value, step)
        events.flush()

    return write


def wandb(folder: Path) -> Write:
    """A run at Weights & Biases; its number is kept in the folder, so that a resumed run goes on in its curve."""
    import wandb as client

    path = folder / "wandb-id"
    if not path.exists():
        atomic_write_text(path, secrets.token_hex(6) + "\n")
    number = path.read_text(encoding="utf-8").strip()
    run: Any = client.init(project="paradec", name=folder.name, id=number, resume="allow")
    return lambda step, values: run.log(values, step=step)


BEGIN = {"tensorboard": tensorboard, "wandb": wandb}
