"""Recorded arrays of SDAR's training code: samples in packed rows, the doubled layout, losses,
gradients.

Cases come from the keys of train.npz; `recorded_block_diffusion` says where it lies.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from marks import over
from recorded import assert_gradients, equal, exported, graded, near, part_of
from recorded_block_diffusion import arrays, assert_close, model

from paradec_jax.convert import qwen2
from paradec_jax.losses import block_diffusion_loss
from paradec_jax.losses.block_diffusion import layout_of, masks_of, read_both
from paradec_jax.losses.cross_entropy import token_losses

LOGITS = 2e-4
LOSS = 1e-4  # relative
GRADIENT = 5e-4  # of an array's largest entry
CASES = sorted({key.partition(".")[0] for key in arrays("train")})


every_case = over(CASES)


@cache
def case_of(name: str) -> dict[str, np.ndarray]:
    return part_of(arrays("train"), f"{name}.")


def batch_of(case: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        "tokens": case["input_ids"],
        "labelled": case["labels"] >= 0,
        "positions": case["position_ids"],
        "hidden": case["masked"],
        "probability": case["p_mask"],
    }


@cache
def found_in(name: str):
    return jax.tree.map(
        np.asarray, layout_of(jnp.asarray(case_of(name)["position_ids"]), model()[0].block)
    )


def interleaved(samples: np.ndarray) -> np.ndarray:
    """Places of `noisy row, clean row` in the order of the released layout, noisy and clean sample
    by sample.
    """
    width = len(samples)
    mine = [np.flatnonzero(samples == which) for which in range(samples[-1] + 1)]
    return np.concatenate([np.concatenate([places, width + places]) for places in mine])


def test_there_are_plain_and_packed_rows():
    counts = {name: max(int(row.max()) + 1 for row in found_in(name).samples) for name in CASES}
    assert min(counts.values()) == 1 and max(counts.values()) > 2, counts


@every_case
def test_samples_are_found_in_packed_rows(name):
    samples = found_in(name).samples
    for i, row in enumerate(samples):
        equal(np.bincount(row), case_of(name)[f"sample_lengths{i}"])


@every_case
def test_the_doubled_layout(name):
    case, layout, (_, _, spec) = case_of(name), found_in(name), model()
    noisy = np.where(case["masked"], spec.mask, case["input_ids"])
    equal(noisy, case["noisy_ids"])
    seen = jax.tree.map(np.asarray, masks_of(jax.tree.map(jnp.asarray, layout)))
    mask = np.block([[seen.noisy, seen.before], [np.zeros_like(seen.clean), seen.clean]])
    for i, samples in enumerate(layout.samples):
        order = interleaved(samples)
        rows = {
            "concat_ids": np.concatenate([noisy[i], case["input_ids"][i]]),
            "concat_positions": np.tile(layout.positions[i], 2),
            "concat_keep": np.concatenate([case["masked"][i], np.zeros_like(case["masked"][i])]),
        }
        for key, row in rows.items():
            equal(row[order], case[key][i], err_msg=key)
        equal(mask[i][order][:, order], case["concat_mask"][i])


@cache
def objective():
    network, _, spec = model()
    return block_diffusion_loss(network, spec)


@every_case
def test_logits_of_hidden_tokens(name):
    case, (network, params, _) = case_of(name), model()

    @jax.jit
    def logits_of(params, clean, noisy, layout):
        return network.logits(params, read_both(network, params, clean, noisy, layout).noisy)

    layout = jax.tree.map(jnp.asarray, found_in(name))
    logits = logits_of(
        params, jnp.asarray(case["input_ids"]), jnp.asarray(case["noisy_ids"]), layout
    )
    chosen, targets = np.asarray(logits)[case["masked"]], case["input_ids"][case["masked"]]
    assert_close(chosen, case["logits_masked"], LOGITS)
    equal(targets, case["target"])
    assert_close(token_losses(jnp.asarray(chosen), jnp.asarray(targets))[0], case["ce"], LOGITS)


@every_case
def test_loss_and_gradients(name):
    case, (network, params, _) = case_of(name), model()
    loss, metrics, grads = graded(objective(), params, None, batch_of(case))
    assert abs(loss - case["loss"]) <= LOSS * abs(case["loss"])
    near(metrics["hidden"], case["masked"].sum() / case["answer_len"], rtol=1e-6)
    assert_gradients(exported(qwen2, network.config, grads), case, GRADIENT)
