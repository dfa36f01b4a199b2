"""What a study is: the settings of one table or figure, and how it is drawn."""

import dataclasses
from collections.abc import Callable, Sequence

from paradec_jax.decode import AutoRegressive, Static
from paradec_jax.decode.machine.setting import Setting


@dataclasses.dataclass(frozen=True)
class Depth:
    """The depths that settings depend on.

    Attributes:
      default: r of static decoding.
      needed: recurrences after which the slowest tokens of a model have settled at the tightest
        threshold.
    """

    default: int
    needed: int = 6

    def width(self, inner: int) -> int:
        """Slots that a wave of r' fills, with one to spare."""
        return max(3, self.needed // inner + 2)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths up to a little more than a wave of r' = 1 fills."""
        return tuple(w for w in (1, 2, 3, 4, 6, 8, 12, 16, 24) if w <= self.needed + 3)


@dataclasses.dataclass(frozen=True)
class Study:
    """One table or figure.

    Attributes:
      title: what it shows.
      others: the settings beside static decoding.
      x: the choice on the horizontal axis of its picture; no picture when None.
      lines: the choices that tell lines apart, with spaces between them.
      family: of the models that it suits.
    """

    title: str
    others: Callable[[Depth], Sequence[Setting]]
    x: str | None = None
    lines: str = ""
    family: str = "recurrent_depth"

    def settings(self, depth: Depth) -> tuple[Setting, ...]:
        """The rows, static decoding at the model's default first."""
        recurrent = self.family == "recurrent_depth"
        decoder = Static(recurrence=depth.default) if recurrent else AutoRegressive()
        return (Setting("autoregressive", decoder, baseline=True), *self.others(depth))
