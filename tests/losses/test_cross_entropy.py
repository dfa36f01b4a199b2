"""Cross-entropies against their formulas in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_table import MASKED, OBJECTIVES, SPEC
from marks import over
from scipy.special import log_softmax

from paradec_jax.losses import ResidualRules, cllm_loss, residual_loss, self_distillation_loss
from paradec_jax.losses.cross_entropy import cross_entropy, soft_cross_entropy, token_losses
from paradec_jax.objective import weighted

RNG = np.random.default_rng(0)
LOGITS, TEACHER = RNG.normal(scale=4, size=(2, 3, 5, 11)).astype(np.float32)
TARGETS, WEIGHTS = RNG.integers(0, 11, (3, 5)), RNG.integers(0, 2, (3, 5)).astype(np.float32)
TARGETS[1] = LOGITS[1].argmax(-1)


def nll_of(logits):
    return -np.take_along_axis(log_softmax(logits.astype(np.float64), -1), TARGETS[..., None], -1)[
        ..., 0
    ]


@over(["float32", "bfloat16"], argument="dtype")
def test_cross_entropy(dtype):
    logits = jnp.asarray(LOGITS, dtype)
    found = cross_entropy(lambda x: x, logits, jnp.asarray(TARGETS))
    value, accuracy = (weighted(x, jnp.asarray(WEIGHTS)).mean for x in found)
    nll = nll_of(np.asarray(logits, np.float32))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, (WEIGHTS * nll).sum() / WEIGHTS.sum(), rtol=1e-6)
    hits = np.asarray(logits, np.float32).argmax(-1) == TARGETS
    assert 0 < accuracy == pytest.approx((WEIGHTS * hits).sum() / WEIGHTS.sum())


@over([0.0, 0.1], argument="smoothing")
def test_token_losses(smoothing):
    found, hits = token_losses(jnp.asarray(LOGITS), jnp.asarray(TARGETS), smoothing)
    wanted = (1 - smoothing) * nll_of(LOGITS) - smoothing * log_softmax(
        LOGITS.astype(np.float64), -1
    ).mean(-1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert np.array_equal(hits, LOGITS.argmax(-1) == TARGETS)


def test_soft_cross_entropy_and_its_gradient():
    temperature = 2.0
    log_p, log_q = (log_softmax(x.astype(np.float64) / temperature, -1) for x in (LOGITS, TEACHER))
    value, entropy = soft_cross_entropy(jnp.asarray(LOGITS), jnp.asarray(TEACHER), temperature)
    np.testing.assert_allclose(value, -(np.exp(log_q) * log_p).sum(-1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(entropy, -(np.exp(log_q) * log_q).sum(-1), rtol=1e-5, atol=1e-6)

    def total(student, teacher):
        return soft_cross_entropy(student, teacher, temperature)[0].sum()

    of_student, of_teacher = jax.grad(total, argnums=(0, 1))(
        jnp.asarray(LOGITS), jnp.asarray(TEACHER)
    )
    np.testing.assert_allclose(of_student, (np.exp(log_p) - np.exp(log_q)) / temperature, atol=1e-6)
    assert not np.any(of_teacher)


class Watched:
    """A network whose logits are made of what `output` gave alone."""

    def __init__(self, network):
        self._network, self.gathered = network, 0

    def __getattr__(self, name):
        return getattr(self._network, name)

    def output(self, params):
        self.gathered += 1
        return {"gathered": self._network.output(params)}

    def logits(self, params, hidden):
        return self._network.logits(params["gathered"], hidden)


@over(["cllm", "residual", "self-distillation"])
def test_losses_gather_an_output_matrix_outside_of_their_chunks(name):
    """Once a pass over the positions: of CLLM's student; of the head's own two steps and of what
    judges them; of the

    step that the teacher draws, of the student and of the teacher.
    """
    row = OBJECTIVES[name]
    frozen = {"teacher": row.teacher(), "round": jnp.int32(0)} if row.teacher() else row.frozen()
    network = Watched(
        OBJECTIVES["block diffusion"].network() if name == "residual" else row.network()
    )
    if name == "residual":
        loss = residual_loss(
            network, row.network(), MASKED, ResidualRules(2, tokens="own"), chunk=3
        )
    elif name == "cllm":
        loss = cllm_loss(network, SPEC, chunk=3)
    else:
        loss = self_distillation_loss(network, MASKED, chunk=3)
    jax.eval_shape(loss, row.params(), frozen, row.batch(1), jax.random.key(0))
    assert network.gathered == (1 if name == "cllm" else 3)
