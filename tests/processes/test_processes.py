"""Two processes of two simulated devices against one process."""

import jax
import numpy as np
from launched import launched
from on_processes import HALF, options_of

from paradec_jax.train import fit

CLOSE = 1e-5
DIFFERENCES = {
    "no mesh": "there are 2 processes and the parameters lie on devices of one: give mesh=make_mesh(...)",
    "mesh of its own": "the mesh has devices of 1 of 2 processes",
    "steps": "process 1 differs from process 0 in steps [2 there, 3 here]: start all with the same command",
    "log": "process 1 differs from process 0 in log_every [1 there, 2 here]",
    "data": "process 1 differs from process 0 in data:",
    "parameters": "process 1 differs from process 0 in parameters:",
    "folder": "/proc/none cannot be written",
}


def one_process(name, steps):
    """Losses and last parameters of a run on one device."""
    seen = []
    state = fit(**options_of(name, steps, None, writers=[lambda _, line: seen.append(line)]))
    return [line["loss"] for line in seen if "loss" in line], jax.tree.leaves(state.params)


def check(found, name, steps):
    losses, params = one_process(name, steps)
    np.testing.assert_allclose(found["losses"], losses, CLOSE)
    for x, y in zip(found["params"], params, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-3 * np.max(np.abs(y)))


def test_a_run_of_two_processes_is_that_of_one_and_differences_are_refused(tmp_path):
    found = launched(tmp_path, ["train", "next token", 5, HALF, None], ["refused", "next token"])
    assert found[1][0]["losses"] == [] and found[1][0]["params"] == found[0][0]["params"]
    check(found[0][0], "next token", 5)
    for _, told in found:
        assert told.keys() == DIFFERENCES.keys()
        for case, sentence in DIFFERENCES.items():
            assert sentence in told[case] and "\n" not in told[case], told[case]
    assert found[1][1]["folder"].startswith("process 0: ")
