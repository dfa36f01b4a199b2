"""SUBS: the mask is no token, known tokens stay, everything is finite, and what has a gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.decode.rules.subs import RULED_OUT, subs, without_mask

MASK = 3
TOKENS = jnp.array([[0, MASK, 4], [2, 1, 0]])  # of the second row, nothing is masked
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)) * 3, jnp.float32)


def test_of_a_masked_position():
    row = np.asarray(LOGITS[0, 1], np.float64)
    kept = np.delete(row, MASK)
    want = kept - np.log(np.exp(kept).sum())
    got = np.asarray(subs(LOGITS, TOKENS, MASK)[0, 1])
    np.testing.assert_allclose(np.delete(got, MASK), want, atol=1e-5)
    assert got[MASK] < -999_900 and np.exp(got[MASK]) == 0


def test_of_known_positions():
    got = np.asarray(subs(LOGITS, TOKENS, MASK))
    known = np.asarray(TOKENS != MASK)
    np.testing.assert_array_equal(np.exp(got[known]), np.eye(5)[np.asarray(TOKENS)[known]])
    assert set(np.unique(got[1]).tolist()) == {0.0, RULED_OUT} and np.isfinite(got).all()


def test_the_mask_alone_is_lowered():
    lowered = without_mask(LOGITS.astype(jnp.bfloat16), MASK)
    assert lowered.dtype == jnp.float32
    others = jnp.arange(5) != MASK
    np.testing.assert_array_equal(
        lowered[..., others], LOGITS.astype(jnp.bfloat16).astype(jnp.float32)[..., others]
    )
    assert (lowered[..., MASK] < RULED_OUT / 2).all()


def test_gradients():
    """None at known positions; the mask's own logit moves no other column, and a divergence stays finite."""
    weights = jnp.where(jnp.arange(5) == MASK, 0.0, 1.0) * jnp.arange(1.0, 6.0)
    gradient = jax.grad(lambda x: jnp.sum(subs(x, TOKENS, MASK) * weights))(LOGITS)
    assert not gradient[1].any() and not gradient[0, 0].any() and not gradient[0, 2].any()
    assert gradient[0, 1].any() and gradient[0, 1, MASK] == 0

    def divergence(x):
        p, q = subs(x, TOKENS, MASK), subs(LOGITS + 1, TOKENS, MASK)
        return jnp.sum(jnp.exp(p) * (p - q))

    value, gradient = jax.value_and_grad(divergence)(2 * LOGITS)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all() and gradient[0, 1].any()
