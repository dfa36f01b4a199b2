"""Gradients through block denoising, in float64: parameters, temperatures, thresholds, vectors of
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
from marks import slow
from results import listed
from soft_canvas import check_differences
from stubs import tiny_blocks, tiny_blocks_params, tiny_request

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode.canvas import choose as rules

WIDE = {"width": 8, "layers": 1, "heads": 2, "kv_heads": 2, "vocab_size": 7}
WIDE |= {"dtype": "float64", "param_dtype": "float64"}
SPEC = TokenSpec(mask=6, alignment="own")
TEXT, GIVEN = [3, 0, 1, 2, 4], [True, False, True, True, True]  # a hole
NEW, STEPS = 7, 8  # two blocks with masks
KNOBS: dict[str, Any] = {"temperature": 1.7, "token_temperature": 0.6}
KNOBS |= {"gate_temperature": 0.7, "threshold": (0.8, 0.7)}


def seen(state, info):
    """A scalar of all that is soft in a step, and what is discrete beside it."""
    weights = jnp.sin(jnp.arange(info.hidden.size)).reshape(info.hidden.shape)
    share = info.staying + info.leaving * jnp.sum(
        info.hidden**2 * jnp.cos(jnp.arange(8.0)), axis=-1
    )
    value = jnp.sum(weights * info.hidden * info.reads[:, None, None]) + jnp.sum(share)
    return value * (1 + 0.1 * state.step[0]), (state.rows.tokens, info.where, state.offsets)


def arguments(shift: float = 0.1) -> dict[str, Any]:
    return soft_canvas.arguments(tiny_blocks_params(1, 2.0, **WIDE), KNOBS, TEXT, shift)


def loss(kind: type, relaxation: str, alignment: str = "own"):
    """Arguments -> a scalar of all steps, and what happened in them."""
    spec = dataclasses.replace(SPEC, alignment=alignment)
    decoder = kind(
        tiny_blocks(**WIDE), len(TEXT) + NEW, spec, relaxation=relaxation, fuse_prompt=False
    )
    request = decode.make_request([TEXT], given=[GIVEN], max_new_tokens=NEW, seed=4)

    def value(at: dict[str, Any]):
        soft = dataclasses.replace(request, recorded=decode.SoftGiven(vectors=at["vectors"]))
        given = (at["params"], soft, decoder.Knobs(**at["knobs"]))
        _, (values, events) = decode.rollout(decoder, *given, n=STEPS, segment=4, record=seen)
        return jnp.sum(values), events

    return value


@functools.cache
def graded(relaxation: str, alignment: str = "own"):
    with jax.enable_x64(True):
        function = loss(decode.SoftBlock, relaxation, alignment)
        (value, events), gradient = jax.jit(jax.value_and_grad(function, has_aux=True))(arguments())
        return float(value), jax.tree.map(np.asarray, events), jax.tree.map(np.asarray, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("alignment", ["own", "next"])
def test_soft_gradients_are_finite_differences(alignment):
    _, events, gradient = graded("soft", alignment=alignment)
    assert not gradient["vectors"][0, 1].any(), "nothing reads what stands at a hole"
    with jax.enable_x64(True):
        plain = jax.jit(loss(decode.SoftBlock, "soft", alignment=alignment))
        check_differences(plain, arguments(), GIVEN, gradient, events[:2])


@dataclasses.dataclass(frozen=True)
class Constant(decode.SoftBlock):
    """Adds `params["constants"]`, [steps, B, S, D], to the vectors that each step leaves."""

    def _advance(self, params, table, state, call, knobs):
        new, info = super()._advance(params, table, state, call, knobs)
        constants = params["constants"][state.rows.counts["network_calls"][0]]
        return dataclasses.replace(new, offsets=new.offsets + constants), info


@pytest.mark.slow
def test_straight_through_gradients_are_those_of_the_surrogate():
    """Of the decoder that reads `v + c`, with the constants c = E[x] - v of this very run."""
    with jax.enable_x64(True):
        at = arguments(shift=0.0)
        straight = jax.jit(
            jax.value_and_grad(loss(decode.SoftBlock, "straight_through"), has_aux=True)
        )
        (value, events), gradient = straight(at)
        plain = jax.jit(loss(Constant, "soft"))
        constants = jnp.zeros((STEPS + 1, 1, *events[2].shape[2:]))
        for step in range(STEPS):  # what a step leaves depends on the constants before it
            at["params"] = at["params"] | {"constants": constants}
            left = plain(at)[1][2][step]
            constants = constants.at[step + 1].add(-left)
        assert float(jnp.max(jnp.abs(constants))) > 0.1, "mixtures are as good as tokens"
        at["params"] = at["params"] | {"constants": constants}
        gradient["params"]["constants"] = np.zeros(constants.shape)
        assert float(plain(at)[0]) == pytest.approx(float(value), rel=1e-9)
        check_differences(plain, at, GIVEN, gradient, events[:2])


# Beside the discrete decoder

HARD = {"temperature": 0.0, "threshold": (0.3, 0.2)}


def compared(kind: type, alignment: str, knobs: dict[str, Any], fused: bool = True, **options):
    """What a decoder writes, and the head inputs that it read."""
    spec = TokenSpec(mask=31, alignment=alignment)
    decoder = kind(tiny_blocks(), 24, spec, fuse_store=fused, fuse_prompt=fused, **options)
    params, request = tiny_blocks_params(1, 3.0), tiny_request((11, 4, 9), seed=2)
    result, info = decode.trace(decoder, params, request, decoder.Knobs(**knobs), n=14)
    return listed(result), jax.tree.map(np.asarray, info)


@pytest.mark.parametrize(
    ("rule", "alignment", "fused", "temperature"),
    [
        slow("dynamic", "own", True, 0.0),
        ("dynamic", "own", True, 1.3),
        slow("threshold", "own", True, 0.0),
        slow("threshold", "next", False, 1.3),
        slow("dynamic", "next", False, 1.3),
    ],
)
def test_straight_tokens_are_those_of_block_denoising(rule, alignment, fused, temperature):
    """Tokens, counts, and what every call read: to the last bit, sampled too."""
    knobs = HARD | {"temperature": temperature}
    want, hard = compared(decode.BlockDenoising, alignment, knobs, fused, rule=rule)
    found, soft = compared(decode.SoftBlock, alignment, knobs, fused, rule=rule)
    assert found == want
    reads = hard.reads
    assert (hard.where[reads].sum(axis=-1) > 1).any(), "no step reveals several"
    np.testing.assert_array_equal(soft.where, hard.where)
    np.testing.assert_allclose(soft.hidden[reads], hard.hidden[reads], rtol=1e-6, atol=1e-6)


def test_shares_leave_once():
    """Over its steps a position leaves once; what is revealed whatever the threshold is leaves at
    once.
    """
    _, info = compared(decode.SoftBlock, "own", HARD, fused=False)
    total, revealed = np.zeros((3, 32)), np.zeros((3, 32), bool)
    for step in range(len(info.at)):
        for row in range(3):
            block = slice(info.at[step, row], info.at[step, row] + 4)
            total[row, block] += info.leaving[step, row]
            revealed[row, block] |= info.where[step, row]
    assert revealed.sum() >= 24
    np.testing.assert_allclose(total[revealed], 1.0, atol=1e-5)
    assert (total[~revealed] < 1).all()
    assert (info.leaving <= info.staying + 1e-6).all() and (info.staying[~info.reads] == 0).all()
    partial = (info.leaving > 1e-3) & (info.leaving < info.staying - 1e-3)
    assert partial.any(), "every gate is open or shut"


@pytest.mark.slow
def test_cold_gates_and_tokens_are_hard():
    """Soft vectors at temperatures near 0 are those of the tokens."""
    cold = {"token_temperature": 1e-3, "gate_temperature": 1e-3}
    want, hard = compared(decode.BlockDenoising, "own", HARD)
    found, soft = compared(decode.SoftBlock, "own", HARD | cold, relaxation="soft")
    assert found == want
    np.testing.assert_allclose(soft.hidden[hard.reads], hard.hidden[hard.reads], atol=1e-3)
    _, warm = compared(decode.SoftBlock, "own", HARD, relaxation="soft")
    assert np.abs(warm.hidden[hard.reads] - hard.hidden[hard.reads]).max() > 0.1


@pytest.mark.slow
def test_each_step_has_its_threshold():
    """The last one holds for all later steps; a schedule of one value is that value."""
    knobs = rules.DenoisingKnobs(threshold=np.array([0.9, 0.5, 0.1], np.float32))
    steps = jnp.array([0, 1, 2, 7])
    np.testing.assert_allclose(rules.threshold_at(steps, knobs)[:, 0], [0.9, 0.5, 0.1, 0.1])
    one, _ = compared(decode.BlockDenoising, "own", {"threshold": 0.3})
    same, _ = compared(decode.BlockDenoising, "own", {"threshold": (0.3, 0.3)})
    first, info = compared(decode.BlockDenoising, "own", {"threshold": (2.0, 0.0)})
    assert one == same != first
    later = info.where[info.reads & (info.step == 1)]
    begun = info.where[info.reads & (info.step == 0)]
    assert (
        (begun.sum(axis=-1) <= 1).all()
        and not (info.reads & (info.step > 1)).any()
        and len(later) > 3
    )
