"""Decoders by name, and changed by the options of a command."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from paradec_jax.decode import (
    Adaptive,
    AutoRegressive,
    Jacobi,
    Lookahead,
    MultiBlock,
    OfficialWavefront,
    PromptLookup,
    SelfSpeculative,
    Wavefront,
)

# With the defaults of their papers; `settings.SETTINGS` has those that suit the bundled models.
DECODERS: dict[str, dict[str, Any]] = {
    "recurrent_depth": {
        "static": AutoRegressive(),
        "adaptive": Adaptive(),
        "speculative": SelfSpeculative(),
        "wavefront": Wavefront(),
        "official": OfficialWavefront(),
    },
    "causal": {
        "static": AutoRegressive(),
        "jacobi": Jacobi(),
        "multiblock": MultiBlock(),
        "prompt_lookup": PromptLookup(),
        "lookahead": Lookahead(),
    },
}


def choose(
    name: str, decoder: Any, knobs: Any = None, options: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """A decoder and its knobs, with the values of some of their fields changed.

    The decoder becomes greedy where the temperature is 0.

    Args:
      name: of the decoder, for the error.
      decoder: to start from.
      knobs: to start from; the decoder's defaults when None.
      options: values by field; "recurrence" is the most that `Adaptive` does.

    Raises:
      ValueError: an option that this decoder does not have.
    """
    knobs = decoder.Knobs() if knobs is None else knobs
    values = dict(options or {})
    if isinstance(decoder, Adaptive) and "recurrence" in values:
        values["max_recurrence"] = values.pop("recurrence")
    static = {field.name for field in dataclasses.fields(decoder)}
    traced = {field.name for field in dataclasses.fields(knobs)}
    for option in values.keys() - static - traced:
        raise ValueError(f"--{option.replace('_', '-')} is no option of --decoder {name}")
    if "width" in values and "buckets" in static:
        values["buckets"] = tuple(b for b in decoder.buckets if b < values["width"])
    values["greedy"] = not np.any(np.asarray(values.get("temperature", knobs.temperature)) > 0)
    decoder = dataclasses.replace(decoder, **{k: v for k, v in values.items() if k in static})
    return decoder, dataclasses.replace(knobs, **{k: v for k, v in values.items() if k in traced})
