"""`paradec train sdtt` on a tiny denoiser: rounds, each student on disk, and what texts of few
steps are worth.
"""

import jax
import numpy as np
import pytest
from commands import ran, words

import paradec_jax as pd
from paradec_jax.cli import main


@pytest.mark.slow
def test_the_student_of_each_round_is_kept_and_the_last_is_the_model(source, tmp_path):
    last = ran(source, tmp_path, updates=3, objective="sdtt")
    first, second, made = (
        pd.load(tmp_path / name) for name in ("round-0/model", "round-1/model", "model")
    )
    jax.tree.map(np.testing.assert_array_equal, dict(second.params), dict(made.params))
    assert made.decoder == "masked --steps 2"
    assert not np.array_equal(first.params["embedding"], second.params["embedding"])
    assert (
        last["before"].keys()
        == last["after"].keys()
        > {"nats of texts of 2 steps at the start, at most"}
    )


REFUSED = [
    (("--rounds", 4), "--first-steps must be at least jump^rounds, 2 to the power of 4, not 8"),
    (("--packed",), "packed is no option of sdtt"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refusals(source, options, reason, tmp_path, capsys):
    assert main(words(source, tmp_path / "run", *options, objective="sdtt")) == 1
    assert reason in capsys.readouterr().err and not (tmp_path / "run").exists()
