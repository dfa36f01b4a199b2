"""How rows meet a matrix in bfloat16: sums in float32, one row as several, gradients, and what a
CPU alone gets.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from marks import over

from paradec_jax.nn import backend
from paradec_jax.nn.products import dense

RNG = np.random.default_rng(0)
WEIGHT = jnp.asarray(RNG.normal(size=(96, 40)), jnp.bfloat16)


def rows(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=(*shape, 96)), jnp.bfloat16)


def exact(x, weight=WEIGHT) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64)


@over(["cpu", "plain"], argument="layouts")
@over([(), (1,), (1, 1), (2, 3), (33,)], argument="shape")
def test_sums_are_float32_and_rounded_once(shape, layouts, monkeypatch):
    monkeypatch.setenv(backend.SWITCH, layouts)
    x = rows(*shape)
    # Terms of size 1 (96 of them): a sum in float32 is within 1e-5, one in bfloat16 is not.
    wide = jax.jit(functools.partial(dense, wide=True))(x, WEIGHT)
    assert wide.dtype == jnp.float32 and wide.shape == (*shape, 40)
    np.testing.assert_allclose(wide, exact(x), atol=2e-5)
    narrow = jax.jit(lambda x: dense(x, WEIGHT))(x)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(narrow, np.float64), exact(x), rtol=2**-8, atol=2e-5)


@over(["cpu", "plain"], argument="layouts")
@over([True, False], argument="wide")
def test_gradients_are_those_of_rounded_products(wide, layouts, monkeypatch):
    monkeypatch.setenv(backend.SWITCH, layouts)
    x = rows(2, 3)
    out, pull = jax.vjp(lambda x, weight: dense(x, weight, wide), x, WEIGHT)
    gradient = jnp.asarray(RNG.normal(size=out.shape), out.dtype)
    of_x, of_weight = pull(gradient)
    assert of_x.dtype == of_weight.dtype == jnp.bfloat16
    rounded = np.asarray(gradient.astype(jnp.bfloat16), np.float64)
    close = functools.partial(np.testing.assert_allclose, rtol=2**-7, atol=1e-2)
    close(np.asarray(of_x, np.float64), rounded @ np.asarray(WEIGHT, np.float64).T)
    want = np.asarray(x, np.float64).reshape(-1, 96).T @ rounded.reshape(-1, 40)
    close(np.asarray(of_weight, np.float64), want)


def test_operands_are_rounded_where_the_precision_says_so():
    """Forward and backward; sums stay float32, and without the setting nothing is rounded."""
    x, weight, gradient = (
        jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((6, 8), (8, 5), (6, 5))
    )

    def rounded(array):
        return np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64)

    with jax.default_matmul_precision("BF16_BF16_F32"):
        value, pull = jax.vjp(dense, x, weight)
        of_x, of_weight = pull(gradient)
    assert value.dtype == of_x.dtype == of_weight.dtype == jnp.float32
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(value, rounded(x) @ rounded(weight))
    close(of_x, rounded(gradient) @ rounded(weight).T)
    close(of_weight, rounded(x).T @ rounded(gradient))
    assert np.abs(dense(x, weight) - value).max() > 1e-4


def test_a_float32_product_is_one_product():
    """Nothing of the narrow path, whose sums may be in another order, is in a float32 program."""
    x, weight = jnp.ones((1, 1, 8)), jnp.ones((8, 4))
    primitives = [equation.primitive.name for equation in jax.make_jaxpr(dense)(x, weight).eqns]
    assert primitives == ["reshape", "dot_general", "reshape"]


@over(["cpu", "cuda", "tpu"], argument="platform")
@over([("cpu", "cpu", "2x96"), ("plain", "cuda", "2x1x96")], argument="layouts, twice, shape")
def test_one_row_is_fed_twice_where_that_is_faster(platform, layouts, twice, shape, monkeypatch):
    monkeypatch.setenv("PARADEC_LAYOUTS", layouts)
    lowered = export.export(jax.jit(lambda x: dense(x, WEIGHT)), platforms=(platform,))(rows(1, 1))
    text = lowered.mlir_module()
    assert (f"tensor<{shape}xbf16>" in text) == (platform == twice)
    assert ("xf32>" in text) == (platform == twice == "cpu")
