"""Bad input gets one clear sentence, before anything is compiled."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import pytest
from decoders import BUDGET, EVERY, ROWS, SIZE, tiny

from paradec_jax import decode
from paradec_jax.decode import drive
from paradec_jax.testing import StubCausal, StubNetwork, tiny_network, tiny_params, tiny_request


@EVERY
def test_what_cannot_work_is_refused_at_once(name):
    row = ROWS[name]
    request, knobs = tiny_request(BUDGET), row.values()
    drivers = {
        "run": decode.run,
        "trace": functools.partial(decode.trace, n=2),
        "rollout": functools.partial(decode.rollout, n=2),
        "stream": lambda *given: next(decode.stream(*given)),
    }
    compiled = [f._cache_size() for f in (drive._run, drive._trace, drive._init, drive._steps)]
    for drive_it in drivers.values():
        with pytest.raises(ValueError, match=r"bind\(network, size\)"):
            drive_it(row.kind(**row.options), None, request, knobs)
        with pytest.raises(ValueError, match="prompt of 5 tokens"):
            drive_it(row.decoder(size=5), None, request, knobs)
        with pytest.raises(ValueError, match=r"65 .* 64 positions"):
            drive_it(row.decoder(size=65), None, request, knobs)
        for field, value in {"temperature": -1.0, "top_p": 0.0, "top_k": -1, "min_p": 2.0}.items():
            with pytest.raises(ValueError, match=field):
                drive_it(row.decoder(), None, request, row.values(**{field: value}))
    assert compiled == [f._cache_size() for f in (drive._run, drive._trace, drive._init, drive._steps)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decode.Adaptive(criterion="mood"), "criterion must be one of"),
        (lambda: decode.SelfSpeculative(lookahead=0), "lookahead"),
        (lambda: decode.SelfSpeculative(draft_recurrence=0), "draft_recurrence"),
        (lambda: decode.SelfSpeculative(continuous=True, lookahead=2), "continuous"),
        (lambda: decode.PromptLookup(max_ngram=0), "max_ngram must be at least 1, not 0"),
        (lambda: decode.PromptLookup(num_pred=0), "num_pred must be at least 1, not 0"),
        (lambda: decode.PromptLookup(dummy=-1), "dummy must be a token id or None, not -1"),
        (lambda: decode.Lookahead(level=2), "level must be at least 3, not 2"),
        (lambda: decode.Lookahead(window=0), "window must be at least 1, not 0"),
        (lambda: decode.Lookahead(guesses=0), "guesses must be at least 1, not 0"),
        (lambda: decode.Lookahead(official=True), "official .* needs pool_from_prompt"),
        (
            lambda: decode.Lookahead(StubNetwork(), SIZE).init(
                None, tiny_request(2), decode.Lookahead.Knobs()
            ),
            "not StubNetwork",
        ),
        (
            lambda: decode.run(
                ROWS["lookahead"].decoder(),
                None,
                tiny_request(2, recorded=decode.Recorded(window=jnp.zeros(3, int))),
            ),
            r"recorded.window must have shape \(4,\), not \(3,\)",
        ),
        (lambda: decode.Jacobi(block=1), "block must be at least 2, not 1"),
        (lambda: decode.Jacobi(pool=-1), "pool and rows must not be negative, not -1, 0"),
        (lambda: decode.Jacobi(rows=-2), "pool and rows must not be negative, not 0, -2"),
        (lambda: decode.Jacobi(pool=2, rows=1), "a pool needs rows of at least 2"),
        (
            lambda: decode.Jacobi(acceptance="hope"),
            "acceptance must be one of coupled, rejection, not 'hope'",
        ),
        (lambda: decode.Jacobi(pool=2, acceptance="rejection"), "rejection' verifies one row, .* not 2, 0"),
        (
            lambda: decode.MultiBlock(rows=2, acceptance="rejection"),
            "rejection' verifies one row, .* not 0, 2",
        ),
        (
            lambda: decode.run(
                ROWS["jacobi-rejection"].decoder(),
                None,
                tiny_request(2, recorded=decode.Recorded(uniforms=jnp.zeros(9))),
            ),
            "recorded.uniforms .* acceptance 'rejection'",
        ),
        (lambda: decode.MultiBlock(block=1), "block must be at least 2, not 1"),
        (lambda: decode.MultiBlock(blocks=0), "blocks must be at least 1, not 0"),
        (lambda: decode.MultiBlock(running=True), "a running window has no blocks"),
        (lambda: unusual(decode.MultiBlock, {"spawn": 1.5}), "spawn must be between 0 and 1, not 1.5"),
        (lambda: unusual(decode.MultiBlock, {"spawn": -0.1}), "spawn must be between 0 and 1, not -0.1"),
        (lambda: unusual(decode.Jacobi, rows=12), "must not exceed the 11 tokens of the vocabulary, not 12"),
        (
            lambda: unusual(decode.Jacobi, network=tiny_network("full"), pool=1),
            "Jacobi with 2 rows needs a network with candidates .*, not RecurrentDepthNetwork",
        ),
        (lambda: decode.Wavefront(inner_recurrence=0), "inner_recurrence"),
        (lambda: decode.Wavefront(width=0), "width"),
        (lambda: decode.Wavefront(headway=0), "headway"),
        (lambda: decode.Wavefront(noise_mixer="shaken"), "noise_mixer"),
        (lambda: decode.Wavefront(width=4, buckets=(4,)), "buckets"),
        (lambda: decode.Wavefront(width=4, buckets=(3, 2)), "buckets"),
        (lambda: decode.OfficialWavefront(rule="mood"), "rule must be one of latent-diff"),
        (lambda: decode.OfficialWavefront(width=2, headway=3), "headway 3 must not exceed the width 2"),
        (lambda: decode.OfficialWavefront(noise_mixer="shaken"), "noise_mixer"),
        (lambda: decode.make_request([[1], []], max_new_tokens=1), "lengths"),
        (lambda: decode.make_request([], max_new_tokens=1), "at least one row"),
        (lambda: decode.make_request([[1]], max_new_tokens=0), "max_new_tokens"),
        (lambda: decode.make_request([[1, 2]], [3], max_new_tokens=1), "lengths"),
        (
            lambda: decode.run(ROWS["multiblock"].decoder(), None, tiny_request(2), decode.Jacobi.Knobs()),
            r"MultiBlock takes knobs of type MultiBlock\.Knobs .*, not AutoRegressiveKnobs",
        ),
        (
            lambda: decode.rollout(ROWS["wavefront"].decoder(), None, tiny_request(2), n=4, segment=3),
            "segment",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def unusual(kind: type, knobs: dict[str, Any] | None = None, *, network: Any = None, **options: Any) -> Any:
    """A run that must be refused."""
    decoder, knobs = kind(network or StubCausal(), SIZE, **options), kind.Knobs(**(knobs or {}))
    return decode.run(decoder, tiny_params() if network else None, tiny_request(2), knobs)


def test_a_wave_too_narrow_for_its_schedule_is_refused():
    """Under "fixed" a wave that is full before anything is due would wait for ever."""
    request = tiny_request(4)
    narrow = tiny(decode.OfficialWavefront, "shared", rule="fixed", inner_recurrence=2, width=4)
    needed = narrow.patience + 3
    narrow = dataclasses.replace(narrow, width=needed - 1)
    with pytest.raises(ValueError, match=f"width must be at least {needed}, not {needed - 1}"):
        decode.run(narrow, tiny_params(), request, narrow.Knobs())
    wide = dataclasses.replace(narrow, width=needed)
    result = decode.run(wide, tiny_params(), request, wide.Knobs(noise=0.0), max_steps=100)
    assert [len(ids) for ids in result.completions()] == [4] * 3
