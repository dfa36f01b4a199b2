"""Self-distillation through time: a student learns to say in one step what its teacher says in m.

SDTT (Deschenaux and Gulcehre 2024, arXiv 2410.21035), Algorithm 1.

::

    noised text        _ b _ _ e _        t, the teacher's step Δ
    teacher, step 1    _ b _ d e _        reveals each position with probability Δ / t
    teacher, step 2    a b _ d e _        ...
    target of          2   2 1   2        the step that reveals the position; the last one for those left over

The student reads the noised text alone and is drawn to the target at every hidden position. One round later it is the
teacher, and Δ is m times as large.

Where each position is revealed its head input is kept (width D, not vocabulary V); the teacher's head reads all of
them after the last step, beside the student's, so that no array [B, S, V] ever exists where `chunk` is set, unless
`teacher_uniforms` bring one: of recorded draws the teacher makes all logits at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.config import TokenSpec
from paradec_jax.config.bounds import check_words
from paradec_jax.decode.rules.race import race, reverse_weights
from paradec_jax.decode.rules.sampling import gumbel
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.losses.cross_entropy import check_chunk, in_chunks, scorer
from paradec_jax.losses.masked_diffusion import mask_of, read
from paradec_jax.noise import LOGLINEAR, SDTT_TIMES, Times, hide
from paradec_jax.objective import Objective, Sums, drawn, weighted

SMALLEST = SDTT_TIMES.floor
"""Where the teacher's grid of times ends, 1e-5."""
GRIDS = ("paper", "released")
DIVERGENCES = ("kld", "forward_kl", "tvd", "mse", "chi_square")


@dataclasses.dataclass(frozen=True)
class DistillationRules:
    """The choices of the objective; the defaults are the paper's.

    Attributes:
      first_steps: steps of the first teacher, which set its step size (1 - 1e-5) / first_steps.
      jump: m, teacher steps that the student is to make in one; the step size grows by it each round.
      grid: the teacher's times: "paper", t - i Δ, or "released", the formula of the released code, which starts
        elsewhere than at t and so distils a smaller jump over most of the range (`teacher_times`).
      divergence: of student p and teacher q, at a hidden position: "kld" KL(p || q), "forward_kl" KL(q || p), "tvd"
        half the L1 distance, "mse" the mean square of log p - log q over all tokens, "chi_square" sum (p - q)^2 / q.
      times: how the times of a batch are drawn.
      released: the released code's "tvd", the L1 distance of log-probabilities, and "mse": both over all columns, the
        mask's included.
    """

    first_steps: int = 1024
    jump: int = 2
    grid: str = "paper"
    divergence: str = "kld"
    times: Times = SDTT_TIMES
    released: bool = False

    def __post_init__(self) -> None:
        if self.jump < 2 or self.first_steps < self.jump:
            raise ValueError(
                f"jump must be at least 2 and first_steps at least jump, not {self.jump} and {self.first_steps}"
            )
        check_words(self, grid=GRIDS, divergence=DIVERGENCES)
        if self.released and self.divergence not in ("kld", "forward_kl", "tvd", "mse"):
            raise ValueError(f"the released code has no {self.divergence}")

    def step_size(self, which: Int[Array, ""] | int) -> Float[Array, ""]:
        """Δ of a round, counted from 0: (1 - 1e-5) / first_steps * jump^round."""
        return jnp.float32((1 - SMALLEST) / self.first_steps) * jnp.float32(self.jump) ** which

    def teacher_times(self, t: Float[Array, "B"], step: Float[Array, ""]) -> Float[Array, "m B"]:
        """Where the teacher stands before each of its steps.

        ::

            paper      t_i = max(t - i Δ, 1e-5)
            released   t_i = max(t (1 - i / (m - 1)) + (1 - t) (t - m Δ), 1e-5)
        """
        index = jnp.arange(self.jump, dtype=jnp.float32)[:, None]
        if self.grid == "paper":
            return jnp.maximum(t - index * step, SMALLEST)
        ahead = 1 - index / (self.jump - 1)
        return jnp.maximum(t * ahead + (1 - t) * (t - self.jump * step), SMALLEST)


def divergence(
    student: Float[Array, "*shape V"],
    teacher: Float[Array, "*shape V"],
    mask: int,
    rules: DistillationRules,
) -> Float[Array, "*shape"]:
    """Divergence of the student from the teacher at each position, from raw logits.

    Both are log-softmaxes over all columns after -1e6 on the mask's. The teacher carries no gradient.
    """
    p = jax.nn.log_softmax(without_mask(student, mask))
    q = jax.nn.log_softmax(without_mask(lax.stop_gradient(teacher), mask))
    if rules.divergence == "kld":
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    if rules.divergence == "forward_kl":
        return jnp.sum(jnp.exp(q) * (q - p), axis=-1)
    if rules.released:
        apart = jnp.abs(p - q) if rules.divergence == "tvd" else jnp.square(p - q) / p.shape[-1]
        return jnp.sum(apart, axis=-1)
    if rules.divergence == "tvd":
        return jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1) / 2
    real = jnp.arange(p.shape[-1]) != mask
    apart = jnp.where(real, p - q, 0)
    if rules.divergence == "mse":
        return jnp.sum(jnp.square(apart), axis=-1) / (p.shape[-1] - 1)
    # q (p / q - 1)^2, its root taken of each factor: the square of a large ratio alone is beyond float32.
    return jnp.sum(jnp.square(jnp.exp(q / 2) * jnp.expm1(apart)), axis=-1)


def self_distillation_loss(
    network: Any,
    spec: TokenSpec,
    rules: DistillationRules | None = None,
    *,
    dropout: bool = True,
    chunk: int | None = 32,
) -> Objective:
    """SDTT's loss: the mean divergence over all hidden positions of the batch, without a weight by time.

    Args:
      network: the denoiser, of student and teacher.
      spec: its special tokens; `mask` matters.
      rules: the choices; the paper's when None.
      dropout: whether the student's activations are dropped, at the rate of the network's config. The teacher's never
        are.
      chunk: positions whose logits are made at a time, and again in the backward pass; all at once when None.

    Returns:
      A loss whose second argument holds `teacher`, its parameters, and `round`, a traced number counted from 0.
      Batches are those of `masked_diffusion_loss`; tokens of weight 0 are never hidden. A batch may bring its own
      `times` [B], `mask_uniforms` [B, S] and `teacher_uniforms` [m - 1 or more, B, S, V], in place of the draws; with
      the last the teacher's logits are made all at once, whatever `chunk` is.
      Metrics: `agreement` (share of hidden positions where both prefer the same token), `hidden`, their share,
      `teacher_steps`, 1 / Δ, and `round`.

    Raises:
      ValueError: no mask token, or a `chunk` below 1.
    """
    mask, chosen = mask_of(spec), DistillationRules() if rules is None else rules
    check_chunk(chunk)

    def sums(params: Any, frozen: dict[str, Any], batch: dict[str, Array], key: Array) -> Sums:
        of_noise, of_teacher, of_dropout = jax.random.split(key, 3)
        noised, hidden, t = _noise(batch, chosen, mask, of_noise)
        teacher, step = lax.stop_gradient(frozen["teacher"]), chosen.step_size(frozen["round"])
        wanted, _ = teach(
            network, teacher, noised, t, step, of_teacher, chosen, mask, chunk, batch.get("teacher_uniforms")
        )
        said = read(network, params, noised, of_dropout if dropout else None)

        student, taught = scorer(network, params, len(noised)), scorer(network, teacher)

        def score(said: Array, wanted: Array) -> tuple[Array, Array]:
            mine, other = student(said), taught(wanted)
            best = [jnp.argmax(without_mask(logits, mask), axis=-1) for logits in (mine, other)]
            return divergence(mine, other, mask, chosen), best[0] == best[1]

        value, same = in_chunks(score, chunk, said, wanted)
        return {
            "loss": weighted(jnp.where(hidden, value, 0), hidden),
            "agreement": weighted(same, hidden),
            "hidden": weighted(hidden, jnp.ones(hidden.shape)),
            "teacher_steps": drawn((1 - SMALLEST) / step),
            "round": drawn(frozen["round"]),
        }

    return Objective(sums)


def _noise(
    batch: dict[str, Array], rules: DistillationRules, mask: int, key: Array
) -> tuple[Array, Array, Array]:
    """Noised tokens [B, S], which of them are hidden [B, S], and the time of each row [B]."""
    of_times, of_masks = jax.random.split(key)
    tokens, t = batch["tokens"], batch.get("times")
    if t is None:
        t = rules.times.draw(of_times, len(tokens))
    uniforms = batch.get("mask_uniforms")
    if uniforms is None:
        uniforms = jax.random.uniform(of_masks, tokens.shape)
    weights = batch.get("weights")
    where = None if weights is None else weights > 0
    noised, hidden = hide(tokens, uniforms, LOGLINEAR.mask_probability(t), mask, where)
    return noised, hidden, t


def teach(
    network: Any,
    teacher: Any,
    noised: Int[Array, "B S"],
    t: Float[Array, "B"],
    step: Float[Array, ""],
    key: Array,
    rules: DistillationRules,
    mask: int,
    chunk: int | None = None,
    recorded: Float[Array, "m B S V"] | None = None,
) -> tuple[Float[Array, "B S D"], Int[Array, "m B S"]]:
    """Algorithm 1: the teacher's m steps from a noised text.

    A step goes from t to s = t - Δ and reveals each hidden position with the probability (t - s) / t, all of them
    where s is not above 0. What the last step would reveal changes no target and is not drawn.

    Args:
      network, teacher: the denoiser and the teacher's parameters.
      noised: the text, hidden in part.
      t: time of each row.
      step: Δ.
      key: random key; the same key gives the same draws.
      rules: `jump` and `grid` matter.
      mask: the mask's id.
      chunk: positions whose logits are made at a time.
      recorded: numbers in [0, 1), of which each step draws by the race that also decides the reveal, as the released
        program does; the logits of all positions are then made at once, whatever `chunk` is.

    Returns:
      The head input of each hidden position at its target's step, and the text before each step.
    """

    def body(carry: tuple[Array, Array], xs: dict[str, Array]) -> tuple[tuple[Array, Array], Array]:
        z, kept = carry
        vectors = read(network, teacher, z)
        kept = jnp.where((z == mask)[..., None], vectors, kept)
        after = lax.cond(
            xs["index"] < rules.jump - 1,
            lambda: _move(network, teacher, z, vectors, xs, step, mask, chunk),
            lambda: z,
        )
        return (after, kept), z

    index = jnp.arange(rules.jump)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(index)
    xs = {"index": index, "t": rules.teacher_times(t, step), "key": keys}
    if recorded is not None:
        xs["uniforms"] = recorded[jnp.minimum(index, len(recorded) - 1)]
    shape = jax.eval_shape(lambda z: read(network, teacher, z), noised)
    (_, kept), before = lax.scan(body, (noised, jnp.zeros(shape.shape, shape.dtype)), xs)
    return lax.stop_gradient(kept), before


def _move(
    network: Any,
    teacher: Any,
    z: Array,
    vectors: Array,
    xs: dict[str, Array],
    step: Array,
    mask: int,
    chunk: int | None,
) -> Int[Array, "B S"]:
    """The text after one of the teacher's steps."""
    if "uniforms" in xs:
        probs = jnp.exp(jax.nn.log_softmax(without_mask(network.logits(teacher, vectors), mask)))
        now, then = (LOGLINEAR.mask_probability(t) for t in (xs["t"], xs["t"] - step))
        return jnp.where(z == mask, race(reverse_weights(probs, now, then, mask), xs["uniforms"]), z)
    of_reveal, of_tokens = jax.random.split(xs["key"])
    share = jnp.clip(step / xs["t"], 0, 1)
    reveal = (z == mask) & (jax.random.uniform(of_reveal, z.shape) < share[:, None])
    return jnp.where(reveal, _draw(network, teacher, vectors, of_tokens, mask, chunk), z)


def _draw(
    network: Any, teacher: Any, vectors: Array, key: Array, mask: int, chunk: int | None
) -> Int[Array, "B S"]:
    """A token of every position, the same whatever the chunk."""
    index = jnp.arange(vectors.shape[0] * vectors.shape[1]).reshape(vectors.shape[:2])
    logits_of = scorer(network, teacher)

    def of_chunk(vectors: Array, index: Array) -> Array:
        logits = without_mask(logits_of(vectors), mask)
        keys = jax.vmap(jax.vmap(lambda i: jax.random.fold_in(key, i)))(index)
        return jnp.argmax(logits + gumbel(keys, logits.shape[-1]), axis=-1).astype(jnp.int32)

    return in_chunks(of_chunk, chunk, vectors, index)
