"""Progressive consistency distillation: every noisy block learns to say what its clean copy says.

::

    L = L_consistency + ar_weight * L_AR

A prompt is followed by T pairs of blocks of n tokens: `noisy`, an iterate of the block's Jacobi trajectory, and
`clean`, its fixed point, both at the same positions. At each noisy position from the first wrong token on, the
model's distribution p is drawn to the one q that it has (without gradient) at the same offset of the clean copy:

    L_consistency = temperature^2 * mean of -sum_v q_v log p_v, divided by T

and L_AR is the cross-entropy of the next token in the prompt and in the clean blocks. "The paper" below is Jacobi
Forcing (Hu et al. 2025, arXiv 2512.14681), equations 7 to 9.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import TokenSpec
from paradec_jax.config.bounds import check_words
from paradec_jax.losses import block_passes
from paradec_jax.losses.cross_entropy import check_chunk, in_chunks, scorer, soft_cross_entropy, token_losses
from paradec_jax.objective import Metrics, Objective, Sum, Sums, weighted


@dataclasses.dataclass(frozen=True)
class ConsistencyRules:
    """The choices of the objective; the defaults are those of the released multi-block trainer.

    Attributes:
      context: what a noisy block sees of earlier blocks: their noisy copies ("nc", the paper's figure 1b), their
        clean ones ("clean", figure 1a, CLLM*), or noisy ones within the own window of pairs and clean ones
        before it ("nc_ic", table 3).
      window: w, pairs of a window of "nc_ic". The released window trainer always takes 16.
      teacher: "online" (the same parameters, no gradient) or "frozen" (the loss's second argument).
      teacher_context: what the teacher's clean block sees of earlier blocks: "clean" (released code) or "noisy"
        (equation 8 of the paper; a pass of the teacher for each pair).
      ar_weight: weight of L_AR: 10 in the released multi-block and clean trainers, 1 in the window trainer and
        by the names of the published checkpoints.
      temperature: divides both logits; the loss is multiplied by its square.
      divergence: "cross_entropy" to the teacher (released code) or "kl" (equation 7), which is less by the
        teacher's entropy and has the same gradient.
      reduction: "mean" over counted offsets (released code) or their "sum" (equation 8 sums within a block).
      divide_by_pairs: whether L_consistency is divided by T after that. Released: yes, so that the term shrinks
        with the length of the answer; with "sum" it makes a mean over blocks.
      offsets: "all" (released multi-block and window trainers) or "inner": without the last offset of a block,
        which predicts the next block's first token (clean trainer).
      prompt_weight: weight of the prompt's tokens in L_AR; released: 1, markers of the chat included.
      after_eos: "pad": tokens after the first stop token of the last clean block become padding, and offsets
        there still count (released); "keep": they stay; "drop": offsets from the stop token on and later pairs
        count nowhere, not even in T (development branch).
      over: L of each row, then the mean over rows ("row": one sequence a device, and micro-batches add up), or
        means over the tokens of the batch and T of the whole batch ("batch", development branch).
    """

    context: str = "nc"
    window: int = 16
    teacher: str = "online"
    teacher_context: str = "clean"
    ar_weight: float = 10.0
    temperature: float = 1.0
    divergence: str = "cross_entropy"
    reduction: str = "mean"
    divide_by_pairs: bool = True
    offsets: str = "all"
    prompt_weight: float = 1.0
    after_eos: str = "pad"
    over: str = "row"

    def __post_init__(self) -> None:
        check_words(
            self,
            context=("nc", "clean", "nc_ic"),
            teacher=("online", "frozen"),
            teacher_context=("clean", "noisy"),
            divergence=("cross_entropy", "kl"),
            reduction=("mean", "sum"),
            offsets=("all", "inner"),
            after_eos=("pad", "keep", "drop"),
            over=("row", "batch"),
        )
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")
        if min(self.ar_weight, self.prompt_weight) < 0:
            raise ValueError("ar_weight and prompt_weight must not be negative")

    def window_of(self, pairs: int) -> int:
        """Pairs of a window: all of them for "nc", one for "clean"."""
        return {"nc": pairs, "clean": 1, "nc_ic": min(self.window, pairs)}[self.context]


MULTIBLOCK = ConsistencyRules()
"""The released "multiblock" trainer."""
CLEAN_CONTEXT = ConsistencyRules(context="clean", offsets="inner")
"""The released clean-context trainer."""
WINDOWED = ConsistencyRules(context="nc_ic", ar_weight=1.0)
"""The released "multiblock_window" trainer."""
PAPER = ConsistencyRules(divergence="kl", reduction="sum", teacher_context="noisy", ar_weight=1.0)
"""Equations 7 to 9 as they are written; their weight w is open, 1 by the published checkpoints."""


class Pairs(NamedTuple):
    """A batch made ready: blocks flat, K = T n, and which tokens count.

    Attributes:
      prompt, lengths: prompts, right-padded, and their tokens.
      noisy, clean: the two copies of all blocks.
      prompt_weight: weight in L_AR of prompt token i + 1.
      block_weight: weight in L_AR of each clean token.
      keep: noisy positions that count in L_consistency.
      valid: T, the pairs of each row that count.
      real: which tokens are text; padding gets no gradient.
    """

    prompt: Int[Array, "B P"]
    lengths: Int[Array, "B"]
    noisy: Int[Array, "B K"]
    clean: Int[Array, "B K"]
    prompt_weight: Float[Array, "B P-1"]
    block_weight: Float[Array, "B K"]
    keep: Bool[Array, "B K"]
    valid: Int[Array, "B"]
    real: block_passes.Real


def counted_pairs(batch: dict[str, Array], spec: TokenSpec, rules: ConsistencyRules) -> Pairs:
    """Which tokens count, from `prompt` [B, P], `prompt_lengths` [B], `noisy`, `clean` [B, T, n], `pairs` [B]."""
    noisy, clean, (_, pairs, block) = batch["noisy"], batch["clean"], batch["noisy"].shape
    real = block_passes.real_tokens(batch)
    index, count = jnp.arange(pairs), batch["pairs"]
    stops = jnp.isin(clean, jnp.asarray(spec.stop, jnp.int32))
    valid = index < count[:, None]
    if rules.after_eos == "drop":
        ended = jnp.cumsum(stops.any(-1) & valid, axis=1) - stops.any(-1) > 0  # by an earlier block
        valid = valid & ~ended
        count = jnp.sum(valid, axis=1)
    before = jnp.cumsum(stops, axis=-1) - stops == 0  # no stop token earlier in the block
    if rules.after_eos == "pad":
        last = (index == count[:, None] - 1)[..., None]
        clean = jnp.where(last & ~before, spec.pad, clean)
        real = real._replace(clean=real.clean & ~(last & ~before))
    keep = jnp.cumsum(noisy != clean, axis=-1) > 0
    keep &= valid[..., None] & real.noisy
    if rules.offsets == "inner":
        keep &= jnp.arange(block) < block - 1
    if rules.after_eos == "drop":
        keep &= before & ~stops
    targets = batch["prompt"][:, 1:]
    inside = jnp.arange(1, targets.shape[1] + 1) < batch["prompt_lengths"][:, None]
    weight = (valid[..., None] & before & real.clean).astype(jnp.float32)
    copies = (noisy, clean, weight, keep, real.noisy, real.clean)
    noisy, clean, weight, keep, *text = (rearrange(x, "b t n -> b (t n)") for x in copies)
    return Pairs(
        batch["prompt"],
        batch["prompt_lengths"],
        noisy,
        clean,
        rules.prompt_weight * (inside & real.prompt[:, 1:] & (count > 0)[:, None]),
        weight,
        keep,
        count,
        block_passes.Real(real.prompt, *text),
    )


def consistency_loss(
    network: Any,
    spec: TokenSpec,
    rules: ConsistencyRules = MULTIBLOCK,
    *,
    packed: bool = False,
    chunk: int | None = None,
) -> Objective:
    """The progressive consistency loss with its next-token term (equations 7 to 9 of the paper).

    The contexts are built from ordinary causal passes, batched as rows of one forward: one over prompt + clean
    blocks, and for the noisy blocks one ("nc"), one a window ("nc_ic") or one a pair ("clean").

    Args:
      network: the causal network.
      spec: its special tokens; `stop` matters, and `pad` as what fills an answer up.
      rules: the choices, by default those of the released trainer.
      packed: one pass over prompt and interleaved copies under a dense mask instead (`masks.noisy_window`), as
        the released code does it: for tests, and for comparing the cost.
      chunk: positions whose logits are made at a time, and again in the backward pass; all at once when None.

    Returns:
      A loss over batches of `prompt` [B, P] (right-padded), `prompt_lengths` [B], `noisy` and `clean` [B, T, n] and
      `pairs` [B], valid pairs of each row (a row without any counts nowhere). Where padding lies elsewhere too, bool
      `prompt_real` [B, P], `noisy_real` and `clean_real` [B, T, n] are False at it. Its metrics: `ar` and
      `consistency`, the two terms (unweighted), `accuracy` of the next token, `agreement` (share of counted
      positions whose largest logit is the teacher's) and `counted`, their number a row.

    Raises:
      ValueError: `packed` with a noisy teacher, a `chunk` below 1 or, while tracing, an empty prompt axis or
        sequences beyond the network's `max_length`.
    """
    if packed and rules.teacher_context == "noisy":
        raise ValueError("packed has no place for a third copy: teacher_context must be 'clean'")
    check_chunk(chunk)
    read = block_passes.read_packed if packed else block_passes.read_passes

    forward = block_passes.forward_of(network)

    def sums(params: Any, frozen: Any, batch: dict[str, Array], key: Array) -> Sums:
        del key
        pairs = counted_pairs(batch, spec, rules)
        block = batch["noisy"].shape[-1]
        length = pairs.prompt.shape[1] + pairs.clean.shape[1]
        if length > network.max_length:
            raise ValueError(f"prompt and blocks take {length} positions of max_length {network.max_length}")
        teacher = frozen if rules.teacher == "frozen" else params
        hidden = read(forward, params, teacher, pairs, block, rules)
        said = _next_token(network, params, hidden, pairs, rules, chunk)
        return said | _consistency(network, params, teacher, hidden, pairs, rules, chunk)

    return Objective(sums, lambda sums: combined(sums, rules))


def combined(sums: Sums, rules: ConsistencyRules) -> tuple[Array, Metrics]:
    """The loss and its metrics from the sums over a batch."""
    metrics = {name: part.mean for name, part in sums.items() if name != "pairs"}
    if rules.over == "batch":
        if rules.reduction == "sum":
            metrics["consistency"] = sums["consistency"].total
        if rules.divide_by_pairs:
            metrics["consistency"] /= jnp.maximum(sums["pairs"].weight, 1)
    return rules.ar_weight * metrics["ar"] + metrics["consistency"], metrics


def _next_token(
    network: Any,
    params: Any,
    hidden: block_passes.Hidden,
    pairs: Pairs,
    rules: ConsistencyRules,
    chunk: int | None,
) -> Sums:
    """Cross-entropy of prompt and clean blocks."""
    logits = scorer(network, params, len(pairs.valid))

    def nll(hidden: Array, targets: Array) -> tuple[Array, Array]:
        return token_losses(logits(hidden), targets)

    parts = [(hidden.before, pairs.clean, pairs.block_weight)]
    if rules.prompt_weight and pairs.prompt.shape[1] > 1:
        parts.append((hidden.prompt[:, :-1], pairs.prompt[:, 1:], pairs.prompt_weight))
    found = [(*in_chunks(nll, chunk, vectors, targets), weight) for vectors, targets, weight in parts]
    value, hit, weight = (jnp.concatenate(each, axis=1) for each in zip(*found, strict=True))
    return {"ar": summed(value, weight, pairs.valid, rules.over), "accuracy": weighted(hit, weight)}


def _consistency(
    network: Any,
    params: Any,
    teacher: Any,
    hidden: block_passes.Hidden,
    pairs: Pairs,
    rules: ConsistencyRules,
    chunk: int | None,
) -> Sums:
    """Divergence of the noisy positions from the clean ones."""
    student, taught = scorer(network, params, len(pairs.valid)), scorer(network, teacher)

    def divergence(student_hidden: Array, teacher_hidden: Array) -> tuple[Array, Array]:
        said, wanted = student(student_hidden), taught(teacher_hidden)
        value, entropy = soft_cross_entropy(said, wanted, rules.temperature)
        if rules.divergence == "kl":
            value = value - entropy
        return value, jnp.argmax(said, axis=-1) == jnp.argmax(wanted, axis=-1)

    value, agree = in_chunks(divergence, chunk, hidden.student, hidden.teacher)
    keep, rows = pairs.keep.astype(value.dtype), (pairs.valid > 0).astype(value.dtype)
    scale = jnp.full(pairs.valid.shape, rules.temperature**2, value.dtype)
    if rules.over == "row":  # of the whole batch `combined` divides
        if rules.divide_by_pairs:
            scale = scale / jnp.maximum(pairs.valid, 1)
        if rules.reduction == "sum":
            scale = scale * jnp.sum(keep, axis=1)
    count = jnp.sum(pairs.valid).astype(value.dtype)
    return {
        "consistency": summed(value * scale[:, None], keep, pairs.valid, rules.over),
        "agreement": weighted(agree, keep),
        "counted": Sum(jnp.sum(keep), jnp.sum(rows)),
        "pairs": Sum(count, count),
    }


def summed(values: Array, weights: Array, count: Int[Array, "B"], over: str = "row") -> Sum:
    """Weighted sum over the batch, or of each row's mean over the rows that have pairs."""
    if over == "batch":
        return weighted(values, weights)
    totals = jnp.sum(weights, axis=1)
    return weighted(jnp.sum(values * weights, axis=1) / jnp.where(totals > 0, totals, 1), count > 0)
