"""The recipe of residual heads at toy size: in one go and in pieces, what it writes and judges, what it refuses."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.block_diffusion import train, train_head
from experiments.tasks import Followers
from paradec_jax import load, store
from paradec_jax.config import ResidualHeadConfig
from paradec_jax.models import ResidualHeadNetwork
from paradec_jax.models.residual_head import init_params

LAW = Followers(symbols=5, length=12)
CHAIN = {"ground": "chains", "law": LAW, "prompt": 4, "batch_tokens": 24, "matmul_precision": "highest"}
BACKBONE = train.Recipe(name="chain", init=None, preset="test-sdar", layers=1, blocks=(4,), **CHAIN)
RECIPE = train_head.Recipe(name="head", layers=1, init="inherited", steps=3, warmup=1, ema_decay=0.9, **CHAIN)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of a backbone of random weights."""
    folder = tmp_path_factory.mktemp("backbone") / "model"
    model = train.untrained(BACKBONE, BACKBONE.source())
    params = jax.tree.map(lambda x: 2 * x, dict(model.params))
    store.save(folder, dataclasses.replace(model, params=params))
    return folder


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The folder of a run that was not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train_head.main(RECIPE, str(start), folder, folder / "half")
    return folder


def test_a_head_lies_beside_its_backbone(whole, start):
    model, backbone, half = load(whole / "model"), load(start), load(whole / "half")
    jax.tree.map(np.testing.assert_array_equal, model.params, backbone.params)
    assert (model.config, model.token_spec) == (backbone.config, backbone.token_spec)
    assert model.head.backbone == store.fingerprint(start)
    assert model.head.config == ResidualHeadConfig.of(model.config, 1)
    assert np.any(model.head.params["final_norm"]) and not np.any(model.head.params["final_norm"] == 1)
    for of_head, of_backbone in zip(
        jax.tree.leaves(model.head.params["layer_0"]), jax.tree.leaves(model.params["layer_0"]), strict=True
    ):
        np.testing.assert_allclose(of_head, of_backbone, atol=0.02)  # it began as that, three updates ago
    assert {x.dtype for x in jax.tree.leaves((half.params, half.head.params))} == {np.dtype("bfloat16")}


def test_what_is_logged_and_judged(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert any({"kl", "uncorrected_kl", "kl_ratio", "agreement"} <= line.keys() for line in lines)
    judged = lines[-2]  # the last line sums the seconds up
    assert {"eval/kl_ratio", "eval/kl_ratio_1", "eval/kl_ratio_2"} <= judged.keys()
    found = json.loads((whole / "held_out.json").read_text())
    assert found["kl_ratio"] == pytest.approx(found["kl"] / found["uncorrected_kl"])
    assert found["rules"]["unroll"] == 2 and found["matmul_precision"] == "highest"


def test_a_head_that_adds_nothing_is_judged_to_be_none(start):
    model = load(start)
    head = ResidualHeadNetwork(ResidualHeadConfig.of(model.config, 1))
    judge = train_head.Judge(model, head, RECIPE.rules(), RECIPE.source(), 48, 2).of()
    found = judge(init_params(head.config, jax.random.key(0)))
    assert found["kl"] == pytest.approx(found["uncorrected_kl"], abs=1e-6) and found["kl"] > 0
    assert [found[name] for name in ("kl_ratio", "kl_ratio_1", "kl_ratio_2")] == pytest.approx(
        [1] * 3, abs=1e-4
    )
    assert found["agreement"] == found["uncorrected_agreement"]


def test_a_run_that_was_stopped_goes_on(whole, start, tmp_path):
    train_head.main(RECIPE, str(start), tmp_path, minutes=0.0)
    assert (tmp_path / "checkpoints" / "1").exists() and not (tmp_path / "model").exists()
    train_head.main(RECIPE, str(start), tmp_path)
    one, other = (load(folder / "model").head.params for folder in (tmp_path, whole))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert store.fingerprint(tmp_path / "model") == store.fingerprint(whole / "model")
    with pytest.raises(SystemExit, match="was begun with other seed"):
        train_head.main(dataclasses.replace(RECIPE, seed=1), str(start), tmp_path)


def test_a_run_keeps_its_backbone(whole, start, tmp_path):
    model = load(start)
    moved = jax.tree.map(lambda x: x + 1, dict(model.params))
    store.save(tmp_path / "other", dataclasses.replace(model, params=moved))
    with pytest.raises(SystemExit, match="was begun with other backbone"):
        train_head.main(RECIPE, str(tmp_path / "other"), whole)
    bound = dataclasses.replace(RECIPE, backbone="0" * 64)
    with pytest.raises(SystemExit, match=r"head is for the backbone 0{64}, not "):
        train_head.main(bound, str(start), tmp_path / "run")


def test_what_has_no_head_is_refused(start, tmp_path):
    with pytest.raises(SystemExit, match="is of family causal; a residual head needs a backbone of block"):
        train_head.main(RECIPE, "tiny-causal", tmp_path / "run")
    words = dataclasses.replace(RECIPE, ground="words")
    with pytest.raises(SystemExit, match="has other tokens than the ground"):
        train_head.main(words, str(start), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"warmup": 3000}, "warmup must be from 0 to below steps"),
        ({"cooldown": 2.0}, "cooldown must be a share"),
        ({"unroll": 0}, "unroll must be at least 1"),
        ({"noise": "row"}, "kind of noise must be one of"),
    ],
)
def test_what_is_no_recipe_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        train_head.Recipe(**wrong)


def test_every_recipe_names_itself_and_its_rules():
    for name, recipe in train_head.RECIPES.items():
        assert recipe.name == name and recipe.rules().unroll == recipe.unroll
        assert recipe.source().text()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_rates(kind):
    """The first update moves every parameter that has a gradient; AdamW's rate ends at a tenth of its peak."""
    recipe = dataclasses.replace(
        RECIPE, optimizer=kind, steps=20, warmup=4, learning_rate=0.1, adam_learning_rate=0.1
    )
    config = ResidualHeadConfig.of(train.shape_of(BACKBONE, BACKBONE.source()), 1)
    params = init_params(config, jax.random.key(0), "ordinary")
    optimizer = train_head.adamw_of(recipe) if kind == "adamw" else train_head.optimizer_of(recipe, config)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    gradient, sizes = jax.tree.map(jnp.ones_like, params), []
    for _ in range(recipe.steps):
        updates, state = update(gradient, state, params)
        assert all(np.any(leaf) for leaf in jax.tree.leaves(updates))
        sizes.append(float(jnp.abs(updates["final_norm"]).max()))
    assert np.argmax(sizes) in range(3, 12) and sizes[0] < sizes[3]
    if kind == "adamw":
        assert max(sizes) == pytest.approx(0.1, rel=0.05) and sizes[-1] == pytest.approx(0.01, rel=0.5)
