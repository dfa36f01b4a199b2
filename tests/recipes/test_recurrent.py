"""`paradec train recurrent` on a tiny model of random weights."""

import json

import pytest
from commands import ran, words

import paradec_jax as pd
from paradec_jax.cli import main


def test_the_mean_of_the_draws_grows(source, tmp_path):
    options = ("--mean", 40, "--first-mean", 1, "--growth", 0.5, 0.51, "--backprop-depth", 1)
    last = ran(source, tmp_path, *options, "--draw", "exponential", objective="recurrent", updates=60)
    assert last["after"]["nats a token"] < last["before"]["nats a token"]
    assert last["after"].keys() == {"nats a token", "tokens a call", "equal to one by one"}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[:-1]]
    first, *_, late = (line["recurrence"] for line in lines)
    assert first < 3 and late > 10
    assert len(pd.generate(pd.load(tmp_path / "model"), ["x 1 "], max_new_tokens=4).text) == 1


REFUSED = [
    (("--packed",), "packed is no option of recurrent"),
    (("--growth", 0.5, 0.5), "growth must be two"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refusals(source, options, reason, tmp_path, capsys):
    try:
        code = main(words(source, tmp_path, *options, objective="recurrent"))
    except SystemExit as ended:
        code = ended.code
    assert code and reason in capsys.readouterr().err
