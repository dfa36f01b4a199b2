"""Attention of whole canvases: some queries at a time, and cuDNN's on CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paradec_jax.nn import attention, backend, masks
from paradec_jax.nn.attention import QUERIES, attend, attend_all
from paradec_jax.nn.cache import KV

LONG = QUERIES + 44


def drawn(width: int, channels: int = 8, dtype=jnp.float32):
    """Queries of four heads, keys and values of two."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, width, channels)), dtype) for n in (4, 2, 2))
    return q, KV(k.swapaxes(-1, -2), v)


def random_masks(width: int):
    seen = jnp.asarray(np.random.default_rng(1).random((2, width, width)) < 0.7) | jnp.eye(width, dtype=bool)
    return {"all": None, "one for all rows": seen[0], "one a row": seen}


@pytest.mark.parametrize("kind", random_masks(2))
@pytest.mark.parametrize("width", [QUERIES - 3, LONG])
def test_some_queries_at_a_time(width, kind):
    q, window = drawn(width)
    mask = random_masks(width)[kind]
    got = jax.jit(attend_all)(q, window, mask)
    want = attend(q, window, masks.full(width) if mask is None else mask)
    np.testing.assert_allclose(got, want, atol=1e-6)


def whole_scores(text: str, width: int) -> bool:
    return f"x{width}x{width}xf32" in text


def test_a_long_canvas_never_has_all_its_scores():
    """Neither forward nor backward."""
    q, window = drawn(LONG)

    def gradient(attending):
        return jax.jit(jax.grad(lambda q: jnp.sum(attending(q, window) ** 2))).lower(q).as_text()

    padded = QUERIES * -(-LONG // QUERIES)
    assert not any(whole_scores(gradient(attend_all), width) for width in (LONG, padded))
    assert whole_scores(gradient(lambda q, window: attend(q, window, masks.full(LONG))), LONG)


@pytest.mark.parametrize("kind", random_masks(2))
def test_what_cudnn_is_asked_for(kind, monkeypatch):
    """The same attention by jax.nn's definition, to which cuDNN's is an implementation."""
    monkeypatch.setenv(backend.ATTENTION, "cudnn")
    definition, asked = jax.nn.dot_product_attention, []

    def define(*arguments, implementation, **options):
        asked.append(implementation)
        return definition(*arguments, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", define)
    q, window = drawn(12, dtype=jnp.bfloat16)
    mask = random_masks(12)[kind]
    got = attend_all(q, window, mask)
    want = attend(q, window, masks.full(12) if mask is None else mask)
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=0.03)
    assert asked == ["cudnn"] and got.dtype == jnp.bfloat16
    for other in (drawn(12), drawn(12, 4, jnp.bfloat16), drawn(11, dtype=jnp.bfloat16)):
        attend_all(*other)  # float32, few channels, an odd number of positions
    assert asked == ["cudnn"]


def test_cudnn_program_of_a_gradient(monkeypatch):
    """On CUDA neither forward nor backward pass holds scores; lowered here as if a device were there."""
    checks = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(checks, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(checks, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(checks, "is_cuda_compute_capability_equal", lambda capability: False)
    monkeypatch.setenv(backend.ATTENTION, "cudnn")
    q, window = drawn(LONG, dtype=jnp.bfloat16)
    mask = jnp.ones((2, LONG, LONG), bool)

    def loss(q, window, mask):
        return jnp.sum(attend_all(q, window, mask).astype(jnp.float32) ** 2)

    for seen in (None, mask):
        lowered = jax.jit(jax.grad(loss)).trace(q, window, seen).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        assert "fmhaScaleBias" in text or "fmhaSoftmax" in text
        assert not whole_scores(text, LONG)


def test_the_switch(monkeypatch):
    assert not backend.cudnn_attention()  # tests run on the CPU
    monkeypatch.setenv(backend.ATTENTION, "plain")
    assert not backend.cudnn_attention()
    monkeypatch.setenv(backend.ATTENTION, "flash")
    with pytest.raises(ValueError, match="PARADEC_ATTENTION must be 'cudnn' or 'plain', not 'flash'"):
        attention.attend_all(*drawn(2))
