"""Drafts by masks: texts are those of one call a token, or have their law."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import excess
from marks import over, slow
from stubs import (
    PROMPTS,
    StubCausal,
    StubDrafter,
    tiny_causal,
    tiny_causal_params,
    tiny_drafter,
    tiny_drafter_params,
    tiny_request,
)

from paradec_jax import decode
from paradec_jax.decode.machine.verify import accept_by_ratio


def test_a_place_without_a_draft_is_drawn_from_p():
    """Its proposal counts for nothing, whatever stands there."""
    p, q = (jnp.tile(jnp.asarray(x), (64, 1, 1)) for x in ([[0.5, 0.5, 0], [0, 0, 1]], [[0, 1, 0]]))
    keys = jax.random.split(jax.random.key(0), 64)[:, None]
    drafts = jnp.full((64, 1), -1)
    accepted, token = accept_by_ratio(drafts, q.astype(float), p, jnp.zeros((64, 1)), keys)
    assert not accepted.any() and 16 < jnp.sum(token) < 48 and {*token[:, 0].tolist()} == {0, 1}


# The law of sampled texts
#
# It was broken in these ways, one after the other, and each time a test failed by more than 10
# standard deviations: the token after a refusal drawn from p, or with the noise of the draft; drafts
# accepted by their own noise; a threshold that asks for the share of the drawn token; q subtracted
# where no draft was fed; and, in `test_a_draft_is_drawn_anew`, noise of drafts by position alone.

VOCAB, NEW = 5, 4
DRAWS = np.random.default_rng(3)
Table = tuple[tuple[float, ...], ...]  # logits by number


def table(rows) -> Table:
    return tuple(map(tuple, np.asarray(rows, np.float64).tolist()))


# Of two numbers of five, drafts are mostly accepted.
LIKELY = table(DRAWS.normal(0, 1.0, (VOCAB, VOCAB)))
SHARES = ((0.6, 0.16, 0.08, 0.08, 0.08), (0.5, 0.2, 0.1, 0.1, 0.1))
GUESSED = (*LIKELY[:2], *table(np.log([DRAWS.permutation(SHARES[i % 2]) for i in range(3)])))


@dataclasses.dataclass(frozen=True)
class Soft(StubCausal):
    """A causal stub whose predicted number stands for a law, a row of a table of logits."""

    vocab_size: int = VOCAB
    weights: tuple[int, ...] = (2, 1)
    table: Table = LIKELY

    def logits(self, params, hidden):
        return rows_of(self.table, hidden)


@dataclasses.dataclass(frozen=True)
class SoftDrafter(StubDrafter):
    """Masks that draft from rows of a table of their own."""

    table: Table = GUESSED

    def scores(self, params, hidden, tokens):
        return jnp.take_along_axis(rows_of(self.table, hidden), tokens, axis=-1)


def rows_of(table, hidden):
    which = jnp.round(hidden[..., 0]).astype(jnp.int32) % len(table)
    return jnp.asarray(table, jnp.float32)[which]


SOFT = Soft()
DRAFTS = SoftDrafter(SOFT, count=2)
STARTS = ((3, 1, 4), (1, 2), (2, 0, 1, 3, 3))  # of a batch


def texts_of(vocab: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(vocab), repeat=NEW))


@functools.cache
def law(soft: Soft, start: tuple[int, ...], temperature: float, top_k: int, top_p: float):
    """Probabilities of `texts_of` after a start, by the definition of each filter."""
    vocab = soft.vocab_size

    @functools.cache
    def of_token(text: tuple[int, ...]) -> np.ndarray:
        scores = np.asarray(soft.table[soft.expected(text, 1)[0]]) / temperature
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        order = np.argsort(-shares)
        before = np.cumsum(shares[order]) - shares[order]
        kept = order[: min(top_k, int(np.sum(before < top_p)))]
        left = np.where(np.isin(np.arange(vocab), kept), shares, 0)
        return left / left.sum()

    return np.asarray(
        [
            np.prod([of_token(start + text[:i])[text[i]] for i in range(NEW)])
            for text in texts_of(vocab)
        ]
    )


@functools.cache
def sampler(drafter: SoftDrafter, acceptance: str, places: int | None, candidates: int):
    """A program that draws many batches: keys [N, 3] and knobs -> texts, and calls of each row."""
    decoder = decode.Drafted(
        drafter.of,
        max(map(len, STARTS)) + NEW,
        drafter=drafter,
        acceptance=acceptance,
        places=places,
        candidates=candidates,
    )
    params = {"network": None, "drafter": None}

    def batch(keys, knobs):
        starts = [[token % drafter.vocab_size for token in start] for start in STARTS]
        request = tiny_request(NEW, prompts=starts, keys=keys)
        result = decode.run(decoder, params, request, knobs)
        where = request.lengths[:, None] + jnp.arange(NEW)
        return jnp.take_along_axis(result.tokens, where, axis=1), result.network_calls

    return jax.jit(jax.vmap(batch, (0, None)))


def drawn(acceptance, places, drafter=DRAFTS, count=8_000, candidates=VOCAB, **knobs):
    keys = jax.random.split(jax.random.key(7), (count, len(STARTS)))
    given = {"top_k": VOCAB, "top_p": 1.0, "draft_threshold": 0.0, **knobs}
    found = sampler(drafter, acceptance, places, candidates)(keys, decode.Drafted.Knobs(**given))
    return jax.tree.map(np.asarray, found)


ASKED = {
    "plain": {"temperature": 1.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "threshold": {"temperature": 1.0, "draft_threshold": 0.55},
}
KINDS = [("ratio", None), ("ratio", 1), ("ratio", 2), ("equal", None), ("equal", 1)]
QUICK = {(*KINDS[0], asked) for asked in ASKED}
CASES = [(*kind, asked) for kind in KINDS for asked in ASKED]


@pytest.mark.parametrize(
    ("acceptance", "places", "asked"), [case if case in QUICK else slow(*case) for case in CASES]
)
def test_sampled_texts_have_the_law_of_the_model(acceptance, places, asked):
    """Of each row of many batches of three; some drafts are accepted, and some refused."""
    knobs = ASKED[asked]
    texts, calls = drawn(acceptance, places, **knobs)
    filters = {
        name: knobs.get(name, default) for name, default in (("top_k", VOCAB), ("top_p", 1.0))
    }
    for i, start in enumerate(STARTS):
        wanted = law(SOFT, start, knobs["temperature"], **filters)
        assert excess(texts[:, i], wanted, VOCAB) < 4
    fewest = 1 + math.ceil((NEW - 1) / 3)
    assert fewest < calls.mean() < NEW - 0.5 and calls.min() == fewest and calls.max() == NEW


def test_a_draft_is_drawn_anew():
    """Where masks stand in a line depends on all drafts of a call, so after a refusal the draft of
    a later place must not be drawn with the noise that decided it.
    """
    soft = Soft(vocab_size=3, table=table([np.log([0.2, 0.4, 0.4])]))
    soft = dataclasses.replace(soft, table=soft.table * 3)
    drafter = SoftDrafter(soft, count=2, table=table([np.log([0.6, 0.2, 0.2])]))
    texts, _ = drawn("ratio", 1, drafter, candidates=3, temperature=1.0)
    wanted = law(soft, (0,), 1.0, 3, 1.0)
    assert excess(texts.reshape(-1, NEW), wanted, 3) < 4


@pytest.mark.slow
def test_few_candidates_change_no_law():
    """q is then that of the few; which they are is decided before the draft is drawn."""
    texts, _ = drawn("ratio", None, candidates=2, temperature=1.0)
    for i, start in enumerate(STARTS):
        assert excess(texts[:, i], law(SOFT, start, 1.0, VOCAB, 1.0), VOCAB) < 4


# Beside a network of random weights

NETWORK, DRAFTER = tiny_causal(), tiny_drafter()
SIZE, BUDGETS = 20, (9, 2, 7)
REAL = {"network": tiny_causal_params(gain=2.0), "drafter": tiny_drafter_params()}
SHAPES = {
    "comb": {},
    "line": {"places": 1},
    "two": {"places": 2},
    "fewer": {"masks": 2},
    "one": {"masks": 1, "places": 1},
}
HOT = {"temperature": 0.8, "top_p": 0.9}
COLD = {"temperature": 0.0, "top_p": 1.0}


def cached(state, info):
    """Records the cache, and how much of it is trusted."""
    return state.cache, state.cached, info


def traced(kind, params, knobs, rows=None, **options):
    request = tiny_request(BUDGETS, seed=5)
    request = request if rows is None else request.take(rows)
    decoder = kind(NETWORK, SIZE, log_probs=True, **options)
    given = decoder.Knobs(**knobs)
    return decode.trace(decoder, params, request, given, n=max(BUDGETS), record=cached)


@functools.cache
def one_by_one(hot: bool):
    return traced(decode.AutoRegressive, REAL["network"], HOT if hot else COLD)


def drafted(hot: bool, shape: str = "comb", rows=None, **options):
    options = {"drafter": DRAFTER, **SHAPES[shape], **options}
    return traced(decode.Drafted, REAL, HOT if hot else COLD, rows, **options)


@pytest.mark.parametrize("hot", [False, True])
@over(SHAPES, {*SHAPES} - {"comb"}, argument="shape")
def test_texts_and_caches_are_those_of_one_by_one(shape, hot):
    (found, records), (wanted, others) = drafted(hot, shape), one_by_one(hot)
    assert found.completions() == wanted.completions()
    np.testing.assert_allclose(found.log_probs, wanted.log_probs, atol=1e-4)
    assert (found.network_calls <= wanted.network_calls).all()
    if hot:  # random drafts are drawn with the noise of what they guess
        assert found.network_calls.sum() < wanted.network_calls.sum()
    # Keys and values of masks are nowhere among those that are trusted.
    (cache, trusted, _), (other, same, _) = (jax.tree.map(last_step, x) for x in (records, others))
    for row, length in enumerate(trusted):
        assert length >= same[row] or found.lengths[row] == wanted.lengths[row]
        length = min(length, same[row])
        for mine, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
            axis = [n >= SIZE for n in mine.shape[1:]].index(True)
            upto = np.arange(length)
            mine, theirs = (np.take(x[row], upto, axis=axis) for x in (mine, theirs))
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


def last_step(x):
    return np.asarray(x[-1])


@over(["equal", "ratio"], {"equal", "ratio"}, argument="acceptance")
def test_a_row_alone_is_a_row_of_the_batch(acceptance):
    """Its tokens and its calls, where other rows of the batch have drafts and it has none."""
    whole, _ = drafted(True, "line", acceptance=acceptance)
    for row in range(len(BUDGETS)):
        alone, _ = drafted(True, "line", [row], acceptance=acceptance)
        assert alone.completions() == whole.completions()[row : row + 1]
        for name, count in whole.counts.items():
            assert alone.counts[name][0] == count[row]


@pytest.mark.slow
def test_the_ratio_is_greedy_at_temperature_0():
    found, (_, _, info) = drafted(False, acceptance="ratio")
    wanted, _ = one_by_one(False)
    assert found.completions() == wanted.completions()
    np.testing.assert_allclose(found.log_probs, wanted.log_probs, atol=1e-4)
    assert (np.asarray(info.accepted) <= np.asarray(info.fed)).all()
    hot, _ = drafted(True, acceptance="ratio")
    assert hot.completions() != one_by_one(True)[0].completions(), "other tokens of the same law"


# What is fed, and what is refused


def stub_run(**given):
    knobs = {name: given.pop(name) for name in ("draft_threshold", "temperature") if name in given}
    stub = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0)
    decoder = decode.Drafted(stub, SIZE, drafter=StubDrafter(stub), **given)
    params = {"network": None, "drafter": None}
    return decode.trace(decoder, params, tiny_request(9), decoder.Knobs(**knobs), n=9)


def test_a_threshold_decides_how_many_are_fed():
    """A stub's share is 0.9967; above it nothing is fed, and nothing is lost but calls."""
    (every, info), (none, bare) = stub_run(draft_threshold=0.99), stub_run(draft_threshold=0.999)
    assert every.completions() == none.completions()
    assert {*np.asarray(info.fed).ravel().tolist()} >= {3}
    assert not np.asarray(bare.fed).any() and not np.asarray(bare.accepted).any()
    assert none.network_calls.tolist() == [9] * len(PROMPTS)
    assert (every.network_calls < none.network_calls).all()
    # A call without drafts costs the newest token and the masks after it.
    assert none.positions.tolist() == [len(p) + 3 + 8 * (1 + 3) for p in PROMPTS]


@pytest.mark.slow
def test_candidates_limit_what_is_drafted():
    """A mask that may draft one token drafts the one that it finds best before it knows more."""
    one, _ = stub_run(candidates=1)
    many, _ = stub_run(candidates=StubCausal.vocab_size)
    assert one.completions() == many.completions()
    assert (one.network_calls >= many.network_calls).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"masks": 4}, "masks must be at most 3, not 4"),
        ({"places": 5}, "places must be at most 4, not 5"),
        ({"masks": 1, "places": 3}, "places must be at most 2, not 3"),
        ({"acceptance": "always"}, "acceptance must be one of equal, ratio, not 'always'"),
    ],
)
def test_what_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        decode.Drafted(NETWORK, SIZE, drafter=DRAFTER, **options)
