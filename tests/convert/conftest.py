"""Folders in the form of Hugging Face, as the converter writes them."""

import functools
import shutil
from pathlib import Path

import exports
import pytest


@pytest.fixture(scope="package")
def folders(tmp_path_factory) -> Path:
    """FAMILY/model and FAMILY/exported of each family, with random weights."""
    root = tmp_path_factory.mktemp("convert")
    for name in exports.FAMILIES:
        exports.exported(exports.make_model(name), root / name)
    return root


@pytest.fixture
def copy(folders, tmp_path):
    """Copies an exported folder, to be changed."""
    return lambda name: Path(shutil.copytree(folders / name / "exported", tmp_path / "source"))


@pytest.fixture
def refused(capsys):
    """Imports a folder, which must fail with the sentence that this returns."""
    return functools.partial(exports.fails, capsys, "import")
