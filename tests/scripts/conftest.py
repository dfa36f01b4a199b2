"""The mark of this folder, and models for the scripts."""

import dataclasses
from pathlib import Path

import jax
import pytest

from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.data import build_tokenizer, token_spec
from paradec_jax.families import init_params
from paradec_jax.store import Model, save

CONFIG = dataclasses.replace(CAUSAL_PRESETS["test-causal"], vocab_size=384, max_length=256)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A script runs as a whole, at toy size: every test of this folder is slow."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders of random weights, one shape."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("before", "after")):
        params = jax.tree.map(lambda x: 2 * x, init_params(CONFIG, jax.random.key(seed)))
        save(folder / name, Model(CONFIG, params, token_spec(), build_tokenizer()))
    return str(folder / "before"), str(folder / "after")
