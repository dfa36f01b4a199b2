"""Self-distillation through time: targets by their definition, the reveals' law, divergences, and
what is traced.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from marks import over
from scipy.special import log_softmax
from stubs import JointDenoiser, tiny_denoiser, tiny_denoiser_params

from paradec_jax.config import TokenSpec
from paradec_jax.losses import DistillationRules, self_distillation_loss
from paradec_jax.losses.self_distillation import Teacher, divergence

EXACT = JointDenoiser(
    3, 5, tuple(np.exp(np.random.default_rng(0).normal(scale=1.5, size=243)).tolist())
)
SPEC = TokenSpec(mask=31, alignment="own")
SMALL = {"vocab_size": 32, "layers": 1}
NETWORK = tiny_denoiser(**SMALL)
BATCH = {
    "tokens": jax.random.randint(jax.random.key(1), (3, 7), 0, 31),
    "weights": jnp.ones((3, 7)),
    "times": jnp.array([0.3, 0.6, 0.9]),
    "mask_uniforms": jax.random.uniform(jax.random.key(2), (3, 7)),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def taught(rules, chunk, noised, t, step, key):
    return Teacher(EXACT, None, rules, EXACT.mask, chunk).targets(noised, t, step, key)


def hidden_of(tokens):
    return EXACT.forward(
        None, tokens, jnp.broadcast_to(jnp.arange(EXACT.length), tokens.shape)
    ).hidden


@over([2, 4, 8], [4], argument="jump")
def test_a_target_is_what_the_teacher_says_when_it_reveals_the_position(jump):
    rows = 64
    noised = jnp.full((rows, EXACT.length), EXACT.mask).at[:, 3].set(1)
    t, step = jnp.linspace(0.3, 1.0, rows), jnp.float32(0.11)
    kept, before = taught(DistillationRules(jump=jump), None, noised, t, step, jax.random.key(0))
    hidden = np.asarray(before == EXACT.mask)
    assert before.shape == (jump, rows, EXACT.length) and np.array_equal(before[0], noised)
    assert (hidden[1:] <= hidden[:-1]).all()  # what is revealed stays
    np.testing.assert_array_equal(
        np.where(hidden[:-1], -1, before[1:])[~hidden[:-1]], before[:-1][~hidden[:-1]]
    )
    # the step that reveals a position, or the last one
    last = hidden.cumprod(axis=0).sum(axis=0) - 1
    assert len(np.unique(last[:, :3])) > 1 and (last[:, 3] == -1).all()
    said = np.stack([hidden_of(z) for z in before])
    want = np.take_along_axis(said, np.maximum(last, 0)[None, ..., None], axis=0)[0]
    chex.assert_trees_all_close(
        np.asarray(kept)[noised == EXACT.mask], want[noised == EXACT.mask], atol=1e-6
    )


@over([(0.8, 0.2, 0.25), (0.05, 0.2, 1.0), (1.0, 0.9, 0.9)], argument="time, step, share")
def test_a_step_reveals_its_share(time, step, share):
    """(t - s) / t, not t - s: that would be 0.2 in the first case."""
    rows = 4000
    noised = jnp.full((rows, EXACT.length), EXACT.mask)
    _, before = taught(
        DistillationRules(),
        None,
        noised,
        jnp.full(rows, time),
        jnp.float32(step),
        jax.random.key(1),
    )
    found, count = np.mean(before[1] != EXACT.mask), noised.size
    assert abs(found - share) < 4 * np.sqrt(share * (1 - share) / count) + 1e-9


def test_what_is_revealed_has_the_teachers_law():
    rows = 20_000
    noised = jnp.full((rows, EXACT.length), EXACT.mask)
    _, before = taught(
        DistillationRules(), 2, noised, jnp.full(rows, 0.5), jnp.float32(0.5), jax.random.key(2)
    )
    want = np.exp(np.asarray(hidden_of(noised[:1]))[0])
    for place in range(EXACT.length):
        found = np.bincount(np.asarray(before[1, :, place]), minlength=EXACT.symbols) / rows
        assert np.abs(found - want[place]).max() < 0.02


RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.normal(scale=2, size=(2, 4, 3, 9)).astype(np.float32)
MASK = 5


def defined(kind):
    """Each divergence in float64 NumPy, over the tokens alone."""
    low = np.zeros(9)
    low[MASK] = -1e6
    p, q = (log_softmax(x.astype(np.float64) + low, -1) for x in (STUDENT, TEACHER))
    p, q = (np.delete(x, MASK, axis=-1) for x in (p, q))
    return {
        "kld": (np.exp(p) * (p - q)).sum(-1),
        "forward_kl": (np.exp(q) * (q - p)).sum(-1),
        "tvd": np.abs(np.exp(p) - np.exp(q)).sum(-1) / 2,
        "mse": ((p - q) ** 2).mean(-1),
        "chi_square": ((np.exp(p) - np.exp(q)) ** 2 / np.exp(q)).sum(-1),
    }[kind]


KINDS = ("kld", "forward_kl", "tvd", "mse", "chi_square")


@over(KINDS, argument="kind")
def test_divergence(kind):
    rules = DistillationRules(divergence=kind)
    got = divergence(jnp.asarray(STUDENT), jnp.asarray(TEACHER), MASK, rules)
    np.testing.assert_allclose(got, defined(kind), rtol=1e-4, atol=1e-5)
    same = divergence(jnp.asarray(TEACHER), jnp.asarray(TEACHER), MASK, rules)
    np.testing.assert_allclose(same, 0, atol=1e-5)

    def total(student, teacher):
        return divergence(student, teacher, MASK, rules).sum()

    of_student, of_teacher = jax.grad(total, (0, 1))(jnp.asarray(STUDENT), jnp.asarray(TEACHER))
    assert np.isfinite(of_student).all() and np.abs(of_student).max() > 1e-3
    assert not np.any(of_teacher) and not np.any(of_student[..., MASK])


def test_a_token_that_the_teacher_rules_out_costs_much_and_not_infinitely_much():
    """exp(60), whose square is beyond float32."""
    apart = jnp.zeros((2, 9)).at[0, 1].set(60).at[1, 2].set(60)
    value, slope = jax.value_and_grad(divergence)(
        *apart, MASK, DistillationRules(divergence="chi_square")
    )
    np.testing.assert_allclose(value, np.exp(60), rtol=1e-3)
    assert np.isfinite(slope).all()


@functools.cache
def step_of():
    loss = self_distillation_loss(NETWORK, SPEC, DistillationRules(first_steps=8), dropout=False)
    return jax.jit(loss)


def graded(which=0, teacher=3, batch=BATCH):
    frozen = {"teacher": tiny_denoiser_params(teacher, **SMALL), "round": jnp.int32(which)}
    return step_of()(tiny_denoiser_params(2, **SMALL), frozen, batch, jax.random.key(0))


def test_a_new_round_and_a_new_teacher_compile_nothing():
    first, metrics = graded()
    programs = step_of()._cache_size()
    second, later = graded(which=2)
    third, _ = graded(teacher=4)
    assert (
        step_of()._cache_size() == programs
        and len({float(first), float(second), float(third)}) == 3
    )
    assert metrics["round"] == 0 and later["round"] == 2
    np.testing.assert_allclose(
        [metrics["teacher_steps"], later["teacher_steps"]], [8, 2], rtol=1e-5
    )


def test_padding_is_never_hidden():
    weights = jnp.ones((3, 7)).at[:, 4:].set(0)
    batch = BATCH | {"mask_uniforms": jnp.zeros((3, 7))}
    shares = [graded(batch=batch | more)[1]["hidden"] for more in ({}, {"weights": weights})]
    np.testing.assert_allclose(shares, [1, 4 / 7], rtol=1e-6)


def test_the_mean_is_over_hidden_positions_without_a_weight():
    """A fully hidden row counts seven times as much as one with a single hidden position, whatever
    their times.

    Times below the teacher's step: its first step reveals all, so that nothing depends on a draw.
    """
    whole, one = jnp.ones((3, 7)).at[0].set(0), jnp.ones((3, 7)).at[1, 3].set(0)
    times = {"times": jnp.array([0.06, 0.12, 0.5])}
    batches = (
        BATCH | times | {"mask_uniforms": uniforms} for uniforms in (whole, one, whole * one)
    )
    first, second, both = (float(graded(batch=batch)[0]) for batch in batches)
    assert abs(first - second) > 1e-3
    np.testing.assert_allclose(both, (7 * first + second) / 8, rtol=1e-5)
