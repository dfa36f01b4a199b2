"""Models that come with the package or with a checkout of its repository, by their bare names."""

import os
from pathlib import Path

from paradec_jax.disk.folders import StoreError

ASSETS = Path(__file__).parents[1] / "assets"
CHECKOUT = Path(__file__).parents[2] / "experiments"  # a folder a paper, some with `assets`
ONLY_IN_CHECKOUT = (
    "tiny-recurrent",
    "tiny-rival",
    "tiny-sdar-next",
)


def locate(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, or the bundled model of that bare name where no such folder exists.

    Raises:
      StoreError: when there is neither.
    """
    path = Path(folder)
    if path.is_dir():
        return path
    if path.exists():
        raise StoreError(f"{path} is a file; a model is a folder")
    if path.name == str(folder):
        for bundled in _bundled():
            if bundled.name == path.name:
                return bundled
        if path.name in ONLY_IN_CHECKOUT:
            raise StoreError(
                f"model {path} is not installed with the package; it lies in experiments/*/assets of the repository"
            )
    found = ", ".join(sorted(bundled.name for bundled in _bundled())) or "none"
    raise StoreError(f"there is no model folder {path}, and no bundled model of that name (bundled: {found})")


def is_bundled(name: str) -> bool:
    """Whether a bundled model of this name is here; a wheel has fewer than a checkout."""
    return any(path.name == name for path in _bundled())


def _bundled() -> list[Path]:
    """The folders of bundled models, those of the package first."""
    files = [*ASSETS.glob("*/config.json"), *CHECKOUT.glob("*/assets/*/config.json")]
    return [file.parent for file in files]
