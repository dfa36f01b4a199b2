"""Log-likelihoods of texts under a network that predicts the next token, one forward a batch.

A row is a sequence of ids of which the last `count` are scored::

    log p(row) = sum over the last count ids of  log softmax(logits(ids before it))[id]

with the network's default recurrence, no cache, and float32 log-probabilities. Rows are padded on the right to
powers of two, which a causal network does not see. The initial latent state of a position is drawn from the seed
and the position alone, so that all texts are scored from the same states.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.rules.randomness import Purpose, purpose_keys
from paradec_jax.decode.rules.sampling import log_probability
from paradec_jax.tokenizer import Tokenizer

SHORTEST = 32  # positions of the smallest batch


@dataclasses.dataclass(frozen=True)
class Row:
    """A sequence of ids of which the last `count` are scored, each from all ids before it."""

    ids: tuple[int, ...]
    count: int


def prefix(spec: TokenSpec) -> int:
    """The id that a text without a context starts from: begin-of-text, or else the first stop token.

    Raises:
      ValueError: the checkpoint has neither.
    """
    if spec.bos is None and not spec.stop:
        raise ValueError("the model has neither a begin-of-text nor a stop token to start a text from")
    return spec.stop[0] if spec.bos is None else spec.bos


def continuation_row(
    tokenizer: Tokenizer, spec: TokenSpec, context: str, continuation: str, length: int
) -> Row:
    """The row that scores a continuation after a context.

    As in lm-eval's own models, white space at the end of the context counts as the continuation's, and the
    continuation's ids are those of both texts together after those that the context has by itself. Where both
    together do not begin with these, lm-eval loses letters; here the continuation is then split by itself. Where a
    row is longer than the model, it loses ids on the left, begin-of-text first.

    Args:
      tokenizer, spec: the model's.
      context: may be empty.
      continuation: what is scored.
      length: positions of the model.

    Raises:
      ValueError: a continuation longer than the model.
    """
    bare = context.rstrip()
    continuation, context = context[len(bare) :] + continuation, bare
    if context:
        read = tokenizer.encode(context)
        scored = tokenizer.encode_after(context, continuation)
        ids = [*tokenizer.begun(read, spec.bos), *scored]
    else:
        scored = tokenizer.encode(continuation)
        ids = [prefix(spec), *scored]
    if len(scored) > length:
        raise ValueError(
            f"a continuation has {len(scored)} tokens, more than the {length} positions the model was built for"
        )
    return Row(tuple(ids[-(length + 1) :]), len(scored))


def rolling_rows(tokenizer: Tokenizer, spec: TokenSpec, text: str, length: int) -> list[Row]:
    """Rows that together score every token of a text once.

    The first starts from `prefix`; each other one scores up to `length` tokens after at least one, and the
    last one after as many as the model's length leaves room for.
    """
    ids = tokenizer.encode(text)
    whole = [prefix(spec), *ids]
    rows = []
    for start in range(0, len(ids), length):
        end = min(start + length, len(ids))
        rows.append(Row(tuple(whole[max(end - length, 0) : end + 1]), end - start))
    return rows


def log_likelihoods(
    network: Any, params: Any, rows: Sequence[Row], *, batch: int = 8, seed: int = 0
) -> list[tuple[float, bool]]:
    """Log-likelihood in nats of each row's scored ids, and whether each of them is the most probable one.

    Arguments and errors are those of `token_log_likelihoods`.
    """
    found = token_log_likelihoods(network, params, rows, batch=batch, seed=seed)
    return [(float(scores.sum(dtype=np.float64)), bool(best.all())) for scores, best in found]


def token_log_likelihoods(
    network: Any, params: Any, rows: Sequence[Row], *, batch: int = 8, seed: int = 0
) -> list[tuple[Float[np.ndarray, "_"], Bool[np.ndarray, "_"]]]:
    """Log-probability in nats of each scored id of each row, and whether it is the most probable one.

    Args:
      network: a causal network whose logits predict the next token.
      params: its parameters.
      rows: at most `network.max_length + 1` ids each.
      batch: rows of a call.
      seed: of the initial latent states.

    Raises:
      ValueError: a row that is too long or scores an id with none before it, or a batch below 1.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    for row in rows:
        if len(row.ids) > network.max_length + 1 or not 0 <= row.count < len(row.ids):
            raise ValueError(
                f"a row of {len(row.ids)} ids that scores {row.count} does not fit: need at least one id before "
                f"those scored and at most {network.max_length + 1} in all"
            )
    params = network.prepare(params)
    sizes = [bucket(len(row.ids) - 1, network.max_length) for row in rows]
    results = [(np.zeros(0, np.float32), np.zeros(0, bool))] * len(rows)
    for size in sorted({size for size, row in zip(sizes, rows, strict=True) if row.count}):
        members = [i for i, row in enumerate(rows) if sizes[i] == size and row.count]
        for start in range(0, len(members), batch):
            some = members[start : start + batch]
            ids = np.zeros((batch, size + 1), np.int32)
            for place, i in enumerate(some):
                ids[place, : len(rows[i].ids)] = rows[i].ids
            scores, best = (np.asarray(x) for x in _score(network, params, ids, np.uint32(seed)))
            for place, i in enumerate(some):
                end = len(rows[i].ids) - 1
                at = slice(end - rows[i].count, end)
                results[i] = (scores[place, at], best[place, at])
    return results


def bucket(count: int, most: int) -> int:
    """Positions of the batch that a row of `count` belongs in: a power of two, or `most`."""
    size = SHORTEST
    while size < count:
        size *= 2
    return min(size, most)


@functools.partial(jax.jit, static_argnums=0)
def _score(
    network: Any, params: Any, ids: Int[Array, "B T1"] | Int[np.ndarray, "B T1"], seed: Any
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Log-probability of each id after the first, and whether it is the most probable one."""
    tokens, targets = jnp.asarray(ids)[:, :-1], jnp.asarray(ids)[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    keys = jnp.broadcast_to(jax.random.key(seed), tokens.shape[:1])
    cache = network.init_cache(purpose_keys(keys, Purpose.STATE), tokens.shape[1])
    out = network.forward(params, tokens, positions, Prefix(cache, None))
    logits = network.logits(params, out.hidden)
    return log_probability(logits, targets), jnp.argmax(logits, axis=-1) == targets
