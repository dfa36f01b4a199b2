"""Laws that random weights cannot show, on a bundled model: drafts are accepted, so a wrong rule
loses answers.
"""

import functools

import numpy as np
import pytest

import paradec_jax as pd
from experiments.tasks import word_problems
from paradec_jax.decode.rules import select

# Of 100 problems those whose texts change where a state is reset only if its own token changed.
TELLING = (3, 11, 41)
KNOBS = pd.Wavefront.Knobs(exit_threshold=np.inf, momentum=0.0)


@functools.cache
def asked() -> tuple:
    problems = word_problems(max(TELLING) + 1, seed=1, steps=(2, 4))
    return pd.load("tiny-recurrent-distilled"), [problems[i].prompt for i in TELLING]


def answers(decoder, knobs=None):
    model, prompts = asked()
    return pd.generate(model, prompts, decoder, knobs=knobs, max_new_tokens=200)


def cold(**options):
    options = {"window": 8, "headway": 8, **options}
    return pd.Wavefront(inner_recurrence=1, warm_start=False, prefill_recurrence=1, **options)


@pytest.mark.slow
def test_a_wave_without_warm_starts_is_static_decoding_in_fewer_calls(monkeypatch):
    """Jacobi decoding of a recurrent model. A state is wrong from the first token on that changed,
    not only there.
    """
    static = answers(pd.Static(recurrence=1))
    waved = answers(cold(), KNOBS)
    assert waved.text == static.text
    assert (waved.network_calls < 0.4 * static.network_calls).all(), waved.network_calls

    monkeypatch.setattr(select, "leading", lambda qualified: qualified)  # only its own token counts
    # no other test's: what was compiled under the patch stays
    mutant = answers(cold(buckets=(5,)), KNOBS)
    assert mutant.text != static.text
