"""`paradec train recurrent` on a tiny model of random weights."""

import pytest
from commands import ran, refused, words

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.losses import exponential
from paradec_jax.objectives import recurrent


@pytest.mark.slow
def test_the_mean_of_the_draws_grows(source, tmp_path, monkeypatch):
    means = []
    monkeypatch.setitem(
        recurrent.DRAWS, "exponential", lambda mean: means.append(mean) or exponential(mean)
    )
    options = ("--mean", 3, "--backprop-depth", 1, "--draw", "exponential")
    assert main(words(source, tmp_path, *options, objective="recurrent", updates=8)) == 0
    assert [float(means[0](step)) for step in (0, 4, 8)] == [1, 2, 3]
    assert pd.load(tmp_path / "model").decoder == "autoregressive --recurrence 3"


@pytest.mark.slow
def test_what_a_run_gains_is_measured(source, tmp_path):
    last = ran(source, tmp_path, objective="recurrent")
    assert last["after"]["nats a token"] < last["before"]["nats a token"]
    assert last["after"].keys() == {"nats a token", "tokens a call", "equal to one by one"}
    assert len(pd.generate(pd.load(tmp_path / "model"), ["x 1 "], max_new_tokens=4).text) == 1


def test_a_mean_of_none_is_refused(source, tmp_path, capsys):
    assert refused(source, tmp_path, "--mean", 0, objective="recurrent")
    assert "--mean must be at least 0.001, not 0.0" in capsys.readouterr().err
