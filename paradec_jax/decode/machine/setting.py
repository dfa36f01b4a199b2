"""A decoder with its knobs and a name: a row of a table, a choice on a command line."""

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """One row of the table.

    Attributes:
      name: the decoder, as on the command line.
      decoder: unbound.
      knobs: its knobs, or None for the defaults.
      baseline: whether speed-ups, equal tokens and paired differences refer to this row (one setting only).
      cache: what the network keeps of a position, see the network; its own choice when None.
    """

    name: str
    decoder: Any
    knobs: Any = None
    baseline: bool = False
    cache: str | None = None

    def settings(self) -> dict[str, Any]:
        """Every choice of the decoder and its knobs, for JSON; a further network is None or the word in its place."""
        knobs = self.decoder.Knobs() if self.knobs is None else self.knobs
        technical = (
            "network",
            *self.decoder.further_networks,
            "size",
            "spec",
            "log_probs",
            "greedy",
            "bounded",
        )
        kept = {} if self.cache is None else {"cache": self.cache}
        further = {name: getattr(self.decoder, name) for name in self.decoder.further_networks}
        words = {name: value if isinstance(value, str) else None for name, value in further.items()}
        return words | fields_of(self.decoder, technical) | fields_of(knobs, ()) | kept

    @property
    def sampled(self) -> bool:
        """Whether any row has a temperature above 0."""
        knobs = self.decoder.Knobs() if self.knobs is None else self.knobs
        return bool(np.any(np.asarray(knobs.temperature) > 0))

    def label(self) -> str:
        """The size of a block and the choices that are not the defaults, in short."""
        defaults = Setting(self.name, type(self.decoder)()).settings()
        changed = {
            name: value
            for name, value in self.settings().items()
            if name == "block" or value != defaults.get(name)
        }
        if "exit_threshold" in changed and changed["exit_threshold"] is None:
            changed["exit_threshold"] = "every step"
        words = {name: f"{x:g}" if isinstance(x, float) else x for name, x in changed.items()}
        return ", ".join(f"{_SHORT.get(name, name)} {word}" for name, word in words.items())


_SHORT = {
    "recurrence": "r",
    "draft_recurrence": "draft r",
    "lookahead": "drafts",
    "inner_recurrence": "inner r",
    "prefill_recurrence": "prefill r",
    "exit_threshold": "exit",
}


def fields_of(value: Any, without: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a dataclass as values that JSON can hold."""
    return {
        field.name: _plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.name not in without
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, bool | str | int | None):
        return value
    if np.ndim(value) > 0:
        return [_plain(entry) for entry in np.asarray(value)]
    number = float(value)
    return number if math.isfinite(number) else None
