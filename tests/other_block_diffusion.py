"""Writes a folder of recorded block diffusion with sizes of its own: `python tests/other_block_diffusion.py FOLDER`.

FOLDER/block_diffusion has the layout of `tests/golden/block_diffusion`, of random weights with another block length,
other heads, RoPE base, mask id and depth of the head; its arrays come from `plain_sdar` and `plain_mrp` alone, in
float64, but for gradients, which JAX takes of the same plain functions. The replays read all sizes from the folder:

    python tests/other_block_diffusion.py FOLDER
    PARADEC_GOLDEN=FOLDER make test-golden FAMILY=block_diffusion
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from plain_losses import residual_arrays, training_arrays
from plain_mrp import base, direct, speculative, veto
from plain_sdar import Reader, Sizes, backbone, decoded, doubled, residual, to_blocks
from safetensors.numpy import save_file

SIZES = Sizes(
    width=40,
    layers=2,
    heads=6,
    kv_heads=3,
    head_dim=8,
    feed_forward=56,
    vocabulary=96,
    eps=1e-5,
    theta=10_000.0,
    block=6,
    mask=70,
    pad=2,
    head_layers=1,
)
SEED = 0
SAFE = 3e-5  # every choice hangs on a difference of at least this, eight times what float32 loses of a logit
PREFIX = "mrp_modules.0.model."
Arrays = dict[str, np.ndarray]


def layer_shapes(s: Sizes, at: str) -> dict[str, tuple[int, ...]]:
    inner, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
    found = {"input_layernorm": (s.width,), "post_attention_layernorm": (s.width,)}
    found |= {f"self_attn.{n}_norm": (s.head_dim,) for n in ("q", "k")}
    found |= {"self_attn.q_proj": (inner, s.width), "self_attn.o_proj": (s.width, inner)}
    found |= {f"self_attn.{n}_proj": (narrow, s.width) for n in ("k", "v")}
    found |= {f"mlp.{n}_proj": (s.feed_forward, s.width) for n in ("gate", "up")}
    found |= {"mlp.down_proj": (s.width, s.feed_forward)}
    return {f"{at}{name}.weight": shape for name, shape in found.items()}


def drawn(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> Arrays:
    """Weights whose layers say something: gains near 1, matrices a little above what keeps sizes."""
    made = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            value = 1 + 0.1 * rng.normal(size=shape)
        else:
            value = rng.normal(size=shape) * (1.0 if "embed" in name else 1.3 / np.sqrt(shape[1]))
        made[name] = value.astype(np.float32)
    return made


def checkpoint(s: Sizes, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Tensors of the backbone and of its head; the mask is never predicted, the head changes scores a little."""
    shapes = {"model.embed_tokens.weight": (s.vocabulary, s.width), "model.norm.weight": (s.width,)}
    for i in range(s.layers):
        shapes |= layer_shapes(s, f"model.layers.{i}.")
    weights = drawn(shapes | {"lm_head.weight": (s.vocabulary, s.width)}, rng)
    weights["lm_head.weight"] *= np.float32(3)
    weights["lm_head.weight"][s.mask] = 0
    shapes = {f"{name}.weight": (s.width,) for name in ("enorm", "hnorm", "norm")}
    shapes["eh_proj.weight"] = (s.width, 2 * s.width)
    for i in range(s.head_layers):
        shapes |= layer_shapes(s, f"layers.{i}.")
    head = drawn(shapes, rng)
    head["norm.weight"] *= np.float32(0.2)
    return weights, head


def config(s: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": s.width,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.feed_forward,
        "vocab_size": s.vocabulary,
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": "float32",
        "block_size": s.block,
        "mask_token_id": s.mask,
        "bos_token_id": s.pad,
        "eos_token_id": s.pad,
    }


def text(s: Sizes, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random tokens that are neither mask nor pad."""
    return rng.choice(np.setdiff1d(np.arange(3, s.vocabulary), [s.mask, s.pad]), count)


def forward_arrays(r: Reader, rng: np.random.Generator) -> Arrays:
    """The network: a prompt, a block behind it, the layout of training."""
    s = r.sizes
    clean = text(s, 4 * s.block, rng)
    prefix, block = clean[: 3 * s.block], clean[3 * s.block :].copy()
    block[::2] = s.mask
    full, at = np.concatenate([prefix, block]), np.arange(4 * s.block)
    h, kv = backbone(s, r.weights, prefix, at[: 3 * s.block], to_blocks(at[: 3 * s.block], s.block))
    whole = r.whole(full)
    noisy = np.where(rng.random(len(at)) < 0.4, s.mask, clean)
    dual, positions = np.concatenate([noisy, clean]), np.tile(at, 2)
    both, _ = backbone(s, r.weights, dual, positions, doubled(at, s.block))
    return {
        "prefix_ids": prefix,
        "prefix_hidden": h,
        "prefix_logits": r.logits(h),
        "cache_k": np.stack([k for k, _ in kv]),
        "cache_v": np.stack([v for _, v in kv]),
        "block_ids": block,
        "block_hidden": whole[-s.block :],
        "block_logits": r.logits(whole[-s.block :]),
        "full_ids": full,
        "full_mask": to_blocks(at, s.block),
        "full_logits": r.logits(whole),
        "dual_ids": dual,
        "dual_positions": positions,
        "dual_mask": doubled(at, s.block),
        "dual_hidden": both,
        "dual_logits": r.logits(both),
    }


def head_arrays(r: Reader, forward: Arrays, rng: np.random.Generator) -> Arrays:
    """The head: the prompt, two steps in a block, the block alone."""
    s, prefix, block, h = r.sizes, forward["prefix_ids"], forward["block_ids"], forward["block_hidden"]
    at = np.arange(len(prefix))
    said, kv = residual(s, r.weights, r.head, prefix, forward["prefix_hidden"], at, to_blocks(at, s.block))
    hidden = np.flatnonzero(block == s.mask)
    first, second = block.copy(), block.copy()
    first[hidden[0]] = second[hidden[0]] = text(s, 1, rng)[0]
    second[hidden[1]] = text(s, 1, rng)[0]
    one = r.added(prefix, first, h)
    two = r.added(prefix, second, h + one)
    return {
        "prefix_ids": prefix,
        "prefix_hidden": forward["prefix_hidden"],
        "prefix_residual_hidden": said,
        "mrp_cache_k": np.stack([k for k, _ in kv]),
        "mrp_cache_v": np.stack([v for _, v in kv]),
        "block_ids_backbone": block,
        "block_hidden": h,
        "block_logits": r.logits(h),
        "step1_ids": first,
        "step1_residual_hidden": one,
        "step1_residual_logits": r.logits(one),
        "step1_corrected_logits": r.logits(h + one),
        "step2_ids": second,
        "step2_hidden_in": h + one,
        "step2_residual_hidden": two,
        "step2_corrected_logits": r.logits(h + one + two),
        "noprefix_step1_residual_hidden": r.added(prefix, first, h, context=False),
        "init_std_0p2_first_values": 0.2 * rng.normal(size=8 * len(r.head)),
    }


def decode_cases(r: Reader, prompts: Arrays) -> dict[str, dict[str, Any]]:
    """Settings of SDAR's decodes."""
    b, found = r.sizes.block, []
    plain = {"denoising_steps": b, "temperature": 1.0, "gen_length": 2 * b + 1, "stop_ids": None}
    plain |= {
        "threshold": None,
        "entropy_gamma": None,
        "confidence": "full-softmax",
        "implementation": "eval",
    }
    static, dynamic = {"strategy": "low_confidence_static"}, {"strategy": "low_confidence_dynamic"}
    for prompt in prompts:
        found += [
            {"prompt": prompt, **plain, **case}
            for case in (
                {"strategy": "sequential", "denoising_steps": 4},
                static,
                dynamic | {"threshold": 0.5},
                {"strategy": "entropy_bounded", "entropy_gamma": 1.5},
            )
        ]
    usual = {"prompt": "p_partial", **plain}
    whole = decoded(r, prompts["p_partial"], usual | static, None)["tokens"]
    found += [
        usual | static | {"denoising_steps": 4},
        usual | static | {"stop_ids": [int(whole[len(prompts["p_partial"]) + b])]},
        usual | dynamic | {"threshold": 0.3, "denoising_steps": 2},
        usual | dynamic | {"threshold": 0.6, "temperature": 0.7},
        usual | dynamic | {"threshold": 0.5, "confidence": "post-truncation", "implementation": "generate"},
    ]
    fast = {"prompt": "p_aligned", "gen_length": 2 * b + 1, "implementation": "independent"}
    named = {f"d{i:02d}": case for i, case in enumerate(found)}
    named["fast_threshold"] = fast | {"strategy": "fast_threshold", "tau": 0.5}
    for name, gamma in (("fast_factor", 1.0), ("fast_factor_half", 0.5)):
        named[name] = fast | {"strategy": "fast_factor", "gamma": gamma}
    return named


def truncations(r: Reader, rng: np.random.Generator) -> Arrays:
    """Logits after top-k and top-p."""
    logits = 3 * rng.normal(size=(3, r.sizes.vocabulary)).astype(np.float32).astype(np.float64)

    def top_k(x: np.ndarray, k: int) -> np.ndarray:
        return np.where(x >= np.sort(x, axis=-1)[:, -k, None], x, -np.inf)

    def top_p(x: np.ndarray, bound: float) -> np.ndarray:
        p = np.exp(x - x.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        before = np.stack([[row[row > one].sum() for one in row] for row in p])
        r.near(before[np.isfinite(x)] - bound)
        return np.where(before <= bound, x, -np.inf)

    found = {"filter.logits": logits, **{f"filter.topk{k}": top_k(logits, k) for k in (1, 7)}}
    found |= {f"filter.topp{p}": top_p(logits, p / 100) for p in (40, 85)}
    both = top_p(top_k(logits / 0.6, 12), 0.8)
    p = np.exp(both - both.max(axis=-1, keepdims=True))
    return found | {"filter.topk12_topp80_T06_probs": p / p.sum(axis=-1, keepdims=True)}


def decode_arrays(r: Reader, prompts: Arrays, rng: np.random.Generator) -> tuple[Arrays, dict[str, Any]]:
    s, made = r.sizes, {f"prompt.{name}": prompt for name, prompt in prompts.items()}
    cases = decode_cases(r, prompts)
    for name, told in cases.items():
        prompt = prompts[told["prompt"]]
        numbers = (told.get(key) for key in ("threshold", "entropy_gamma", "tau", "gamma"))
        found = decoded(r, prompt, told, next((x for x in numbers if x is not None), None))
        told["n_denoise_forwards"] = len(found["block"])
        if not name.startswith("fast"):
            stores = int(found["block"].max()) + 1 - len(prompt) // s.block
            told["n_forwards"] = len(found["block"]) + stores + (len(prompt) >= s.block)
        left_out = {"entropy"} - ({"entropy"} if told["strategy"] == "entropy_bounded" else set())
        left_out |= {"logits"} - ({"logits"} if name in ("d01", "d02") else set())
        if name.startswith("fast"):
            left_out |= {"step", "pred"}
        made |= {f"{name}.{key}": value for key, value in found.items() if key not in left_out}
    told = {"block_length": s.block, "mask_token_id": s.mask, "cases": cases}
    return made | truncations(r, rng), told


def mrp_arrays(r: Reader, prompts: Arrays) -> tuple[Arrays, dict[str, Any]]:
    """Decodes with the head."""
    new, made, cases = 4 * r.sizes.block, Arrays(), {}
    static, dynamic = "low_confidence_static", "low_confidence_dynamic"

    def keep(name: str, prompt: str, found: Any, **told: Any) -> None:
        arrays, counts = found
        made.update({f"{name}.{prompt}.{key}": value for key, value in arrays.items()})
        cases[f"{name}.{prompt}"] = told | {"prompt": prompt, "gen_length": new} | counts

    for prompt in ("p_aligned", "p_partial", "p_short"):
        p = prompts[prompt]
        keep("base_static", prompt, base(r, p, new, None), mode="base", strategy=static)
        for k in (1, 2, 4):
            told: dict[str, Any] = {"mode": "direct", "K": k, "backbone": static, "mrp": f"{static} n=1"}
            found: Any = direct(r, p, new, k, None, None, "sum", 1.0)
            keep(f"direct_static_k{k}", prompt, found, **told, mix="logits_sum")
        for k in (1, 2, 4):
            told = {"mode": "spec", "K": k}
            found = speculative(r, p, new, k, None)
            keep(f"spec_fresh_k{k}", prompt, found, **told, variant="fresh", mrp_prefix_kv=True)
            for tag, context in (("", True), ("_noprefix", False)):
                found = speculative(r, p, new, k, None, released=True, context=context)
                keep(
                    f"spec_official{tag}_k{k}",
                    prompt,
                    found,
                    **told,
                    variant="official",
                    mrp_prefix_kv=context,
                )
    p = prompts["p_aligned"]
    for tau in (0.4, 0.7):
        tag = f"t{round(100 * tau)}"
        found = base(r, p, new, tau)
        keep(f"base_dynamic_{tag}", "p_aligned", found, mode="base", strategy=dynamic, tau=tau)
        for k in (1, 2):
            for kind, own in ((static, None), (dynamic, tau)):
                name = f"direct_dynamic_{tag}_{kind.rpartition('_')[2]}_k{k}"
                told = {"mode": "direct", "K": k, "backbone": dynamic, "tau": tau, "mrp": f"{kind} min 1"}
                keep(name, "p_aligned", direct(r, p, new, k, tau, own, "sum", 1.0), **told, mix="logits_sum")
        for k in (2, 3):
            told = {"mode": "spec", "variant": "fresh", "strategy": dynamic, "tau": tau, "K": k}
            keep(f"spec_dynamic_{tag}_k{k}", "p_aligned", speculative(r, p, new, k, tau), **told)
    found = direct(r, p, new, 2, None, None, "none", 1.0)
    keep("direct_static_mixnone_k2", "p_aligned", found, mode="direct", K=2, mix="none")
    found = direct(r, p, new, 2, None, None, "sum", 2.0)
    keep("direct_static_scale2_k2", "p_aligned", found, mode="direct", K=2, mix="logits_sum", scale=2.0)
    told = {"tau": 0.2, "delta": 0.6, "mrp_prefix_kv": False}
    keep("remask_delta", "p_aligned", veto(r, p, new, 0.2, 0.6), mode="remask", **told)
    keep(
        "remask_conf",
        "p_aligned",
        veto(r, p, new, 0.2, None),
        mode="remask_conf",
        tau=0.2,
        mrp_prefix_kv=True,
    )
    return made, cases


def residual_sizes(r: Reader, prompt: np.ndarray, found: Arrays) -> Arrays:
    """How far k reveals move what the backbone says, over the first four blocks of a decode."""
    s, whole = r.sizes, found["base_static.p_aligned.tokens"]
    first = len(prompt) // s.block
    states, hidden = [], []
    for n in range(first, first + 4):
        mine = found["base_static.p_aligned.block"] == n
        own = [*found["base_static.p_aligned.before"][mine], whole[n * s.block : (n + 1) * s.block]]
        states.append(np.stack(own))
        hidden.append(np.stack([r.hidden(whole[: n * s.block], state) for state in own]))
    made: Arrays = {"states": np.stack(states), "hidden": np.stack(hidden)}
    logits = r.logits(made["hidden"])
    made["logits_shape"] = np.asarray(logits.shape)
    for name, f in (("hidden", made["hidden"]), ("logits", logits)):
        size = np.sqrt((f**2).mean(axis=(2, 3)))
        moved = [
            np.sqrt(((f[:, k:] - f[:, : f.shape[1] - k]) ** 2).mean(axis=(2, 3))).mean()
            for k in range(1, s.block + 1)
        ]
        made |= {f"{name}_residual_rms": np.asarray(moved), f"{name}_reference_rms": size[:, :-1].mean()}
    return made


def write(folder: Path, s: Sizes = SIZES, seed: int = SEED) -> float:
    """Writes the folder; the least difference that any choice in it hangs on."""
    rng = np.random.default_rng(seed)
    weights, head = checkpoint(s, rng)
    r = Reader(s, *({k: v.astype(np.float64) for k, v in of.items()} for of in (weights, head)))
    b = s.block
    lengths = {"p_partial": 2 * b + 2, "p_aligned": 3 * b, "p_short": b - 2, "p_one": 4 * b + 1}
    prompts = {name: text(s, count, rng) for name, count in lengths.items()}
    forward = forward_arrays(r, rng)
    decodes, cases = decode_arrays(r, prompts, rng)
    with_head, head_cases = mrp_arrays(r, prompts)
    files = {
        "forward": forward,
        "decode": decodes,
        "mrp_forward": head_arrays(r, forward, rng),
        "mrp_decode": with_head,
        "residual": residual_sizes(r, prompts["p_aligned"], with_head),
        "train": training_arrays(r, lambda count: text(s, count, rng), rng),
        "mrp_loss": residual_arrays(r, lambda count: text(s, count, rng), rng),
    }
    place = folder / "block_diffusion"
    place.mkdir(parents=True, exist_ok=True)
    for name, arrays in files.items():
        np.savez_compressed(place / f"{name}.npz", **{k: narrow(k, v) for k, v in arrays.items()})
    save_file(weights, place / "model.safetensors")
    save_file({f"{PREFIX}{k}": v for k, v in head.items()}, place / "mrp.safetensors")
    told = {
        "num_nextn_predict_layers": s.head_layers,
        "num_mrp_heads": 1,
        "block_size": b,
        "mask_token_id": s.mask,
    }
    texts = {"config": config(s), "mrp_config": told, "decode_cases": cases, "mrp_decode_cases": head_cases}
    for name, content in texts.items():
        (place / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return r.margin


def narrow(name: str, value: Any) -> np.ndarray:
    """Integers in int32, numbers in float32, but for means over many states."""
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return array if name.endswith("_rms") else array.astype(np.float32)
    return array.astype(np.int32) if array.dtype.kind == "i" else array


if __name__ == "__main__":
    found = write(
        Path(sys.argv[1]), dataclasses.replace(SIZES), int(sys.argv[2]) if len(sys.argv) > 2 else SEED
    )
    print(f"every choice hangs on a difference of at least {found:.1e}")
    if found < SAFE:
        sys.exit(f"one of them is below {SAFE:.0e}: give another seed")
