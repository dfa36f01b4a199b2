"""Training of a residual head: multi-token residual prediction (MRP), Algorithm 1.

::

    y_0 noised text      _ b _ _ | _ _ g h        a_0 = backbone(y_0)
    y_1                  _ b c _ | e _ g h        one token of each block revealed, anywhere
    y_2                  a b c _ | e f g h        and another
    r_k = head(y_k, a_{k-1})                      a_k = a_{k-1} + r_k
    loss of step k       KL( U backbone(y_k) || U (stopped a_{k-1} + r_k) )     where y_k is still masked

U is the backbone's output matrix; the backbone is frozen. The base of a step carries no gradient,
the head's input does, so that a later step also trains the residuals before it. The K texts y_k are
taught in one call of K B rows.

Noisy blocks see the clean blocks before them (`block_diffusion`): the backbone reads the clean copy
once, the head at every step, with a running sum of its own. Or, with `layout` "infer_matched",
noisy blocks see the noisy ones before.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import Ranged, TokenSpec
from paradec_jax.decode.machine import Prefix
from paradec_jax.decode.rules import without_mask
from paradec_jax.losses.block_diffusion import (
    Streams,
    Texts,
    before_each,
    lengths_of,
    masks_of,
    noised,
)
from paradec_jax.losses.cross_entropy import (
    in_chunks,
    scorer,
    soft_cross_entropy,
    token_losses,
)
from paradec_jax.losses.masked_diffusion import mask_of
from paradec_jax.losses.recorded import recorded_or
from paradec_jax.noise import BlockNoise, choose
from paradec_jax.objective import Batch, Metrics, Objective, Sum, Sums, weighted
from paradec_jax.records import record


@dataclasses.dataclass(frozen=True)
class ResidualRules(Ranged):
    """The choices of the objective; but for `unroll` and `normaliser` the defaults are as released.

    Attributes:
      unroll: K, number of steps.
      normaliser: what a step's sum over the positions still masked is divided by. With weights
        1 / p: "selfnorm" for their sum, "official" for the number of labelled tokens less 1 / p for
        each token revealed so far, which can come near zero or below; "mean" weighs all positions
        alike.
      objective: "kl" to the backbone on y_k, "cross_entropy" to the clean tokens, "mse" to the
        backbone's logits, the mean over the vocabulary.
      direct: direct modelling: scores are U r_k, and the next step reads r_k in the place of the
        sum.
      layout: "doubled" (a noisy and a clean copy) or "infer_matched" (the noisy one alone).
      reveals: how many tokens a step reveals in a block that has any: one of these numbers, drawn
        for each block.
      tokens: what is revealed, the "truth", or the best token of the running sum, the head's "own".
      noise: noise of y_0.
      blocks: lengths of blocks, one drawn for each row; the backbone's own when None.
    """

    unroll: int = 1
    normaliser: str = "selfnorm"
    objective: str = "kl"
    direct: bool = False
    layout: str = "doubled"
    reveals: tuple[int, ...] = (1,)
    tokens: str = "truth"
    noise: BlockNoise = BlockNoise()  # noqa: RUF009
    blocks: tuple[int, ...] | None = None

    WORDS = {  # noqa: RUF012
        "normaliser": ("selfnorm", "official", "mean"),
        "objective": ("kl", "cross_entropy", "mse"),
        "layout": ("doubled", "infer_matched"),
        "tokens": ("truth", "own"),
    }


MRP = ResidualRules()


class Steps(NamedTuple):
    """All steps, k = 1 .. K.

    Attributes:
      start: hidden states of the backbone for y_0 and the clean copy, a_0.
      tokens: y_k.
      still: positions still masked in y_k, at which the step is judged.
      base: input of the head for each copy, a_{k-1} (direct modelling: r_{k-1}).
      residual: r_k of each copy.
      taught: hidden states of the backbone for y_k.
    """

    start: Streams
    tokens: Int[Array, "K B T"]
    still: Bool[Array, "K B T"]
    base: Streams
    residual: Streams
    taught: Float[Array, "K B T D"]


@record
class Unrolling:
    """Algorithm 1 for a backbone, its head and the texts of a batch.

    Where logits are about the "next" position, a block's first one is predicted by the last row of
    the block before it, which no reveal in the block changes and no residual corrects.

    Attributes:
      backbone, head: the networks.
      spec: special tokens of the backbone.
      rules, chunk: as of `residual_loss`.
      frozen: parameters of the backbone, without gradient.
      texts: packed rows and what is hidden of them.
    """

    backbone: Any
    head: Any
    spec: TokenSpec
    rules: ResidualRules
    chunk: int | None
    frozen: Any
    texts: Texts

    def reveals(self, key: Array) -> Bool[Array, "B K T"]:
        """Positions that each step reveals: some of those still masked in every block, by chance."""
        still, drawn = self.texts.hidden.where, []
        for k in range(self.rules.unroll):
            counts = jnp.asarray(self.rules.reveals)
            drawn.append(
                choose(jax.random.fold_in(key, k), still, self.texts.layout.blocks, counts)
            )
            still = still & ~drawn[-1]
        return jnp.stack(drawn, axis=1)

    def unroll(self, params: Any, reveals: Bool[Array, "B K T"]) -> Steps:
        """All steps, from the parameters of the head."""
        texts = self.texts
        still, clean, kv = texts.hidden.where, None, None
        tokens = jnp.where(still, mask_of(self.spec), texts.tokens)  # y_0
        if self.rules.layout == "doubled":
            seen = masks_of(texts.layout).clean
            at = texts.layout.positions
            out = self.backbone.forward(self.frozen, texts.tokens, at, mask=seen)
            clean, kv = out.hidden, out.kv
        noisy = self.read(tokens[None], kv)[0]
        start = base = Streams(noisy if clean is None else clean, noisy)  # a_0
        each = []
        for reveal in jnp.moveaxis(reveals, 1, 0):
            # y_k: y_{k-1} with the revealed positions.
            shown = texts.tokens
            if self.rules.tokens == "own":
                shown = self.best(base, start)
            tokens, still = jnp.where(reveal, shown, tokens), still & ~reveal
            # r_k = head(y_k, a_{k-1})
            residual = self.residual(params, tokens, base)
            each.append((tokens, still, base, residual))
            # a_k = a_{k-1} + r_k
            base = residual if self.rules.direct else jax.tree.map(jnp.add, base, residual)
        tokens, still, base, residual = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        return Steps(start, tokens, still, base, residual, self.read(tokens, kv))

    def read(self, states: Int[Array, "M B T"], kv: Any) -> Float[Array, "M B T D"]:
        """The backbone's hidden states of M noisy copies, in one call; `kv` of the clean copy."""
        visible = masks_of(self.texts.layout)

        def repeated(x: Array) -> Array:
            return jnp.broadcast_to(x, (len(states), *x.shape)).reshape(-1, *x.shape[1:])

        tokens = states.reshape(-1, states.shape[-1])
        positions = repeated(self.texts.layout.positions)
        prefix, mask = None, visible.clean
        if kv is not None:
            prefix = Prefix(jax.tree.map(repeated, kv), repeated(visible.before))
            mask = visible.noisy
        out = self.backbone.forward(self.frozen, tokens, positions, prefix, repeated(mask))
        return out.hidden.reshape(*states.shape, -1)

    def residual(self, params: Any, tokens: Array, base: Streams) -> Streams:
        """Residuals of both copies."""
        table, forward = self.backbone.embedding(self.frozen), self.head.forward
        visible, at = masks_of(self.texts.layout), self.texts.layout.positions
        vectors = table[tokens]
        if self.rules.layout == "infer_matched":
            out = forward(params, vectors, at, None, visible.clean, hidden=base.noisy)
            return Streams(out.hidden, out.hidden)
        clean = table[self.texts.tokens]
        first = forward(params, clean, at, None, visible.clean, hidden=base.clean)
        prefix = Prefix(first.kv, visible.before)
        noisy = forward(params, vectors, at, prefix, visible.noisy, hidden=base.noisy)
        return Streams(first.hidden, noisy.hidden)

    def predicting(self, noisy: Float[Array, "B T D"], start: Streams) -> Float[Array, "B T D"]:
        """The hidden state that predicts each position, from those of the noisy copy."""
        if self.spec.alignment == "own":
            return noisy
        before = noisy if self.rules.layout == "infer_matched" else start.clean
        return before_each(Streams(before, noisy), self.texts.layout)

    def best(self, base: Streams, start: Streams) -> Int[Array, "B T"]:
        """The best token of each position, never the mask."""
        logits = scorer(self.backbone, self.frozen)
        vectors = lax.stop_gradient(self.predicting(base.noisy, start))
        best = in_chunks(
            lambda x: jnp.argmax(without_mask(logits(x), mask_of(self.spec)), axis=-1),
            self.chunk,
            vectors,
        )
        return best.astype(jnp.int32)

    def judge(self, steps: Steps) -> tuple[Float[Array, "K B T"], dict[str, Float[Array, "K B T"]]]:
        """The objective at each position of each step, and measures of the distance from the
        teacher.

        Returns:
          The values; and "kl" from the backbone on y_k, "uncorrected_kl", that of a head that adds
          nothing, "agreement" and "uncorrected_agreement", 1 where the best token is the teacher's.
        """
        logits_of, shape = scorer(self.backbone, self.frozen), steps.tokens.shape
        # The student's scores are U (stopped a_{k-1} + r_k); direct modelling: U r_k.
        students = steps.residual.noisy
        if not self.rules.direct:
            students = lax.stop_gradient(steps.base.noisy) + students

        def flat(noisy: Float[Array, "K B T D"]) -> Array:
            vectors = jax.vmap(lambda x: self.predicting(x, steps.start))(noisy)
            return vectors.reshape(-1, *vectors.shape[2:])

        def score(
            student: Array, teacher: Array, start: Array, targets: Array
        ) -> tuple[Array, dict[str, Array]]:
            p, q, before = (logits_of(vectors) for vectors in (student, teacher, start))
            cross, entropy = soft_cross_entropy(p, q)
            best = jnp.argmax(q, axis=-1)
            measures = {
                # KL( U backbone(y_k) || U (a_{k-1} + r_k) )
                "kl": cross - entropy,
                "uncorrected_kl": soft_cross_entropy(before, q)[0] - entropy,
                "agreement": (jnp.argmax(p, axis=-1) == best).astype(cross.dtype),
                "uncorrected_agreement": (jnp.argmax(before, axis=-1) == best).astype(cross.dtype),
            }
            value = measures["kl"]
            if self.rules.objective == "cross_entropy":
                value = token_losses(p, targets)[0]
            elif self.rules.objective == "mse":
                value = jnp.mean(jnp.square(p - q), axis=-1)
            return value, lax.stop_gradient(measures)

        starts = jnp.broadcast_to(steps.start.noisy, students.shape)
        targets = jnp.broadcast_to(self.texts.tokens, shape).reshape(-1, shape[-1])
        vectors = (flat(each) for each in (students, steps.taught, starts))
        scored = in_chunks(score, self.chunk, *vectors, targets)
        return jax.tree.map(lambda x: x.reshape(shape), scored)

    def weigh(self, still: Bool[Array, "K B T"], values: Float[Array, "K B T"]) -> Sum:
        """Sum of each step over the positions still masked, and its divisor, [K]."""
        where, probability = self.texts.hidden
        # 1 / p, or 1
        inverse = 1 / jnp.where(where, probability, 1)
        each = jnp.ones_like(inverse) if self.rules.normaliser == "mean" else inverse
        weights = jnp.where(still, each, 0)
        # The sum of the weights, or n less 1 / p of each token revealed so far.
        total = jnp.sum(weights, axis=(1, 2))
        if self.rules.normaliser == "official":
            revealed = jnp.where(where & ~still, inverse, 0)
            total = jnp.sum(self.texts.labelled) - jnp.sum(revealed, axis=(1, 2))
        return Sum(jnp.sum(weights * values, axis=(1, 2)), total.astype(values.dtype))


def residual_loss(
    backbone: Any, head: Any, spec: TokenSpec, rules: ResidualRules = MRP, *, chunk: int | None = 32
) -> Objective:
    """The loss of Algorithm 1, the mean over the steps that have a masked position left.

    The head is trained. The parameters of the frozen backbone are the loss's second argument, and
    `spec` is the backbone's. Logits of a chunk are those of K B rows.

    Returns:
      A loss over the batches of `block_diffusion_loss`. Metrics, means over the positions at which
      steps are judged: those of `Unrolling.judge`; `kl_ratio`, `kl` over `uncorrected_kl`; and
      `judged`, the number of these positions for each labelled token.
    """
    mask_of(spec)
    lengths = lengths_of(backbone, rules.blocks)

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        of_texts, of_reveals = jax.random.split(key)
        texts = noised(batch, of_texts, lengths, rules.noise, spec.alignment)
        frozen = lax.stop_gradient(frozen)
        unrolling = Unrolling(backbone, head, spec, rules, chunk, frozen, texts)
        reveals = recorded_or(batch, "reveals", lambda: unrolling.reveals(of_reveals))
        steps = unrolling.unroll(params, reveals)
        values, measures = unrolling.judge(steps)
        still, masked = steps.still, jnp.sum(steps.still, axis=(1, 2)).astype(values.dtype)
        judged = {n: weighted(jnp.where(still, x, 0), still) for n, x in measures.items()}
        return judged | {
            "steps": unrolling.weigh(still, values),
            "masked": Sum(masked, masked),
            "judged": Sum(jnp.sum(masked), jnp.sum(texts.labelled).astype(values.dtype)),
        }

    def value(sums: Sums) -> tuple[Array, Metrics]:
        metrics = {n: part.mean for n, part in sums.items() if n not in ("steps", "masked")}
        metrics["kl_ratio"] = metrics["kl"] / jnp.maximum(metrics["uncorrected_kl"], 1e-9)
        there = sums["masked"].weight > 0  # steps that have a masked position left
        losses = jnp.where(there, sums["steps"].mean, 0)
        # L: the mean over these steps
        return jnp.sum(losses) / jnp.maximum(jnp.sum(there), 1), metrics

    return Objective(sums, value)
