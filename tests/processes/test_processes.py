"""Two processes of two simulated devices against one process."""

import numpy as np
import pytest
from decoders import ROWS as DECODERS
from launched import launched, said
from objectives import LENGTH, OBJECTIVES, ROWS
from on_processes import HALF, train

CLOSE = 1e-5
DIFFERENCES = {
    "no mesh": "there are 2 processes and the parameters lie on devices of one: give mesh=make_mesh(...)",
    "mesh of its own": "the mesh has devices of 1 of 2 processes",
    "steps": "process 1 differs from process 0 in steps [2 on process 0, 3 on process 1]: start all with the same",
    "log": "process 1 differs from process 0 in log_every [1 on process 0, 2 on process 1]",
    "batches": "process 1 differs from process 0 in data:",
    "parameters": "process 1 differs from process 0 in parameters:",
    "broken": "'rows'",
    "profile": "profile must be (first, last) with 1 <= first <= last, not (3, 1)",
    "folder": "/proc/none cannot be written",
}


LATER = {
    "batch": "process 1 differs from process 0 in the batch: the state of update 2 is not saved; all must train on",
    "drift": "process 1 differs from process 0 in copies of arrays: the state of update 3 is not saved; all",
    "data": "shard-1 is gone",
    "evaluation": "'problems'",
    "elsewhere": "process 1 does not see the folder of process 0: run must be one that all share",
    "nowhere": "process 1 does not see the folder of process 0: away must be one that all share",
}


def apart(found, wanted, scale=1e-30):
    """The largest difference of two runs: of losses, and of parameters over the largest number of their array."""
    sizes = np.maximum(np.abs(wanted["losses"]), scale)
    losses = np.max(np.abs(np.subtract(found["losses"], wanted["losses"])) / sizes)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(found["params"], wanted["params"], strict=True)]
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
    assert found[1][1]["folder"].startswith("process 0: ")
    assert found[0][1]["broken"] == "process 1: KeyError: 'rows'"


@pytest.mark.slow
def test_what_fails_in_one_process_later_ends_both_in_one_sentence(tmp_path):
    (mine,), (other,) = launched(tmp_path, ["refused_later", "next token", str(tmp_path)])
    for told in (mine, other):
        assert told.keys() == LATER.keys()
        for case, sentence in LATER.items():
            assert sentence in told[case] and "\n" not in told[case], (case, told)
    assert mine["data"] == "process 1: shard-1 is gone"
    assert mine["evaluation"] == "process 1: KeyError: 'problems'"
    assert all(mine[case] == other[case] for case in ("batch", "drift", "elsewhere", "nowhere"))
    saved = {
        name: [path.name for path in (tmp_path / name / "checkpoints").iterdir()] for name in ("run", "drift")
    }
    assert saved == {"run": ["1"], "drift": []}
    left = {str(path.relative_to(tmp_path)) for own in tmp_path.glob("own-*") for path in own.rglob("*")}
    assert left == {"own-0/run", "own-0/run/.holder", "own-0/away", "own-0/away/.holder", "own-1/run"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "alters"),
    [
        ("JsonCheckpointHandler", False),
        ("StandardCheckpointHandler", False),
        ("StandardCheckpointHandler", True),
    ],
)
def test_a_checkpoint_that_one_process_cannot_read_is_passed_over_by_all(tmp_path, reader, alters):
    (mine,), (other,) = launched(tmp_path, ["unreadable", str(tmp_path / "run"), reader, alters])
    assert (mine["failed"], other["failed"]) == (0, 1)
    assert len(mine["losses"]) == 2 and mine["losses"][0] == mine["before"][2]  # updates 3 and 4
    assert mine["params"] == other["params"]
    of_one = "1 arrays have other checksums" if alters else "stale file handle"
    for reason in (of_one, "another process could not read it"):
        assert f"run/checkpoints/3: OSError: {reason}" in said(tmp_path)


@pytest.mark.slow
def test_drivers_give_every_process_the_tokens_of_one(tmp_path):
    drivers = ["run", "run, by rows", "trace", "serve", "stream"]
    for drivers_found, generated in launched(tmp_path, ["decode", drivers], ["generate"]):
        assert len(drivers_found) == 5 and all(drivers_found.values()), drivers_found
        assert generated == {"plain": True, "stop": True}


TABLE = list(DECODERS)
AT_ONCE = 4  # decoders that two processes run before they end


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(TABLE), AT_ONCE))
def test_every_decoder_gives_every_process_the_tokens_of_one(tmp_path, first):
    meshes = [[1, 4, 1], list(HALF)]
    for (found,) in launched(tmp_path, ["decode_table", TABLE[first : first + AT_ONCE], meshes]):
        assert list(found) == TABLE[first : first + AT_ONCE]
        for name, told in found.items():
            assert all(told[str(mesh)] == {} for mesh in meshes), (name, told)


@pytest.mark.slow
def test_the_gradient_of_a_rollout_is_that_of_one(tmp_path):
    for (apart_by,) in launched(tmp_path, ["gradient"]):
        assert apart_by < CLOSE


@pytest.mark.slow
def test_an_export_may_be_longer_than_the_heartbeat(tmp_path):
    (mine,), (other,) = launched(tmp_path, ["export", 14.0], heartbeat=6)
    assert min(mine, other) > 13


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
