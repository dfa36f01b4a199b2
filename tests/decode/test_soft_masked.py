"""Gradients through the masked sampler, in float64: parameters, temperatures, vectors in place of
given tokens.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soft_canvas
from soft_canvas import check_differences
from stubs import tiny_denoiser, tiny_denoiser_params

from paradec_jax import decode
from paradec_jax.config import TokenSpec

WIDE = {
    "width": 8,
    "layers": 1,
    "heads": 2,
    "vocab_size": 7,
    "dtype": "float64",
    "param_dtype": "float64",
}
NETWORK = tiny_denoiser(**WIDE)
SPEC = TokenSpec(mask=6, alignment="own")
TEXT, GIVEN = [3, 0, 1], [True, False, True]
NEW, STEPS = 4, 4  # positions after them
KNOBS = {"temperature": 2.5, "token_temperature": 0.6}


def seen(state, info):
    """A scalar of all that is soft in a step, and the tokens beside it."""
    weights = jnp.sin(jnp.arange(info.hidden.size)).reshape(info.hidden.shape)
    return jnp.sum(weights * info.hidden), state.rows.tokens


def arguments(shift: float = 0.1) -> dict[str, Any]:
    return soft_canvas.arguments(tiny_denoiser_params(1, **WIDE), KNOBS, TEXT, shift)


@functools.cache
def loss(relaxation: str, top_p: float = 1.0):
    decoder = decode.SoftMasked(
        NETWORK, len(TEXT) + NEW, SPEC, order="single", chunk=2, relaxation=relaxation
    )
    request = decode.make_request([TEXT], given=[GIVEN], max_new_tokens=NEW, seed=4)

    def value(at: dict[str, Any]):
        soft = dataclasses.replace(request, recorded=decode.SoftGiven(vectors=at["vectors"]))
        given = (at["params"], soft, decoder.Knobs(**at["knobs"], top_p=top_p))
        _, (values, tokens) = decode.rollout(decoder, *given, n=STEPS, segment=2, record=seen)
        return jnp.sum(values * (1 + jnp.arange(STEPS))), (tokens,)

    return value


@functools.cache
def graded(relaxation: str, top_p: float = 1.0):
    with jax.enable_x64(True):
        graded = jax.jit(jax.value_and_grad(loss(relaxation, top_p), has_aux=True))
        (value, (tokens,)), gradient = graded(arguments())
        return float(value), np.asarray(tokens), jax.tree.map(np.asarray, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_soft_gradients_are_finite_differences(top_p):
    _, tokens, gradient = graded("soft", top_p)
    with jax.enable_x64(True):
        plain = jax.jit(loss("soft", top_p))
        check_differences(plain, arguments(), GIVEN, gradient, (tokens,))
        assert not gradient["vectors"][0, 1].any(), "nothing reads what stands at a hole"


@pytest.mark.slow
def test_a_straight_token_is_read_as_it_is_and_has_the_gradient_of_a_mixture():
    """Tokens and values are those of `Masked`; where q is nearly a token both relaxations agree."""
    value, tokens, gradient = graded("straight_through")
    _, soft_tokens, _ = graded("soft")
    assert np.isfinite(value)
    with jax.enable_x64(True):
        plain = arguments(shift=0.0)
        hard_value, (hard_tokens,) = jax.jit(loss("straight_through"))(plain)
        hard = decode.Masked(NETWORK, len(TEXT) + NEW, SPEC, order="single", chunk=2)
        request = decode.make_request([TEXT], given=[GIVEN], max_new_tokens=NEW, seed=4)
        knobs = hard.Knobs(temperature=KNOBS["temperature"])
        _, traced = decode.trace(hard, plain["params"], request, knobs, n=STEPS, record=tokens_of)
        np.testing.assert_array_equal(hard_tokens, traced)
        cold = {**plain, "knobs": plain["knobs"] | {"token_temperature": jnp.float64(1e-3)}}
        soft_value, (cold_tokens,) = jax.jit(loss("soft"))(cold)
        np.testing.assert_array_equal(cold_tokens, hard_tokens)
        assert float(soft_value) == pytest.approx(float(hard_value), rel=1e-6)
    assert tokens.shape == soft_tokens.shape
    for name in ("embedding", "head"):
        assert np.abs(gradient["params"][name]).max() > 1e-3
    assert abs(float(gradient["knobs"]["temperature"])) > 1e-3


def tokens_of(state, info):
    return state.rows.tokens
