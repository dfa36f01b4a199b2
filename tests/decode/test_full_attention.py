"""Decoders of a canvas in which every position sees all, on tiny weights: what is the same by law."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over, slow
from reading import read
from results import listed
from stubs import PROMPTS, StubDenoiser, tiny_full, tiny_full_params, tiny_request

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.rules import reveal

SIZE, NEWS, MASK = 16, (9, 6, 7), 31
SPEC = TokenSpec(mask=MASK, alignment="own")
NETWORK, PARAMS = tiny_full(), tiny_full_params(1, 3.0)
# In blocks of 6: one new token, none, one; many; a prompt alone. 0 is a new token's place.
TEXTS = np.array(
    [
        [3, 5, 6, 7, 8, 0, 9, 4, 4, 4, 4, 4, 4, 5, 0],
        [0, 5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
)
INFILLING = decode.make_request(
    TEXTS, (15, 8, 2), given=TEXTS > 0, max_new_tokens=(0, 3, 9), stop=(-1,), seed=4
)


def of(kind: type, **options: Any) -> Any:
    return kind(NETWORK, SIZE, SPEC, log_probs=True, **options)


def semi(**options: Any) -> decode.SemiAutoregressive:
    return of(decode.SemiAutoregressive, **options)


def traced(decoder: Any, request: Any = None, **knobs: Any) -> tuple[decode.Decoded, Any]:
    """A result and its infos; all tests trace, so that they share programs."""
    request = tiny_request(NEWS, seed=3) if request is None else request
    return decode.trace(decoder, PARAMS, request, decoder.Knobs(**knobs), n=10)


def run(*of_run: Any, **knobs: Any) -> decode.Decoded:
    return traced(*of_run, **knobs)[0]


def is_same(one: decode.Decoded, other: decode.Decoded, *counts: str) -> None:
    """Tokens, log-probabilities but for rounding, and counts."""
    assert one.completions() == other.completions()
    assert one.reasons.tolist() == other.reasons.tolist()
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    for name in counts:
        assert one.counts[name].tolist() == other.counts[name].tolist(), name


# Blocks and caches


@pytest.mark.parametrize("cache", ["dual", slow("prefix")])
def test_a_cache_that_every_call_renews_is_none(cache):
    cached = semi(length=4, cache=cache)
    knobs = {"threshold": 0.5, "temperature": 0.8}
    plain = run(semi(length=4), **knobs)
    is_same(run(cached, renew=1, **knobs), plain, "network_calls", "positions")
    assert (plain.network_calls < np.array(NEWS)).any()
    once, often = run(cached, **knobs), run(cached, renew=2, **knobs)
    assert once.positions.sum() < often.positions.sum() < plain.positions.sum()
    assert listed(once)["log_probs"] != listed(often)["log_probs"]


def test_a_threshold_above_1_is_one_position_a_call():
    one = run(semi(length=4, rule="static"), temperature=0.8)
    is_same(run(semi(length=4), threshold=1.5, temperature=0.8), one, "network_calls", "positions")
    assert one.network_calls.tolist() == [*NEWS]


@pytest.mark.slow
def test_one_block_is_the_whole_canvas():
    knobs = {"threshold": 0.5, "temperature": 0.8}
    whole = run(semi(length=None), **knobs)
    is_same(run(semi(length=max(NEWS)), **knobs), whole, "network_calls", "positions")
    assert whole.completions() != run(semi(length=4), **knobs).completions()


def test_a_prefix_cache_and_one_block_are_a_cache_of_the_prompt():
    """By a plain program, where the prompt's keys and values are those of the first call."""
    (prompt, new), row = (PROMPTS[1], NEWS[1]), [1]
    start, end = len(prompt), len(prompt) + new
    text = np.array([[*prompt, *[MASK] * new]])
    logits, _, kv = read(NETWORK, PARAMS, text, mask=jnp.ones((end, end), bool))
    request = tiny_request(NEWS).take(row)
    cache = NETWORK.write(NETWORK.init_cache(request.keys, SIZE), kv, jnp.zeros(1, int))
    logits, kept = np.array(logits[:, start:]), []
    for _ in range(new):
        logits[..., MASK] = -np.inf
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs = (probs / probs.sum(-1, keepdims=True)).max(-1) * (text[:, start:] == MASK)
        place = probs[0].argmax()
        text[0, start + place] = logits[0, place].argmax()
        prefix, places = decode.Prefix(cache, jnp.array([start])), jnp.arange(start, end)[None]
        mask = jnp.ones((new, new), bool)
        logits = np.array(read(NETWORK, PARAMS, text[:, start:], places, prefix, mask)[0])
        kept.append(place)
    found = run(semi(length=max(NEWS), cache="prefix"), request, threshold=1.5)
    assert found.completions() == text[:, start:].tolist()
    assert found.positions.tolist() == [end + (new - 1) * new]
    assert len(set(kept)) == new and kept != sorted(kept)


@pytest.mark.slow
def test_steps_of_a_grid_that_reveal_nothing_call_nothing():
    masks, calls = NEWS[0], 0
    for step in range(64):
        count = int(reveal.on_grid(jnp.array([masks]), jnp.array([step]), jnp.array(64), 1e-3)[0])
        masks, calls = masks - count, calls + (count > 0)
    assert masks == 0 and 1 < calls <= NEWS[0]
    found = run(semi(length=None, rule="grid"), steps=64)
    assert found.network_calls[0] == calls
    assert run(semi(length=None, rule="grid"), steps=3).network_calls.tolist() == [3] * 3


# Rows

RNG = np.random.default_rng(0)
MANY = decode.make_request(
    RNG.integers(1, 30, (16, 5)), RNG.integers(1, 6, 16), max_new_tokens=RNG.integers(1, 10, 16)
)
DECODERS = {
    "dual": (semi(length=4, cache="dual"), {"threshold": 0.5, "renew": 3}),
    "prefix": (semi(length=3, cache="prefix"), {"threshold": 0.5}),
    "wino": (of(decode.Wino, length=4), {"threshold": 0.3}),
    "prophet": (of(decode.Prophet, length=3), {"early": 2.0, "middle": 2.0}),
    "planned": (of(decode.Planned), {"steps": 4}),
    "speculative": (of(decode.SpeculativeDenoising, length=5), {}),
}


@over(DECODERS, DECODERS.keys() - {"dual"})
def test_a_row_alone_is_a_row_of_any_batch(name):
    decoder, knobs = DECODERS[name]
    knobs = decoder.Knobs(temperature=0.8, **knobs)
    together, ages = decode.trace(decoder, PARAMS, MANY, knobs, n=12, record=age_of)
    assert (together.reasons > 0).all()
    if name == "dual":
        renewed = ages[0] == 0
        assert (renewed.any(axis=1) & ~renewed.all(axis=1)).sum() > 3, "rows renew apart"
    for size in (1, 4):
        for i in range(0, 16, size):
            rows = range(i, i + size)
            some = decode.run(decoder, PARAMS, MANY.take(rows), knobs)
            is_same(some, of_rows(together, rows), *together.counts)


def age_of(state, info):
    return state.age, state.rows.done


def of_rows(decoded: decode.Decoded, rows: Any) -> decode.Decoded:
    return jax.tree.map(lambda x: x[np.array(rows)], decoded)


# Drafts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_the_denoiser_itself_are_one_position_a_call(temperature):
    """In tokens, in their order and in log-probabilities, with fewer calls."""
    plain, info = traced(semi(length=4, rule="static"), temperature=temperature)
    drafted, did = traced(of(decode.SpeculativeDenoising, length=4), temperature=temperature)
    is_same(drafted, plain)
    assert (drafted.network_calls <= plain.network_calls + 1).all()
    assert drafted.network_calls.sum() < plain.network_calls.sum()
    for row, new in enumerate(NEWS):
        order = (info.at[:, row] + np.argmax(info.where[:, row], axis=1))[:new].tolist()
        places = did.places[:, row][np.arange(4) < did.accepted[:, row, None]]
        assert places.tolist() == order != sorted(order)


# Revocation


def test_without_doubt_and_below_its_threshold_wino_reveals_one_position_a_call():
    """So shadows change nothing of what the canvas says."""
    plain = run(semi(length=4), threshold=1.5, temperature=0.8)
    wino = run(of(decode.Wino, length=4), threshold=1.0, back=0.0, temperature=0.8)
    is_same(wino, plain, "network_calls")


def test_wino_takes_back_less_than_it_revealed():
    """On a stub, which doubts whatever it is asked about."""
    stub = StubDenoiser(sharpness=12.0)
    decoder = decode.Wino(stub, SIZE, TokenSpec(mask=stub.mask, alignment="own"), length=6)
    for threshold in (0.5, 0.7):
        knobs = decoder.Knobs(threshold=threshold)
        result, (info, tokens) = decode.trace(
            decoder, None, INFILLING, knobs, n=10, record=info_and_tokens
        )
        shown, again = info.where.sum(axis=2), info.again.sum(axis=2)
        assert (again[1:] < np.maximum(shown[:-1], 1)).all() and again.sum() == 4
        assert (result.network_calls <= result.generated).all() and (result.reasons > 0).all()
        keeps_what_is_given(tokens)


def info_and_tokens(state, info):
    return info, state.rows.tokens


def keeps_what_is_given(tokens: Any) -> None:
    given = TEXTS > 0
    assert (np.asarray(tokens)[:, :, : TEXTS.shape[1]][:, given] == TEXTS[given]).all()


# An early end


def test_a_gap_that_is_never_reached_changes_nothing():
    never = dict.fromkeys(("early", "middle", "late"), 1e9)
    plain = run(semi(length=4, rule="static"), steps=2, temperature=0.8)
    prophet = run(of(decode.Prophet, length=4), steps=2, temperature=0.8, **never)
    is_same(prophet, plain, "network_calls", "positions")


@pytest.mark.slow
def test_a_gap_that_is_reached_at_once_is_one_call():
    at_once = run(of(decode.Prophet, length=4), early=0.0, temperature=0.8)
    assert at_once.network_calls.tolist() == [1] * 3
    is_same(at_once, run(semi(length=None), threshold=0.0, temperature=0.8), "positions")


# Planning


def test_planning_masks_what_its_schedule_says():
    """In N steps, or as many as there are new positions."""
    decoder = of(decode.Planned)
    knobs = decoder.Knobs(steps=4, temperature=0.8)
    result, (info, tokens) = decode.trace(
        decoder, PARAMS, INFILLING, knobs, n=4, record=info_and_tokens
    )
    new = np.asarray(result.generated)
    steps, index = np.minimum(new, 4), np.arange(4)[:, None]
    left = (tokens == MASK).sum(axis=2) - (tokens[-1] == MASK).sum(axis=1)
    assert left.tolist() == np.maximum(new * (steps - index - 1) // steps, 0).tolist()
    assert result.network_calls.tolist() == steps.tolist() == [2, 4, 4]
    assert (result.reasons > 0).all()
    keeps_what_is_given(tokens)
    shown = info.where.sum(axis=(0, 2))
    assert (shown > new).any(), "nothing was masked again"
