"""The rows of the tables that compare decoders. They stand here and nowhere else."""

import dataclasses
import math
from typing import Any

import numpy as np

from paradec_jax.decode import (
    Adaptive,
    AutoRegressive,
    Jacobi,
    Lookahead,
    MultiBlock,
    PromptLookup,
    SelfSpeculative,
    Wavefront,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """One row of the table.

    Attributes:
      name: the decoder, as on the command line.
      decoder: unbound.
      knobs: its knobs, or None for the defaults.
      baseline: whether speed-ups, equal tokens and paired differences refer to this row (one setting only).
      half: the same decoder with half the recurrences a step. It is only timed: the slope between the two is
        the cost of one pass of the core.
      cache: what the network keeps of a position, see the network; its own choice when None.
    """

    name: str
    decoder: Any
    knobs: Any = None
    baseline: bool = False
    half: Any = None
    cache: str | None = None

    def settings(self) -> dict[str, Any]:
        """Every choice of the decoder and its knobs, for JSON."""
        knobs = self.decoder.Knobs() if self.knobs is None else self.knobs
        technical = ("network", "size", "pad", "log_probs", "greedy", "bounded")
        kept = {} if self.cache is None else {"cache": self.cache}
        return fields_of(self.decoder, technical) | fields_of(knobs, ()) | kept

    @property
    def sampled(self) -> bool:
        """Whether any row has a temperature above 0."""
        return self.knobs is not None and bool(np.any(np.asarray(self.knobs.temperature) > 0))

    def label(self) -> str:
        """The size of a block and the choices that are not the defaults, in short."""
        defaults = Setting(self.name, type(self.decoder)()).settings()
        changed = {
            name: value
            for name, value in self.settings().items()
            if name == "block" or value != defaults.get(name)
        }
        return ", ".join(
            f"{_SHORT.get(name, name)} {f'{value:g}' if isinstance(value, float) else value}"
            for name, value in changed.items()
        )


_SHORT = {
    "recurrence": "r",
    "draft_recurrence": "draft r",
    "lookahead": "drafts",
    "inner_recurrence": "inner r",
    "prefill_recurrence": "prefill r",
    "exit_threshold": "exit",
}

_Wave = Wavefront.Knobs
EVERY_STEP = 1e9  # an exit threshold that every position meets


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
    return None if math.isnan(number) else number


SETTINGS: dict[str, tuple[Setting, ...]] = {
    "recurrent_depth": (
        Setting("autoregressive", AutoRegressive(recurrence=1)),
        Setting("autoregressive", AutoRegressive(recurrence=2)),
        Setting("autoregressive", AutoRegressive(recurrence=4)),
        Setting(
            "autoregressive", AutoRegressive(recurrence=16), baseline=True, half=AutoRegressive(recurrence=8)
        ),
        Setting("adaptive", Adaptive(), Adaptive.Knobs(exit_threshold=0.2)),
        Setting("speculative", SelfSpeculative(recurrence=4, draft_recurrence=1, lookahead=4)),
        Setting(
            "wavefront",
            Wavefront(inner_recurrence=16, width=1),
            _Wave(exit_threshold=EVERY_STEP, momentum=0.0),
            half=Wavefront(inner_recurrence=8, width=1),
        ),
        Setting(
            "wavefront",
            Wavefront(inner_recurrence=1, width=8, headway=8, carry=False, prefill_recurrence=1),
            _Wave(exit_threshold=EVERY_STEP, momentum=0.0),
        ),
        Setting(
            "wavefront",
            Wavefront(inner_recurrence=1, width=2, prefill_recurrence=4),
            _Wave(exit_threshold=0.4, momentum=0.0),
        ),
        Setting(
            "wavefront",
            Wavefront(inner_recurrence=1, width=3, prefill_recurrence=4),
            _Wave(exit_threshold=0.1, momentum=0.0),
        ),
    ),
    "causal": (
        Setting("autoregressive", AutoRegressive(), baseline=True),
        Setting("prompt_lookup", PromptLookup()),
        Setting("lookahead", Lookahead()),
        Setting("jacobi", Jacobi(block=16)),
        Setting("jacobi", Jacobi(block=16, pool=4)),
        Setting("multiblock", MultiBlock(block=16, blocks=2, pool=4), MultiBlock.Knobs(spawn=0.5)),
        Setting("multiblock", MultiBlock(block=16, blocks=2, rows=4), MultiBlock.Knobs(spawn=0.0)),
        Setting("jacobi", Jacobi(block=8, running=True)),
        Setting("jacobi", Jacobi(block=16, running=True)),
        Setting("jacobi", Jacobi(block=16, running=True, rows=2)),
    ),
}
