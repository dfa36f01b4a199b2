"""Four simulated devices against one: training, decoding, collectives, what is refused."""

import functools

import pytest
from decoders import ROWS
from devices import on_devices
from objectives import OBJECTIVES

BLOCKS = {"test-causal": 2, "test-sdar": 2, "test-recurrent": 4, "test-mdlm": 2}
CLOSE = 1e-5
HALF = "fsdp x tensor"


@functools.cache
def quick():
    return on_devices(
        ["refusals"],
        ["train", ["next token"], [HALF], 5, ["adamw"]],
        ["collectives", ["test-causal"], [2, 1, 2], {}],
        ["drivers", HALF, []],
        ["layouts"],
        ["gathers", 4],
        ["stop_tests", ["jacobi"]],
        ["weights", ["test-causal"]],
        ["gathers", None],
    )


def test_explicit_axes_are_refused_in_one_sentence():
    for name, told in quick()[0].items():
        assert "are Explicit" in told and "paradec_jax.make_mesh" in told and "\n" not in told, name


def check_training(found):
    assert found.pop("moved") == 0, "an array changed its sharding"
    assert found.pop("compiled") == 0, "something was compiled after the first update"
    assert found["losses"] < CLOSE and found.pop("split") > 0
    return found


def test_a_step_compiles_once_and_moves_nothing():
    (found,) = quick()[1].values()
    check_training(found)


def check_collectives(found, of_block=2):
    for name, counts in found.items():
        assert counts.pop("blocks") == BLOCKS[name]
        assert set(counts) == {"all-reduce"}, name
        assert of_block * BLOCKS[name] <= counts["all-reduce"] <= of_block * BLOCKS[name] + 2, name


def test_a_tensor_parallel_forward_has_two_all_reduces_a_block():
    check_collectives(quick()[2])


def test_masters_are_cast_before_they_are_gathered_and_a_head_is_gathered_once_for_all_chunks():
    found = quick()[5]
    assert "f32" not in found and found["f16"] > 2 * 7 and found["head"] == 1


def test_devices_add_up_the_gradient_of_a_head_once_for_all_chunks():
    chunks, whole = quick()[5]["reduced"], quick()[8]["reduced"]
    assert 0 < chunks <= 1.01 * whole


def check_drivers(found):
    assert found.pop("cache") == "P('fsdp', 'tensor')" and found.pop("tokens") == "P('fsdp',)"
    assert found.pop("moved") == found.pop("compiled") == 0 and found.pop("steps") > 2
    assert all(found.values()), found


def test_run_and_stream_give_the_same_tokens_and_a_stream_compiles_once():
    check_drivers(quick()[3])


def test_a_layout_says_the_same_before_and_after():
    before, *after = quick()[4]
    assert after == [before] * 2 and "kv_heads 2 is not a multiple of tensor 4" in before


def check_stop_tests(found):
    """All-reduces of a number or two for all rows: whether they go on, and how far what stands inside must go."""
    for name, told in found.items():
        assert set(told["loop"]) == {"all-reduce"}, (name, told)
        assert told["bytes"] <= 8 * told["loop"]["all-reduce"], (name, told)


def test_a_loop_over_sharded_rows_has_the_all_reduce_of_its_stop_test_alone():
    found = quick()[6]
    check_stop_tests(found)
    assert found["jacobi"]["loop"] == {"all-reduce": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_loop_over_sharded_rows_has_the_all_reduces_of_its_stop_tests_alone(name):
    (found,) = on_devices(["stop_tests", [name]])
    check_stop_tests(found)


def check_weights(found):
    for name, one in found.items():
        assert one.pop("kept") == 0, name
        assert one.pop("reads") == 1, name
        assert set(one) == {"same", "cast", "again", "could be kept"} and all(one.values()), (name, one)


def test_a_mesh_gets_its_slices_each_byte_is_read_once_and_saving_keeps_no_copy():
    check_weights(quick()[7])


@pytest.mark.slow
def test_slices_of_every_family():
    check_weights(*on_devices(["weights", list(BLOCKS)]))


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
def test_collectives_of_every_family():
    (found,) = on_devices(["collectives", list(BLOCKS), [2, 1, 2], {}])
    check_collectives(found)


@pytest.mark.slow
def test_a_forward_whose_heads_do_not_divide_has_one_all_reduce_a_block():
    one = {"heads": 1}  # as Huginn's 55
    recurrent, others = on_devices(
        ["collectives", ["test-recurrent", "test-mdlm"], [2, 1, 2], one],
        ["collectives", ["test-causal", "test-sdar"], [2, 1, 2], one | {"kv_heads": 1}],
    )
    check_collectives(recurrent | others, of_block=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(name):
    (found,) = on_devices(["train", [name], ["fsdp", HALF], 20, ["sgd", "adamw", "muon"]])
    for case, told in found.items():
        check_training(told)
        # What Muon leaves to Adam is divided by the size of gradients, those too that are hardly more than rounding.
        assert told["params"][0] < (2e-4 if "muon" in case else CLOSE), (case, told)
        if told["k_bias"] is not None:
            assert told["k_bias"][0] < (5e-3 if "muon" in case else 2 * CLOSE), (case, told)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_of_every_objective(name):
    (found,) = on_devices(["accumulate", name, "fsdp"])
    assert found[0] < CLOSE, found


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_descent_on_one_device_is_stable_to_the_last_bit_of_its_beginning(name):
    """Otherwise another order of sums would say nothing of a mesh."""
    (found,) = on_devices(["jolted", name])
    assert 0 < found[0] < CLOSE, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_decoder(name):
    by_rows, half = on_devices(["decode", [name], "fsdp"], ["decode", [name], HALF])
    assert by_rows[name]["same"] and half[name]["same"], (by_rows, half)


@pytest.mark.slow
def test_a_tpus_kernel_of_attention_on_a_mesh():
    """Each device computes its rows and heads."""
    (found,) = on_devices(["splashed", HALF])
    assert found["difference"] < CLOSE and found["lies"] == "P('fsdp', 'tensor')"
