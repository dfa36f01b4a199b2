"""Marks of parametrised tests."""

import importlib.util
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def slow(*values):
    """Values of a test that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def peers(*packages: str) -> Callable[[Any], Any]:
    """A test beside these packages, skipped where one of them is not installed."""
    there = all(map(importlib.util.find_spec, packages))
    skipped = pytest.mark.skipif(not there, reason=f"needs {', '.join(packages)}")
    return lambda test: pytest.mark.peers(skipped(test))


def over(names: Iterable[Any], seldom: Collection[Any] = (), argument: str = "name"):
    """A test of each of these names, slow for those that are tested seldom.

    Args:
      argument: what the test calls a name, or the parts of one ("name, kind").
    """
    return pytest.mark.parametrize(
        argument, [slow(name) if name in seldom else name for name in names]
    )
