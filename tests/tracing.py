"""Whether programs are traced, seen from outside."""

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def nothing_is_traced(kind: type) -> Iterator[None]:
    """Fails where a program of this class of decoders is traced, which alone calls `init` and
    `step`.
    """

    def refuse(*args: object, **kwargs: object):
        raise AssertionError(f"{kind.__name__} is traced again")

    with mock.patch.object(kind, "init", refuse), mock.patch.object(kind, "step", refuse):
        yield
