"""`paradec train recurrent` on a tiny model of random weights."""

import pytest
from commands import ran, refused

import paradec_jax as pd
from paradec_jax.losses import exponential
from paradec_jax.recipes import recurrent


def test_the_mean_of_the_draws_grows(source, tmp_path, monkeypatch):
    means = []
    monkeypatch.setitem(recurrent.DRAWS, "exponential", lambda mean: means.append(mean) or exponential(mean))
    options = ("--mean", 3, "--growth", 0.25, 0.75, "--backprop-depth", 1, "--draw", "exponential")
    last = ran(source, tmp_path, *options, objective="recurrent", updates=8)
    assert [float(means[0](step)) for step in (0, 2, 4, 6, 8)] == [1, 1, 2, 3, 3]
    assert last["after"]["nats a token"] < last["before"]["nats a token"]
    assert last["after"].keys() == {"nats a token", "tokens a call", "equal to one by one"}
    assert len(pd.generate(pd.load(tmp_path / "model"), ["x 1 "], max_new_tokens=4).text) == 1


REFUSED = [
    (("--packed",), "packed is no option of recurrent"),
    (("--growth", 0.5, 0.5), "growth must be two"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refusals(source, options, reason, tmp_path, capsys):
    assert refused(source, tmp_path, *options, objective="recurrent") and reason in capsys.readouterr().err
