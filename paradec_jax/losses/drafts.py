"""Masks that guess: each learns what the model will say at its place, the model untouched.

::

    anchor a     the text is known up to it
    mask j       stands at a + j, sees the text up to a and masks 1 .. j, and drafts token a + j + 1

    L = sum over anchors and j of w_j KL( p_(a+j) || q_j ),      w_j = decay^(j - 1)

p_(a+j) is the model's own law of that token, of its row of text at a + j; q_j that of the mask, whose
sampler head knows the token at a + j. (I-DLM, arXiv 2604.11035; "Your LLM knows the future", arXiv
2507.11851.)

Rows of text are computed once for all anchors of a text, without gradient: no adapter changes them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import Ranged
from paradec_jax.decode.machine import Prefix
from paradec_jax.decode.rules import positions_of
from paradec_jax.losses.cross_entropy import (
    in_chunks,
    scorer,
    soft_cross_entropy,
    token_losses,
)
from paradec_jax.nn import masks
from paradec_jax.objective import Batch, Objective, Sums, weighted


@dataclasses.dataclass(frozen=True)
class DraftRules(Ranged):
    """The choices of the objective.

    Attributes:
      target: what a mask learns, "law" (the model's distribution at its place, by forward
        Kullback-Leibler divergence) or "token" (the text's token, by cross-entropy).
      decay: w_j over w_(j-1): later drafts count only where all before them are accepted.
      anchors: S, places of a text at which masks stand, drawn anew for every update.
    """

    target: str = "law"
    decay: float = 0.9
    anchors: int = 48

    BOUNDS = {"decay": (0, 1), "anchors": (1, 65536)}  # noqa: RUF012
    WORDS = {"target": ("law", "token")}  # noqa: RUF012


def draft_loss(
    network: Any, drafter: Any, rules: DraftRules = DraftRules(), *, chunk: int | None = None
) -> Objective:
    """Mean of `w_j KL(p || q_j)` over masks, in nats, of the parameters beside a causal model's.

    Args:
      network: the model, whose parameters are the loss's second argument.
      drafter: what stands beside it (`models.DraftNetwork`), whose parameters are trained.
      rules: the choices.
      chunk: anchors of a text whose masks are computed at a time, and again in the backward pass;
        all at once when None.

    Returns:
      A loss over batches of `tokens`, `targets` [B, T] and `weights` [B, T], 1 where the target is a
      token of an answer. Metrics: `hits_j`, the share of masks j whose best token is the target's.

    Raises:
      ValueError: a network that sees what it would have to predict.
    """
    count = drafter.count

    def sums(params: Any, frozen: Any, batch: Batch, key: Array) -> Sums:
        frozen = lax.stop_gradient(frozen)
        params = {"network": frozen, "drafter": params}
        tokens, targets, counted = batch["tokens"], batch["targets"], batch["weights"] > 0
        # Anchors: places before two tokens of the answer, the first of which the model says itself.
        anchors, some = draw_anchors(counted & shifted(counted), rules.anchors, key)
        # The text's own rows, once: keys and values that masks see, and what they are to learn.
        cache, text = text_rows(network, frozen, tokens)
        logits = scorer(network, frozen)

        def of_anchors(anchors: Int[Array, "B S"]) -> tuple[Float[Array, "B S"], ...]:
            places = anchors[..., None] + 1 + jnp.arange(count)
            known = jnp.minimum(places, tokens.shape[1] - 1)
            asked = (places < tokens.shape[1]) & at(counted, known)
            # h_j: masks at a + 1 .. a + k, which see the text up to a
            seen = jnp.arange(tokens.shape[1]) <= anchors[..., None]
            hidden = mask_rows(drafter, params, cache, seen, places)
            # z_j: they learn the token at a + j
            informed = drafter.informed(params, hidden, at(tokens, known))
            scores, target = logits(informed), at(targets, known)
            nats, hits = token_losses(scores, target)
            if rules.target == "law":
                # KL( p_(a+j) || q_j ): the law of the text's row at a + j
                cross, entropy = soft_cross_entropy(scores, logits(at(text, known)))
                nats = cross - entropy
            parts = nats, hits.astype(jnp.float32), asked.astype(jnp.float32)
            return tuple(part[..., j] for part in parts for j in range(count))

        parts = jnp.stack(in_chunks(of_anchors, chunk, anchors))
        nats, hits, asked = jnp.split(parts * some[:, None], 3)
        # w_j = decay^(j - 1)
        falling = rules.decay ** jnp.arange(count)[:, None, None]
        by_mask = {f"hits_{j + 1}": weighted(hits[j], asked[j]) for j in range(count)}
        return {"loss": weighted(nats, asked * falling), **by_mask}

    return Objective(sums)


def shifted(x: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Each place's value one place earlier, none after the last."""
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))


def at(x: Array, places: Int[Array, "B *shape"]) -> Array:
    """Entries of each row at its places."""
    return jax.vmap(lambda row, where: row[where])(x, places)


def draw_anchors(
    places: Bool[Array, "B T"], count: int, key: Array
) -> tuple[Int[Array, "B S"], Bool[Array, "B"]]:
    """Places of each row, one drawn in each of S equal parts of those that may be; rows that have
    some.
    """
    total = jnp.sum(places, axis=1)
    drawn = (jnp.arange(count) + jax.random.uniform(key, (len(places), count))) / count
    rank = jnp.floor(drawn * total[:, None]).astype(jnp.int32)  # of the place among those
    upto = jnp.cumsum(places, axis=1)
    found = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(upto, rank)
    return jnp.minimum(found, places.shape[1] - 1).astype(jnp.int32), total > 0


def text_rows(network: Any, params: Any, tokens: Int[Array, "B T"]) -> tuple[Any, Array]:
    """A cache of the texts, and their hidden states [B, T, D]; neither has a gradient."""
    batch, width = tokens.shape
    positions = positions_of(tokens)
    out = network.forward(params, tokens, positions)
    empty = network.init_cache(jnp.zeros(batch), width)
    cache = network.write(empty, out.kv, jnp.zeros(batch, jnp.int32))
    return lax.stop_gradient((cache, out.hidden))


def mask_rows(
    drafter: Any,
    params: Any,
    cache: Any,
    seen: Bool[Array, "B S T"],
    places: Int[Array, "B S k"],
) -> Float[Array, "B S k D"]:
    """Hidden states of the masks after each anchor, in one call.

    Each sees of the cache what its anchor does, and the masks before it of the same anchor.
    """
    batch, size, count = places.shape
    ids = jnp.broadcast_to(drafter.vocab_size + jnp.arange(count), places.shape)
    prefix = Prefix(cache, jnp.repeat(seen, count, axis=1))
    own = masks.windows([count] * size, jnp.zeros((size, size), jnp.int32), causal=True)
    flat = (batch, size * count)
    out = drafter.forward(params, ids.reshape(flat), places.reshape(flat), prefix, own)
    return out.hidden.reshape(*places.shape, -1)
