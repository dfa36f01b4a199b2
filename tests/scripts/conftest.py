"""The mark of this folder, and models for the scripts."""

from pathlib import Path

import pytest
import toys as made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A script runs as a whole, at toy size: every test of this folder is slow."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """A folder with all models of `toys.py`."""
    return made.make(tmp_path_factory.mktemp("toys"))
