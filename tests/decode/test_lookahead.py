"""Lookahead's pool of n-grams against a dictionary of lists, and a recorded window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_baselines import keep
from stubs import PROMPTS, StubCausal, tiny_request

from paradec_jax import decode
from paradec_jax.decode.causal.lookahead import RecordedLookahead
from paradec_jax.decode.causal.ngrams import CHUNK, NGrams

VOCAB, PLACES, N = 4, 3, 3
EMPTY = NGrams(jnp.full((2, VOCAB, PLACES, N - 1), -1, jnp.int32))


def listed(pool) -> list[dict]:
    """The lists of each row of a pool."""
    rows = np.asarray(pool.lists).tolist()
    lists = [[[tuple(e) for e in entries if e[0] >= 0] for entries in row] for row in rows]
    return [{key: entries for key, entries in enumerate(row) if entries} for row in lists]


@pytest.mark.parametrize("seed", range(3))
def test_insertions_are_those_of_lists(seed):
    rng = np.random.default_rng(seed)
    pool, plain = EMPTY, [{}, {}]
    for _ in range(6):
        new, valid = rng.integers(0, VOCAB, (2, 9, N)), rng.random((2, 9)) < 0.8
        new[..., 1:] %= 2  # so that many are the same
        pool = jax.jit(NGrams.insert)(pool, jnp.asarray(new), jnp.asarray(valid))
        for row, some, count in zip(plain, new.tolist(), valid, strict=True):
            for ngram, counts in zip(some, count, strict=True):
                if counts:
                    keep(row, ngram, PLACES)
        assert listed(pool) == plain


@pytest.mark.parametrize("width", [2, CHUNK, 2 * CHUNK + 5])
def test_a_text_is_read_from_its_start(width):
    tokens = np.random.default_rng(width).integers(0, VOCAB, (2, width))
    lengths = np.array([width, max(width - 7, 1)])
    pool = jax.jit(NGrams.read_prompt)(EMPTY, jnp.asarray(tokens), jnp.asarray(lengths))
    plain = [{}, {}]
    for row, text, length in zip(plain, tokens.tolist(), lengths, strict=True):
        for start in range(length - N + 1):
            keep(row, text[start : start + N], PLACES)
    assert listed(pool) == plain


def test_a_recorded_window_takes_the_place_of_the_keys():
    network, window = StubCausal(), jnp.array([2, 7, 1, 8])
    decoder = decode.Lookahead(network, 26, level=4, window=3)
    state, _ = next(
        decode.stream(decoder, None, tiny_request(4, recorded=RecordedLookahead(window=window)))
    )
    # The prompt's call has read level 0, moved it one column on and given level 1.
    assert state.levels.tokens[:, 0, 1:4].tolist() == [window[1:].tolist()] * len(PROMPTS)
    assert decoder.drafts(state).tolist() == [[*window[1:].tolist(), -1]] * len(PROMPTS)
