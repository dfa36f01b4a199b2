"""The checker of annotations that jaxtyping's import hook calls where TYPES is set."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checks what it is given and returns.

    Functions inside functions are left as they are: they are made, and would be prepared, at every
    call of the outer one. So are constructors: a pytree is rebuilt around whatever its leaves are
    mapped to (shapes, NumPy arrays, one more axis under `vmap`).
    """
    free = "<locals>" in function.__qualname__ or function.__name__ == "__init__"
    return function if free else beartype(function)
