"""Recorded probabilities of the original recurrent-depth program, filtered and penalised."""

import jax.numpy as jnp
import numpy as np
import pytest
from recorded_recurrent_depth import arrays, assert_close, cases, names

from paradec_jax.decode.sampling import SamplingKnobs, filtered_probabilities, repetition_penalty

pytestmark = pytest.mark.golden

PROBABILITIES = 2e-6


@pytest.mark.parametrize("case", cases("sampling"))
def test_filtered_probabilities(case):
    values = {k: case[k] for k in ("top_k", "top_p", "min_p") if case.get(k) is not None}
    knobs = SamplingKnobs(temperature=case.get("temperature") or 1.0, **values)
    probs = filtered_probabilities(jnp.asarray(arrays("sampling")["logits"]), knobs)
    assert_close(probs, arrays("sampling")[f"probs_{case['case']}"], PROBABILITIES)


@pytest.mark.parametrize("name", names("sampling", r"penalized_logits_\d+p\d+"))
def test_repetition_penalty(name):
    penalty = float(name.removeprefix("penalized_logits_").replace("p", "."))
    logits = jnp.asarray(arrays("sampling")["logits"])
    seen = np.zeros(logits.shape, bool)
    seen[:, np.unique(arrays("sampling")["penalty_input_ids"])] = True
    assert_close(repetition_penalty(logits, jnp.asarray(seen), penalty), arrays("sampling")[name])
