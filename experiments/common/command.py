"""How scripts are run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import tyro


def run(main: Callable[..., Any]) -> None:
    """Runs `main` with the command line; programs are kept in the checkout, user errors are one sentence."""
    jax.config.update("jax_compilation_cache_dir", str(Path(".cache/jax").resolve()))
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
