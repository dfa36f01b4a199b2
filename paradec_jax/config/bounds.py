"""What the numbers of a config may be, whoever wrote it."""

import numbers
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

MOST = 2**31 - 1  # sizes and positions are int32 on devices
MOST_RECURRENCES = 4096  # a call runs them one after the other
ATTENTIONS = ("dense", "blocked", "cudnn", "splash")  # backends of nn.attention
REMATS = ("none", "layer", "dots", "offload")  # of nn.remat
SMALLEST, LARGEST = 1e-37, 1e37  # normal numbers of float32, in which the network computes


def check_positive(config: Any, *names: str) -> None:
    """Refuses fields that are no positive numbers of float32. Raises ValueError."""
    for name in names:
        value = getattr(config, name)
        if not SMALLEST <= value <= LARGEST:  # false for NaN
            raise ValueError(f"{name} must be a positive number of float32, not {value}")


def check_words(owner: Any, **allowed: Iterable[str]) -> None:
    """Refuses fields that are none of their words. Raises ValueError."""
    for name, words in allowed.items():
        if getattr(owner, name) not in words:
            raise ValueError(
                f"{name} must be one of {', '.join(words)}, not {getattr(owner, name)!r}"
            )


class Ranged:
    """Options whose numbers and words are refused where the object is made (`check_numbers`,
    `check_words`).
    """

    BOUNDS: Any = {}  # noqa: RUF012  least and most by name
    WORDS: Any = {}  # noqa: RUF012  what may be said by name

    def __post_init__(self) -> None:
        check_numbers(type(self), vars(self), self.BOUNDS)
        check_words(self, **self.WORDS)


def check_numbers(
    owner: Any, values: Mapping[str, Any], bounds: Any, positions: int = MOST, within: str = ""
) -> None:
    """Refuses numbers of another kind than their annotation says, or out of range; NaN and infinity
    always.

    Where `bounds` says nothing, a whole number is at least 1, or 0 where that is the default, and
    at most `positions`, or `MOST_RECURRENCES` by its name; a seed has 64 bits. Another is from 0 to
    the largest number of float32. A tuple holds one number at least.

    Args:
      owner: class or function, whose annotations say which values are numbers, and of what kind.
      values: values by name.
      bounds: least and most by name.
      positions: positions of the model, where there is one.
      within: what stands before the names in a message.

    Raises:
      ValueError: the name, what is allowed and the value.
    """
    hints, bounds = typing.get_type_hints(owner), {"seed": (-(2**63), 2**63 - 1), **bounds}
    for name, given in values.items():
        kinds = re.findall(r"\w+", f"{hints.get(name)}")
        whole = "int" in kinds
        if not (whole or "float" in kinds) or (given is None and "None" in kinds):
            continue
        most = MOST_RECURRENCES if name.endswith("recurrence") else positions
        usual = (int(getattr(owner, name, 1) != 0), most) if whole else (0, LARGEST)
        for value in given if given and isinstance(given, tuple | list) else (given,):
            check_number(within + name, value, *bounds.get(name, usual), whole)  # type: ignore[call-arg]


def check_number(
    name: str, value: Any, least: float = 1, most: float = MOST, whole: bool = True
) -> None:
    """Refuses what is no number, or out of range. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(
        value, numbers.Integral if whole else numbers.Real
    ):
        raise ValueError(f"{name} must be a {'whole ' * whole}number, not {value!r}")
    if not least <= value <= most:  # type: ignore[operator]  # NaN too
        wanted = f"at least {least}" if value < least else f"at most {most}"
        raise ValueError(f"{name} must be {wanted}, not {value}")
