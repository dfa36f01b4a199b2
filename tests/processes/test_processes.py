"""Two processes of two simulated devices against one process."""

import numpy as np
import pytest
from launched import launched
from loss_table import LENGTH, OBJECTIVES, ROWS
from on_processes import HALF, train

CLOSE = 1e-5
DIFFERENCES = {
    "no mesh": "there are 2 processes and the parameters lie on devices of one: give mesh=make_mesh(...)",
    "mesh of its own": "the mesh has devices of 1 of 2 processes",
    "steps": "process 1 differs from process 0 in steps [2 on process 0, 3 on process 1]",
    "batches": "process 1 differs from process 0 in data:",
    "parameters": "process 1 differs from process 0 in parameters:",
    "broken": "'rows'",
}


def apart(found, wanted, scale=1e-30):
    """The largest difference of two runs: of losses, and of parameters over the largest number of
    their array.
    """
    sizes = np.maximum(np.abs(wanted["losses"]), scale)
    losses = np.max(np.abs(np.subtract(found["losses"], wanted["losses"])) / sizes)
    pairs = [
        (np.asarray(x), np.asarray(y))
        for x, y in zip(found["params"], wanted["params"], strict=True)
    ]
    return losses, max(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-30) for x, y in pairs)


def test_a_run_of_two_processes_is_that_of_one_and_differences_are_refused(tmp_path):
    run = ["next token", 5, HALF, True]
    found = launched(tmp_path, ["train", *run], ["refused", "next token"])
    (mine, _), (other, _) = found
    # Its digest is that of the whole first batch.
    assert (mine["made"], other["made"]) == ([[0, 4], *[[0, 2]] * 5], [[0, 4], *[[2, 4]] * 5])
    assert other["losses"] == [] and other["params"] == mine["params"]
    np.testing.assert_allclose(mine["tokens"], ROWS * LENGTH)
    losses, params = apart(mine, train("next token", 5, None, True))
    assert losses < CLOSE and params < CLOSE
    for _, told in found:
        assert told.keys() == DIFFERENCES.keys()
        for case, sentence in DIFFERENCES.items():
            assert sentence in told[case] and "\n" not in told[case], told[case]
    assert found[0][1]["broken"] == "process 1: KeyError: 'rows'"


@pytest.mark.slow
def test_drivers_give_every_process_the_tokens_of_one(tmp_path):
    drivers = ["run", "run, by rows", "trace", "serve", "stream"]
    for (found,) in launched(tmp_path, ["decode", drivers]):
        assert len(found) == 5 and all(found.values()), found


KINDS = list(OBJECTIVES)
SOME = 4  # kinds of runs, one after the other
DIES = ("muon", "recurrent consistency")  # in gloo, see docs/meshes.md


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(KINDS), SOME))
@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [("adamw", HALF), ("muon", HALF), ("sgd", (1, 4, 1))],
    ids=["adamw", "muon", "sgd on fsdp 4"],
)
def test_every_kind_of_run_is_that_of_one_process(tmp_path, optimizer, mesh, first):
    """One process of four devices, two of two. Sums of two numbers have one order, of four several."""
    names = [name for name in KINDS[first : first + SOME] if (optimizer, name) != DIES]
    calls = {name: ["train", name, 20, mesh, False, optimizer] for name in names}
    if mesh == HALF and "self-distillation" in names:
        calls["rounds"] = ["train", "self-distillation", 20, mesh, False, optimizer, 8]
    one = launched(tmp_path / "one", *calls.values(), processes=1, devices=4)[0]
    two = launched(tmp_path / "two", *calls.values())[0]
    scales = [OBJECTIVES[name].scale for name in names] + [0.0] * ("rounds" in calls)
    found = {
        name: apart(*runs, max(scale, 1e-30))
        for name, scale, *runs in zip(calls, scales, two, one, strict=True)
    }
    assert all(max(pair) < CLOSE for pair in found.values()), found
