"""A decoder with its knobs and a name: a row of a table, a choice on a command line."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paradec_jax.decode.machine.knobs import unneeded
from paradec_jax.records import record

# Fields that are no choice of a row.
UNNAMED = ("network", "size", "spec", "log_probs", "greedy", "bounded")
SHORT = {
    "recurrence": "r",
    "draft_recurrence": "draft r",
    "lookahead": "drafts",
    "inner_recurrence": "inner r",
    "prefill_recurrence": "prefill r",
    "exit_threshold": "exit",
}


@record
class Setting:
    """One row of the table.

    Attributes:
      name: name of the decoder, as on the command line.
      decoder: an unbound decoder.
      knobs: knobs of the decoder, or None for the defaults.
      baseline: whether speed-ups, equal tokens and paired differences refer to this row (one
        setting only).
      cache: what the network keeps of a position, see the network; its own choice when None.
    """

    name: str
    decoder: Any
    knobs: Any = None
    baseline: bool = False
    cache: str | None = None

    @property
    def values(self) -> Any:
        """The knobs, or the decoder's defaults."""
        return self.knobs or self.decoder.Knobs()

    @property
    def sampled(self) -> bool:
        """Whether any row has a temperature above 0."""
        return bool(np.any(np.asarray(self.values.temperature) > 0))

    def settings(self) -> dict[str, Any]:
        """Every choice of the decoder and its knobs, for JSON; a further network is None or the
        word in its place.
        """
        words = {
            name: value if isinstance(value := getattr(self.decoder, name), str) else None
            for name in self.decoder.further_networks
        }
        decoder = _fields_of(self.decoder, (*UNNAMED, *words))
        cache = {} if self.cache is None else {"cache": self.cache}
        return words | decoder | _fields_of(self.values) | cache

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
        return ", ".join(f"{SHORT.get(name, name)} {word}" for name, word in words.items())

    def changed(self, options: Mapping[str, Any]) -> "Setting":
        """The setting with other values of some fields of its decoder and knobs.

        The decoder becomes greedy where the temperature is 0. Knobs that its new fields have no use
        for are dropped.

        Args:
          options: values by field; "recurrence" is the most recurrences where a decoder has
            `max_recurrence` alone.

        Raises:
          ValueError: an option that this decoder does not have.
        """
        values, knobs = dict(options), self.values
        static = {field.name for field in dataclasses.fields(self.decoder)}.difference(UNNAMED)
        if "recurrence" in values and "recurrence" not in static and "max_recurrence" in static:
            values["max_recurrence"] = values.pop("recurrence")
        traced = {field.name for field in dataclasses.fields(knobs)}
        for option in values.keys() - static - traced:
            raise ValueError(f"--{option.replace('_', '-')} is no option of {self.name}")
        greedy = not np.any(np.asarray(values.get("temperature", knobs.temperature)) > 0)
        decoder = dataclasses.replace(
            self.decoder, greedy=greedy, **{k: v for k, v in values.items() if k in static}
        )
        meaningless = unneeded(knobs, decoder).keys() - values.keys()  # to the decoder as it is now
        new = dict.fromkeys(meaningless) | {k: v for k, v in values.items() if k in traced}
        return dataclasses.replace(self, decoder=decoder, knobs=dataclasses.replace(knobs, **new))


def _fields_of(value: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
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
