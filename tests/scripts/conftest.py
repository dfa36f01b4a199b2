"""Models for the scripts."""

import pytest
import toys as made


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    return made.make(tmp_path_factory.mktemp("toys"))
