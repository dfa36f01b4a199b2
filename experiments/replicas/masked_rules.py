"""One reverse step of the released programs of masked diffusion, from time t to s, quirk for quirk.

Each draws a whole vocabulary at every position, the mask among it, by `rules.race`.
"""

import dataclasses
import math
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.canvas.canvas import Canvas
from paradec_jax.decode.machine.knobs import NOT_NEGATIVE, UNLIMITED, SamplingKnobs, knob
from paradec_jax.decode.machine.request import RecordedDraws
from paradec_jax.decode.machine.rows import Rows
from paradec_jax.decode.rules.randomness import Purpose, fold
from paradec_jax.decode.rules.sampling import filtered_probabilities, is_hot
from paradec_jax.decode.rules.subs import subs
from paradec_jax.nn.precision import at_least_float32
from paradec_jax.noise import LOGLINEAR

AnyCanvas = TypeVar("AnyCanvas", bound=Canvas)

LAST = 1e-5  # time at which the steps end


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleasedMaskedKnobs(SamplingKnobs):
    """The programs draw from the denoiser's own distribution, at temperature 1 and unfiltered, the
    defaults here.
    """

    temperature: Float[Array, ""] | float = knob(1.0, NOT_NEGATIVE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedRaces(RecordedDraws):
    """Recorded uniforms of every step, each row's own, [B, T, S, V]; calls beyond T see those of
    the last one.
    """

    races: Float[Array, "B T S V"] | None = None
    per_row: ClassVar[tuple[str, ...]] = ("races",)


def linspace(start: float, end: float, count: int) -> np.ndarray:
    """`torch.linspace` in float32: counted from the nearer end, rounded once."""
    first, last, index = np.float32(start), np.float32(end), np.arange(count)
    step = np.float64((last - first) / np.float32(count - 1))
    low, high = first + step * index, last - step * (count - 1 - index)
    return np.where(index < count // 2, low, high).astype(np.float32)


def uniforms(
    rows: Rows, call: Int[Array, "B"], at: Int[Array, "B"], width: int, vocab: int
) -> Float[Array, "B W V"]:
    """Numbers of a race at positions `at .. at + width - 1` in each row's call, recorded or of its
    key.
    """
    recorded = getattr(rows.recorded, "races", None)
    if getattr(rows.recorded, "uniforms", None) is not None:
        raise ValueError(
            "a race needs a number for every token: give recorded.races and no recorded.uniforms"
        )
    if recorded is not None:
        step = jnp.minimum(call, recorded.shape[1] - 1)
        return jax.vmap(lambda race, i: lax.dynamic_index_in_dim(race, i, keepdims=False))(
            recorded, step
        )
    keys = fold(rows.keys, Purpose.NOISE, at[:, None] + jnp.arange(width), call)
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (vocab,), jnp.float32)))(keys)


def mask_probability(t: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """m_t of the ancestral steps, `1 - exp(-sigma(t))`; cached ones take t itself."""
    return 1 - jnp.exp(-LOGLINEAR.sigma(t))


def analytic_weights(
    probs: Float[Array, "B W V"],
    tokens: Int[Array, "B W"],
    t: Float[Array, "B"],
    s: Float[Array, "B"] | None,
    mask: int,
) -> Float[Array, "B W V"]:
    """Staggered score times transition (SEDD, arXiv 2310.16834), of all positions; without s the
    denoiser.

    The score of a masked position is `k p_y`, 1 at the mask, `k = 1 / (e^sigma - 1)`; that of
    another one is 1 at its own token and 1 / k at the mask.
    """
    sigma = LOGLINEAR.sigma(t)[:, None, None]
    change = sigma if s is None else sigma - LOGLINEAR.sigma(s)[:, None, None]
    masked, own = (tokens == mask)[..., None], jax.nn.one_hot(tokens, probs.shape[-1])
    at_mask = jax.nn.one_hot(mask, probs.shape[-1])
    odds = jnp.expm1(sigma)
    score = jnp.where(masked, probs / odds * (1 - at_mask) + at_mask, own + odds * at_mask)
    extra = (1 - jnp.exp(change)) * jnp.sum(score, axis=-1, keepdims=True)
    staggered = score * jnp.exp(change) + extra * at_mask
    weights = staggered * (jnp.exp(-change) * own + jnp.where(masked, 1 - jnp.exp(-change), 0.0))
    return weights if s is not None else weights.at[:, :, mask].set(-1.0)


def most_probable(probs: Float[Array, "B W V"], mask: int) -> Int[Array, "B W"]:
    """The token with which a program ends, never the mask: also where probabilities are NaN nothing
    stays masked.
    """
    return jnp.argmax(probs.at[:, :, mask].set(-1.0), axis=-1).astype(jnp.int32)


def distribution(
    logits: Float[Array, "*shape V"], knobs: Any, *, top_p_rule: str = "keep"
) -> Float[Array, "*shape V"]:
    """What `sample` draws from: `filtered_probabilities`, or at temperature 0 the most probable
    token alone.
    """

    def greedy(logits: Array) -> Array:
        best = jnp.argmax(logits, axis=-1)
        return jax.nn.one_hot(best, logits.shape[-1], dtype=at_least_float32(logits).dtype)

    def stochastic(logits: Array) -> Array:
        return filtered_probabilities(logits, knobs, top_p_rule=top_p_rule)

    return lax.cond(is_hot(knobs.temperature), stochastic, greedy, logits)


def predict(
    decoder: Any,
    params: Any,
    canvas: AnyCanvas,
    at: Int[Array, "B"],
    width: int,
    knobs: SamplingKnobs,
) -> tuple[Float[Array, "B W V"], dict[str, Any]]:
    """Probabilities of a window's tokens after SUBS, and what the call counted, [B] each."""
    network = decoder.network
    tokens, positions, _, mask = canvas.window(at, width)
    out = network.forward(params, tokens, positions - at[:, None], None, mask)
    log_probs = subs(network.logits(params, out.hidden), tokens, decoder.spec.mask)
    counts = {name: jnp.broadcast_to(amount, at.shape) for name, amount in out.counts.items()}

    def shaped(log_probs: Array) -> Array:
        return distribution(log_probs, knobs, top_p_rule=decoder.top_p_rule)

    if decoder.greedy:
        best = jnp.argmax(log_probs, axis=-1)
        return jax.nn.one_hot(best, network.vocab_size, dtype=log_probs.dtype), counts
    unshaped = (
        (jnp.asarray(knobs.temperature) == 1)
        & (jnp.asarray(knobs.top_p) >= 1)
        & (jnp.asarray(knobs.min_p) <= 0)
        & (jnp.asarray(UNLIMITED if knobs.top_k is None else knobs.top_k) >= network.vocab_size)
    )
    return lax.cond(unshaped, jnp.exp, shaped, log_probs), counts


def predict_if(
    needed: Bool[Array, ""],
    kept: Float[Array, "B W V"],
    decoder: Any,
    params: Any,
    canvas: AnyCanvas,
    at: Int[Array, "B"],
    knobs: SamplingKnobs,
) -> tuple[Float[Array, "B W V"], dict[str, Any]]:
    """As `predict` where it is needed, else what was kept of the call before, at no cost: one call
    for all rows.
    """

    def call() -> tuple[Array, dict[str, Any]]:
        return predict(decoder, params, canvas, at, kept.shape[1], knobs)

    def reuse() -> tuple[Array, dict[str, Any]]:
        return kept, dict.fromkeys(decoder.network.counters, jnp.zeros_like(at))

    return lax.cond(needed, call, reuse)


def write(
    canvas: AnyCanvas,
    tokens: Int[Array, "B W"],
    at: Int[Array, "B"],
    mask: int,
    over: Bool[Array, "B"],
) -> tuple[AnyCanvas, Bool[Array, "B"]]:
    """Puts what a step has made of a window's masked positions into it; a row ends when its program
    does.

    The programs do not look whether the text is complete, so its last position is committed when
    the row is `over`.

    Returns:
      The canvas, and the rows in which anything changed.
    """
    _, _, open_, _ = canvas.window(at, tokens.shape[1])
    where = open_ & (tokens != mask)
    upto = canvas.rows.limit - ~over
    return canvas.show(tokens, where, at).seal(upto), jnp.any(where, axis=1)


def check_program(decoder: Any, **sizes: int | None) -> None:
    """Refuses sizes below 1, and log-probabilities. Raises ValueError."""
    for field, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{field} must be at least 1, not {value}")
    if decoder.log_probs:
        raise ValueError(f"{type(decoder).__name__} keeps no log-probabilities")


def tokens_before(tokens: np.ndarray, eos: int) -> np.ndarray:
    """Length of each text as the programs tell it: tokens after the first one and before the first
    `eos`, [B].
    """
    hits = tokens[:, 1:] == eos
    return np.where(hits.any(axis=1), hits.argmax(axis=1), hits.shape[1])


def whole_steps(steps: int) -> int:
    """`int(1 / dt)` for `dt = 1 / steps`, which float arithmetic makes one less for some numbers,
    49 for one.
    """
    return math.floor(1 / (1 / steps))


def time_grid(
    masked: Int[Array, "B"],
    call: Int[Array, "B"] | int,
    calls: Int[Array, ""] | int,
    epsilon: Float[Array, ""] | float = 1e-3,
) -> Int[Array, "B"]:
    """How many of the positions that are still masked call `call` (from 0) of `calls` reveals
    (Dream).

    ::

        floor(masked (1 - t_{i+1} / t_i)),   t_i = 1 - (1 - epsilon) i / calls;   the last call reveals all

        6 positions in 6 calls   0 1 1 1 1 2

    In float32, where a product close to an integer may fall to either side; times count from the
    nearer end, as the released program's do.
    """

    def time(index: Array) -> Array:
        step = jnp.float32(1 - epsilon) / calls
        return jnp.where(2 * index < calls + 1, 1 - step * index, epsilon + step * (calls - index))

    call = jnp.asarray(call)
    count = (masked * (1 - time(call + 1) / time(call))).astype(jnp.int32)
    return jnp.where(call >= calls - 1, masked, count)
