"""Recorded probabilities of the original recurrent-depth program, filtered."""

import jax.numpy as jnp
import pytest
from recorded_recurrent_depth import arrays, assert_close, cases

from paradec_jax.decode import SamplingKnobs
from paradec_jax.decode.rules.sampling import filtered_probabilities

PROBABILITIES = 2e-6


@pytest.mark.parametrize("case", cases("sampling"))
def test_filtered_probabilities(case):
    values = {k: case[k] for k in ("top_k", "top_p", "min_p") if case.get(k) is not None}
    knobs = SamplingKnobs(temperature=case.get("temperature") or 1.0, **values)
    probs = filtered_probabilities(jnp.asarray(arrays("sampling")["logits"]), knobs)
    assert_close(probs, arrays("sampling")[f"probs_{case['case']}"], PROBABILITIES)
