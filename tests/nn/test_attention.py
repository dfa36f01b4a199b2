"""Attention by every backend: values and gradients of the dense one, no scores of a long window,
cuDNN on CUDA.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from marks import over

from paradec_jax.nn import attention as module
from paradec_jax.nn import backend, masks
from paradec_jax.nn.attention import attend, attention, splash
from paradec_jax.nn.cache import KV
from paradec_jax.nn.visibility import CAUSAL, FULL, Rule, by_block, mask_of

QUERIES = 16  # of a block, in these tests
LONG = 3 * QUERIES - 5
SIZE = 24  # of a cache


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(module, "QUERIES", QUERIES)


def drawn(width: int, channels: int = 8, dtype=jnp.float32, size: int | None = None):
    """Queries of four heads, keys and values of two, of a window or of a cache of `size` positions."""
    rng = np.random.default_rng(0 if size is None else 2)
    size = width if size is None else size
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, *s, channels)), dtype)
        for s in ((4, width), (2, size), (2, size))
    )
    return q, KV(k.swapaxes(-1, -2), v)


def random_masks(width: int):
    seen = jnp.asarray(np.random.default_rng(1).random((2, width, width)) < 0.7) | jnp.eye(
        width, dtype=bool
    )
    return {"all": None, "one for all rows": seen[0], "one a row": seen}


def rules(width: int):
    positions = jnp.arange(width) + jnp.asarray([[0], [3]])
    sliding = Rule("sliding", positions, 6)
    return {"causal": CAUSAL, "full": FULL, "blocks": by_block(positions, 5), "sliding": sliding}


def prefixes(width: int):
    """None, what each row sees of a cache, and what each of its queries sees."""
    cache, lengths = drawn(width, size=SIZE)[1], jnp.asarray([SIZE, 7])
    each = jnp.asarray(np.random.default_rng(3).random((2, width, SIZE)) < 0.5)
    of_rows = masks.visible(lengths, SIZE)
    return {"no prefix": (None, None), "a length": (cache, of_rows), "a query": (cache, each)}


def gradients(attending, q, window, seen, cache, cached):
    """The attended heads, and gradients by queries, keys and values of window and cache."""

    @jax.jit
    def both(arrays, seen, cached):
        def value(arrays):
            q, window, cache = arrays
            out = attending(q, window, seen, cache, cached)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

        return jax.value_and_grad(value, has_aux=True)(arrays)

    (_, out), found = both((q, window, cache), seen, cached)
    return out, found


def dense(q, window, seen, cache, cached):
    return attend(q, window, mask_of(seen, q.shape[2]), cache, cached)


def test_prefix_mask_of_each_query():
    """A mask [B, W, S] is that of a row where its queries agree, and hides a key from one query
    alone.
    """
    q, window = drawn(3)
    cache, row = drawn(3, size=5)[1], masks.visible(jnp.array([2, 5]), 5)
    each = jnp.broadcast_to(row[:, None], (2, 3, 5))
    want = dense(q, window, CAUSAL, cache, row)
    np.testing.assert_array_equal(dense(q, window, CAUSAL, cache, each), want)
    got = dense(q, window, CAUSAL, cache, each.at[1, 2, 4].set(False))
    shorter = dense(q, window, CAUSAL, cache, masks.visible(jnp.array([2, 4]), 5))
    np.testing.assert_array_equal(got[:, :, :2], want[:, :, :2])
    np.testing.assert_allclose(got[1, :, 2], shorter[1, :, 2], atol=1e-6)
    np.testing.assert_array_equal(got[0], want[0])
    assert np.abs(got[1, :, 2] - want[1, :, 2]).max() > 1e-3


CASES = [
    *((kind, "no prefix") for kind in (*random_masks(2), *rules(2))),
    ("one a row", "a length"),
    ("causal", "a query"),
    ("blocks", "a length"),
    ("sliding", "a query"),
]


@over(CASES, argument="kind, prefix")
def test_values_and_gradients_of_the_dense_one(kind, prefix):
    """In blocks of queries, whose last is not whole, under masks and rules, with and without a
    cache.
    """
    q, window = drawn(LONG)
    seen = (random_masks(LONG) | rules(LONG))[kind]
    arguments = (q, window, seen, *prefixes(LONG)[prefix])
    got = gradients(functools.partial(attention, backend="blocked"), *arguments)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, gradients(dense, *arguments)
    )


def test_a_short_window_is_the_dense_one():
    q, window = drawn(QUERIES)
    got, want = (
        jax.jit(functools.partial(attention, backend=name)).lower(q, window, CAUSAL).as_text()
        for name in ("blocked", "dense")
    )
    assert got == want


@over(rules(2))
def test_rules_are_the_masks(name):
    rule, positions = rules(LONG)[name], jnp.arange(LONG) + jnp.asarray([[0], [3]])
    want = {
        "causal": masks.causal(LONG),
        "full": jnp.ones((LONG, LONG), bool),
        "blocks": masks.block_causal(positions, 5),
        "sliding": masks.causal(LONG) & ~np.tri(LONG, k=-6, dtype=bool) & jnp.ones((2, 1, 1), bool),
    }
    np.testing.assert_array_equal(rule.mask(LONG), want[name])
    np.testing.assert_array_equal(
        rule.rows(jnp.asarray([4, 20]), LONG), want[name][..., [4, 20], :]
    )


def whole_scores(text: str, width: int) -> bool:
    return f"x{width}x{width}xf32" in text


@over(prefixes(2), argument="prefix")
def test_a_long_window_never_has_all_its_scores(prefix):
    """Neither forward nor backward, and of a rule not even its mask."""
    q, window = drawn(LONG)
    cache, cached = prefixes(LONG)[prefix]

    def gradient(name):
        def value(q):
            return jnp.sum(attention(q, window, CAUSAL, cache, cached, backend=name) ** 2)

        return jax.jit(jax.grad(value)).lower(q).as_text()

    padded = QUERIES * -(-LONG // QUERIES)
    keys = (LONG, padded, LONG + SIZE)
    text = gradient("blocked")
    assert not any(f"{rows}x{k}x" in text for rows in (LONG, padded) for k in keys)
    assert whole_scores(gradient("dense"), LONG)


def test_many_rows_take_fewer_queries_at_a_time(monkeypatch):
    """Eight prompts of 4,000 under 55 heads, a row of 4,096 for each device, and what is never gone
    below.
    """
    monkeypatch.setattr(module, "QUERIES", 256)

    def count(rows, heads):
        return module._at_a_time((rows, heads, 4000, 96), 4000)

    assert [count(rows, 55) for rows in (1, 8, 1000)] == [256, 64, 32]
    mesh = jax.sharding.AbstractMesh(
        (8, 5), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    with jax.sharding.use_abstract_mesh(mesh):
        # 54 heads are never cut in 5
        assert [count(8, 55), count(80, 55), count(80, 54)] == [
            256,
            256,
            32,
        ]


@over(random_masks(2) | rules(2), argument="kind")
def test_what_cudnn_is_asked_for(kind, monkeypatch):
    """The same attention by jax.nn's definition, to which cuDNN's is an implementation."""
    monkeypatch.setenv(backend.ATTENTION, "cudnn")
    definition, asked = jax.nn.dot_product_attention, []

    def define(*arguments, implementation, **options):
        asked.append(implementation)
        return definition(*arguments, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", define)
    attending = functools.partial(attention, backend="cudnn")
    q, window = drawn(12, dtype=jnp.bfloat16)
    seen = (random_masks(12) | rules(12))[kind]
    got = attending(q, window, seen)
    want = attend(q, window, mask_of(seen, 12))
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=0.03)
    assert asked == ["cudnn"] and got.dtype == jnp.bfloat16
    for other in (drawn(12), drawn(12, 4, jnp.bfloat16), drawn(11, dtype=jnp.bfloat16)):
        attending(*other)  # float32, few channels, an odd number of positions
    attending(q, window, seen, *prefixes(12)["a length"])
    assert asked == ["cudnn"]


def test_the_switch(monkeypatch):
    assert not backend.cudnn_attention()  # tests run on the CPU
    monkeypatch.setenv(backend.ATTENTION, "plain")
    assert not backend.cudnn_attention()
    monkeypatch.setenv(backend.ATTENTION, "flash")
    with pytest.raises(
        ValueError, match="PARADEC_ATTENTION must be 'cudnn' or 'plain', not 'flash'"
    ):
        attention(*drawn(2), backend="cudnn")


def of_lanes(width: int):
    """Queries of two heads, keys and values of one, as long and wide as a TPU's kernel wants them."""
    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, width, 128)), jnp.float32) for n in (2, 1, 1))
    return q, KV(k.swapaxes(-1, -2), v)


@pytest.mark.parametrize(
    "seen", [CAUSAL, pytest.param(FULL, marks=pytest.mark.slow)], ids=lambda rule: rule.name
)
def test_splash_is_the_dense_one(seen):
    """Values and gradients of the TPU's kernel, run as plain JAX."""

    def kernel(q, window, seen, *_):
        return splash(q, window, seen, interpret=True)

    arguments = (*of_lanes(256), seen, None, None)
    got, want = gradients(kernel, *arguments), gradients(dense, *arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_splash_is_a_kernel_on_tpus_alone():
    """And only where it serves: a rule, whole lanes, no cache."""
    q, window = of_lanes(256)

    def kernels(platform, *arguments):
        def value(q):
            return jnp.sum(attention(q, *arguments, backend="splash") ** 2)

        exported = export.export(jax.jit(jax.grad(value)), platforms=(platform,))(q)
        return exported.mlir_module().count("tpu_custom_call")

    assert kernels("tpu", window, CAUSAL) == 2  # forward, and backward by queries
    assert kernels("cuda", window, CAUSAL) == kernels("tpu", window, masks.causal(256)) == 0
    assert kernels("tpu", window, CAUSAL, window, masks.visible(jnp.asarray([9]), 256)) == 0
