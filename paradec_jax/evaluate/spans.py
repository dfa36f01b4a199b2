"""How probable a part of a text is: exactly to a model that predicts the next token, bounded to one that fills masks.

A span is a run of ids of a text that is scored; all other ids are seen::

    ids     b c c c | s s s | e          start = 4, end = 7
            seen     scored   seen       (a model that predicts the next token sees none after)

The bound is `evaluate.bound`'s. Spans of one stream are judged under the same times and the same hidden positions.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.evaluate.bound import HEADS, Span, bounds
from paradec_jax.evaluate.likelihood import Row, bucket, log_likelihoods
from paradec_jax.store import Model

DRAWS = 32


class Scored(NamedTuple):
    """What a model says of a span.

    Attributes:
      nats: -log p, or an upper bound on it.
      error: standard error of the bound over its draws; 0 where exact.
      greedy: whether the most probable tokens are those of the span: one after the other where the model predicts the
        next token, all at once from what is seen where it fills masks.
    """

    nats: float
    error: float
    greedy: bool


def is_exact(model: Model) -> bool:
    """Whether a model's likelihoods are exact: it predicts the next token from those before it."""
    return model.network.visibility == "causal" and model.token_spec.alignment == "next"


def room(model: Model) -> int:
    """Tokens that may follow a row's first: a model that fills masks has to read the last one too."""
    return model.network.max_length - (not is_exact(model))


def score_spans(
    model: Model,
    spans: Sequence[Span],
    *,
    draws: int = DRAWS,
    streams: Sequence[int] | None = None,
    seed: int = 0,
    batch: int = 8,
) -> list[Scored]:
    """Scores spans, each by itself.

    Args:
      model: any model.
      spans: no longer than the model; where it predicts the next token, one needs an id before it.
      draws: of a bound, for each span.
      streams: numbers of the spans' draws; each span has its own when None.
      seed: of draws, and of initial latent states.
      batch: spans, or draws of them, of a call.

    Raises:
      ValueError: spans that do not fit, or a model that has neither likelihoods nor bounds.
    """
    if is_exact(model):
        rows = [Row(span.ids[: span.stop], span.count) for span in spans]
        found = log_likelihoods(model.network, model.params, rows, batch=batch, seed=seed)
        return [Scored(-score, 0.0, greedy) for score, greedy in found]
    mask = mask_of(model)
    some = [i for i, span in enumerate(spans) if span.count]
    kept, numbers = [spans[i] for i in some], some if streams is None else [streams[i] for i in some]
    each = bounds(
        model.network, model.params, kept, mask, draws=draws, batch=batch, seed=seed, streams=numbers
    )
    filled = fill(model, kept, batch=batch)
    scored = [Scored(0.0, 0.0, True)] * len(spans)
    for i, of, ids in zip(some, each, filled, strict=True):
        scored[i] = Scored(of.nats, of.error, ids == spans[i].ids[spans[i].start : spans[i].stop])
    return scored


def fill(model: Model, spans: Sequence[Span], *, batch: int = 8) -> list[tuple[int, ...]]:
    """The most probable token of each scored position, all of a span hidden at once, in one call of the network.

    Raises:
      ValueError: a span that does not fit, or a model that does not fill masks.
    """
    network, mask = model.network, mask_of(model)
    for span in spans:
        if len(span.ids) > network.max_length:
            raise ValueError(
                f"a span of {len(span.ids)} ids does not fit into {network.max_length} positions"
            )
    params = network.prepare(model.params)
    sizes = [bucket(len(span.ids), network.max_length) for span in spans]
    found: list[tuple[int, ...]] = [()] * len(spans)
    for size in sorted(set(sizes)):
        members = [i for i in range(len(spans)) if sizes[i] == size]
        for first in range(0, len(members), batch):
            some = members[first : first + batch]
            ids, lengths = np.full((batch, size), mask, np.int32), np.ones(batch, np.int32)
            for place, i in enumerate(some):
                span, lengths[place] = spans[i], len(spans[i].ids)
                ids[place, : len(span.ids)] = span.ids
                ids[place, span.start : span.stop] = mask
            best = np.asarray(_best(network, mask, params, ids, lengths))
            for place, i in enumerate(some):
                found[i] = tuple(best[place, spans[i].start : spans[i].stop].tolist())
    return found


def best_token(logits: Float[Array, "*shape V"], mask: int) -> Int[Array, "*shape"]:
    """The most probable token, which the mask is not."""
    return jnp.argmax(without_mask(logits, mask), axis=-1)


def mask_of(model: Model) -> int:
    """The mask of a model that fills masks from all other positions. Raises ValueError for any other model."""
    spec, visibility = model.token_spec, model.network.visibility
    if spec.mask is None or spec.alignment != "own" or visibility != "full":
        raise ValueError(
            "a likelihood needs a model that predicts the next token from those before it, or one that fills masks "
            f"from all others, not one of visibility {visibility!r}, alignment {spec.alignment!r} and "
            f"{'no mask' if spec.mask is None else 'a mask'}"
        )
    return spec.mask


@functools.partial(jax.jit, static_argnums=(0, 1))
def _best(
    network: Any,
    mask: int,
    params: Any,
    ids: Int[Array, "B T"] | Int[np.ndarray, "B T"],
    lengths: Int[Array, "B"] | Int[np.ndarray, "B"],
) -> Int[Array, "B T"]:
    """The most probable token at each position of rows that see nothing after their length."""
    ids = jnp.asarray(ids)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    seen = (positions < jnp.asarray(lengths)[:, None])[:, None]
    out = network.forward(params, ids, positions, mask=jnp.broadcast_to(seen, (*ids.shape, ids.shape[1])))

    def best(vector: Array) -> Array:
        return best_token(network.logits(params, vector), mask)

    return lax.map(best, out.hidden.reshape(ids.size, -1), batch_size=HEADS).reshape(ids.shape)
