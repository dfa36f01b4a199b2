"""The loss of a residual head: both alignments, reveals, objectives, what is kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over, slow
from stubs.tiny import drawn

from paradec_jax.config import ResidualHeadConfig, TokenSpec
from paradec_jax.families import PRESETS, init_params, network_of, parameter_shapes
from paradec_jax.losses import ResidualRules, residual_loss
from paradec_jax.losses.cross_entropy import token_losses
from paradec_jax.losses.residual import Unrolling, lengths_of, noised
from paradec_jax.models import ResidualHeadNetwork

MASK, BLOCK, K = 31, 4, 2
SPECS = {name: TokenSpec(mask=MASK, alignment=name) for name in ("own", "next")}
CONFIG = dataclasses.replace(PRESETS["test-sdar"], layers=1, block=BLOCK)
BACKBONE = network_of(CONFIG)
HEAD = network_of(ResidualHeadConfig.of(CONFIG, layers=1))
# Two samples in the first row, one and padding in the second.
POSITIONS = np.asarray([[*range(8), *range(8)], [*range(12), 0, 0, 0, 0]])
SAMPLES = np.asarray([[0] * 8 + [1] * 8, [0] * 12 + [1] * 4])
BATCH = {
    "tokens": np.random.default_rng(0).integers(0, 30, POSITIONS.shape),
    "labelled": (POSITIONS >= 2) & ((SAMPLES == 0) | (np.arange(2)[:, None] == 0)),
    "positions": POSITIONS,
}
RECORDED = BATCH | {
    "hidden": BATCH["labelled"] & (POSITIONS % BLOCK != 1),
    "probability": np.where(SAMPLES == 0, 0.5, 0.8).astype(np.float32),
}
GIVEN = jax.tree.map(jnp.asarray, RECORDED)


@functools.cache
def params_of(network, seed=0):
    rng = np.random.default_rng(seed)
    with jax.ensure_compile_time_eval():
        return jax.tree.map(
            lambda s: jnp.asarray(0.4 * rng.normal(size=s.shape), s.dtype),
            parameter_shapes(network.config),
        )


@functools.cache
def backbone_params():
    return drawn(init_params, CONFIG, 0, 2.0)


@functools.cache
def step_of(alignment, rules):
    objective = residual_loss(BACKBONE, HEAD, SPECS[alignment], rules)
    return jax.jit(jax.value_and_grad(objective, has_aux=True))


def graded(batch=RECORDED, alignment="own", rules=ResidualRules(K), params=None):  # noqa: B008
    params = params_of(HEAD) if params is None else params
    (loss, metrics), grads = step_of(alignment, rules)(
        params, backbone_params(), batch, jax.random.key(0)
    )
    return loss, metrics, grads


def unrolling_of(frozen, batch, key, alignment="own", rules=ResidualRules(K)):  # noqa: B008
    lengths = lengths_of(BACKBONE, rules.blocks)
    texts = noised(batch, key, lengths, rules.noise, alignment)
    return Unrolling(BACKBONE, HEAD, SPECS[alignment], rules, None, frozen, texts)


@functools.cache
def unrolled(*how):
    @jax.jit
    def run(params, frozen, batch, key):
        unrolling = unrolling_of(frozen, batch, key, *how)
        steps = unrolling.unroll(params, unrolling.reveals(key))
        return steps, unrolling.judge(steps)

    return run(params_of(HEAD), backbone_params(), RECORDED, jax.random.key(3))


def samples():
    """Row, first place, number of positions of each sample that has labelled tokens."""
    return [(0, 0, 8), (0, 8, 8), (1, 0, 12)]


def kl(teacher, student):
    p, q = (np.asarray(x, np.float64) for x in (teacher, student))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(-1)


@over(SPECS, argument="alignment")
def test_divergences_and_normalisers(alignment):
    steps, (values, found) = unrolled(alignment)

    def logits(vectors):
        return BACKBONE.logits(backbone_params(), jnp.asarray(vectors))

    def predicting(noisy):
        noisy, clean = np.asarray(noisy), np.asarray(steps.start.clean)
        if alignment == "own":
            return noisy
        before = np.where(
            (POSITIONS % BLOCK == 0)[..., None], np.roll(clean, 1, 1), np.roll(noisy, 1, 1)
        )
        return np.where((POSITIONS == 0)[..., None], 0, before)

    for k in range(K):
        still = np.asarray(steps.still[k])
        teacher = logits(predicting(steps.taught[k]))
        mine = logits(predicting(steps.base.noisy[k] + steps.residual.noisy[k]))
        plain = logits(predicting(steps.start.noisy))
        np.testing.assert_allclose(values[k][still], kl(teacher, mine)[still], atol=1e-4)
        np.testing.assert_allclose(found["kl"][k][still], kl(teacher, mine)[still], atol=1e-4)
        np.testing.assert_allclose(
            found["uncorrected_kl"][k][still], kl(teacher, plain)[still], atol=1e-4
        )
        same = np.argmax(teacher, -1) == np.argmax(mine, -1)
        np.testing.assert_array_equal(found["agreement"][k][still], same[still])
        first = still & (POSITIONS % BLOCK == 0)
        assert first.any()
        if alignment == "next":  # the head says nothing of a block's first position
            np.testing.assert_allclose(values[k][first], 0, atol=1e-5)
        assert (values[k][still & ~first] > 1e-3).mean() > 0.9


# What the head begins with, what is trained


def test_a_head_that_adds_nothing_is_the_uncorrected_backbone():
    params = ResidualHeadNetwork.init_params(HEAD.config, jax.random.key(0), "zero_gain")
    _, metrics, grads = graded(params=params)
    assert metrics["kl_ratio"] == pytest.approx(1, abs=1e-5) and metrics["kl"] > 1e-3
    assert metrics["agreement"] == metrics["uncorrected_agreement"]
    moved = {path for path, leaf in grads.items() if any(np.any(x) for x in jax.tree.leaves(leaf))}
    assert moved == {"final_norm"}  # the first update moves it, and the next ones the rest


@pytest.mark.slow
def test_a_step_carries_no_gradient_to_its_base_but_to_its_input():
    """With two steps, the gradient of the second reaches the first residual through the head's
    input alone.
    """
    key = jax.random.key(3)
    unrolling = unrolling_of(backbone_params(), GIVEN, key)

    def second(params, stopped):
        steps = unrolling.unroll(params, unrolling.reveals(key))
        last = jax.tree.map(lambda x: x[-1:], steps)._replace(start=steps.start)
        if stopped:
            base = jax.tree.map(lambda x: jax.lax.stop_gradient(x[0]), last.base)
            residual = unrolling.residual(params, last.tokens[0], base)
            last = last._replace(residual=jax.tree.map(lambda x: x[None], residual))
        return jnp.sum(unrolling.judge(last)[0])

    gradient = jax.jit(jax.grad(second), static_argnums=1)
    whole, cut = (gradient(params_of(HEAD), stopped) for stopped in (False, True))
    apart = [
        float(jnp.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (whole, cut)), strict=True)
    ]
    assert min(apart) > 1e-5

    def of_base(base):
        steps = unrolling.unroll(params_of(HEAD), unrolling.reveals(key))
        shifted = steps._replace(base=steps.base._replace(noisy=steps.base.noisy + base))
        return jnp.sum(unrolling.judge(shifted)[0])

    assert not jnp.any(jax.jit(jax.grad(of_base))(jnp.zeros(())))


def test_nothing_flows_into_the_backbone():
    objective = residual_loss(BACKBONE, HEAD, SPECS["own"], ResidualRules(K), chunk=None)
    gradient = jax.jit(
        jax.grad(lambda frozen: objective(params_of(HEAD), frozen, GIVEN, jax.random.key(0))[0])
    )
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(gradient(backbone_params())))


def test_reveals_of_rows_and_steps_differ():
    steps, _ = unrolled()
    hidden = RECORDED["hidden"]
    before = hidden
    for k in range(K):
        still = np.asarray(steps.still[k])
        revealed = before & ~still
        for row, first, size in samples():
            for start in range(first, first + size, BLOCK):
                place = slice(start, start + BLOCK)
                assert revealed[row, place].sum() == min(1, before[row, place].sum())
        np.testing.assert_array_equal(
            steps.tokens[k], np.where(hidden & still, MASK, BATCH["tokens"])
        )
        before = still


@over(SPECS, ["next"], argument="alignment")
def test_tokens_of_its_own(alignment):
    """The best of the running sum, never the mask, where the truth would be revealed."""
    steps, _ = unrolled(alignment, ResidualRules(K, tokens="own"))
    truth, _ = unrolled(alignment)
    base = steps.start.noisy
    np.testing.assert_array_equal(steps.still, truth.still)
    for k in range(K):
        before = np.roll(np.asarray(base), 1, axis=1)
        if alignment == "next":
            clean = np.roll(np.asarray(steps.start.clean), 1, axis=1)
            base = np.where((POSITIONS % BLOCK == 0)[..., None], clean, before)
        logits = np.array(BACKBONE.logits(backbone_params(), jnp.asarray(base)))
        logits[..., MASK] = -np.inf
        known = steps.still[k - 1] if k else RECORDED["hidden"]
        shown = np.asarray(known) & ~np.asarray(steps.still[k])
        assert shown.any()
        np.testing.assert_array_equal(np.asarray(steps.tokens[k])[shown], logits.argmax(-1)[shown])
        base = steps.base.noisy[k] + steps.residual.noisy[k]
    assert np.any(steps.tokens != truth.tokens)


def test_a_step_without_masked_positions_is_none():
    hidden = np.zeros_like(RECORDED["hidden"])
    hidden[0, [2, 3]] = True  # of one block: nothing is left after two steps
    one = RECORDED | {"hidden": hidden}
    loss, metrics, _ = graded(one, rules=ResidualRules(3))
    same = graded(one, rules=ResidualRules(1))[0]
    assert metrics["judged"] == pytest.approx(1 / BATCH["labelled"].sum())
    assert np.isfinite(loss) and loss > 0 and same > 0


@over(
    [slow("cross_entropy", False), ("mse", True), slow("cross_entropy", True), slow("mse", False)],
    argument="objective, direct",
)
def test_objectives(objective, direct):
    rules = ResidualRules(K, objective=objective, direct=direct)
    steps, (values, found) = unrolled("own", rules)
    logits = functools.partial(BACKBONE.logits, backbone_params())
    for k in range(K):
        said = steps.residual.noisy[k] + (0 if direct else steps.base.noisy[k])
        teacher, mine = logits(steps.taught[k]), logits(said)
        want = np.mean(np.square(np.asarray(mine - teacher)), axis=-1)
        if objective == "cross_entropy":
            want = token_losses(mine, jnp.asarray(BATCH["tokens"]))[0]
        np.testing.assert_allclose(values[k], want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found["kl"][k], kl(teacher, mine), atol=1e-4)
    if direct:
        np.testing.assert_array_equal(steps.base.noisy[1], steps.residual.noisy[0])
        np.testing.assert_array_equal(steps.base.clean[1], steps.residual.clean[0])


@pytest.mark.slow
def test_lengths_of_blocks():
    """One drawn for each row; a length that is not the backbone's reads other blocks."""
    own, wide, mixed = (
        graded(BATCH, rules=ResidualRules(blocks=blocks))[0] for blocks in (None, (8,), (4, 8))
    )
    same = graded(BATCH, rules=ResidualRules(blocks=(BLOCK,)))[0]
    assert own == same and own != wide and np.isfinite(mixed)
