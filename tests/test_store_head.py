"""A residual head as a part of its backbone's folder: round trips, what it is known by, heads of other backbones."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import test_store
from test_store import assert_same, edit

from paradec_jax import store
from paradec_jax.config import ResidualHeadConfig, TokenSpec
from paradec_jax.families import PRESETS
from paradec_jax.store import Model, ResidualHead, StoreError

CONFIG = PRESETS["test-sdar"]
SHAPE = ResidualHeadConfig.of(CONFIG, layers=2)
SPEC = TokenSpec(bos=3, stop=(1, 2), pad=4, mask=31, alignment="own")


def drawn(config, seed=0):
    return test_store.make_model(config, seed).params


def make_model(seed=0, head=SHAPE, backbone=None) -> Model:
    part = None if head is None else ResidualHead(head, drawn(head, 7), backbone)
    return Model(CONFIG, drawn(CONFIG, seed), SPEC, head=part)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "model"
    store.save(folder, make_model())
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_load_gives_back_what_save_got(saved, tmp_path):
    model = make_model()
    again = store.load(saved)
    assert (again.config, again.head.config) == (CONFIG, SHAPE)
    assert_same(again.params, model.params)
    assert_same(again.head.params, model.head.params)
    assert again.head.network.config == SHAPE and again.network.block == again.head.network.block
    store.save(tmp_path / "again", again)
    assert store.fingerprint(tmp_path / "again") == store.fingerprint(saved)
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(store.load(saved, host=True).head.params))


def test_a_head_is_known_by_its_backbone(saved, tmp_path):
    """By the fingerprint of a folder of the backbone alone; a folder's own fingerprint counts the head."""
    store.save(tmp_path / "plain", make_model(head=None))
    assert store.load(tmp_path / "plain", host=True).head is None
    alone = store.fingerprint(tmp_path / "plain")
    assert store.load(saved).head.backbone == alone != store.fingerprint(saved)
    other = dataclasses.replace(make_model(), head=ResidualHead(SHAPE, drawn(SHAPE, 8)))
    store.save(tmp_path / "other", other)
    assert store.fingerprint(tmp_path / "other") != store.fingerprint(saved)
    store.save(tmp_path / "named", make_model(backbone=alone))
    assert store.fingerprint(tmp_path / "named") == store.fingerprint(saved)


def test_rounded_numbers_are_another_backbone(saved, tmp_path):
    """So that a head that was cast with its backbone is known by what it lies beside from then on."""
    model = store.load(saved, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves((model.params, model.head.params))} == {"bfloat16"}
    assert model.head.config.param_dtype == model.head.config.dtype == "bfloat16"
    assert model.head.backbone is None
    store.save(tmp_path / "half", model)
    assert store.load(tmp_path / "half").head.backbone not in (None, store.load(saved).head.backbone)
    assert store.load(saved, dtype="float32").head.backbone == store.load(saved).head.backbone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {"params": drawn(CONFIG, 1)}, "another backbone .fingerprint [0-9a-f]{12}. than"),
        (lambda m: {"config": dataclasses.replace(CONFIG, rope_base=5.0)}, "was trained on another backbone"),
        (
            lambda m: {"head": dataclasses.replace(m.head, config=dataclasses.replace(SHAPE, block=8))},
            "has block 8, but the backbone has 4: it is another's",
        ),
    ],
)
def test_save_refuses_the_head_of_another_backbone(saved, tmp_path, change, message):
    model = store.load(saved)
    with pytest.raises(StoreError, match=message) as caught:
        store.save(tmp_path / "new", dataclasses.replace(model, **change(model)))
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_save_refuses_what_has_no_blocks_and_parameters_that_are_wrong(tmp_path):
    causal = PRESETS["test-causal"]
    with pytest.raises(StoreError, match="writes blocks, but one of family causal does not"):
        store.save(tmp_path / "new", dataclasses.replace(make_model(), config=causal, params=drawn(causal)))
    model = make_model()
    model.head.params.pop("fusion")
    with pytest.raises(StoreError, match="parameter fusion is missing"):
        store.save(tmp_path / "new", model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: part.pop("backbone"), "was trained on another backbone .fingerprint None."),
        (lambda part: part.update(family="causal"), "must be one of residual_head, not 'causal'"),
        (lambda part: part["config"].update(layers=9), "must be 1 to 8, not 9"),
        (lambda part: part["config"].update(layers=1), "layer_1.* is there"),
        (lambda part: part["config"].update(block=2), "has block 2, but the backbone has 4"),
        (lambda part: part["sha256"].update(fusion=["0"]), "fusion differs from its digests"),
    ],
)
def test_config_that_is_wrong(copy, change, message):
    edit(copy, lambda description, _: change(description["parts"]["residual_head"]))
    with pytest.raises(StoreError, match=message) as caught:
        store.load(copy)
    assert "\n" not in str(caught.value)
