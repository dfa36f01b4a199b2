"""Bad input gets one clear sentence, before anything is compiled."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from decoder_rows import BUDGET, SIZE
from decoders import EACH_CLASS, ROWS, tiny
from stubs import StubCausal, StubDenoiser, tiny_params, tiny_request
from tracing import nothing_is_traced

from experiments import replicas
from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.causal.lookahead import RecordedLookahead


@EACH_CLASS
def test_what_cannot_work_is_refused_at_once(name):
    row = ROWS[name]
    request, knobs = tiny_request(BUDGET), row.values()
    drivers = {
        "run": decode.run,
        "trace": functools.partial(decode.trace, n=2),
        "rollout": functools.partial(decode.rollout, n=2),
        "stream": lambda *given: next(decode.stream(*given)),
    }
    values = {"temperature": -1.0, "top_p": 0.0, "top_k": -1, "min_p": 2.0}
    with nothing_is_traced(row.kind):
        for drive_it in drivers.values():
            with pytest.raises(ValueError, match=r"bind\(network, size\)"):
                drive_it(row.kind(**row.options), row.params, request, knobs)
            with pytest.raises(ValueError, match="prompt of 5 tokens"):
                drive_it(row.decoder(size=5), row.params, request, knobs)
            if not row.kind.windowed:
                with pytest.raises(ValueError, match=r"65 .* 64 positions"):
                    drive_it(row.decoder(size=65), row.params, request, knobs)
            for field, value in values.items():
                wrong = dataclasses.replace(knobs, **{field: value})
                with pytest.raises(ValueError, match=field):
                    drive_it(row.decoder(), row.params, request, wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decode.Adaptive(criterion="mood"), "criterion must be one of"),
        (lambda: decode.SelfSpeculative(lookahead=0), "lookahead"),
        (lambda: decode.SelfSpeculative(draft_recurrence=0), "draft_recurrence"),
        (lambda: decode.SelfSpeculative(continuous=True, lookahead=2), "continuous"),
        (lambda: decode.PromptLookup(max_ngram=0), "max_ngram must be at least 1, not 0"),
        (lambda: decode.PromptLookup(num_pred=0), "num_pred must be at least 1, not 0"),
        (lambda: replicas.ReleasedPromptLookup(dummy=-1), "dummy must be a token id, not -1"),
        (lambda: decode.Lookahead(level=2), "level must be at least 3, not 2"),
        (lambda: decode.Lookahead(window=0), "window must be at least 1, not 0"),
        (lambda: decode.Lookahead(guesses=0), "guesses must be at least 1, not 0"),
        (
            lambda: decode.run(
                ROWS["lookahead"].decoder(),
                None,
                tiny_request(2, recorded=RecordedLookahead(window=jnp.zeros(3, int))),
            ),
            r"has shape \(3,\) but expected \(4\)\. \[recorded.window\]",
        ),
        (lambda: decode.Jacobi(block=1), "block must be at least 2, not 1"),
        (lambda: decode.Jacobi(pool=-1), "candidates .* must be at least 1, 2 with a pool, not 0"),
        (lambda: decode.Jacobi(pool=2, candidates=1), "2 with a pool, not 1"),
        (lambda: unusual(decode.Jacobi, recurrence=2), "are for networks of recurrent depth"),
        (lambda: unusual(decode.Jacobi, prefill_recurrence=1), "are for networks of recurrent depth"),
        (lambda: decode.Jacobi(blocks=0), "blocks must be at least 1, not 0"),
        (lambda: decode.Jacobi(running=True, blocks=2), "a running window has no blocks"),
        (lambda: unusual(decode.Jacobi, {"spawn": 1.5}, blocks=2), "spawn must be between 0 and 1, not 1.5"),
        (
            lambda: unusual(decode.Jacobi, {"spawn": -0.1}, blocks=2),
            "spawn must be between 0 and 1, not -0.1",
        ),
        (lambda: unusual(decode.Jacobi, {"spawn": 0.5}), "spawn"),
        (lambda: decode.Wavefront(inner_recurrence=0), "inner_recurrence"),
        (lambda: decode.Wavefront(window=0), "window"),
        (lambda: decode.Wavefront(headway=0), "headway"),
        (lambda: decode.Wavefront(noise_mixing="shaken"), "noise_mixing"),
        (lambda: replicas.ReleasedJacobi(block=0), "block must be at least 1, not 0"),
        (lambda: replicas.ReleasedJacobi(greedy=False), "ReleasedJacobi is greedy"),
        (lambda: replicas.ReleasedJacobi(log_probs=True), "keeps no log-probabilities"),
        (lambda: replicas.ReleasedRunningWindow(block=1), "block must be at least 2"),
        (lambda: replicas.ReleasedMultiBlock(variant="dev"), "variant must be one of main, tail, plain, not"),
        (lambda: replicas.ReleasedMultiBlock(pool=-1), "pool must be at least 0, not -1"),
        (lambda: replicas.ReleasedWavefront(rule="mood"), "rule must be one of latent-diff"),
        (lambda: replicas.ReleasedWavefront(window=2, headway=3), "headway 3 must not exceed the window 2"),
        (lambda: replicas.ReleasedWavefront(noise_schedule="shaken"), "noise_schedule"),
        (lambda: decode.Masked(order="mood"), "order must be one of random, single, confidence, .*'mood'"),
        (lambda: decode.Masked(chunk=0), "chunk must be at least 1, not 0"),
        (lambda: decode.SoftMasked(relaxation="mood"), "relaxation must be one of straight_through, soft"),
        (lambda: decode.Strided(width=0), "width must be at least 1, not 0"),
        (
            lambda: decode.Strided(StubDenoiser(), 80, width=65),
            "width must be .* the 64 positions .*, not 65",
        ),
        (lambda: decode.Strided(width=8, stride=9), "stride must be from 1 to the width 8, not 9"),
        (lambda: masked(steps=0), "steps must be at least 1, not 0"),
        (lambda: masked(grid="square"), "grid must be linear or cosine or an array of times, not 'square'"),
        (lambda: masked(grid=np.array([1.0, 0.5, 0.5])), "grid must be times that fall from 1 to above 0"),
        (
            lambda: masked(grid=np.array([1.0, 0.5]), steps=2),
            "2 times has as many steps, so steps must be None",
        ),
        (lambda: masked(order="single", steps=2), "steps needs order random or .* or entropy, not single"),
        (lambda: masked(order="single", grid="cosine"), "grid needs order random or .*, not single"),
        (
            lambda: masked(spec=TokenSpec(alignment="own")),
            "mask token, but the checkpoint's token spec has none",
        ),
        (
            lambda: masked(spec=TokenSpec(alignment="own", mask=11)),
            "the mask token must be an id below the 11 of the vocabulary, not 11",
        ),
        (
            lambda: masked(prompts=([3], [4, 10])),
            "row 1 gives the mask token 10 at position 1: leave a hole there",
        ),
        (lambda: replicas.ReleasedMasked(program="mood"), "program must be one of mdlm, sdtt, not 'mood'"),
        (
            lambda: replicas.ReleasedMasked(program="sdtt"),
            "of sdtt must be one of ancestral, analytic, not 'cached'",
        ),
        (lambda: replicas.ReleasedMasked(steps=0), "steps must be at least 1, not 0"),
        (lambda: replicas.ReleasedMasked(log_probs=True), "ReleasedMasked keeps no log-probabilities"),
        (lambda: replicas.ReleasedStrided(stride=9, width=8), "stride at most the width, not 8 and 9"),
        (lambda: decode.make_request([], max_new_tokens=1), "at least one row"),
        (lambda: decode.make_request([[1]], max_new_tokens=0), "max_new_tokens"),
        (lambda: decode.make_request([[1, 2]], [3], max_new_tokens=1), "lengths"),
        (
            lambda: decode.run(ROWS["jacobi"].decoder(), None, tiny_request(2), decode.Static.Knobs()),
            r"Jacobi takes knobs of type Jacobi\.Knobs .*, not LatentKnobs",
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


def masked(prompts: Any = ([3], [4]), spec: Any = None, order: str = "random", **knobs: Any) -> Any:
    """A run of `Masked` that must be refused."""
    spec = TokenSpec(alignment="own", mask=10) if spec is None else spec
    decoder, request = (
        decode.Masked(StubDenoiser(), SIZE, spec, order=order),
        tiny_request(2, prompts=prompts),
    )
    return decode.run(decoder, None, request, decoder.Knobs(**knobs))


def unusual(kind: type, knobs: dict[str, Any] | None = None, **options: Any) -> Any:
    """A run that must be refused."""
    decoder, knobs = kind(StubCausal(), SIZE, **options), kind.Knobs(**(knobs or {}))
    return decode.run(decoder, None, tiny_request(2), knobs)


def test_a_wave_too_narrow_for_its_schedule_is_refused():
    """Under "fixed" a wave that is full before anything is due would wait for ever."""
    request = tiny_request(4)
    narrow = tiny(replicas.ReleasedWavefront, "shared", rule="fixed", inner_recurrence=2, window=4)
    needed = narrow.patience + 3
    narrow = dataclasses.replace(narrow, window=needed - 1)
    with pytest.raises(ValueError, match=f"window must be at least {needed}, not {needed - 1}"):
        decode.run(narrow, tiny_params(), request, narrow.Knobs())
    wide = dataclasses.replace(narrow, window=needed)
    result = decode.run(wide, tiny_params(), request, wide.Knobs(noise=0.0), max_steps=100)
    assert [len(ids) for ids in result.completions()] == [4] * 3
