"""Recorded scores of Dream's sampler, and what its filters leave."""

import jax.numpy as jnp
import pytest
from recorded import GOLDEN, arrays_in, equal, near

from paradec_jax.decode.machine.knobs import SamplingKnobs
from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.sampling import filtered_probabilities

FOLDER = GOLDEN / "baselines"


def negative_entropy(logits):
    return -score.entropy(logits)


@pytest.mark.skipif(
    not (FOLDER / "dream" / "sampler_units.npz").is_file(), reason="no sampler units there"
)
def test_scores_are_those_of_dreams_sampler():
    units = arrays_in(FOLDER / "dream" / "sampler_units.npz")
    logits = jnp.asarray(units["logits"])

    def filtered(temperature=0.0, **knobs):
        knobs = SamplingKnobs(temperature, **knobs)
        return jnp.log(filtered_probabilities(logits, knobs, top_p_rule="keep"))

    cases = {
        "plain": (score.probability, logits),
        "margin": (score.margin, logits),
        "negent": (negative_entropy, logits),
        "topp0p8": (score.probability, filtered(top_p=0.8)),
        "topk5": (score.probability, filtered(top_k=5)),
        "topp0p7_topk4_negent": (negative_entropy, filtered(top_p=0.7, top_k=4)),
    }
    for name, (rule, shaped) in cases.items():
        atol = 5e-4 if name.endswith("negent") else 1e-4
        near(rule(shaped), units[f"conf_{name}"], atol=atol, err_msg=name)
        equal(shaped.argmax(axis=-1), units[f"x0_{name}"], err_msg=name)
    equal(score.probability(logits, jnp.asarray(units["x0_plain"])), score.probability(logits))
    kept = {"topp0p8": filtered(top_p=0.8), "topk5": filtered(top_k=5)}
    kept["temp0p5_topp0p8"] = filtered(0.5, top_p=0.8)
    for name, shaped in kept.items():
        equal(jnp.isfinite(shaped), units[f"filtered_{name}"] > -1e38, err_msg=name)
