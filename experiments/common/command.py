"""How scripts are run, and runs that go on in their folder."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import tyro

from paradec_jax.io import atomic_write_text, one_sentence
from paradec_jax.train import NoneReadable, NonFiniteLoss
from paradec_jax.train.processes import VARIABLES, leave


def run(main: Callable[..., Any]) -> None:
    """Runs `main` with the command line; programs are kept in the checkout, user errors are one
    sentence.

    Options of `main` may stand before the name of a recipe and after it.
    """
    jax.config.update("jax_compilation_cache_dir", str(Path(".cache/jax").resolve()))
    try:
        tyro.cli(main, config=(tyro.conf.CascadeSubcommandArgs,))
    except (ValueError, OSError, NonFiniteLoss) as error:
        leave(error)
    except NoneReadable as error:  # a line for each checkpoint
        leave(one_sentence(error))


def claim(folder: Path, recipe: Any) -> None:
    """Writes the recipe into the run's folder, or refuses a folder that another recipe has begun."""
    path, mine = folder / "recipe.json", json.loads(json.dumps(dataclasses.asdict(recipe)))
    if path.exists():
        begun = json.loads(path.read_text(encoding="utf-8"))
        differs = [name for name in mine | begun if mine.get(name) != begun.get(name)]
        if differs:
            raise SystemExit(
                f"{folder} was begun with other {', '.join(differs)}: choose another folder"
            )
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(mine, indent=2) + "\n")


def alone() -> None:
    """Refuses several processes, which would each train for themselves. Raises SystemExit."""
    count = os.environ.get(VARIABLES[1], "1")
    if count != "1":
        raise SystemExit(
            f"this command trains in one process, but was started as one of {count}: "
            "start it without the launcher"
        )
