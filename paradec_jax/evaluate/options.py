"""Decoders changed by the options of a command."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from paradec_jax.decode.machine.knobs import unneeded


def choose(
    name: str, decoder: Any, knobs: Any = None, options: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """A decoder and its knobs, with the values of some of their fields changed.

    The decoder becomes greedy where the temperature is 0, and loses the knobs that its new fields have no use for.

    Args:
      name: of the decoder, for the error.
      decoder: to start from.
      knobs: to start from; the decoder's defaults when None.
      options: values by field; "recurrence" is the most recurrences where a decoder has `max_recurrence` alone.

    Raises:
      ValueError: an option that this decoder does not have.
    """
    knobs = decoder.Knobs() if knobs is None else knobs
    values = dict(options or {})
    static = {field.name for field in dataclasses.fields(decoder)}
    if "recurrence" in values and "recurrence" not in static and "max_recurrence" in static:
        values["max_recurrence"] = values.pop("recurrence")
    traced = {field.name for field in dataclasses.fields(knobs)}
    for option in values.keys() - static - traced:
        raise ValueError(f"--{option.replace('_', '-')} is no option of {name}")
    values["greedy"] = not np.any(np.asarray(values.get("temperature", knobs.temperature)) > 0)
    decoder = dataclasses.replace(decoder, **{k: v for k, v in values.items() if k in static})
    meaningless = unneeded(knobs, decoder).keys() - values.keys()  # to the decoder as it is now
    knobs = dataclasses.replace(knobs, **dict.fromkeys(meaningless))
    return decoder, dataclasses.replace(knobs, **{k: v for k, v in values.items() if k in traced})
