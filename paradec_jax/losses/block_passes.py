"""Reads noisy and clean copies of blocks in their contexts: as ordinary causal passes, or packed under a mask.

With P prompt tokens and K = T n block tokens, block token k of either copy stands at position `length + k`, and the
position before it predicts it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from paradec_jax.nn import masks

Forward = Callable[..., Array]
"""`(params, tokens, real, positions, mask=causal) -> hidden [B, S, D]`; real [B, S] is False at padding."""


def forward_of(network: Any) -> Forward:
    """The network's forward, without a gradient to the input vectors of padding, as in the released trainers."""

    def forward(params: Any, tokens: Array, real: Array, positions: Array, **options: Any) -> Array:
        vectors = network.embedding(params)[tokens]
        inputs = jnp.where(real[..., None], vectors, lax.stop_gradient(vectors))
        return network.forward(params, inputs, positions, **options).hidden

    return forward


class Real(NamedTuple):
    """Which tokens of a batch are text, and not padding.

    Attributes:
      prompt: of the prompts, before their lengths are looked at.
      noisy, clean: of the two copies of all blocks, before the number of pairs is.
    """

    prompt: Bool[Array, "B P"]
    noisy: Bool[Array, "B *blocks"]
    clean: Bool[Array, "B *blocks"]


def real_tokens(batch: dict[str, Array]) -> Real:
    """`prompt_real`, `noisy_real` and `clean_real` of a batch; without them every token is text.

    Padding is never told by its id, which may be that of a stop token.
    """
    shapes = (batch[name].shape for name in Real._fields)
    names = (f"{name}_real" for name in Real._fields)
    masks = [
        jnp.asarray(batch.get(name, np.ones(shape)), bool) for name, shape in zip(names, shapes, strict=True)
    ]
    return Real(*masks)


class Hidden(NamedTuple):
    """Head inputs where logits are needed.

    Attributes:
      prompt: of the prompt's tokens.
      before: of the position before each clean token, which predicts it.
      student: of the noisy tokens.
      teacher: of the clean tokens in the teacher's context; carries no gradient.
    """

    prompt: Float[Array, "B P D"]
    before: Float[Array, "B K D"]
    student: Float[Array, "B K D"]
    teacher: Float[Array, "B K D"]


def noisy_blocks(pairs: int, window: int) -> np.ndarray:
    """Which blocks each causal pass takes from the noisy copy, [1 + ceil(T / w), T].

    Pass 0 is clean throughout. Pass 1 + g reads the noisy blocks of window g after clean ones (window 2 of five
    pairs drawn; what follows a window is not read)::

        . . . . .
        x x x x x
        . . x x x
        . . . . x
    """
    first = np.arange(0, pairs, window)[:, None]
    return np.concatenate([np.zeros((1, pairs), bool), np.arange(pairs) >= first])


def read_passes(forward: Forward, params: Any, teacher: Any, pairs: Any, block: int, rules: Any) -> Hidden:
    """Reads every context as a causal sequence of its own; all are rows of one forward."""
    count = pairs.clean.shape[1] // block
    window = rules.window_of(count)
    noisy = np.repeat(noisy_blocks(count, window), block, axis=1)
    student_pass = np.repeat(1 + np.arange(count) // window, block)
    rows = _read(forward, params, pairs, noisy)
    clean, each = rows[:, :1], np.arange(block * count)
    before = _pick(clean, pairs.lengths, each - 1, 0)
    student = _pick(rows, pairs.lengths, each, student_pass)
    if rules.teacher == "online" and rules.teacher_context == "clean":
        wanted = _pick(clean, pairs.lengths, each, 0)
    elif rules.teacher_context == "clean":
        wanted = _pick(_read(forward, teacher, pairs, noisy[:1]), pairs.lengths, each, 0)
    else:  # pass j: noisy blocks before j, then the clean block j
        own = np.repeat(~np.eye(count, dtype=bool), block, axis=1)
        constant = lax.stop_gradient(teacher)
        wanted = _pick(_read(forward, constant, pairs, own), pairs.lengths, each, each // block)
    return Hidden(clean[:, 0, : pairs.prompt.shape[1]], before, student, lax.stop_gradient(wanted))


def _read(forward: Forward, params: Any, pairs: Any, noisy: np.ndarray) -> Float[Array, "B R S D"]:
    """Hidden states of R sequences a row, whose blocks are noisy or clean."""

    def passes(prompt: Array, noisy_copy: Array, clean_copy: Array) -> Array:
        blocks = jnp.where(noisy, noisy_copy[:, None], clean_copy[:, None])  # [B, R, K]
        return sequences(prompt, pairs.lengths, blocks)

    tokens, real = passes(pairs.prompt, pairs.noisy, pairs.clean), passes(*pairs.real)
    flat = tokens.reshape(-1, tokens.shape[-1])
    positions = jnp.broadcast_to(jnp.arange(flat.shape[1]), flat.shape)
    return forward(params, flat, real.reshape(flat.shape), positions).reshape(*tokens.shape, -1)


def sequences(
    prompt: Shaped[Array, "B P"], lengths: Int[Array, "B"], blocks: Shaped[Array, "B R K"]
) -> Shaped[Array, "B R P+K"]:
    """Prompts with their blocks directly after them; padding comes last, where no causal query sees it."""
    (batch, passes, size), width = blocks.shape, prompt.shape[1]
    at = jnp.arange(width + size) - lengths[:, None]
    index = jnp.broadcast_to(jnp.clip(at, 0, size - 1)[:, None], (batch, passes, width + size))
    before = jnp.pad(prompt, [(0, 0), (0, size)])[:, None]
    return jnp.where((at < 0)[:, None], before, jnp.take_along_axis(blocks, index, axis=2))


def _pick(
    rows: Float[Array, "B R S D"], lengths: Int[Array, "B"], tokens: np.ndarray, which: np.ndarray | int
) -> Float[Array, "B K D"]:
    """Positions `lengths + tokens` of the passes `which`."""
    batch, passes, size, _ = rows.shape
    index = lengths[:, None] + (which * size + tokens)
    return jnp.take_along_axis(rows.reshape(batch, passes * size, -1), index[..., None], axis=1)


def packed_positions(lengths: Int[Array, "B"], prompt: int, pairs: int, block: int) -> Int[Array, "B P+2K"]:
    """Positions of a packed sequence: both copies of a pair stand at the same ones, directly after the prompt."""
    pair, offset = np.arange(2 * pairs * block) // (2 * block), np.arange(2 * pairs * block) % block
    after = lengths[:, None] + (pair * block + offset)
    return jnp.concatenate([jnp.broadcast_to(jnp.arange(prompt), (len(lengths), prompt)), after], axis=1)


def read_packed(forward: Forward, params: Any, teacher: Any, pairs: Any, block: int, rules: Any) -> Hidden:
    """Reads prompt and interleaved copies in one sequence of P + 2 K tokens under a dense mask."""
    width, size = pairs.prompt.shape[1], pairs.clean.shape[1]
    count, each = size // block, np.arange(size)

    def packed(prompt: Array, noisy: Array, clean: Array) -> Array:
        blocks = rearrange([noisy, clean], "copy b (t n) -> b (t copy n)", n=block)
        return jnp.concatenate([prompt, blocks], axis=1)

    tokens, text = packed(pairs.prompt, pairs.noisy, pairs.clean), packed(*pairs.real)
    positions = packed_positions(pairs.lengths, width, count, block)
    place = np.arange(width + 2 * size)
    real = (place >= width) | (place < pairs.lengths[:, None])  # no padding of the prompt
    mask = masks.noisy_window(width, count, block, rules.window_of(count)) & real[:, None]

    hidden = forward(params, tokens, text, positions, mask=mask)
    wanted = hidden
    if rules.teacher == "frozen":
        wanted = forward(teacher, tokens, text, positions, mask=mask)
    noisy = width + 2 * (each - each % block) + each % block
    clean = noisy + block
    last = jnp.take_along_axis(hidden, pairs.lengths[:, None, None] - 1, axis=1)
    before = jnp.concatenate([last, hidden[:, clean[:-1]]], axis=1)
    return Hidden(hidden[:, :width], before, hidden[:, noisy], lax.stop_gradient(wanted[:, clean]))
