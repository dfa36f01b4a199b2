"""Recorded arrays of multi-token residual prediction: the head's outputs, Algorithm 1, the size of
residuals.

`recorded_block_diffusion` says where they lie; cases and sizes are read from them.
"""

import dataclasses
import functools
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from reading import read
from recorded import assert_gradients, equal, exported, graded, near, part_of
from recorded_block_diffusion import arrays, assert_close, head, model

from experiments.block_diffusion.magnitudes import magnitudes, read_states
from paradec_jax.convert import mrp
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.losses import ResidualRules, residual_loss
from paradec_jax.losses.residual import Unrolling, lengths_of, noised

RESIDUAL, LOGITS, LOSS, GRADIENT = 5e-5, 2e-4, 1e-4, 5e-4
CASES = sorted({key.partition(".")[0] for key in arrays("mrp_loss")})


# The module


@functools.partial(jax.jit, static_argnums=(0, 1))
def call(backbone, network, frozen, params, tokens, positions, hidden, prefix):
    """The residual, its logits and those of the sum, and the keys and values."""
    vectors = backbone.embedding(frozen)[tokens]
    out = network.forward(params, vectors, positions, prefix, hidden=hidden)
    return (
        out.hidden,
        backbone.logits(frozen, out.hidden),
        backbone.logits(frozen, hidden + out.hidden),
        out,
    )


def call_of(tokens, hidden, start: int, prefix=None, prepared: bool = False):
    """As `call`, of one row of the recorded model."""
    (backbone, frozen, _), (network, params) = model(), head()
    tokens = jnp.asarray(tokens)[None]
    positions = start + jnp.arange(tokens.shape[1])[None]
    params = network.prepare(params) if prepared else params
    return call(
        backbone, network, frozen, params, tokens, positions, jnp.asarray(hidden)[None], prefix
    )


@cache
def context(prepared: bool = False):
    """What the head says of the prefix, and its keys and values as a cache."""
    want = arrays("mrp_forward")
    residual, *_, out = call_of(want["prefix_ids"], want["prefix_hidden"], 0, prepared=prepared)
    return residual, Prefix(out.kv, jnp.asarray([len(want["prefix_ids"])]))


def close(got, name: str) -> None:
    """What was computed of a row is the recorded array."""
    tolerance = RESIDUAL if name.endswith("residual_hidden") else LOGITS
    assert_close(got, arrays("mrp_forward")[name], tolerance)


@over([False, True], argument="prepared")
def test_the_prefix(prepared):
    want, (residual, prefix) = arrays("mrp_forward"), context(prepared)
    close(residual[0], "prefix_residual_hidden")
    for i, kv in enumerate(prefix.kv):
        assert_close(jnp.swapaxes(kv.k[0], 1, 2), want["mrp_cache_k"][i], RESIDUAL)
        assert_close(kv.v[0], want["mrp_cache_v"][i], RESIDUAL)


@over([False, True], argument="prepared")
def test_two_steps_in_a_block(prepared):
    want, (_, prefix), start = (
        arrays("mrp_forward"),
        context(prepared),
        len(arrays("mrp_forward")["prefix_ids"]),
    )
    first, logits, corrected, out = call_of(
        want["step1_ids"], want["block_hidden"], start, prefix, prepared
    )
    assert out.counts == {"head_calls": 1}
    close(first[0], "step1_residual_hidden")
    close(logits[0], "step1_residual_logits")
    close(corrected[0], "step1_corrected_logits")
    close(want["block_logits"] + logits[0], "step1_corrected_logits")
    close(want["block_hidden"] + first[0], "step2_hidden_in")
    second, _, corrected, _ = call_of(
        want["step2_ids"], want["step2_hidden_in"], start, prefix, prepared
    )
    close(second[0], "step2_residual_hidden")
    close(corrected[0], "step2_corrected_logits")


def test_a_block_without_its_prefix():
    want = arrays("mrp_forward")
    residual, *_ = call_of(want["step1_ids"], want["block_hidden"], len(want["prefix_ids"]))
    close(residual[0], "noprefix_step1_residual_hidden")


def test_what_the_backbone_says_before_the_head():
    (network, params, _), want = model(), arrays("mrp_forward")
    whole = jnp.asarray(np.concatenate([want["prefix_ids"], want["block_ids_backbone"]]))[None]
    hidden, size = read(network, params, whole)[1][0], len(want["prefix_ids"])
    close(hidden[:size], "prefix_hidden")
    close(hidden[size:], "block_hidden")
    close(network.logits(params, hidden[size:]), "block_logits")


def test_the_released_initialisation():
    """Every parameter has the spread of the recorded first values of each tensor, gains of norms
    too.
    """
    network, params = head()
    first = arrays("mrp_forward")["init_std_0p2_first_values"]
    leaves = jax.tree.leaves(network.init_params(network.config, jax.random.key(0), "normal_0.2"))
    assert len(first) == 8 * len(leaves) == 8 * len(jax.tree.leaves(params))
    for values in (first, *leaves):
        error = 4 / np.sqrt(2 * values.size)  # of a standard deviation, as a share of it
        assert abs(np.std(values) / 0.2 - 1) < error and abs(np.mean(values)) < 0.8 / np.sqrt(
            values.size
        )


# Algorithm 1


every_case = over(CASES)


@cache
def case_of(name: str) -> dict[str, np.ndarray]:
    return part_of(arrays("mrp_loss"), f"{name}.")


def rules_of(name: str) -> ResidualRules:
    steps = {int(key[1]) for key in case_of(name) if re.match(r"s\d\.", key)}
    return ResidualRules(
        unroll=len(steps),
        normaliser="official",
        direct="direct" in name,
        layout="infer_matched" if "_im_" in name else "doubled",
    )


def noisy_of(name: str, array: np.ndarray) -> np.ndarray:
    """The noisy half of an array [B, T, ...] of the doubled layout."""
    rules = rules_of(name)
    return array if rules.layout == "infer_matched" else array[:, : array.shape[1] // 2]


def batch_of(name: str) -> dict[str, jax.Array]:
    """The batch with its recorded noise and reveals.

    The files tell how many tokens are labelled, not which: hidden ones, and of the others the last
    ones.
    """
    case = case_of(name)
    tokens, hidden = (noisy_of(name, case[key]) for key in ("labels", "masked"))
    missing = int(case["answer_len"]) - hidden.sum()
    labelled = hidden.copy()
    labelled.flat[np.flatnonzero(~hidden)[::-1][:missing]] = True
    reveals = [noisy_of(name, case[f"s{k}.reveal"]) for k in range(1, rules_of(name).unroll + 1)]
    found = {
        "tokens": tokens,
        "labelled": labelled,
        "positions": noisy_of(name, case["positions"]),
        "hidden": hidden,
        "probability": noisy_of(name, case["p_mask"]),
        "reveals": np.stack(reveals, axis=1),
    }
    return {key: jnp.asarray(value) for key, value in found.items()}


@cache
def unrolled_by(rules: ResidualRules):
    (backbone, _, spec), (network, _) = model(), head()
    lengths = lengths_of(backbone, rules.blocks)

    @jax.jit
    def run(params, frozen, batch):
        texts = noised(batch, jax.random.key(0), lengths, rules.noise, spec.alignment)
        unrolling = Unrolling(backbone, network, spec, rules, None, frozen, texts)
        steps = unrolling.unroll(params, batch["reveals"])
        values, found = unrolling.judge(steps)
        losses = {
            name: dataclasses.replace(unrolling, rules=dataclasses.replace(rules, normaliser=name))
            .weigh(steps.still, values)
            .mean
            for name in ("selfnorm", "official", "mean")
        }
        direct = dataclasses.replace(unrolling, rules=dataclasses.replace(rules, direct=True))
        before = direct.judge(steps._replace(residual=steps.base))[1]["kl"]
        return steps, values, found, before, losses

    return run


@cache
def unrolled(name: str):
    return unrolled_by(rules_of(name))(head()[1], model()[1], batch_of(name))


def both(name: str, streams) -> np.ndarray:
    """Vectors as the files hold them."""
    if rules_of(name).layout == "infer_matched":
        return np.asarray(streams.noisy)
    return np.concatenate([streams.noisy, streams.clean], axis=1)


@every_case
def test_steps(name):
    case, (steps, *_) = case_of(name), unrolled(name)
    if "hidden_A" in case:
        assert_close(both(name, steps.start), case["hidden_A"], LOGITS)
    for k in range(1, rules_of(name).unroll + 1):
        equal(steps.tokens[k - 1], noisy_of(name, case[f"s{k}.ids"]))
        equal(steps.still[k - 1], noisy_of(name, case[f"s{k}.still_masked"]))
        base, residual = (jax.tree.map(lambda x: x[k - 1], t) for t in (steps.base, steps.residual))  # noqa: B023
        taught = steps.start._replace(noisy=steps.taught[k - 1])
        for key, streams in (("in", base), ("residual", residual), ("teacher", taught)):
            if f"s{k}.hidden_{key}" in case:
                assert_close(both(name, streams), case[f"s{k}.hidden_{key}"], LOGITS)


@every_case
def test_divergences(name):
    case, (steps, values, found, before, _) = case_of(name), unrolled(name)
    without = found["uncorrected_kl"] if rules_of(name).direct else before
    for k in range(1, rules_of(name).unroll + 1):
        still = np.asarray(steps.still[k - 1])
        for key, got in (("kl", values), ("kl", found["kl"]), ("kl_no_residual", without)):
            want = noisy_of(name, case[f"s{k}.{key}"])
            assert_close(np.where(still, got[k - 1], 0), want, LOGITS)


@every_case
def test_three_normalisers(name):
    case, (*_, losses) = case_of(name), unrolled(name)
    for kind, got in losses.items():
        want = [case[f"s{k}.loss_{kind}"] for k in range(1, len(got) + 1)]
        near(got, want, rtol=LOSS)
        near(np.mean(got), case[f"loss_{kind}"], rtol=LOSS)


def test_a_denominator_is_negative():
    assert any(case_of(name)["s1.answer_len_corrected"] < 0 for name in CASES)


@cache
def objective_of(rules: ResidualRules):
    (backbone, _, spec), (network, _) = model(), head()
    return residual_loss(backbone, network, spec, rules, chunk=5)


@every_case
def test_gradients(name):
    case, (network, params) = case_of(name), head()
    objective = objective_of(rules_of(name))
    loss, metrics, grads = graded(objective, params, model()[1], batch_of(name))
    near(loss, case["loss_official"], rtol=LOSS)
    assert metrics["kl_ratio"] == pytest.approx(float(metrics["kl"] / metrics["uncorrected_kl"]))
    assert_gradients(exported(mrp, network.config, grads), case, GRADIENT)


def test_sizes_of_residuals():
    want, (network, params, _) = arrays("residual"), model()
    hidden = read_states(network, params, arrays("decode")["prompt.p_aligned"], want["states"])
    assert_close(hidden, want["hidden"], LOGITS)
    logits = network.logits(params, jnp.asarray(hidden))
    assert logits.shape == tuple(want["logits_shape"])
    for name, features in (("hidden", want["hidden"]), ("logits", np.asarray(logits))):
        found = magnitudes(features)
        near(found.residual, want[f"{name}_residual_rms"], rtol=LOSS)
        near(found.reference, want[f"{name}_reference_rms"], rtol=LOSS)


def test_every_recorded_array_is_compared():
    read = {
        "hidden",
        "states",
        "logits_shape",
        *(
            f"{name}_{kind}_rms"
            for name in ("hidden", "logits")
            for kind in ("residual", "reference")
        ),
    }
    assert arrays("residual").keys() == read
    parts = r"ids|positions|mask|masked|p_mask|labels|answer_len|hidden_A|(s\d\.)?loss_\w+|grad(norm)?\..*"
    of_step = r"s\d\.(reveal|ids|still_masked|kl|kl_no_residual|answer_len_corrected|hidden_\w+)"
    for name in CASES:
        assert all(re.fullmatch(f"{parts}|{of_step}", key) for key in case_of(name)), name
