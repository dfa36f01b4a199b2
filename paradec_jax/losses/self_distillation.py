"""Self-distillation through time: a student learns to say in one step what its teacher says in m.

SDTT (Deschenaux and Gulcehre 2024, arXiv 2410.21035), Algorithm 1.

::

    noised text        _ b _ _ e _        t, the teacher's step Δ
    teacher, step 1    _ b _ d e _        reveals each position with probability Δ / t
    teacher, step 2    a b _ d e _        ...
    target of          2   2 1   2        the step that reveals the position; the last one for those left over

The student reads the noised text alone and is drawn to the target at every hidden position. One
round later it is the teacher, and Δ is m times as large.

Where each position is revealed its hidden state is kept (width D, not vocabulary V). Logits are
made of all of them after the last step, beside the student's, so that no array [B, S, V] exists
where `chunk` is set. Recorded draws are the exception: they are such an array, and the teacher
makes all logits at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.config import Ranged, TokenSpec, check_words
from paradec_jax.decode.rules import gumbel, without_mask
from paradec_jax.decode.rules.race import race, reverse_weights
from paradec_jax.losses.cross_entropy import in_chunks, scorer
from paradec_jax.losses.masked_diffusion import mask_of, read
from paradec_jax.losses.recorded import recorded_or
from paradec_jax.noise import LOGLINEAR, SDTT_TIMES, Times, hide
from paradec_jax.objective import Batch, Objective, Sums, drawn, weighted
from paradec_jax.records import record

SMALLEST = SDTT_TIMES.floor  # 1e-5, where the teacher's grid of times ends


@dataclasses.dataclass(frozen=True)
class DistillationRules(Ranged):
    """The choices of the objective; the defaults are the paper's.

    Attributes:
      first_steps: steps of the first teacher, which set its step size (1 - 1e-5) / first_steps.
      jump: m, teacher steps that the student is to make in one; the step size grows by it each
        round.
      grid: the teacher's times: "paper", t - i Δ, or "released", the formula of the released code,
        which starts elsewhere than at t and so distils a smaller jump over most of the range
        (`teacher_times`).
      divergence: of student p and teacher q, at a hidden position: "kld" KL(p || q), "forward_kl"
        KL(q || p), "tvd" half the L1 distance, "mse" the mean square of log p - log q over all
        tokens, "chi_square" sum (p - q)^2 / q.
      times: how the times of a batch are drawn.
      released: the released code's "tvd", the L1 distance of log-probabilities, and "mse": both
        over all columns, the mask's included.
    """

    first_steps: int = 1024
    jump: int = 2
    grid: str = "paper"
    divergence: str = "kld"
    times: Times = SDTT_TIMES
    released: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jump < 2 or self.first_steps < self.jump:
            raise ValueError(
                f"jump must be at least 2 and first_steps at least jump, not {self.jump} and {self.first_steps}"
            )
        kinds = ("kld", "forward_kl", "tvd", "mse", "chi_square")
        check_words(self, grid=("paper", "released"), divergence=kinds)
        if self.released and self.divergence == "chi_square":
            raise ValueError("the released code has no chi_square")

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


SDTT = DistillationRules()


def divergence(
    student: Float[Array, "*shape V"],
    teacher: Float[Array, "*shape V"],
    mask: int,
    rules: DistillationRules,
) -> Float[Array, "*shape"]:
    """Divergence of the student from the teacher at each position, from raw logits.

    Both are log-softmaxes over all columns after -1e6 on the mask's. The teacher carries no
    gradient.
    """
    p = jax.nn.log_softmax(without_mask(student, mask))
    q = jax.nn.log_softmax(without_mask(lax.stop_gradient(teacher), mask))
    # KL(p || q)
    if rules.divergence == "kld":
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    # KL(q || p)
    if rules.divergence == "forward_kl":
        return jnp.sum(jnp.exp(q) * (q - p), axis=-1)
    if rules.released:
        apart = jnp.abs(p - q) if rules.divergence == "tvd" else jnp.square(p - q) / p.shape[-1]
        return jnp.sum(apart, axis=-1)
    # sum |p - q| / 2
    if rules.divergence == "tvd":
        return jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1) / 2
    # mean (log p - log q)^2
    real = jnp.arange(p.shape[-1]) != mask
    apart = jnp.where(real, p - q, 0)
    if rules.divergence == "mse":
        return jnp.sum(jnp.square(apart), axis=-1) / (p.shape[-1] - 1)
    # sum q (p / q - 1)^2, its root taken of each factor: the square of a large ratio alone is
    # beyond float32.
    return jnp.sum(jnp.square(jnp.exp(q / 2) * jnp.expm1(apart)), axis=-1)


def self_distillation_loss(
    network: Any,
    spec: TokenSpec,
    rules: DistillationRules = SDTT,
    *,
    dropout: bool = True,
    chunk: int | None = 32,
) -> Objective:
    """SDTT's loss: the mean divergence over all hidden positions of the batch, without a weight by
    time.

    With `dropout` the student's activations are dropped, at the rate of the network's config, the
    teacher's never.

    Returns:
      A loss whose second argument holds `teacher`, its parameters, and `round`, a traced number
      counted from 0. Batches are those of `masked_diffusion_loss`; tokens of weight 0 are never
      hidden. Metrics: `agreement`, the share of hidden positions where both prefer the same token,
      `hidden`, their share, `teacher_steps`, 1 / Δ, and `round`.
    """
    mask = mask_of(spec)

    def sums(params: Any, frozen: dict[str, Any], batch: Batch, key: Array) -> Sums:
        of_noise, of_teacher, of_dropout = jax.random.split(key, 3)
        of_times, of_masks = jax.random.split(of_noise)
        tokens, weights = batch["tokens"], batch.get("weights")
        # t, and z_t ~ q(z_t | x)
        t = recorded_or(batch, "times", lambda: rules.times.draw(of_times, len(tokens)))
        uniforms = recorded_or(
            batch, "mask_uniforms", lambda: jax.random.uniform(of_masks, tokens.shape)
        )
        where = None if weights is None else weights > 0
        noised, hidden = hide(tokens, uniforms, LOGLINEAR.mask_probability(t), mask, where)
        # Algorithm 1: the teacher's targets.
        step = rules.step_size(frozen["round"])
        teacher = Teacher(network, lax.stop_gradient(frozen["teacher"]), rules, mask, chunk)
        recorded = recorded_or(batch, "teacher_uniforms", lambda: None)
        targets, _ = teacher.targets(noised, t, step, of_teacher, recorded)
        # The student's prediction, from z_t alone.
        vectors = read(network, params, noised, of_dropout if dropout else None)
        student_logits = scorer(network, params, len(noised))
        teacher_logits = scorer(network, teacher.params)

        def score(vectors: Array, targets: Array) -> tuple[Array, ...]:
            p, q = student_logits(vectors), teacher_logits(targets)
            best, wanted = (jnp.argmax(without_mask(x, mask), axis=-1) for x in (p, q))
            return divergence(p, q, mask, rules), best == wanted

        # L = mean of the divergence over hidden positions
        value, same = in_chunks(score, chunk, vectors, targets)
        return {
            "loss": weighted(jnp.where(hidden, value, 0), hidden),
            "agreement": weighted(same, hidden),
            "hidden": weighted(hidden, jnp.ones(hidden.shape)),
            "teacher_steps": drawn((1 - SMALLEST) / step),
            "round": drawn(frozen["round"]),
        }

    return Objective(sums)


@record
class Teacher:
    """The teacher of a round.

    Attributes:
      network, params: the denoiser and the teacher's parameters.
      rules, chunk: as in the objective; `jump` and `grid` matter.
      mask: the mask's id.
    """

    network: Any
    params: Any
    rules: DistillationRules
    mask: int
    chunk: int | None = None

    def targets(
        self,
        noised: Int[Array, "B S"],
        t: Float[Array, "B"],
        step: Float[Array, ""],
        key: Array,
        recorded: Float[Array, "m B S V"] | None = None,
    ) -> tuple[Float[Array, "B S D"], Int[Array, "m B S"]]:
        """Algorithm 1: the teacher's m steps, each of size Δ, from a noised text at the times t of
        its rows.

        Where numbers in [0, 1) are recorded, each step draws from them by the released race.

        Returns:
          The hidden state of each hidden position at its target's step, and the text before each
          step.
        """
        z, before = noised, [noised]
        target = vectors = read(self.network, self.params, z)
        # What the last step would reveal changes no target and is not drawn.
        for i, time in enumerate(self.rules.teacher_times(t, step)[:-1]):
            # z: a reverse step from t_i to t_i - Δ.
            if recorded is None:
                z = self.reverse_step(z, vectors, step / time, jax.random.fold_in(key, i))
            else:
                z = self.recorded_step(z, vectors, time, step, recorded[i])
            before.append(z)
            # The target of a position is the prediction when it is revealed, or the last one: each
            # step overwrites the targets of the positions that are still hidden.
            vectors = read(self.network, self.params, z)
            target = jnp.where((z == self.mask)[..., None], vectors, target)
        return lax.stop_gradient(target), jnp.stack(before)

    def reverse_step(
        self,
        z: Int[Array, "B S"],
        vectors: Float[Array, "B S D"],
        share: Float[Array, "B"],
        key: Array,
    ) -> Int[Array, "B S"]:
        """The text after a step from t to s: each hidden position is revealed with the probability
        (t - s) / t.

        All of them are where that share is 1 or more. Tokens are the same whatever the chunk.
        """
        of_reveal, of_tokens = jax.random.split(key)
        uniforms = jax.random.uniform(of_reveal, z.shape)
        reveal = (z == self.mask) & (uniforms < jnp.clip(share, 0, 1)[:, None])
        logits_of = scorer(self.network, self.params)

        def draw(vectors: Array, index: Array) -> Array:
            logits = without_mask(logits_of(vectors), self.mask)
            keys = jax.vmap(jax.vmap(lambda i: jax.random.fold_in(of_tokens, i)))(index)
            return jnp.argmax(logits + gumbel(keys, logits.shape[-1]), axis=-1).astype(jnp.int32)

        index = jnp.arange(z.size).reshape(z.shape)
        return jnp.where(reveal, in_chunks(draw, self.chunk, vectors, index), z)

    def recorded_step(
        self, z: Array, vectors: Array, time: Array, step: Array, uniforms: Float[Array, "B S V"]
    ) -> Int[Array, "B S"]:
        """The same from recorded numbers: one race decides if and as what each is revealed."""
        logits = without_mask(self.network.logits(self.params, vectors), self.mask)
        probs = jnp.exp(jax.nn.log_softmax(logits))
        now, then = (LOGLINEAR.mask_probability(t) for t in (time, time - step))
        weights = reverse_weights(probs, now, then, self.mask)
        return jnp.where(z == self.mask, race(weights, uniforms), z)
