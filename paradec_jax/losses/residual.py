"""Training of a residual head: multi-token residual prediction (MRP), Algorithm 1.

::

    y_0 noised text      _ b _ _ | _ _ g h        a_0 = backbone(y_0)
    y_1                  _ b c _ | e _ g h        one token of each block revealed, anywhere
    y_2                  a b c _ | e f g h        and another
    r_k = head(y_k, a_{k-1})                      a_k = a_{k-1} + r_k
    loss of step k       KL( U backbone(y_k) || U (stopped a_{k-1} + r_k) )     where y_k is still masked

U is the backbone's output matrix; the backbone is frozen. The base of a step carries no gradient, the head's input
does, so that a later step also trains the residuals before it. The K texts y_k are taught in one call of K B rows.

Noisy blocks see the clean blocks before them (`block_streams`): the backbone reads the clean copy once, the head at
every step, with a running sum of its own. Or, with `layout` "infer_matched", noisy blocks see the noisy ones before.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import TokenSpec
from paradec_jax.config.bounds import check_words
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.losses.block_streams import Layout, Streams, before_each, masks_of, noised
from paradec_jax.losses.cross_entropy import check_chunk, in_chunks, scorer, soft_cross_entropy, token_losses
from paradec_jax.losses.masked_diffusion import mask_of
from paradec_jax.noise import BlockNoise, Hidden, choose
from paradec_jax.objective import Metrics, Objective, Sum, Sums, weighted

NORMALISERS = ("selfnorm", "official", "mean")
OBJECTIVES = ("kl", "cross_entropy", "mse")
LAYOUTS = ("doubled", "infer_matched")
TOKENS = ("truth", "own")


@dataclasses.dataclass(frozen=True)
class ResidualRules:
    """The choices of the objective; but for `unroll` and `normaliser` the defaults are those of the released heads.

    Attributes:
      unroll: K, steps.
      normaliser: what a step's sum over the positions still masked is divided by. With weights 1 / p: "selfnorm" for
        their sum, "official" for the number of labelled tokens less 1 / p for each token revealed so far, which can
        come near zero or below; "mean" weighs all positions alike.
      objective: "kl" to the backbone on y_k, "cross_entropy" to the clean tokens, "mse" to the backbone's logits,
        the mean over the vocabulary.
      direct: direct modelling: scores are U r_k, and the next step reads r_k in the place of the sum.
      layout: "doubled" (a noisy and a clean copy) or "infer_matched" (the noisy one alone).
      reveals: how many tokens a step reveals in a block that has any: one of these numbers, drawn for each block.
      tokens: what is revealed, the "truth", or the best token of the running sum, the head's "own".
      noise: of y_0.
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

    def __post_init__(self) -> None:
        if self.unroll < 1:
            raise ValueError(f"unroll must be at least 1, not {self.unroll}")
        for name, numbers in (("reveals", self.reveals), ("blocks", self.blocks)):
            if numbers is not None and min(numbers, default=0) < 1:
                raise ValueError(f"{name} must be numbers of at least 1, at least one of them, not {numbers}")
        check_words(self, normaliser=NORMALISERS, objective=OBJECTIVES, layout=LAYOUTS, tokens=TOKENS)


class Texts(NamedTuple):
    """Packed rows, and which of their labelled tokens are hidden.

    Attributes:
      tokens: the clean ones.
      labelled: tokens that could have been hidden.
      hidden: tokens that are, and how likely each of them was to be.
      layout: where samples and blocks lie.
    """

    tokens: Int[Array, "B T"]
    labelled: Bool[Array, "B T"]
    hidden: Hidden
    layout: Layout


class Step(NamedTuple):
    """One step k.

    Attributes:
      tokens: y_k.
      still: positions still masked in it, at which the step is judged.
      base: what the head reads of each copy, a_{k-1} (direct modelling: r_{k-1}).
      residual: r_k of each copy.
    """

    tokens: Int[Array, "B T"]
    still: Bool[Array, "B T"]
    base: Streams
    residual: Streams


class Steps(NamedTuple):
    """All steps.

    Attributes:
      start: what the backbone says of y_0 and of the clean copy.
      each: one by one.
      taught: what the backbone says of each y_k.
    """

    start: Streams
    each: list[Step]
    taught: Float[Array, "K B T D"]

    @property
    def still(self) -> Bool[Array, "K B T"]:
        """Positions at which each step is judged."""
        return jnp.stack([step.still for step in self.each])


@dataclasses.dataclass(frozen=True)
class Unrolling:
    """Algorithm 1 for a backbone and its head.

    Where logits are about the "next" position, a block's first one is predicted by the last row of the block before
    it, which no reveal in the block changes and no residual corrects.

    Attributes:
      backbone, head: the networks.
      spec: special tokens; `mask` and `alignment` matter.
      rules: the choices.
      chunk: positions whose logits are made at a time.
    """

    backbone: Any
    head: Any
    spec: TokenSpec
    rules: ResidualRules
    chunk: int | None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of blocks."""
        return self.rules.blocks or ((self.backbone.block,) if self.backbone.block else ())

    def texts(self, batch: dict[str, Array], key: Array) -> Texts:
        """The rows of a batch, noised by its own noise or by a draw."""
        return Texts(
            batch["tokens"], *noised(batch, key, self.lengths, self.rules.noise, self.spec.alignment)
        )

    def unroll(
        self, params: Any, frozen: Any, texts: Texts, key: Array, recorded: Bool[Array, "B K T"] | None = None
    ) -> Steps:
        """All steps.

        Args:
          params, frozen: parameters of head and backbone.
          texts: the noised rows.
          key: of the reveals.
          recorded: positions that each step reveals, in the place of draws.
        """
        frozen, visible = lax.stop_gradient(frozen), masks_of(texts.layout)
        still, clean, kv = texts.hidden.where, None, None
        tokens = jnp.where(still, mask_of(self.spec), texts.tokens)
        if self.rules.layout == "doubled":
            out = self.backbone.forward(frozen, texts.tokens, texts.layout.positions, mask=visible.clean)
            clean, kv = out.hidden, out.kv
        noisy = self.read(frozen, texts, tokens[None], kv)[0]
        start = base = Streams(noisy if clean is None else clean, noisy)
        each = []
        for k in range(self.rules.unroll):
            if recorded is None:
                counts = jnp.asarray(self.rules.reveals)
                reveal = choose(jax.random.fold_in(key, k), still, texts.layout.blocks, counts)
            else:
                reveal = recorded[:, k]
            shown = texts.tokens if self.rules.tokens == "truth" else self.best(frozen, texts, base, start)
            tokens, still = jnp.where(reveal, shown, tokens), still & ~reveal
            residual = self.residual(params, frozen, texts, tokens, base)
            each.append(Step(tokens, still, base, residual))
            base = residual if self.rules.direct else jax.tree.map(jnp.add, base, residual)
        return Steps(start, each, self.read(frozen, texts, jnp.stack([step.tokens for step in each]), kv))

    def read(
        self, frozen: Any, texts: Texts, states: Int[Array, "M B T"], kv: Any
    ) -> Float[Array, "M B T D"]:
        """What the backbone says of M noisy copies, in one call; `kv` of the clean copy, None where there is none."""
        visible = masks_of(texts.layout)

        def repeated(x: Array) -> Array:
            return jnp.broadcast_to(x, (len(states), *x.shape)).reshape(-1, *x.shape[1:])

        tokens, positions = states.reshape(-1, states.shape[-1]), repeated(texts.layout.positions)
        if kv is None:
            out = self.backbone.forward(frozen, tokens, positions, mask=repeated(visible.clean))
        else:
            prefix = Prefix(jax.tree.map(repeated, kv), repeated(visible.before))
            out = self.backbone.forward(frozen, tokens, positions, prefix, repeated(visible.noisy))
        return out.hidden.reshape(*states.shape, -1)

    def residual(self, params: Any, frozen: Any, texts: Texts, tokens: Array, base: Streams) -> Streams:
        """What the head says of both copies, the clean one first."""
        table, positions, visible = (
            self.backbone.embedding(frozen),
            texts.layout.positions,
            masks_of(texts.layout),
        )
        if self.rules.layout == "infer_matched":
            out = self.head.forward(params, table[tokens], positions, mask=visible.clean, hidden=base.noisy)
            return Streams(out.hidden, out.hidden)
        clean = self.head.forward(
            params, table[texts.tokens], positions, mask=visible.clean, hidden=base.clean
        )
        prefix = Prefix(clean.kv, visible.before)
        noisy = self.head.forward(params, table[tokens], positions, prefix, visible.noisy, hidden=base.noisy)
        return Streams(clean.hidden, noisy.hidden)

    def predicting(self, texts: Texts, noisy: Float[Array, "B T D"], start: Streams) -> Float[Array, "B T D"]:
        """The vector that predicts each position, of those of the noisy copy's rows."""
        if self.spec.alignment == "own":
            return noisy
        before = noisy if self.rules.layout == "infer_matched" else start.clean
        return before_each(Streams(before, noisy), texts.layout)

    def best(self, frozen: Any, texts: Texts, base: Streams, start: Streams) -> Int[Array, "B T"]:
        """The best token of each position, never the mask."""
        logits = scorer(self.backbone, frozen)

        def of_chunk(vectors: Array) -> Array:
            return jnp.argmax(without_mask(logits(vectors), mask_of(self.spec)), axis=-1).astype(jnp.int32)

        return in_chunks(of_chunk, self.chunk, lax.stop_gradient(self.predicting(texts, base.noisy, start)))

    def judge(
        self, frozen: Any, texts: Texts, steps: Steps
    ) -> tuple[Float[Array, "K B T"], dict[str, Float[Array, "K B T"]]]:
        """The objective at each position of each step, and how far from the teacher it is and would be uncorrected.

        Returns:
          The values; and "kl" from the backbone on y_k, "uncorrected_kl" of what it said of y_0, "agreement" and
          "uncorrected_agreement", 1 where the best token is the teacher's.
        """
        frozen, count = lax.stop_gradient(frozen), len(steps.each)

        def joined(vectors: Any) -> Array:
            return jnp.concatenate([self.predicting(texts, noisy, steps.start) for noisy in vectors])

        said = [step.residual.noisy for step in steps.each]
        if not self.rules.direct:
            bases = (lax.stop_gradient(step.base.noisy) for step in steps.each)
            said = list(map(jnp.add, bases, said))
        plain, targets = joined([steps.start.noisy] * count), jnp.tile(texts.tokens, (count, 1))
        logits_of = scorer(self.backbone, frozen)

        def score(said: Array, taught: Array, plain: Array, targets: Array) -> tuple[Array, dict[str, Array]]:
            mine, teacher, before = (logits_of(v) for v in (said, taught, plain))
            cross, entropy = soft_cross_entropy(mine, teacher)
            found = {
                "kl": cross - entropy,
                "uncorrected_kl": soft_cross_entropy(before, teacher)[0] - entropy,
            }
            best = jnp.argmax(teacher, axis=-1)
            for name, logits in (("agreement", mine), ("uncorrected_agreement", before)):
                found[name] = (jnp.argmax(logits, axis=-1) == best).astype(cross.dtype)
            if self.rules.objective == "cross_entropy":
                return token_losses(mine, targets)[0], lax.stop_gradient(found)
            if self.rules.objective == "mse":
                return jnp.mean(jnp.square(mine - teacher), axis=-1), lax.stop_gradient(found)
            return found["kl"], lax.stop_gradient(found)

        found = in_chunks(score, self.chunk, joined(said), joined(steps.taught), plain, targets)
        return jax.tree.map(lambda x: x.reshape(count, len(texts.tokens), -1), found)

    def weigh(self, texts: Texts, still: Bool[Array, "K B T"], values: Float[Array, "K B T"]) -> Sum:
        """Each step's sum over the positions still masked, and what it is divided by, [K]."""
        where, probability = texts.hidden
        inverse = 1 / jnp.where(where, probability, 1)
        weights = jnp.where(still, jnp.ones_like(inverse) if self.rules.normaliser == "mean" else inverse, 0)
        total = jnp.sum(weights, axis=(1, 2))
        if self.rules.normaliser == "official":
            revealed = jnp.where(where & ~still, inverse, 0)
            total = jnp.sum(texts.labelled) - jnp.sum(revealed, axis=(1, 2))
        return Sum(jnp.sum(weights * values, axis=(1, 2)), total.astype(values.dtype))


def residual_loss(
    backbone: Any,
    head: Any,
    spec: TokenSpec,
    rules: ResidualRules | None = None,
    *,
    chunk: int | None = 32,
) -> Objective:
    """The loss of Algorithm 1, the mean over the steps that have a masked position left.

    Args:
      backbone: the frozen network; its parameters are the loss's second argument.
      head: the network that is trained.
      spec: special tokens of the backbone; `mask` and `alignment` matter.
      rules: the choices; the defaults of `ResidualRules` when None.
      chunk: positions whose logits are made at a time, for K B rows, and again in the backward pass; all at once when
        None.

    Returns:
      A loss over batches as those of `block_diffusion_loss`, which may bring `reveals` bool [B, K, T] too. Metrics,
      means over the positions that steps are judged at: `kl` from the backbone on y_k, `uncorrected_kl`, that of a
      head that adds nothing, `kl_ratio`, the first over the second, and `agreement` and `uncorrected_agreement`, the
      shares of positions where the best token is the backbone's; and `judged`, how many positions there are for each
      labelled token.

    Raises:
      ValueError: no mask token, no length of blocks, or a `chunk` below 1.
    """
    mask_of(spec)
    unrolling = Unrolling(backbone, head, spec, ResidualRules() if rules is None else rules, chunk)
    if not unrolling.lengths:
        raise ValueError("a network without blocks of its own needs the lengths of blocks (rules.blocks)")
    check_chunk(chunk)

    def sums(params: Any, frozen: Any, batch: dict[str, Array], key: Array) -> Sums:
        of_texts, of_reveals = jax.random.split(key)
        texts = unrolling.texts(batch, of_texts)
        steps = unrolling.unroll(params, frozen, texts, of_reveals, batch.get("reveals"))
        values, found = unrolling.judge(frozen, texts, steps)
        still, masked = steps.still, jnp.sum(steps.still, axis=(1, 2)).astype(values.dtype)
        judged = {name: weighted(jnp.where(still, value, 0), still) for name, value in found.items()}
        return judged | {
            "steps": unrolling.weigh(texts, still, values),
            "masked": Sum(masked, masked),
            "judged": Sum(jnp.sum(masked), jnp.sum(texts.labelled).astype(values.dtype)),
        }

    def value(sums: Sums) -> tuple[Array, Metrics]:
        metrics = {name: part.mean for name, part in sums.items() if name not in ("steps", "masked")}
        metrics["kl_ratio"] = metrics["kl"] / jnp.maximum(metrics["uncorrected_kl"], 1e-9)
        there = sums["masked"].weight > 0  # steps that have a masked position left
        losses = jnp.where(there, sums["steps"].mean, 0)
        return jnp.sum(losses) / jnp.maximum(jnp.sum(there), 1), metrics

    return Objective(sums, value)
