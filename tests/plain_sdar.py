"""SDAR's network and decoding, written a second time from their description: no cache, no batch, no compiled loop.

A text is read whole at every call, earlier blocks clean, which is what a cache of them stands for. Arrays are those
of a checkpoint by their released names, float64; `xp` is numpy, or jax.numpy where gradients are asked.
"""

import dataclasses
from typing import Any

import numpy as np

Tensors = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a config.json tells.

    Attributes:
      width, layers, heads, kv_heads, head_dim, feed_forward, vocabulary: of the network.
      eps: of norms.
      theta: base of RoPE.
      block: B.
      mask: the token that hides.
      pad: the token that fills and ends.
      head_layers: of the residual head.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    eps: float
    theta: float
    block: int
    mask: int
    pad: int
    head_layers: int


def softmax(x: Any, xp: Any = np) -> Any:
    """Over the last axis."""
    e = xp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rms(x: Any, gain: Any, eps: float, xp: Any = np) -> Any:
    return x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain


def rotated(x: Any, positions: Any, theta: float, xp: Any = np) -> Any:
    """RoPE of [T, heads, d], first half against second half."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = xp.cos(angles)[:, None], xp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return xp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def layer(s: Sizes, w: Tensors, at: str, x: Any, positions: Any, mask: Any, xp: Any = np) -> Any:
    """Vectors after a layer, and its keys and values [kv_heads, T, d]."""
    count = len(positions)
    y = rms(x, w[f"{at}input_layernorm.weight"], s.eps, xp)
    q, k, v = (
        (y @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(count, -1, s.head_dim) for n in ("q", "k", "v")
    )
    q = rotated(rms(q, w[f"{at}self_attn.q_norm.weight"], s.eps, xp), positions, s.theta, xp)
    k = rotated(rms(k, w[f"{at}self_attn.k_norm.weight"], s.eps, xp), positions, s.theta, xp)
    heard = []
    for i in range(s.heads):
        own = i // (s.heads // s.kv_heads)
        scores = xp.where(mask, q[:, i] @ k[:, own].T / np.sqrt(s.head_dim), -1e30)
        heard.append(softmax(scores, xp) @ v[:, own])
    x = x + xp.concatenate(heard, axis=-1) @ w[f"{at}self_attn.o_proj.weight"].T
    y = rms(x, w[f"{at}post_attention_layernorm.weight"], s.eps, xp)
    gate = y @ w[f"{at}mlp.gate_proj.weight"].T
    y = gate / (1 + xp.exp(-gate)) * (y @ w[f"{at}mlp.up_proj.weight"].T)
    return x + y @ w[f"{at}mlp.down_proj.weight"].T, (k.swapaxes(0, 1), v.swapaxes(0, 1))


def backbone(s: Sizes, w: Tensors, ids: Any, positions: Any, mask: Any, xp: Any = np) -> Any:
    """Hidden states [T, D], and keys and values of the layers."""
    x, kept = w["model.embed_tokens.weight"][ids], []
    for i in range(s.layers):
        x, kv = layer(s, w, f"model.layers.{i}.", x, positions, mask, xp)
        kept.append(kv)
    return rms(x, w["model.norm.weight"], s.eps, xp), kept


def residual(
    s: Sizes, w: Tensors, m: Tensors, ids: Any, h: Any, positions: Any, mask: Any, xp: Any = np
) -> Any:
    """What the head adds to hidden states [T, D], and keys and values of its layers; `m` has names without prefix."""
    e = rms(w["model.embed_tokens.weight"][ids], m["enorm.weight"], s.eps, xp)
    x = xp.concatenate([e, rms(h, m["hnorm.weight"], s.eps, xp)], axis=-1) @ m["eh_proj.weight"].T
    kept = []
    for i in range(s.head_layers):
        x, kv = layer(s, m, f"layers.{i}.", x, positions, mask, xp)
        kept.append(kv)
    return rms(x, m["norm.weight"], s.eps, xp), kept


def to_blocks(positions: np.ndarray, block: int) -> np.ndarray:
    """Which of T positions see which: their own block and those before."""
    of = positions // block
    return of[None] <= of[:, None]


def doubled(positions: np.ndarray, block: int) -> np.ndarray:
    """The same of a noisy copy and then a clean one, [2 T, 2 T]."""
    of = positions // block
    same, before = of[None] == of[:, None], of[None] < of[:, None]
    return np.block([[same, before], [np.zeros_like(same), same | before]])


@dataclasses.dataclass(eq=False)
class Reader:
    """A checkpoint and its head, and how near to a tie any of its choices was.

    Attributes:
      sizes, weights, head: the checkpoint; `head` may be empty.
      margin: least difference that a choice hung on.
    """

    sizes: Sizes
    weights: Tensors
    head: Tensors
    margin: float = np.inf

    def near(self, *differences: Any) -> None:
        """Takes note of differences that were decided on."""
        for d in differences:
            if np.size(d):
                self.margin = min(self.margin, float(np.min(np.abs(d))))

    def hidden(self, before: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Hidden states [B, D] of a block behind clean ones."""
        return self.whole(np.concatenate([before, block]))[len(before) :]

    def whole(self, ids: np.ndarray) -> np.ndarray:
        at = np.arange(len(ids))
        return backbone(self.sizes, self.weights, ids, at, to_blocks(at, self.sizes.block))[0]

    def logits(self, hidden: Any) -> Any:
        return hidden @ self.weights["lm_head.weight"].T

    def added(
        self, before: np.ndarray, block: np.ndarray, hidden: np.ndarray, context: bool = True
    ) -> np.ndarray:
        """What the head adds in a block [B, D]; without `context` it sees the block alone."""
        ids, h = block, hidden
        at = np.arange(len(before), len(before) + len(block))
        if context and len(before):
            ids, h = np.concatenate([before, block]), np.concatenate([self.whole(before), hidden])
            at = np.arange(len(ids))
        mask = to_blocks(at, self.sizes.block)
        return residual(self.sizes, self.weights, self.head, ids, h, at, mask)[0][-len(block) :]

    def candidates(
        self, logits: np.ndarray, temperature: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, their confidences, and all probabilities."""
        two = np.sort(logits, axis=-1)[:, -2:]
        self.near(two[:, 1] - two[:, 0])
        p = softmax(logits / temperature)
        return p.argmax(axis=-1), p.max(axis=-1), p

    def largest(self, masked: np.ndarray, c: np.ndarray, quota: int) -> np.ndarray:
        """The `quota` largest of the masked ones."""
        order = sorted(np.flatnonzero(masked), key=lambda i: (-c[i], i))
        found = np.zeros(len(c), bool)
        found[order[:quota]] = True
        if 0 < quota < len(order):
            self.near(c[order[quota - 1]] - c[order[quota]])
        return found

    def above(self, masked: np.ndarray, c: np.ndarray, tau: float, quota: int = 1) -> np.ndarray:
        """Those above a threshold, or the `quota` largest where these are fewer."""
        self.near(c[masked] - tau)
        high = masked & (c > tau)
        return high if high.sum() >= min(quota, masked.sum()) else self.largest(masked, c, quota)

    def reveals(
        self, rule: str, masked: np.ndarray, c: np.ndarray, p: np.ndarray, quota: int, number: Any
    ) -> Any:
        """Which masked positions a rule reveals."""
        if rule == "sequential":
            return masked & (np.cumsum(masked) <= quota)
        if rule == "low_confidence_static":
            return self.largest(masked, c, quota)
        if rule == "low_confidence_dynamic":
            return self.above(masked, c, number, quota)
        if rule == "entropy_bounded":
            sums = np.cumsum(np.sort(entropies(p)[masked]))
            self.near(sums - number)
            return self.largest(masked, -entropies(p), max(1, int((sums < number).sum())))
        if rule == "fast_threshold":
            self.near(c[masked] - number)
            return self.largest(masked, c, 1) | (masked & (c >= number))
        assert rule == "fast_factor"
        ordered = np.sort(c[masked])[::-1]
        bounds = 1 - number / (np.arange(1, len(ordered) + 1) + 1)
        self.near(ordered[1:] - bounds[1:])
        passed = np.concatenate([[True], ordered[1:] >= bounds[1:]])
        return self.largest(masked, c, int(np.cumprod(passed).sum()))


def entropies(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.maximum(p, 1e-12))).sum(axis=-1)


def quotas(block: int, steps: int) -> list[int]:
    """Tokens of each step."""
    return [block // steps + (i < block % steps) for i in range(steps)]


def canvas(s: Sizes, prompt: np.ndarray, new: int) -> np.ndarray:
    """The prompt, and masks to the end of a block."""
    found = np.full(-(-(len(prompt) + new) // s.block) * s.block, s.mask)
    found[: len(prompt)] = prompt
    return found


def decoded(reader: Reader, prompt: np.ndarray, told: dict[str, Any], number: Any) -> dict[str, np.ndarray]:
    """A decode of SDAR: its text and its steps.

    Args:
      reader: the checkpoint.
      prompt: tokens.
      told: `strategy`, `gen_length`, `denoising_steps`, `temperature`, `stop_ids` and `confidence` of a case.
      number: what its rule compares with.
    """
    s = reader.sizes
    text = canvas(s, prompt, told["gen_length"])
    steps: list[dict[str, Any]] = []
    for at in range(len(prompt) // s.block * s.block, len(text), s.block):
        cur = text[at : at + s.block].copy()
        for step, quota in enumerate(quotas(s.block, told.get("denoising_steps") or s.block)):
            masked = cur == s.mask
            if not masked.any():
                break
            z = reader.logits(reader.hidden(text[:at], cur))
            tokens, c, p = reader.candidates(z, told.get("temperature") or 1.0)
            if told.get("confidence") == "post-truncation":
                c = np.ones_like(c)  # one token is left of each distribution
                shown = masked
            else:
                shown = reader.reveals(told["strategy"], masked, c, p, quota, number)
            own = {
                "block": at // s.block,
                "step": step,
                "before": cur,
                "pred": tokens,
                "conf": c,
                "reveal": shown,
            }
            steps.append(own | {"entropy": entropies(p), "logits": z})
            cur = np.where(shown, tokens, cur)
        text[at : at + s.block] = cur
        if np.isin(text[len(prompt) :], told.get("stop_ids") or ()).any():
            break
    found = {name: np.stack([np.asarray(own[name]) for own in steps]) for name in steps[0]}
    return found | {"tokens": text}
