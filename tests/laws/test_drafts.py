"""Drafts: what a state of a decoder guesses for the positions after its committed tokens, -1 after
the last guess.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_rows import BUDGET, STEPS
from decoders import LONG, ROWS, first_rows, traced
from marks import over
from stubs import StubCausal, StubNetwork
from stubs.tiny import NEVER

from paradec_jax import decode
from paradec_jax.decode.recurrent.latents import LatentKnobs

# positions after a slow one are committed together
BURSTS = StubNetwork(needed=(5, 1, 1, 1), errs=False)
# Of canvases, whose guesses have gaps, `test_house.py` speaks.
NAMES = first_rows(name for name, row in ROWS.items() if not row.kind.any_order)
NOTHING = {"autoregressive", "static", "adaptive-latent", "speculative", "released-adaptive"}
# What they commit was guessed elsewhere: in a pool, or in the step itself.
ELSEWHERE = {"lookahead", "released-lookahead"}
# replicas, and what guesses as others do, or nothing
SELDOM = {*LONG, "static", "speculative", "wavefront-straight-through"}


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
    row = ROWS[name]
    network = BURSTS if issubclass(row.kind.Knobs, LatentKnobs) else row.network()
    decoder = row.decoder(network)
    result, (states, *_) = traced(name, BUDGET, (NEVER,), network)
    drafts = jax.vmap(lambda state: (decoder.drafts(state), reach(decoder, state)))(states)
    return jax.tree.map(np.asarray, (result.tokens, states.rows.length, *drafts))


@over(NAMES, SELDOM)
def test_drafts_are_tokens_and_then_nothing(name):
    _, _, drafts, _ = history(name)
    assert np.issubdtype(drafts.dtype, np.integer)
    assert drafts.min(initial=0) >= -1 and drafts.max(initial=0) < StubCausal.vocab_size
    guessed = drafts >= 0
    assert (guessed[..., :-1] | ~guessed[..., 1:]).all()
    assert guessed.any() == (drafts.shape[-1] > 0) == (name not in NOTHING)


@over([name for name in NAMES if name not in NOTHING | ELSEWHERE], SELDOM)
def test_a_step_commits_drafts_and_one_token_more(name):
    tokens, lengths, drafts, _ = history(name)
    several = 0
    for step, row in np.ndindex(STEPS - 1, len(tokens)):
        start, end = lengths[step : step + 2, row]
        taken = max(end - 1 - start, 0)
        assert drafts[step, row, :taken].tolist() == tokens[row, start : start + taken].tolist()
        several += taken
    assert several > 0


@pytest.mark.parametrize("name", ["jacobi", "wavefront", "wavefront-straight-through", "lookahead"])
def test_drafts_end_with_the_window(name):
    _, _, drafts, reach = history(name)
    count = (drafts >= 0).sum(-1)
    np.testing.assert_array_equal(count, reach)
    assert count.min() < count.max() or name == "lookahead"  # whose window is full from the start
