"""Log-likelihoods of texts under a network that predicts the next token, one forward a batch.

A span is a run of ids of a text that is scored::

    ids     b c c c | s s s | e          start = 4, end = 7
            seen     scored   not seen

    log p(span) = sum over scored ids of  log softmax(logits(ids before it))[id]

with the network's default recurrence, no cache, and float32 log-probabilities. Rows are padded on
the right to powers of two, which a causal network does not see. The initial latent state of a
position is drawn from the seed and the position alone, so that all texts are scored from the same
states.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine import Prefix, key_of, seed_words
from paradec_jax.decode.rules import Purpose, log_probability, positions_of, purpose_keys
from paradec_jax.text.tokenizer import Tokenizer

SHORTEST = 32  # positions of the smallest batch


@dataclasses.dataclass(frozen=True)
class Span:
    """A row of ids of which `ids[start:end]` are scored. `end` None is the end of the row."""

    ids: tuple[int, ...]
    start: int = 0
    end: int | None = None

    @property
    def stop(self) -> int:
        """The position after the last scored one."""
        return len(self.ids) if self.end is None else self.end

    @property
    def count(self) -> int:
        """Scored positions."""
        return self.stop - self.start


def prefix(spec: TokenSpec) -> int:
    """The id that a text without a context starts from: begin-of-text, or else the first stop
    token.

    Raises:
      ValueError: the checkpoint has neither.
    """
    if spec.bos is None and not spec.stop:
        raise ValueError(
            "the model has neither a begin-of-text nor a stop token to start a text from"
        )
    return spec.stop[0] if spec.bos is None else spec.bos


def continuation_span(
    tokenizer: Tokenizer, spec: TokenSpec, context: str, continuation: str, length: int
) -> Span:
    """The span of a continuation after a context, which may be empty.

    As in lm-eval's own models, white space at the end of the context counts as the continuation's,
    and the continuation's ids are those of both texts together after those that the context has by
    itself. Where both together do not begin with these, lm-eval loses letters; here the
    continuation is then split by itself. Where a row is longer than the model, it loses ids on the
    left, begin-of-text first.

    Raises:
      ValueError: a continuation longer than the `length` of the model.
    """
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if bare:
        before = tokenizer.begun(tokenizer.encode(bare), spec.bos)
        scored = tokenizer.encode_after(bare, continuation)
    else:
        before, scored = [prefix(spec)], tokenizer.encode(continuation)
    if len(scored) > length:
        raise ValueError(
            f"a continuation has {len(scored)} tokens, more than the {length} positions the model was built for"
        )
    ids = [*before, *scored][-(length + 1) :]
    return Span(tuple(ids), len(ids) - len(scored))


def rolling_spans(tokenizer: Tokenizer, spec: TokenSpec, text: str, length: int) -> list[Span]:
    """Spans that together score every token of a text once.

    The first starts from `prefix`; each other one scores up to `length` tokens after at least one,
    and the last one after as many as the model's length leaves room for.
    """
    ids = tokenizer.encode(text)
    whole = [prefix(spec), *ids]
    spans = []
    for start in range(0, len(ids), length):
        end = min(start + length, len(ids))
        first = max(end - length, 0)
        spans.append(Span(tuple(whole[first : end + 1]), start + 1 - first))
    return spans


def log_likelihoods(
    network: Any, params: Any, spans: Sequence[Span], *, batch: int = 8, seed: int = 0
) -> list[tuple[Float[np.ndarray, "_"], Bool[np.ndarray, "_"]]]:
    """Log-probability in nats of each scored id of each span, and whether it is the most probable
    one.

    Args:
      network: a causal network whose logits predict the next token.
      spans: spans that end within `network.max_length + 1` ids, each after at least one id; else a
        ValueError.
      batch: rows of a call.
      seed: seed of the initial latent states.
    """
    for span in spans:
        if not 1 <= span.start <= span.stop <= min(len(span.ids), network.max_length + 1):
            raise ValueError(
                f"a row of {len(span.ids)} ids that scores {span.start} to {span.stop} does not fit: need at least "
                f"one id before those scored and at most {network.max_length + 1} in all"
            )
    params = network.prepare(params)
    results = [(np.zeros(0, np.float32), np.zeros(0, bool))] * len(spans)
    scored = [i for i, span in enumerate(spans) if span.count]
    for size, some in batches([spans[i].stop - 1 for i in scored], network.max_length, batch):
        members = [scored[i] for i in some]
        ids, _ = padded([Span(spans[i].ids[: spans[i].stop]) for i in members], batch, size + 1)
        scores, best = (np.asarray(x) for x in _score(network, params, ids, seed_words(seed)))
        for place, i in enumerate(members):
            at = slice(spans[i].start - 1, spans[i].stop - 1)
            results[i] = scores[place, at], best[place, at]
    return results


def batches(lengths: Sequence[int], most: int, batch: int) -> Iterator[tuple[int, list[int]]]:
    """Positions and numbers of the rows of each batch: rows that fit into the same power of two, or
    into `most`.
    """
    sizes = [min(max(SHORTEST, 1 << (length - 1).bit_length()), most) for length in lengths]
    for size in sorted(set(sizes)):
        members = [i for i, other in enumerate(sizes) if other == size]
        for start in range(0, len(members), batch):
            yield size, members[start : start + batch]


def padded(spans: Sequence[Span], batch: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [B, S] and (length, start, stop) [B, 3] of a batch; rows that are missing score nothing."""
    ids = np.zeros((batch, size), np.int32)
    ends = np.tile(np.asarray([1, 0, 0], np.int32), (batch, 1))
    for row, span in enumerate(spans):
        ids[row, : len(span.ids)] = span.ids
        ends[row] = len(span.ids), span.start, span.stop
    return ids, ends


@jax.jit(static_argnums=0)
def _score(
    network: Any, params: Any, ids: Int[Array, "B T1"], words: Any
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Log-probability of each id after the first, and whether it is the most probable one."""
    tokens, targets = ids[:, :-1], ids[:, 1:]
    positions = positions_of(tokens)
    keys = jnp.broadcast_to(key_of(words), tokens.shape[:1])
    cache = network.init_cache(purpose_keys(keys, Purpose.STATE), tokens.shape[1])
    out = network.forward(params, tokens, positions, Prefix(cache, None))
    logits = network.logits(params, out.hidden)
    return log_probability(logits, targets), jnp.argmax(logits, axis=-1) == targets
