"""Options of a training that say who else is told of it than its log."""

import dataclasses
import importlib
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from paradec_jax.io import atomic_write_text
from paradec_jax.train import Writer, writers

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

    def options(self, folder: Path, steps: int) -> dict[str, Any]:
        """Arguments of `fit`.

        Args:
          folder: of the run.
          steps: updates of the run.

        Raises:
          ValueError: a trace of updates that the run does not have.
        """
        updates = None if self.profile is None else self._updates(self.profile)
        if updates is not None and updates[1] > steps:
            raise ValueError(f"profile asks for updates {self.profile} of a run of {steps}")
        made: dict[str, Callable[[], Writer]] = {
            "tensorboard": lambda: writers.tensorboard(folder / "events"),
            "wandb": lambda: writers.wandb("paradec", name=folder.name, id=_number(folder), resume="allow"),
        }
        told = [_begun_late(made[name]) for name in self.writers]
        return {"profile": updates, "writers": told}


def _begun_late(make: Callable[[], Writer]) -> Writer:
    """A writer that begins with its first line, so in one process, and not for a run that is refused."""
    begun: list[Writer] = []

    def write(step: int, values: Mapping[str, float]) -> None:
        if not begun:
            begun.append(make())
        begun[0](step, values)

    return write


def _number(folder: Path) -> str:
    """The run's own at Weights & Biases, kept in its folder."""
    path = folder / "wandb-id"
    if not path.exists():
        atomic_write_text(path, secrets.token_hex(6) + "\n")
    return path.read_text(encoding="utf-8").strip()
