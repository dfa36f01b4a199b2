"""What the recipes do beside `fit` where a run has several processes, and how others refuse them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.common.command import claim
from paradec_jax.objectives.folder import wait_for_all
from paradec_jax.sharding.processes import gathered, shared
from paradec_jax.train.processes import VARIABLES, all_or_none


def claim_together(folder: Path, recipe: Any, allow: Sequence[str] = ()) -> None:
    """As `claim`, by process 0; a folder of another recipe is refused on all.

    Raises:
      SystemExit: that folder, of one process.
      ValueError: that folder, of several.
    """
    if jax.process_count() == 1:
        return claim(folder, recipe, allow)
    with all_or_none():
        if jax.process_index() == 0:
            try:
                claim(folder, recipe, allow)
            except SystemExit as error:
                raise ValueError(str(error)) from None
    return None


def on_this(tree: Any) -> Any:
    """Arrays of several processes whole on one device of this one, for what each process computes
    alone.
    """
    return jax.tree.map(lambda x: x.addressable_data(0) if shared(x) else x, gathered(tree))


def by_first(what: str, work: Callable[[], Any]) -> None:
    """Work that process 0 does alone while the others wait; `what` is a name that a run uses once.

    Raises:
      Exception: what the work raises; in the others, and of several processes for SystemExit,
        OSError or ValueError.
    """
    with all_or_none():
        try:
            if jax.process_index() == 0:
                work()
        except SystemExit as error:
            if jax.process_count() == 1:
                raise
            raise ValueError(str(error)) from None
        finally:
            wait_for_all(what)


def alone() -> None:
    """Refuses several processes, which would each train for themselves. Raises SystemExit."""
    count = os.environ.get(VARIABLES[1], "1")
    if count != "1":
        raise SystemExit(
            f"this command trains in one process, but was started as one of {count}: start it without the launcher"
        )
