"""Gradients of a rollout for the knobs (law 6); those of the soft wavefront, in float64, are in
test_gradients.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_rows import BUDGET
from decoders import tiny
from stubs import tiny_params, tiny_request

from paradec_jax import decode


def latents_of(state, info):
    """Records what the soft path carries, and the tokens that it must not change."""
    if hasattr(state, "wave"):
        return state.wave.states, state.wave.tokens
    return state.cache.initial, state.rows.tokens


def soft(
    decoder, names: tuple[str, ...], steps: int, segment: int, **fixed
) -> Callable[[Any], Any]:
    """A scalar of all latents on the way, and the tokens, as a function of some knobs."""

    def value(at: jax.Array):
        knobs = decoder.Knobs(**fixed, **{name: at[i] for i, name in enumerate(names)})
        _, (latents, tokens) = decode.rollout(
            decoder,
            tiny_params(),
            tiny_request(BUDGET),
            knobs,
            n=steps,
            segment=segment,
            record=latents_of,
        )
        weights = jnp.sin(jnp.arange(latents.size, dtype=jnp.float32)).reshape(latents.shape)
        return jnp.sum(weights * latents), tokens

    return value


SOFT = {
    "wavefront": (
        (decode.Wavefront, {"window": 3, "inner_recurrence": 2}),
        ("momentum", "noise", "init_scale", "exit_threshold"),
        (0.2, 0.3, 0.8, 1e-3),
    ),
    "continuous": ((decode.Static, {"continuous": True}), ("init_scale",), (0.8,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOFT)
def test_gradients_are_finite_differences(name):
    (kind, options), names, at = SOFT[name]
    decoder, at = tiny(kind, "shared", **options), np.array(at, np.float32)
    graded = jax.jit(jax.value_and_grad(soft(decoder, names, 4, 2), has_aux=True))
    (_, tokens), gradient = graded(at)
    plain = jax.jit(soft(decoder, names, 4, 2))
    for i, knob in enumerate(names):
        if knob == "exit_threshold":
            assert gradient[i] == 0
            continue
        h = 0.01 * np.eye(len(names), dtype=np.float32)[i]
        (high, tokens_high), (low, tokens_low) = plain(at + h), plain(at - h)
        for other in (tokens_high, tokens_low):
            np.testing.assert_array_equal(other, tokens)
        difference = (float(high) - float(low)) / 0.02
        assert abs(gradient[i]) > 1e-2
        assert gradient[i] == pytest.approx(difference, rel=1e-2, abs=2e-3), knob
