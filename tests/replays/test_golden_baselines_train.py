"""Recorded training losses of LLaDA, and likelihoods of LLaDA and Dream."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from recorded import GOLDEN, arrays_in, equal, imported, near

from paradec_jax.decode.canvas.guidance import Guided
from paradec_jax.evaluate.bound import bounds, costs_of, counts_of
from paradec_jax.evaluate.likelihood import Span
from paradec_jax.losses import BoundRules, masked_diffusion_loss
from paradec_jax.losses.masked_diffusion import noise
from paradec_jax.noise import Schedule, Times

FOLDER = GOLDEN / "baselines"
COSTS = jax.jit(costs_of, static_argnums=0, static_argnames=("mask", "first"))
LLADA = BoundRules(Schedule("ratio"), Times("plain", 1e-3))


def arrays(part: str, name: str) -> dict[str, np.ndarray]:
    return arrays_in(FOLDER / part / f"{name}.npz")


# LLaDA's losses


def labelled_of(kind: str):
    """What may be hidden: all of a text, the answer after a prompt."""
    want = arrays("llada", "train_loss")
    at = np.broadcast_to(np.arange(want["input_ids"].shape[1]), want["input_ids"].shape)
    return at >= (want["sft_prompt_lengths"][:, None] if kind == "sft" else 0)


@over(["pretrain", "sft"], argument="kind")
def test_training_loss(kind):
    """A row's answer counts 1 in all, with the padding that the recorded length includes."""
    network, params, spec = imported(FOLDER / "llada")
    want, labelled = arrays("llada", "train_loss"), labelled_of(kind)
    probability, noisy = want[f"{kind}_p_mask"], want[f"{kind}_noisy"]
    masked = noisy == spec.mask
    equal(want["pretrain_masked"], want["pretrain_noisy"] == spec.mask)
    batch = {
        "tokens": jnp.asarray(want["input_ids"]),
        "labelled": jnp.asarray(labelled),
        "weights": jnp.asarray(labelled / labelled.sum(axis=1, keepdims=True)),
        "time_uniforms": jnp.asarray((probability[:, 0] - 1e-3) / 0.999),
        "mask_uniforms": jnp.where(masked, 0.0, 1.0),
    }
    key = jax.random.key(0)
    noised, hidden, weight = noise(batch, LLADA, spec.mask, key, key)
    equal(noised, noisy)
    equal(hidden, masked)
    near(np.broadcast_to(weight[:, None], noisy.shape), 1 / probability, rtol=1e-5)
    loss, _ = jax.jit(masked_diffusion_loss(network, spec, LLADA))(params, None, batch, key)
    near(loss, want[f"{kind}_loss"], atol=1e-3)


def test_every_recorded_loss_is_compared():
    kinds = [
        f"{kind}_{name}" for kind in ("pretrain", "sft") for name in ("noisy", "p_mask", "loss")
    ]
    assert arrays("llada", "train_loss").keys() == {
        "input_ids",
        "pretrain_masked",
        "sft_prompt_lengths",
        *kinds,
    }


# Likelihoods


@dataclasses.dataclass(frozen=True)
class Leaning:
    """A network that leans away from what it says of a canvas without the first tokens."""

    network: Any
    mask: int
    given: int
    scale: float
    subs: bool = False

    def forward(self, params, tokens, positions, mask=None):
        given, scale = positions < self.given, jnp.float32(self.scale)
        guided = Guided(network=self.network, mask=self.mask)
        return guided.forward(params, tokens, positions, None, mask, given, scale)

    def logits(self, params, hidden):
        return self.network.logits(params, hidden)


@pytest.mark.parametrize(("run", "scale"), [("cfg0", 0), ("cfg1", 1)])
def test_llada_likelihood(run, scale):
    """Counts, probabilities and costs of every recorded batch of draws."""
    network, params, spec = imported(FOLDER / "llada")
    want = arrays("llada", "likelihood")
    start, length = len(want["prompt"]), len(want["answer"])
    ids = np.concatenate([want["prompt"], want["answer"]])
    noisy, probability = want[f"perturbed_{run}"], want[f"p_mask_{run}"]
    counts, hidden = want[f"n_masked_{run}"], noisy == spec.mask
    draws = counts.shape[1]
    equal(counts_of(counts[:, :1], jnp.arange(draws), draws, length), counts)
    equal(hidden.sum(axis=-1), counts)
    assert not hidden[..., :start].any()
    near(
        probability[hidden], np.broadcast_to(counts[..., None] / length, noisy.shape)[hidden], 1e-6
    )
    network = Leaning(network, spec.mask, start, scale) if scale else network
    costs = COSTS(network, params, *rows(noisy, ids), mask=spec.mask, first=0, view=None)
    each = np.where(hidden, costs.reshape(noisy.shape) / probability, 0).sum(axis=-1)
    near(each.mean(axis=1), want[f"loss_per_batch_{run}"], atol=1e-3)
    near(-each.mean(), want[f"loglik_{run}"], atol=1e-3)


def rows(noisy, ids):
    """Canvases and their texts, as rows of one batch."""
    flat = jnp.asarray(noisy.reshape(-1, len(ids)))
    return flat, jnp.broadcast_to(jnp.asarray(ids), flat.shape)


def test_dream_likelihood():
    """Of canvases whose first and last token were always seen, as recorded; and in both orders."""
    network, params, spec = imported(FOLDER / "dream")
    want = arrays("dream", "likelihood")
    assert spec.alignment == "next"
    start, ids = len(want["prefix"]), np.concatenate([want["prefix"], want["target"]])
    noisy, at = want["mc_perturbed"], np.arange(len(ids))
    hidden = noisy == spec.mask
    assert not hidden[..., [0, -1]].any()
    costs = COSTS(network, params, *rows(noisy, ids), mask=spec.mask, first=1, view=None)
    each = np.where(hidden, costs.reshape(noisy.shape) / want["mc_p_mask"], 0).sum(axis=-1)
    near(each.mean(), want["mc_nll"], atol=1e-3)

    places = np.arange(start, len(ids))[:, None]
    equal(np.where(at >= places, spec.mask, ids), want["ar_ftb_inputs"])
    for order, name in (("forward", "ar_ftb_nll"), ("backward", "ar_btf_nll")):
        (found,) = bounds(
            network,
            params,
            [Span((*ids.tolist(),), start)],
            spec.mask,
            alignment="next",
            order=order,
        )
        near(found.nats, want[name], atol=1e-3)
