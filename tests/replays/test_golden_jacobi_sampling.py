"""Recorded target probabilities of the verifier that samples, of the original Jacobi Forcing programs."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from recorded_jacobi import MODELS
from recorded_jacobi import arrays_if_any as arrays

from paradec_jax.decode import SamplingKnobs
from paradec_jax.decode.rules.sampling import filtered_probabilities

PROBABILITIES = 1e-6


def probability_names() -> list:
    return [(m, name) for m in MODELS for name in arrays(m, "running_window") if name.startswith("probs/set")]


@pytest.mark.parametrize(("model", "name"), probability_names())
def test_target_probabilities(model, name):
    stored = arrays(model, "running_window")
    temperature, top_k, top_p = re.fullmatch(r"probs/set\d+_T([\d.]+)_k(\w+)_p([\w.]+)", name).groups()
    knobs = SamplingKnobs(
        temperature=float(temperature),
        top_k=None if top_k == "None" else int(top_k),
        top_p=1.0 if top_p == "None" else float(top_p),
    )
    probs = filtered_probabilities(jnp.asarray(stored["probs/logits"]), knobs, top_p_rule="drop-renormalised")
    assert np.abs(np.asarray(probs) - stored[name]).max() <= PROBABILITIES
