"""SDAR's training loss and Algorithm 1 of residual prediction, written a second time, with noise drawn for them.

Losses are written for one row at a time with the plain network; JAX takes their gradients, in float64.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from plain_sdar import Reader, Sizes, backbone, doubled, residual, to_blocks

Draw = Callable[[int], np.ndarray]  # how many tokens -> tokens
Arrays = dict[str, np.ndarray]


def log_softmax(z: Any) -> Any:
    z = z - z.max(axis=-1, keepdims=True)
    return z - jnp.log(jnp.exp(z).sum(axis=-1, keepdims=True))


def gradients(loss: Callable[[Any], Any], weights: Any, whole: list[str]) -> Arrays:
    """Norms of the gradient of every tensor, and the whole of some."""
    with jax.enable_x64(True):
        grads = jax.jit(jax.grad(loss))({k: jnp.asarray(v, jnp.float64) for k, v in weights.items()})
    found = {f"gradnorm.{name}": np.linalg.norm(np.asarray(g)) for name, g in grads.items()}
    return found | {f"grad.{name}": np.asarray(grads[name]) for name in whole}


# SDAR


def masked_nats(s: Sizes, w: Any, clean: np.ndarray, masked: np.ndarray) -> tuple[Any, Any]:
    """Logits of a sample's masked tokens, and their cross-entropies."""
    at = np.arange(len(clean))
    ids = np.concatenate([np.where(masked, s.mask, clean), clean])
    h, _ = backbone(s, w, ids, np.tile(at, 2), doubled(at, s.block), jnp)
    where = np.flatnonzero(masked)
    z = h[where] @ w["lm_head.weight"].T
    return z, -log_softmax(z)[np.arange(len(where)), clean[where]]


def training_arrays(r: Reader, draw: Draw, rng: np.random.Generator) -> Arrays:
    """Two plain rows, and a packed one with a tail of padding."""
    b = r.sizes.block
    plain = [[(5 * b, b + 1)], [(5 * b, b + 3)]]  # length and prompt of each sample of a row
    packed = [[(3 * b, 4), (2 * b + 3, 3), (2 * b, 5)]]
    made = Arrays()
    for name, rows, tail in (("t_plain", plain, 0), ("t_packed", packed, b + 1)):
        found = training_case(r, rows, tail, draw, rng)
        made |= {f"{name}.{key}": value for key, value in found.items()}
    return made


def training_case(r: Reader, rows: Any, tail: int, draw: Draw, rng: np.random.Generator) -> Arrays:
    """The rows of a batch, their noise, layout, loss and gradients."""
    s = r.sizes
    told: dict[str, list[np.ndarray]] = {}
    lengths, samples = Arrays(), []
    for i, row in enumerate(rows):
        own: dict[str, list[np.ndarray]] = {}
        for length, prompt in [*row, *([(tail, tail)] if tail else [])]:
            padding = prompt == length
            ids = np.full(length, s.pad) if padding else draw(length)
            p = rng.uniform(0.3, 0.9)
            masked = (np.arange(length) >= prompt) & (rng.random(length) < p)
            samples.append((ids, masked, p))
            at = np.arange(length)
            one = {
                "input_ids": ids,
                "labels": np.where(at < prompt, -100, ids),
                "position_ids": np.zeros_like(at) if padding else at,
                "noisy_ids": np.where(masked, s.mask, ids),
                "masked": masked,
                "p_mask": np.where(masked, p, 0),
                "concat_ids": np.concatenate([np.where(masked, s.mask, ids), ids]),
                "concat_positions": np.tile(at, 2),
                "concat_keep": np.concatenate([masked, np.zeros_like(masked)]),
            }
            for key, value in one.items():
                own.setdefault(key, []).append(value)
        sizes = [len(ids) for ids in own["input_ids"]]
        lengths[f"sample_lengths{i}"] = np.asarray(sizes)
        mask = np.zeros((2 * sum(sizes), 2 * sum(sizes)), bool)
        for size, start in zip(sizes, np.cumsum([0, *sizes[:-1]]), strict=True):
            place = slice(2 * start, 2 * (start + size))
            mask[place, place] = doubled(np.arange(size), s.block)
        for key, values in own.items():
            told.setdefault(key, []).append(np.concatenate(values))
        told.setdefault("concat_mask", []).append(mask)
    batch = {key: np.stack(values) for key, values in told.items()}
    return batch | lengths | training_loss(r, samples, int((batch["labels"] >= 0).sum()))


def training_loss(r: Reader, samples: Any, count: int) -> Arrays:
    """Cross-entropies over 1 / p, of all labelled tokens."""
    s, some = r.sizes, [sample for sample in samples if sample[1].any()]

    def loss(w: Any) -> Any:
        return sum(masked_nats(s, w, ids, masked)[1].sum() / p for ids, masked, p in some) / count

    whole = ["model.norm.weight", *(f"model.layers.0.self_attn.{n}.weight" for n in ("q_norm", "k_proj"))]
    with jax.enable_x64(True):
        w = {k: jnp.asarray(v, jnp.float64) for k, v in r.weights.items()}
        said = [masked_nats(s, w, ids, masked) for ids, masked, _ in some]
        value = loss(w)
    return {
        "logits_masked": np.concatenate([np.asarray(z) for z, _ in said]),
        "ce": np.concatenate([np.asarray(nats) for _, nats in said]),
        "target": np.concatenate([ids[masked] for ids, masked, _ in some]),
        "answer_len": np.asarray(count),
        "loss": np.asarray(value),
        **gradients(loss, r.weights, whole),
    }


# Algorithm 1


def residual_arrays(r: Reader, draw: Draw, rng: np.random.Generator) -> Arrays:
    """One to three steps, the noisy copy alone, direct modelling, a denominator below zero."""
    made = Arrays()
    cases: dict[str, dict[str, Any]] = {f"l_bd_k{k}": {"k": k} for k in (1, 2, 3)}
    cases |= {"l_im_k1": {"k": 1, "alone": True}, "l_bd_k2_direct": {"k": 2, "direct": True}}
    cases["l_bd_k1_negative"] = {"k": 1, "p": 0.04}
    for name, told in cases.items():
        made |= {f"{name}.{key}": value for key, value in residual_case(r, draw, rng, **told).items()}
    return made


def drawn_reveals(masked: np.ndarray, block: int, rng: np.random.Generator) -> np.ndarray:
    """One masked position of each block that has any."""
    found = np.zeros_like(masked)
    for row, out in zip(masked, found, strict=True):
        for at in range(0, len(row), block):
            if (places := np.flatnonzero(row[at : at + block])).size:
                out[at + rng.choice(places)] = True
    return found


def residual_case(
    r: Reader,
    draw: Draw,
    rng: np.random.Generator,
    *,
    k: int,
    alone: bool = False,
    direct: bool = False,
    p: float = 0,
) -> Arrays:
    """Two rows of four blocks, the first block a prompt."""
    s, size = r.sizes, 4 * r.sizes.block
    clean, at = np.stack([draw(size) for _ in range(2)]), np.arange(size)
    ps = np.full(2, p) if p else rng.uniform(0.5, 0.9, 2)
    free = np.tile(at >= s.block, (2, 1))
    masked = free & (rng.random((2, size)) < np.maximum(ps, 0.5)[:, None])
    copies = 1 if alone else 2

    def twice(noisy: np.ndarray, other: Any) -> np.ndarray:
        return noisy if alone else np.concatenate([noisy, np.broadcast_to(other, noisy.shape)], axis=1)

    mask = to_blocks(at, s.block) if alone else doubled(at, s.block)
    ids = twice(np.where(masked, s.mask, clean), clean)
    reveals, states, stills = [], [ids], [twice(masked, False)]
    for _ in range(k):
        reveal = twice(drawn_reveals(stills[-1][:, :size], s.block, rng), False)
        reveals.append(reveal)
        stills.append(stills[-1] & ~reveal)
        states.append(np.where(reveal, np.tile(clean, copies), states[-1]))
    told = {
        "ids": ids,
        "labels": np.tile(clean, copies),
        "masked": stills[0],
        "mask": mask,
        "positions": np.tile(at, (2, copies)),
        "p_mask": twice(np.broadcast_to(ps[:, None], masked.shape), 1.0),
        "answer_len": np.asarray(float(free.sum())),
    }
    for i in range(k):
        told |= {
            f"s{i + 1}.reveal": reveals[i],
            f"s{i + 1}.ids": states[i + 1],
            f"s{i + 1}.still_masked": stills[i + 1],
        }
    return told | unrolled(r, told, states, stills[1:], reveals, direct)


def unrolled(r: Reader, told: Arrays, states: Any, stills: Any, reveals: Any, direct: bool) -> Arrays:
    """Residuals, divergences, losses in three normalisations, gradients of the official one."""
    s, k, positions, mask = r.sizes, len(stills), told["positions"][0], told["mask"]
    bigger = 1 / told["p_mask"]
    shown = np.cumsum([(reveal * bigger).sum() for reveal in reveals])
    bounds = told["answer_len"] - shown
    with jax.enable_x64(True):
        w = {name: jnp.asarray(v, jnp.float64) for name, v in r.weights.items()}
        taught = [
            jnp.stack([backbone(s, w, row, positions, mask, jnp)[0] for row in state]) for state in states
        ]

    def run(m: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        inputs, added, kls, befores, a = [], [], [], [], taught[0]
        for i in range(k):
            rows = zip(states[i + 1], a, strict=True)
            d = jnp.stack([residual(s, w, m, ids, h, positions, mask, jnp)[0] for ids, h in rows])
            teacher = log_softmax(taught[i + 1] @ w["lm_head.weight"].T)
            without = taught[0] if direct else jax.lax.stop_gradient(a)
            student = d if direct else without + d
            for kept, h in ((kls, student), (befores, without)):
                kl = (jnp.exp(teacher) * (teacher - log_softmax(h @ w["lm_head.weight"].T))).sum(axis=-1)
                kept.append(jnp.where(stills[i], kl, 0))
            inputs.append(a)
            added.append(d)
            a = d if direct else a + d
        return inputs, added, kls, befores

    def official(m: Any) -> Any:
        return sum((kl * bigger).sum() / bound for kl, bound in zip(run(m)[2], bounds, strict=True)) / k

    with jax.enable_x64(True):
        every = run({name: jnp.asarray(v, jnp.float64) for name, v in r.head.items()})
    inputs, added, kls, befores = ([np.asarray(x) for x in of] for of in every)
    found: Arrays = {"hidden_A": np.asarray(taught[0])}
    for i, (kl, still) in enumerate(zip(kls, stills, strict=True), start=1):
        found |= {f"s{i}.hidden_residual": added[i - 1], f"s{i}.hidden_teacher": np.asarray(taught[i])}
        if i > 1:
            found[f"s{i}.hidden_in"] = inputs[i - 1]
        found |= {f"s{i}.kl": kl, f"s{i}.kl_no_residual": befores[i - 1]}
        found[f"s{i}.answer_len_corrected"] = np.asarray(bounds[i - 1])
        weighed = (kl * bigger).sum()
        found[f"s{i}.loss_official"] = weighed / bounds[i - 1]
        found[f"s{i}.loss_selfnorm"] = weighed / (still * bigger).sum()
        found[f"s{i}.loss_mean"] = kl.sum() / still.sum()
    for name in ("official", "selfnorm", "mean"):
        found[f"loss_{name}"] = np.mean([found[f"s{i}.loss_{name}"] for i in range(1, k + 1)])
    whole = ["enorm.weight", "hnorm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"]
    return found | gradients(official, r.head, whole)
