"""Recorded arrays of the original training code: selection, packing, masks, pairs, losses,
gradients.

Models are named by the files `NAME_train.npz` and `NAME_cllm_loss.npz`; their weights lie in a
folder of that name, or beside the files. Cases come from each file's `names`, masks and losses from
its keys.
"""

import dataclasses
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from reading import read
from recorded import assert_close, equal, exported, graded, near, part_of
from recorded_jacobi import FOLDER, arrays, folder_of, models
from recorded_jacobi import model as imported

from paradec_jax.convert import qwen2
from paradec_jax.convert.engine import read_json
from paradec_jax.data.pairs import Selection, noise_ratio
from paradec_jax.data.trajectories import Generation
from paradec_jax.losses import (
    CLEAN_CONTEXT,
    MULTIBLOCK,
    WINDOWED,
    ConsistencyRules,
    cllm_loss,
    consistency_loss,
)
from paradec_jax.losses.consistency import counted_pairs, packed_positions
from paradec_jax.nn import masks

LOGITS = {"random": 3e-4}  # large random weights make large logits
LOGITS_OTHERWISE = 1e-4
LOSS = 1e-5  # relative, as that of a global norm:
NORM = 1e-4
GRADIENT = 1e-3  # relative, and beside it, in units of an array's largest entry (1 at least):
GRADIENT_NOISE = 2e-5  # float64 misses the recorded arrays by up to 0.8e-5
# Arrays of gradients, by the names of the original parameters.
GRADIENTS = {
    "grad_q0": "model.layers.0.self_attn.q_proj.weight",
    "grad_kbias1": "model.layers.1.self_attn.k_proj.bias",
    "grad_final_norm": "model.norm.weight",
}


@cache
def model(name: str):
    """Network, parameters and special tokens; the original code knows one stop token."""
    network, params, spec = imported(name)
    fields = read_json(folder_of(name) / "config.json")
    spec = dataclasses.replace(spec, stop=(fields["eos_token_id"],), pad=fields["pad_token_id"])
    return network, params, spec


def cases(kind: str, pattern: str = "") -> list:
    """(model, tag), or (model, tag, mask) for masks with an array of this name."""
    found = []
    for name in models(kind):
        for tag in arrays(name, kind)["names"].tolist():
            subs = [re.fullmatch(rf"{tag}/(\w+)/{pattern}", key) for key in arrays(name, kind)]
            found += [(name, tag, sub[1]) for sub in subs if sub] if pattern else [(name, tag)]
    return [pytest.param(*case, id="-".join(case)) for case in found]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One recorded sequence."""

    arrays: dict[str, np.ndarray]
    prompt: int
    pairs: int
    block: int
    window: int

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]

    @property
    def blocks(self) -> np.ndarray:
        """Both copies of each block, [T, 2, n]."""
        return self["packed_ids"][self.prompt :].reshape(self.pairs, 2, self.block)

    @property
    def batch(self) -> dict[str, np.ndarray]:
        return {
            "prompt": self["packed_ids"][None, : self.prompt],
            "prompt_lengths": np.asarray([self.prompt], np.int32),
            "noisy": self.blocks[None, :, 0],
            "clean": self.blocks[None, :, 1],
            "pairs": np.asarray([self.pairs], np.int32),
        }

    def padded(self, pad: int) -> dict[str, np.ndarray]:
        """The batch, its padding told by the token, as the original does."""
        return told_by_id(self.batch, pad)

    def places(self, copy: int) -> np.ndarray:
        """Packed place of each block token of a copy (0 noisy, 1 clean)."""
        each = np.arange(self.pairs * self.block)
        return self.prompt + (2 * (each // self.block) + copy) * self.block + each % self.block


def told_by_id(batch: dict[str, np.ndarray], pad: int) -> dict[str, np.ndarray]:
    """A batch whose padding is every token of one id."""
    return batch | {f"{name}_real": batch[name] != pad for name in ("prompt", "noisy", "clean")}


@cache
def case_of(name: str, tag: str) -> Case:
    found = arrays(name, "train")
    inner = part_of(found, f"{tag}/")
    return Case(inner, *inner["P_T_N_w"].tolist())


def rules_of(sub: str) -> ConsistencyRules:
    """The rules of a recorded mask: nc, clean, windowW, with _TX for a temperature."""
    base, temperature = re.fullmatch(r"(nc|clean|window\d+)(?:_T(\d+))?", sub).groups()
    if base.startswith("window"):
        rules = dataclasses.replace(WINDOWED, window=int(base.removeprefix("window")))
    else:
        rules = {"nc": MULTIBLOCK, "clean": CLEAN_CONTEXT}[base]
    return dataclasses.replace(rules, temperature=float(temperature or 1))


mask_of = jax.jit(masks.noisy_window, static_argnums=(0, 1, 2, 3))
positions_of = jax.jit(packed_positions, static_argnums=(1, 2, 3))
counted = jax.jit(counted_pairs, static_argnums=(1, 2))


def assert_relative(got, want, tolerance: float):
    assert abs(float(got) - float(want)) <= tolerance * abs(float(want)), (
        f"{float(got)} for {float(want)}"
    )


def test_folder_holds_recorded_arrays():
    for kind in ("train", "cllm_loss"):
        assert models(kind), f"{FOLDER} has no file NAME_{kind}.npz"


@over(cases("train"), argument="name, tag")
def test_selection_and_packing(name, tag):
    case, rng = case_of(name, tag), np.random.default_rng(0)
    points = [
        block[~np.isnan(ratio)]
        for block, ratio in zip(case["points"], case["point_ratio"], strict=True)
    ]
    for block, ratio in zip(points, case["point_ratio"], strict=True):
        equal(noise_ratio(block).astype(np.float32), ratio[~np.isnan(ratio)])
    selection = Selection(window=case.window)
    targets = selection.targets(case.pairs, rng)
    equal(targets.astype(np.float32), case["target_ratio"])
    # The released data had overwritten the first iterate with the fixed point.
    overwritten = [np.concatenate([block[-1:], block[1:]]) for block in points]
    generation = Generation(
        0, case["packed_ids"][: case.prompt], overwritten, case.pairs * case.block
    )
    chosen = selection.chosen(generation, rng)
    equal(chosen, case["traj_position_indices"])
    equal(generation.fixed, case.blocks[:, 1])
    noisy = [iterates[i] for iterates, i in zip(overwritten, chosen, strict=True)]
    equal(noisy, case.blocks[:, 0])


@over(cases("train", "mask"), argument="name, tag, sub")
def test_masks_and_pairs(name, tag, sub):
    case, rules = case_of(name, tag), rules_of(sub)
    _, _, spec = model(name)
    mask = mask_of(case.prompt, case.pairs, case.block, rules.window_of(case.pairs))
    equal(mask, case[f"{sub}/mask"])
    positions = positions_of(case.batch["prompt_lengths"], case.prompt, case.pairs, case.block)
    equal(positions[0], case["position_ids"])

    pairs = jax.tree.map(np.asarray, counted(case.padded(spec.pad), spec, rules))
    noisy, clean = case.places(0), case.places(1)
    flipped = case["packed_ids"].copy()
    flipped[clean] = pairs.clean[0]
    equal(flipped, case["ids_after_eos_flip"])

    prompt = np.flatnonzero(pairs.prompt_weight[0])
    answer = np.flatnonzero(pairs.block_weight[0])
    before = np.concatenate([[case.prompt - 1], clean[:-1]])
    got = sorted(
        zip(
            [*prompt, *before[answer]],
            [*prompt + 1, *clean[answer]],
            [*flipped[prompt + 1], *flipped[clean[answer]]],
            strict=True,
        )
    )
    recorded = zip(
        *(case[f"{sub}/ar_{part}"] for part in ("logit_pos", "target_pos", "targets")), strict=True
    )
    assert got == sorted(item for item in recorded if item[2] != -100)

    # Offsets from the first difference on, whatever they hold: as if nothing were padding.
    batch = {**case.batch, "clean": pairs.clean.reshape(case.batch["clean"].shape)}
    as_it_is = dataclasses.replace(rules, after_eos="keep")
    all_offsets = np.asarray(counted(batch, spec, as_it_is).keep[0])
    offsets = np.flatnonzero(all_offsets)
    equal(noisy[offsets], case[f"{sub}/student_pos"])
    equal(clean[offsets], case[f"{sub}/teacher_pos"])
    equal(pairs.keep[0][offsets], case[f"{sub}/cons_keep"])
    assert not pairs.keep[0][~all_offsets].any()


@over(cases("train", "logits"), argument="name, tag, sub")
def test_logits(name, tag, sub):
    network, params, _ = model(name)
    case, rules = case_of(name, tag), rules_of(sub)
    ids, positions = case["ids_after_eos_flip"][None], case["position_ids"][None]
    mask = mask_of(case.prompt, case.pairs, case.block, rules.window_of(case.pairs))
    packed, *_ = read(network, params, ids, positions, None, mask)
    assert_close(packed[0], case[f"{sub}/logits"], LOGITS.get(name, LOGITS_OTHERWISE))


@cache
def step_of(name: str, rules: ConsistencyRules):
    """Loss, terms and gradient; the weight of the next-token term is an argument."""
    network, _, spec = model(name)
    objective = consistency_loss(network, spec, rules)

    def loss(params, weight, batch):
        value, terms = objective(params, None, batch, jax.random.key(0))
        return value + (weight - rules.ar_weight) * terms["ar"], terms

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def result_of(name: str, case: Case, rules: ConsistencyRules):
    """What `step_of` gives; rules that read the same passes share a program."""
    if rules.window_of(case.pairs) == case.pairs:
        shared = dataclasses.replace(
            MULTIBLOCK, offsets=rules.offsets, temperature=rules.temperature
        )
    else:
        shared = rules
    _, params, spec = model(name)
    (loss, terms), grads = step_of(name, shared)(params, rules.ar_weight, case.padded(spec.pad))
    return float(loss), terms, jax.tree.map(np.asarray, grads)


def global_norm(grads) -> float:
    return float(
        np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(grads)))
    )


@over(cases("train", "loss_total"), argument="name, tag, sub")
def test_loss_and_gradient(name, tag, sub):
    case, rules = case_of(name, tag), rules_of(sub)
    loss, terms, grads = result_of(name, case, rules)
    assert case[f"{sub}/ar_weight"] == rules.ar_weight
    for which in ("", "unpacked_"):
        if f"{sub}/{which}loss_total" in case.arrays:
            assert_relative(loss, case[f"{sub}/{which}loss_total"], LOSS)
            assert_relative(rules.ar_weight * terms["ar"], case[f"{sub}/{which}loss_ar"], LOSS)
            assert_relative(terms["consistency"], case[f"{sub}/{which}loss_cons"], LOSS)
    assert_relative(global_norm(grads), case[f"{sub}/grad_global_norm"], NORM)
    tensors = exported(qwen2, model(name)[0].config, grads)
    for key, parameter in GRADIENTS.items():
        if f"{sub}/{key}" in case.arrays:
            want = case[f"{sub}/{key}"]
            noise = GRADIENT_NOISE * max(np.abs(want).max(), 1)
            near(tensors[parameter], want, rtol=GRADIENT, atol=noise)


@over(cases("cllm_loss"), argument="name, tag")
def test_cllm(name, tag):
    network, params, spec = model(name)
    found = arrays(name, "cllm_loss")
    points, start = found[f"{tag}/trajectory"], int(found[f"{tag}/prompt_len"])
    picked = points[found[f"{tag}/picked"]]
    batch = {
        "prompt": jnp.asarray(points[:1, :start]),
        "prompt_lengths": jnp.asarray([start]),
        "noisy": jnp.asarray(picked[None, None, start:]),
        "clean": jnp.asarray(points[-1][None, None, start:]),
        "pairs": jnp.asarray([1]),
    }
    batch = told_by_id(batch, spec.pad)
    loss, terms, grads = graded(cllm_loss(network, spec), params, None, batch)
    assert_relative(10 * terms["ar"], found[f"{tag}/loss_ar_x10"], LOSS)
    assert_relative(terms["consistency"], found[f"{tag}/loss_cons"], LOSS)
    assert_relative(loss, found[f"{tag}/total"], LOSS)
    assert_relative(global_norm(grads), found[f"{tag}/grad_global_norm"], NORM)
