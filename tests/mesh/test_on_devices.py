"""Four simulated devices against one: training, decoding, collectives, what is refused."""

import functools

import pytest
from decoders import ROWS
from devices import on_devices
from loss_table import OBJECTIVES
from marks import over, slow

BLOCKS = {"test-causal": 2, "test-sdar": 2, "test-recurrent": 4, "test-mdlm": 2}
CLOSE = 1e-5
HALF = "fsdp x tensor"


@functools.cache
def quick():
    calls = {
        "collectives": (["test-causal"], [2, 1, 2]),
        "drivers": (HALF, []),
        "gathers": (4,),
        "stop_tests": (["jacobi"],),
        "weights": (["test-causal"],),
    }
    return dict(
        zip(calls, on_devices(*([name, *given] for name, given in calls.items())), strict=True)
    )


def answer(call, *given):
    """What a call on the devices gives; without arguments it is one of the quick ones."""
    return on_devices([call, *given])[0] if given else quick()[call]


@pytest.mark.parametrize(
    "given", [(), slow((list(BLOCKS), [2, 1, 2]))], ids=["causal", "every family"]
)
def test_a_tensor_parallel_forward_has_two_all_reduces_a_block(given):
    for name, counts in answer("collectives", *given).items():
        assert counts.pop("blocks") == BLOCKS[name]
        assert set(counts) == {"all-reduce"}, name
        assert 2 * BLOCKS[name] <= counts["all-reduce"] <= 2 * BLOCKS[name] + 2, name


def test_masters_are_cast_before_they_are_gathered_and_a_head_is_gathered_once_for_all_chunks():
    found = quick()["gathers"]
    assert "f32" not in found and found["f16"] > 2 * 7 and found["head"] == 1


def check_drivers(found):
    assert found.pop("cache") == "P('fsdp', 'tensor')" and found.pop("tokens") == "P('fsdp',)"
    assert found.pop("moved") == found.pop("compiled") == 0 and found.pop("steps") > 2
    assert all(found.values()), found


def test_run_and_stream_give_the_same_tokens_and_a_stream_compiles_once():
    check_drivers(quick()["drivers"])


@pytest.mark.parametrize("given", [(), *(slow(([name],)) for name in ROWS)], ids=["quick", *ROWS])
def test_a_loop_over_sharded_rows_has_the_all_reduces_of_its_stop_tests_alone(given):
    """All-reduces of a number or two for all rows: whether they go on, and how far what stands
    inside must go.
    """
    for name, told in answer("stop_tests", *given).items():
        assert set(told["loop"]) == {"all-reduce"}, (name, told)
        assert told["bytes"] <= 8 * told["loop"]["all-reduce"], (name, told)
        assert name != "jacobi" or told["loop"] == {"all-reduce": 1}


@pytest.mark.parametrize("given", [(), slow((list(BLOCKS),))], ids=["causal", "every family"])
def test_a_mesh_gets_its_slices(given):
    for name, one in answer("weights", *given).items():
        assert set(one) == {"same", "cast", "again"} and all(one.values()), (name, one)


@pytest.mark.slow
def test_every_driver_and_the_gradient_of_a_rollout():
    found, same, gradient = on_devices(
        ["drivers", HALF, ["trace", "rollout"]], ["serve", HALF], ["gradient", HALF]
    )
    check_drivers(found)
    assert same and gradient["difference"][0] < CLOSE, gradient


@pytest.mark.slow
def test_generate_and_load_on_a_mesh():
    (found,) = on_devices(["generate", HALF])
    assert all(found.values()), found


@pytest.mark.slow
def test_a_run_goes_on_from_mesh_to_mesh():
    (difference,) = on_devices(["resume", ["fsdp", HALF, "one", "fsdp"], 3])
    assert difference < CLOSE


@pytest.mark.slow
@over(OBJECTIVES)
def test_every_objective(name):
    (found,) = on_devices(["train", [name], ["fsdp", HALF], 20, ["sgd", "adamw", "muon"]])
    for case, told in found.items():
        assert told["moved"] == 0, "an array changed its sharding"
        assert told["compiled"] == 0, "something was compiled after the first update"
        assert told["losses"] < CLOSE and told["split"] > 0
        # What Muon leaves to Adam is divided by the size of gradients, those too that are hardly
        # more than rounding.
        assert told["params"][0] < (2e-4 if "muon" in case else CLOSE), (case, told)
        if told["k_bias"] is not None:
            assert told["k_bias"][0] < (5e-3 if "muon" in case else 2 * CLOSE), (case, told)


@pytest.mark.slow
@over(ROWS)
def test_every_decoder(name):
    by_rows, half = on_devices(["decode", [name], "fsdp"], ["decode", [name], HALF])
    assert by_rows[name]["same"] and half[name]["same"], (by_rows, half)


@pytest.mark.slow
def test_a_tpus_kernel_of_attention_on_a_mesh():
    """Each device computes its rows and heads."""
    (found,) = on_devices(["splashed", HALF])
    assert found["difference"] < CLOSE and found["lies"] == "P('fsdp', 'tensor')"
