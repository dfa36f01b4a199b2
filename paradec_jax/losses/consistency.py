"""Progressive consistency distillation: every noisy block learns to say what its clean copy says.

::

    L = L_consistency + ar_weight * L_AR

A prompt is followed by T pairs of blocks of n tokens: `noisy`, an iterate of the block's Jacobi
trajectory, and `clean`, its fixed point, both at the same positions. At each noisy position from
the first wrong token on, the model's distribution p is drawn to the one q that it has (without
gradient) at the same offset of the clean copy:

    L_consistency = temperature^2 * mean of -sum_v q_v log p_v, divided by T

and L_AR is the cross-entropy of the next token in the prompt and in the clean blocks.

"The paper" below is Jacobi Forcing (Hu et al. 2025, arXiv 2512.14681), equations 7 to 9. Its
released code, and this file, differ from the equations in three points::

    here and released                      the paper
    cross-entropy to the teacher           KL divergence (eq. 7): less by the teacher's entropy, the same gradient
    mean over the counted offsets          sum within a block (eq. 8)
    the teacher's block follows clean ones noisy ones (eq. 8)
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import Ranged, TokenSpec, check_words
from paradec_jax.losses.cross_entropy import (
    Scorer,
    cross_entropy,
    in_chunks,
    scorer,
    soft_cross_entropy,
    token_losses,
)
from paradec_jax.nn import masks
from paradec_jax.objective import Batch, Metrics, Objective, Sum, Sums, weighted


@dataclasses.dataclass(frozen=True)
class ConsistencyRules(Ranged):
    """The choices of the objective; the defaults are those of the released multi-block trainer.

    Attributes:
      context: what a noisy block sees of earlier blocks: their noisy copies ("nc", the paper's
        figure 1b), their clean ones ("clean", figure 1a, CLLM*), or noisy ones within the own
        window of pairs and clean ones before it ("nc_ic", table 3).
      window: w, pairs of a window of "nc_ic". The released window trainer always takes 16.
      teacher: "online" (the same parameters, no gradient) or "frozen" (the loss's second argument).
      ar_weight: weight of L_AR: 10 in the released multi-block and clean trainers, 1 in the window
        trainer and by the names of the published checkpoints.
      temperature: divides both logits; the loss is multiplied by its square.
      divide_by_pairs: whether L_consistency is divided by T. Released: yes, so that the term
        shrinks with the length of the answer.
      offsets: "all" (released multi-block and window trainers) or "inner": without the last offset
        of a block, which predicts the next block's first token (clean trainer).
      prompt_weight: weight of the prompt's tokens in L_AR; released: 1, markers of the chat
        included.
      after_eos: "pad": tokens after the first stop token of the last clean block become padding,
        and offsets there still count (released); "keep": they stay; "drop": offsets from the stop
        token on and later pairs count nowhere, not even in T (development branch).
      over: L of each row, then the mean over rows ("row": one sequence a device, and micro-batches
        add up), or means over the tokens of the batch and T of the whole batch ("batch",
        development branch).
    """

    context: str = "nc"
    window: int = 16
    teacher: str = "online"
    ar_weight: float = 10.0
    temperature: float = 1.0
    divide_by_pairs: bool = True
    offsets: str = "all"
    prompt_weight: float = 1.0
    after_eos: str = "pad"
    over: str = "row"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_words(
            self,
            context=("nc", "clean", "nc_ic"),
            teacher=("online", "frozen"),
            offsets=("all", "inner"),
            after_eos=("pad", "keep", "drop"),
            over=("row", "batch"),
        )
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")

    def window_of(self, pairs: int) -> int:
        """Pairs of a window: all of them for "nc", one for "clean"."""
        return {"nc": pairs, "clean": 1, "nc_ic": min(self.window, pairs)}[self.context]


# The released trainers "multiblock", of clean contexts, and "multiblock_window".
MULTIBLOCK = ConsistencyRules()
CLEAN_CONTEXT = ConsistencyRules(context="clean", offsets="inner")
WINDOWED = ConsistencyRules(context="nc_ic", ar_weight=1.0)


class Real(NamedTuple):
    """Which tokens are text and not padding, in the prompts and in the two copies of all blocks."""

    prompt: Bool[Array, "B P"]
    noisy: Bool[Array, "B *blocks"]
    clean: Bool[Array, "B *blocks"]


def real_tokens(batch: Batch) -> Real:
    """`prompt_real`, `noisy_real` and `clean_real` of a batch; without them every token is text.

    An id never marks padding, since it may be that of a stop token.
    """
    given = (batch.get(f"{name}_real", np.ones(batch[name].shape)) for name in Real._fields)
    return Real(*(jnp.asarray(mask, bool) for mask in given))


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
    real: Real


def counted_pairs(batch: Batch, spec: TokenSpec, rules: ConsistencyRules) -> Pairs:
    """Which tokens count in a batch of `consistency_loss`."""
    noisy, clean, (_, pairs, block) = batch["noisy"], batch["clean"], batch["noisy"].shape
    real, count, index = real_tokens(batch), batch["pairs"], jnp.arange(pairs)
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

    # Offsets of the sums of equations 7 and 8: from the first wrong token on.
    keep = jnp.cumsum(noisy != clean, axis=-1) > 0
    keep &= valid[..., None] & real.noisy
    if rules.offsets == "inner":
        keep &= jnp.arange(block) < block - 1
    if rules.after_eos == "drop":
        keep &= before & ~stops

    # Next tokens of L_AR (equation 9): of the prompt, and of the clean blocks up to a stop token.
    inside = jnp.arange(1, batch["prompt"].shape[1]) < batch["prompt_lengths"][:, None]
    inside &= real.prompt[:, 1:] & (count > 0)[:, None]
    weight = (valid[..., None] & before & real.clean).astype(jnp.float32)

    def flat(x: Array) -> Array:
        return rearrange(x, "b t n -> b (t n)")

    return Pairs(
        prompt=batch["prompt"],
        lengths=batch["prompt_lengths"],
        noisy=flat(noisy),
        clean=flat(clean),
        prompt_weight=rules.prompt_weight * inside,
        block_weight=flat(weight),
        keep=flat(keep),
        valid=count,
        real=Real(real.prompt, flat(real.noisy), flat(real.clean)),
    )


def consistency_loss(
    network: Any, spec: TokenSpec, rules: ConsistencyRules = MULTIBLOCK, *, chunk: int | None = None
) -> Objective:
    """The progressive consistency loss with its next-token term (equations 7 to 9 of the paper).

    One pass reads the prompt and both copies of all blocks under a dense mask
    (`masks.noisy_window`).

    Returns:
      A loss over batches of `prompt` [B, P] (right-padded), `prompt_lengths` [B], `noisy` and
      `clean` [B, T, n] and `pairs` [B], valid pairs of each row (a row without any counts nowhere).
      Where padding lies elsewhere too, bool `prompt_real` [B, P], `noisy_real` and `clean_real` [B,
      T, n] are False at it. Its metrics: `ar` and `consistency`, the two terms (unweighted),
      `accuracy` of the next token, `agreement` (share of counted positions whose largest logit is
      the teacher's) and `counted`, their number a row.

    Raises:
      ValueError: while tracing, an empty prompt axis or sequences beyond the network's
        `max_length`.
    """

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        pairs, block = counted_pairs(batch, spec, rules), batch["noisy"].shape[-1]
        length = pairs.prompt.shape[1] + pairs.clean.shape[1]
        if length > network.max_length:
            raise ValueError(
                f"prompt and blocks take {length} positions of max_length {network.max_length}"
            )
        teacher = frozen if rules.teacher == "frozen" else params
        states = read_packed(network, params, teacher, pairs, block, rules)
        logits = scorer(network, params, len(pairs.valid))
        return terms(logits, scorer(network, teacher), states, pairs, rules, chunk)

    return Objective(sums, lambda sums: combined(sums, rules))


def combined(sums: Sums, rules: ConsistencyRules) -> tuple[Array, Metrics]:
    """The loss and its metrics from the sums over a batch."""
    metrics = {name: part.mean for name, part in sums.items() if name != "pairs"}
    if rules.over == "batch" and rules.divide_by_pairs:
        metrics["consistency"] /= jnp.maximum(sums["pairs"].weight, 1)
    # L = L_consistency + w L_AR
    return rules.ar_weight * metrics["ar"] + metrics["consistency"], metrics


# One pass over the prompt and both copies


class States(NamedTuple):
    """Hidden states where logits are needed.

    Attributes:
      prompt: states of the prompt's tokens.
      last: state of the last of them, which predicts the first clean token.
      noisy, clean: states of the two copies of all blocks.
      teacher: states of the clean tokens as a frozen teacher has them; `clean` for an online one.
    """

    prompt: Float[Array, "B P D"]
    last: Float[Array, "B 1 D"]
    noisy: Float[Array, "B K D"]
    clean: Float[Array, "B K D"]
    teacher: Float[Array, "B K D"]


def hidden_states(
    network: Any, params: Any, tokens: Array, real: Array, positions: Array, mask: Array
) -> Float[Array, "B S D"]:
    """Hidden states of a pass; input vectors of padding get no gradient, as released."""
    vectors = network.embedding(params)[tokens]
    inputs = jnp.where(real[..., None], vectors, lax.stop_gradient(vectors))
    return network.forward(params, inputs, positions, mask=mask).hidden


def packed_positions(
    lengths: Int[Array, "B"], prompt: int, pairs: int, block: int
) -> Int[Array, "B P+2K"]:
    """Positions of a packed sequence, the same for both copies of a pair, from the prompt's end on."""
    place = np.arange(2 * pairs * block)
    after = lengths[:, None] + (place // (2 * block) * block + place % block)
    before = jnp.broadcast_to(jnp.arange(prompt), (len(lengths), prompt))
    return jnp.concatenate([before, after], axis=1)


def read_packed(
    network: Any, params: Any, teacher: Any, pairs: Pairs, block: int, rules: ConsistencyRules
) -> States:
    """Reads prompt and interleaved copies in one sequence of P + 2 K tokens under a dense mask."""
    width, size = pairs.prompt.shape[1], pairs.clean.shape[1]
    count, each = size // block, np.arange(size)

    def packed(prompt: Array, noisy: Array, clean: Array) -> Array:
        blocks = rearrange([noisy, clean], "copy b (t n) -> b (t copy n)", n=block)
        return jnp.concatenate([prompt, blocks], axis=1)

    tokens, real = packed(pairs.prompt, pairs.noisy, pairs.clean), packed(*pairs.real)
    positions = packed_positions(pairs.lengths, width, count, block)
    place = np.arange(width + 2 * size)
    seen = (place >= width) | (place < pairs.lengths[:, None])  # no padding of the prompt
    mask = masks.noisy_window(width, count, block, rules.window_of(count)) & seen[:, None]

    hidden = taught = hidden_states(network, params, tokens, real, positions, mask)
    if rules.teacher == "frozen":
        taught = hidden_states(network, teacher, tokens, real, positions, mask)
    noisy = width + 2 * (each - each % block) + each % block
    clean = noisy + block
    last = jnp.take_along_axis(hidden, pairs.lengths[:, None, None] - 1, axis=1)
    return States(hidden[:, :width], last, hidden[:, noisy], hidden[:, clean], taught[:, clean])


# The two terms


def terms(
    student: Scorer,
    teacher: Scorer,
    states: States,
    pairs: Pairs,
    rules: ConsistencyRules,
    chunk: int | None,
) -> Sums:
    """Cross-entropy of prompt and clean blocks, and divergence of noisy positions from clean ones.

    A clean position's logits serve both: they predict the next token, and they teach the noisy
    position.
    """

    def score(noisy: Array, clean: Array, taught: Array, following: Array) -> tuple[Array, ...]:
        p, of_clean = student(noisy), student(clean)
        q = of_clean if rules.teacher == "online" else teacher(taught)
        # Equation 7: -sum_v q_v log p_v, without gradient towards q.
        value, _ = soft_cross_entropy(p, q, rules.temperature)
        agree = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
        return value, agree, *token_losses(of_clean, following)

    following = jnp.roll(pairs.clean, -1, axis=1)  # the last position's prediction counts nowhere
    arrays = states.noisy, states.clean, states.teacher, following
    value, agree, nll, hit = in_chunks(score, chunk, *arrays)

    # Equation 9: the first clean token, the others, and the prompt's.
    first = cross_entropy(student, states.last, pairs.clean[:, :1])
    parts = [
        (*first, pairs.block_weight[:, :1]),
        (nll[:, :-1], hit[:, :-1], pairs.block_weight[:, 1:]),
    ]
    if rules.prompt_weight and pairs.prompt.shape[1] > 1:
        losses = cross_entropy(student, states.prompt[:, :-1], pairs.prompt[:, 1:], chunk)
        parts.append((*losses, pairs.prompt_weight))
    nll, hit, weight = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))

    keep, rows = pairs.keep.astype(value.dtype), (pairs.valid > 0).astype(value.dtype)
    # Equation 8, as a mean over offsets: temperature^2 / T.
    value = rules.temperature**2 * value
    if rules.divide_by_pairs and rules.over == "row":  # of the whole batch `combined` divides
        value = value / jnp.maximum(pairs.valid, 1)[:, None]
    count = jnp.sum(pairs.valid).astype(value.dtype)
    return {
        "ar": summed(nll, weight, pairs.valid, rules.over),
        "accuracy": weighted(hit, weight),
        "consistency": summed(value, keep, pairs.valid, rules.over),
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
