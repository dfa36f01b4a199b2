"""Drafts: what a state of a decoder guesses for the positions after its committed tokens, -1 after
the last guess.
"""

import dataclasses
import functools
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from stubs import StubCausal, StubDrafter, StubNetwork, tiny_request

from experiments import replicas
from paradec_jax import decode
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.recurrent.latents import LatentKnobs
from paradec_jax.decode.recurrent.wave import WaveDecoder

REPEATING = StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0)  # the text has period 3
# positions after a slow one are committed together
BURSTS = StubNetwork(needed=(5, 1, 1, 1), errs=False)
SIZE, BUDGET, STEPS = 24, 9, 16
OPTIONS = {  # for each decoder that has such a field
    "window": 6,
    "inner_recurrence": 2,
    "level": 5,
    "guesses": 2,
    "max_ngram": 2,
    "num_pred": 3,
    "min_ngram": 1,
    "draft_recurrence": 2,
    "lookahead": 3,
    "block": 4,
    "blocks": 2,
    "pool": 0,
    "drafter": StubDrafter(REPEATING),
}
NOTHING = {"AutoRegressive", "Static", "Adaptive", "SelfSpeculative", "ReleasedAdaptive"}
# What they commit was guessed elsewhere: in a pool, or in the step itself.
ELSEWHERE = {"Lookahead", "ReleasedLookahead"}


def defined() -> dict[str, type]:
    """Every decoder and replica by its name; those of canvases, whose guesses have gaps, are
    elsewhere.
    """
    for package in (decode, replicas):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    places = "paradec_jax.decode.", "experiments.replicas."
    bases = (DecoderBase, WaveDecoder)
    kinds = [
        kind for base in bases for kind in base.__subclasses__() if not inspect.isabstract(kind)
    ]
    kinds = [kind for kind in kinds if kind.__module__.startswith(places) and not kind.any_order]
    return {kind.__name__: kind for kind in kinds}


KINDS = defined()


def reach(decoder, state):
    """How many positions after the committed ones a state has room to guess, where its window says
    so.
    """
    if isinstance(decoder, decode.Jacobi):
        return jnp.minimum(state.window_end - state.rows.length, decoder.width - 1)
    if isinstance(decoder, decode.Wavefront | decode.SoftWavefront):
        return state.wave.active - 1
    return state.levels.width - 1 if isinstance(decoder, decode.Lookahead) else None


@functools.cache
def history(name: str):
    """The tokens of a decoder [B, S], and after each step lengths [N, B], drafts [N, B, K] and
    `reach`.
    """
    kind = KINDS[name]
    fields = {field.name for field in dataclasses.fields(kind)}
    options = {field: value for field, value in OPTIONS.items() if field in fields}
    network = BURSTS if issubclass(kind.Knobs, LatentKnobs) else REPEATING
    decoder = kind(network, SIZE, **options)
    params = dict.fromkeys(("network", *kind.further_networks)) if kind.further_networks else None

    def record(state, info):
        return state.rows.length, decoder.drafts(state), reach(decoder, state)

    result, records = decode.trace(decoder, params, tiny_request(BUDGET), n=STEPS, record=record)
    return jax.tree.map(np.asarray, (result.tokens, *records))


def test_every_decoder_is_here():
    assert len(KINDS) > 12 and KINDS.keys() >= NOTHING | ELSEWHERE


SELDOM = [
    name
    for name, kind in KINDS.items()
    if kind.__module__.startswith("experiments.")
    or name in ("Static", "SelfSpeculative", "SoftWavefront")  # as others without drafts, or a wave
]


@over(KINDS, SELDOM)
def test_drafts_are_tokens_and_then_nothing(name):
    _, _, drafts, _ = history(name)
    assert np.issubdtype(drafts.dtype, np.integer)
    assert drafts.min(initial=0) >= -1 and drafts.max(initial=0) < StubCausal.vocab_size
    guessed = drafts >= 0
    assert (guessed[..., :-1] | ~guessed[..., 1:]).all()
    assert guessed.any() == (drafts.shape[-1] > 0) == (name not in NOTHING)


@over(sorted(KINDS.keys() - NOTHING - ELSEWHERE), SELDOM)
def test_a_step_commits_drafts_and_one_token_more(name):
    tokens, lengths, drafts, _ = history(name)
    several = 0
    for step, row in np.ndindex(STEPS - 1, len(tokens)):
        start, end = lengths[step : step + 2, row]
        taken = max(end - 1 - start, 0)
        assert drafts[step, row, :taken].tolist() == tokens[row, start : start + taken].tolist()
        several += taken
    assert several > 0


@pytest.mark.parametrize("name", ["Jacobi", "Wavefront", "SoftWavefront", "Lookahead"])
def test_drafts_end_with_the_window(name):
    _, _, drafts, reach = history(name)
    count = (drafts >= 0).sum(-1)
    np.testing.assert_array_equal(count, reach)
    assert count.min() < count.max()
