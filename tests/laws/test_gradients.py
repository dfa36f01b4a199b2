"""Law 6: gradients through the sampler, in float64, and what the soft wavefront shares with the
discrete one.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stubs import StubNetwork, tiny_network, tiny_params, tiny_request
from tracing import nothing_is_traced

from paradec_jax import decode
from paradec_jax.decode.machine.knobs import at_age
from paradec_jax.decode.recurrent.soft_wavefront import SoftWavefrontState, SoftWaveInfo
from paradec_jax.decode.rules import score
from paradec_jax.decode.rules.relaxation import relaxed

SIZE, BUDGET, STEPS = 16, 9, 6
WIDE = {"core_layers": 1, "dtype": "float64", "param_dtype": "float64"}
WAVE = {"window": 3, "inner_recurrence": 1, "prefill_recurrence": 2}
# Every knob of the soft path, as a schedule where it may be one.
KNOBS: dict[str, tuple[float, ...] | float] = {
    "momentum": (0.1, 0.2, 0.3),
    "noise": (0.3, 0.2, 0.0),
    "exit_threshold": (0.9, 0.5, 0.4),
    "init_scale": 0.8,
    "candidate_temperature": 0.7,
    "gate_temperature": 0.5,
}


@dataclasses.dataclass(frozen=True)
class Constant(decode.SoftWavefront):
    """Adds `params["constants"]`, [steps, B, W, D], to the vectors p E of each step's candidates."""

    def _predict(self, params, state, knobs):
        *others, offsets = super()._predict(params, state, knobs)
        return *others, offsets + params["constants"][state.steps[0]]


def wide_params() -> dict[str, Any]:
    network = tiny_network(**WIDE)
    zeros = jnp.zeros((STEPS, 2, WAVE["window"], network.config.width), jnp.float64)
    return {**tiny_params(11, gain=2.0, **WIDE), "constants": zeros}


def at_knobs() -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.float64) for name, value in KNOBS.items()}


def seen(state: SoftWavefrontState, info: SoftWaveInfo):
    """A scalar of all that is soft in a step, and the discrete events beside it."""
    weights = jnp.sin(jnp.arange(info.refined.size)).reshape(info.refined.shape)
    loss = jnp.sum(info.refined**2, axis=-1)
    value = jnp.sum(weights * info.refined) + jnp.sum(info.staying + info.leaving * loss)
    return value * (1 + 0.1 * state.steps[0]), (state.wave.tokens, info.committed, info.hidden)


def soft_loss(kind: type, relaxation: str, remat: bool = True):
    """(knobs, params) -> a scalar of all steps, and what happened in them."""
    decoder = kind(tiny_network(**WIDE), SIZE, **WAVE, relaxation=relaxation, greedy=True)
    request = tiny_request(BUDGET, prompts=((3, 1, 4), (2, 7)))

    def loss(knobs: dict[str, jax.Array], params):
        arguments = (params, request, decoder.Knobs(**knobs))
        if remat:
            _, (values, events) = decode.rollout(
                decoder, *arguments, n=STEPS, segment=2, record=seen
            )
        else:
            _, (values, events) = decode.trace(
                decoder.differentiable(), *arguments, n=STEPS, record=seen
            )
        return jnp.sum(values), events

    return loss


@functools.cache
def graded(relaxation: str):
    """Value, events and gradient of the loss at `KNOBS`."""
    with jax.enable_x64(True):
        loss = soft_loss(decode.SoftWavefront, relaxation)
        (value, events), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
            at_knobs(), wide_params()
        )
        return float(value), jax.tree.map(np.asarray, events), jax.tree.map(np.asarray, gradient)


@functools.cache
def plain():
    """The loss of soft candidates with constants, compiled without its gradient."""
    return jax.jit(soft_loss(Constant, "soft"))


def check_differences(params, gradient: dict[str, np.ndarray], events, h: float = 1e-5):
    """Compares a gradient at `KNOBS` with central differences of `plain()`, at which no token may
    change.
    """
    committed = np.asarray(events[1])
    assert committed.sum() > 2 and (committed == 0).any(), "the wave never waits or never moves"
    for name, value in KNOBS.items():
        for i in range(np.size(value)):
            step = np.zeros(np.size(value))
            step[i] = h
            high, low = (
                plain()(
                    {**at_knobs(), name: at_knobs()[name] + sign * step.reshape(np.shape(value))},
                    params,
                )
                for sign in (1, -1)
            )
            for side in (high, low):
                jax.tree.map(np.testing.assert_array_equal, side[1][:2], events[:2])
            difference = (float(high[0]) - float(low[0])) / (2 * h)
            found = gradient[name].reshape(-1)[i]
            if (name, i) == ("momentum", 0):  # a fresh slot has nothing to average with
                assert found == difference == 0
                continue
            assert abs(found) > 1e-2, f"{name}[{i}] does nothing"
            assert found == pytest.approx(difference, rel=1e-3), f"{name}[{i}]"


@pytest.mark.slow
def test_soft_gradients_are_finite_differences():
    value, events, gradient = graded("soft")
    with jax.enable_x64(True):
        assert float(plain()(at_knobs(), wide_params())[0]) == pytest.approx(value, rel=1e-12)
        check_differences(wide_params(), gradient, events)


@pytest.mark.slow
def test_straight_through_gradients_are_those_of_the_surrogate():
    """Of the sampler that reads `p E + c`, with the constants c = E[y] - p E of this very run."""
    value, events, gradient = graded("straight_through")
    with jax.enable_x64(True):
        params, network = wide_params(), tiny_network(**WIDE)
        logits = network.logits(params, jnp.asarray(events[2]))
        mixed = jax.nn.softmax(logits / KNOBS["candidate_temperature"]) @ params["embedding"]
        params["constants"] = params["embedding"][jnp.argmax(logits, axis=-1)] - mixed
        assert float(jnp.max(jnp.abs(params["constants"]))) > 0.1, "candidates are as good as hard"
        assert float(plain()(at_knobs(), params)[0]) == pytest.approx(value, rel=1e-9)
        check_differences(params, gradient, events)


@pytest.mark.slow
def test_segments_and_checkpoints_do_not_change_gradients():
    """`rollout` in segments against a plain scan that keeps every residual."""
    _, events, gradient = graded("soft")
    with jax.enable_x64(True):
        loss = soft_loss(decode.SoftWavefront, "soft", remat=False)
        kept, same = jax.jit(jax.grad(loss, has_aux=True))(at_knobs(), wide_params())
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), kept, gradient
        )
        jax.tree.map(np.testing.assert_array_equal, same[:2], events[:2])


@pytest.mark.parametrize("relaxation", ["straight_through", "soft"])
def test_relaxed_vectors(relaxation):
    key = jax.random.key(0)
    table, logits = jax.random.normal(key, (7, 5)), 3 * jax.random.normal(key, (2, 3, 7))
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def vectors(logits, tau, table):
        return table[tokens] + relaxed(table, logits, tokens, tau, relaxation)

    def mixture(logits, tau, table):
        return jax.nn.softmax(logits / tau) @ table

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, *at):
        out, back = jax.vjp(function, *at)
        return out, back(jnp.sin(jnp.arange(out.size)).reshape(out.shape))

    out, gradient = both(vectors, logits, 0.5, table)
    soft, soft_gradient = both(mixture, logits, 0.5, table)
    want = table[tokens] if relaxation == "straight_through" else soft
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, gradient, soft_gradient)
    np.testing.assert_allclose(vectors(logits, 1e-3, table), table[tokens], atol=1e-5)


def test_a_state_that_stands_still_has_a_gradient():
    still = jnp.ones((2, 3))
    assert score.latent_change(still, still).tolist() == [0.0, 0.0]
    gradient = jax.grad(lambda x: jnp.sum(score.latent_change(x, still)))(still)
    assert np.isfinite(gradient).all()


# The soft wavefront beside the discrete one


LIVELY = {"exit_threshold": 0.7, "momentum": 0.2, "noise": 0.1}
TRACED = 14
# The soft wavefront computes every slot of the window, in use or not.
WHOLE = (("buckets", (WAVE["window"],)),)


def whole(state, info):
    """Records wave, rows and info, but no keys, which NumPy cannot hold."""
    return state.wave, dataclasses.replace(state.rows, keys=None), info


@functools.cache
def traced(kind: type, options: tuple = (), knobs: tuple = ()):
    """Wave, rows and info of every step of a small random model."""
    network = tiny_network(core_layers=1)
    decoder = kind(network, SIZE, **WAVE, greedy=True, **dict(options))
    knobs = decoder.Knobs(**{**LIVELY, **{k: np.asarray(v, np.float32) for k, v in knobs}})
    params, request = tiny_params(5, core_layers=1), tiny_request((BUDGET, 4, 6))
    return decode.trace(decoder, params, request, knobs, n=TRACED, record=whole)[1]


def check_same_tokens(soft, hard):
    (soft_wave, soft_rows, _), (hard_wave, hard_rows, _) = soft, hard
    np.testing.assert_array_equal(soft_wave.tokens, hard_wave.tokens)
    jax.tree.map(np.testing.assert_array_equal, soft_rows, hard_rows)


@pytest.mark.slow
def test_straight_through_tokens_are_the_discrete_ones_step_for_step():
    hard = traced(decode.Wavefront, WHOLE)
    committed = np.asarray(hard[2].committed)
    assert (committed == 0).any() and (committed > 1).any(), "every step commits one token"
    soft = traced(decode.SoftWavefront)
    check_same_tokens(soft, hard)
    np.testing.assert_array_equal(soft[0].states, hard[0].states)


@pytest.mark.slow
def test_cold_mixtures_are_tokens():
    soft = traced(
        decode.SoftWavefront, (("relaxation", "soft"),), (("candidate_temperature", 1e-3),)
    )
    check_same_tokens(soft, traced(decode.Wavefront, WHOLE))


@pytest.mark.parametrize("gate", [0.5, 1e-4])
def test_a_committed_position_has_left_once(gate):
    soft = traced(decode.SoftWavefront, (), (("gate_temperature", gate),))
    _, rows, soft = jax.tree.map(np.asarray, soft)
    batch, width = soft.staying.shape[1:]
    left, stayed, steps = (np.zeros((batch, SIZE + width)) for _ in range(3))
    for t in range(TRACED):
        for row in range(batch):
            first = rows.length[t, row] - soft.committed[t, row] - 1
            at = slice(first, first + width)
            left[row, at] += soft.leaving[t, row]
            stayed[row, at] += soft.staying[t, row]
            steps[row, at] += soft.staying[t, row] > 0
    for row in range(batch):
        done = slice(rows.prompt_lengths[0, row], rows.length[-1, row] - 1)
        np.testing.assert_allclose(left[row, done], 1, rtol=1e-5)
        assert (stayed[row, done] <= steps[row, done] + 1e-5).all() and steps[row, done].max() > 1
        if gate < 0.1:
            np.testing.assert_allclose(stayed[row, done], steps[row, done], rtol=1e-4)
            np.testing.assert_allclose(
                soft.finished.sum(-1)[:, row], soft.committed[:, row], atol=1e-3
            )
        else:
            assert stayed[row, done].sum() < 0.95 * steps[row, done].sum()


@pytest.mark.slow
def test_a_schedule_of_one_value_is_that_value():
    schedules = tuple((name, (value,) * 3) for name, value in LIVELY.items())
    check_same_tokens(traced(decode.Wavefront, (), schedules), traced(decode.Wavefront))


def test_ages():
    ages = jnp.array([[0, 1, 2, 7]])
    assert at_age(jnp.array([3.0, 1.0, 2.0]), ages).tolist() == [[3.0, 1.0, 2.0, 2.0]]
    assert at_age(0.5, ages) == 0.5


def test_a_schedule_commits_at_its_age_and_compiles_once():
    stub = StubNetwork(needed=(1,))
    decoder, request = (
        decode.Wavefront(stub, 20, window=4, inner_recurrence=2),
        tiny_request(BUDGET),
    )
    for age in range(3):  # a position is committed in the step that it begins at this age
        thresholds = np.full(3, 0.0, np.float32)
        thresholds[age:] = np.inf
        with nothing_is_traced(decode.Wavefront) if age else contextlib.nullcontext():
            result = decode.run(decoder, None, request, decoder.Knobs(exit_threshold=thresholds))
        assert (np.asarray(result.network_calls) == 1 + age + BUDGET - 1).all()
