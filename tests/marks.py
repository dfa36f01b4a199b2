"""Marks of parametrised tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Values of a test that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def over(names: Iterable[Any], seldom: Collection[Any] = (), argument: str = "name") -> Any:
    """A test of each of these names, slow for those that are tested seldom.

    Args:
      argument: what the test calls a name, or the parts of one ("name, kind").
    """
    return pytest.mark.parametrize(
        argument, [slow(name) if name in seldom else name for name in names]
    )
