"""Folders in the form of Hugging Face, as the converter writes them."""

import shutil
from pathlib import Path

import pytest
from exports import export_random


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A Hugging Face folder with random weights."""
    return export_random(tmp_path_factory.mktemp("convert"))


@pytest.fixture
def source(exported, tmp_path) -> Path:
    """A copy of it to be spoilt."""
    return Path(shutil.copytree(exported, tmp_path / "source"))
