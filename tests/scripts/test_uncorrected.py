"""What a head has to learn from: shares by hand, and means that are those of the training's own metrics."""

import dataclasses

import jax
import numpy as np
import pytest
from experiment import read

from experiments.block_diffusion import train, train_head, uncorrected
from paradec_jax import store
from paradec_jax.config import ResidualHeadConfig
from paradec_jax.losses import residual_loss
from paradec_jax.models import ResidualHeadNetwork
from paradec_jax.models.residual_head import init_params

RECIPE = train.Recipe(name="chain", ground="chains", init=None, preset="test-sdar", layers=1, blocks=(4,))
TOKENS = 128


def test_how_divergences_lie():
    found = uncorrected.spread(np.array([0.0, 0.05, 0.3, 0.65, 2.0]))
    assert found == {
        "positions": 5,
        "mean": pytest.approx(0.6),
        "above_0.1": pytest.approx(0.6),
        "above_1": pytest.approx(0.2),
        "of_sum_above_0.5": pytest.approx(2.65 / 3),
    }


def test_the_script(tmp_path, capsys):
    model = train.untrained(RECIPE, RECIPE.source())
    model = dataclasses.replace(model, params=jax.tree.map(lambda x: 2 * x, dict(model.params)))
    store.save(tmp_path / "model", model)
    options = uncorrected.Options(
        str(tmp_path / "model"),
        recipes=("chains-counts",),
        batches=1,
        batch_tokens=TOKENS,
        seed=3,
        out=tmp_path / "rows.json",
    )
    uncorrected.main(options)
    result, table = read(options.out)
    assert [(row["recipe"], row["step"]) for row in result["rows"]] == [
        (name, step) for name in options.recipes for step in (1, 2)
    ]
    assert len(table) == 2 and result["model_sha256"] == store.fingerprint(tmp_path / "model")
    assert "chains-counts" in capsys.readouterr().out
    head = ResidualHeadNetwork(ResidualHeadConfig.of(model.config, 1))
    zero = init_params(head.config, jax.random.key(0), "zero_gain")
    for name in options.recipes:
        recipe = train_head.RECIPES[name]
        loss = jax.jit(residual_loss(model.network, head, model.token_spec, recipe.rules()))
        batch = recipe.source().held_out(TOKENS, 4)(0)
        _, want = loss(zero, model.params, batch, jax.random.fold_in(jax.random.key(3), 0))
        rows = [row for row in result["rows"] if row["recipe"] == name]
        mean = np.average([row["mean"] for row in rows], weights=[row["positions"] for row in rows])
        assert mean > 1e-3
        np.testing.assert_allclose(mean, want["uncorrected_kl"], rtol=1e-5)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"recipes": ("none-such",)}, "no recipe none-such: choose of tiny-head"),
        ({"recipes": ("tiny-head", "chains-head")}, "recipes must be one or several of one ground"),
        ({"recipes": ()}, "recipes must be one or several of one ground"),
        ({"batches": 0}, "batches and batch_tokens must be at least 1"),
    ],
)
def test_bad_input_is_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        uncorrected.Options("tiny-sdar", **asked)
