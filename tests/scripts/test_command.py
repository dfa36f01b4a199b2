"""How scripts end where their user, their data or their files are wrong."""

import sys

import jax
import pytest

from experiments.common.command import run
from paradec_jax.train import NoneReadable, NonFiniteLoss

UNREADABLE = NoneReadable(
    "none of the checkpoints in runs/a can be read:\n/runs/a/8: OSError: cut\n/runs/a/4: cut"
)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("no such recipe"), "no such recipe"),
        (
            NonFiniteLoss(7, float("nan"), float("inf"), None),
            "update 7 had loss nan and gradient norm inf and was not applied; there is no checkpoint",
        ),
        (UNREADABLE, " ".join(str(UNREADABLE).split())),
    ],
    ids=["user", "loss", "checkpoints"],
)
def test_what_goes_wrong_is_one_sentence(error, sentence, monkeypatch):
    def main() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # where programs are kept
    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == sentence  # printed, and code 1


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def main() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(RuntimeError, match="a bug"):
        run(main)
