"""Knobs are typed by their fields, and what a field cannot hold is refused in one sentence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from paradec_jax import decode
from paradec_jax.decode.machine.knobs import SamplingKnobs, as_arrays

NUMBER, WHOLE = "must be a number of float32", "must be a whole number of 32 bits"
PLAIN = decode.AutoRegressive
WRONG = [
    (PLAIN, "temperature", "0.5", f"temperature {NUMBER}, not '0.5'"),
    (PLAIN, "temperature", None, f"temperature {NUMBER}, not None"),
    (PLAIN, "temperature", float("nan"), f"temperature {NUMBER}, not nan"),
    (PLAIN, "temperature", jnp.float32(np.nan), f"temperature {NUMBER}, not "),
    (PLAIN, "temperature", 1e39, f"temperature {NUMBER}, not 1e\\+39"),
    (PLAIN, "temperature", 10**400, f"temperature {NUMBER}, not 1000"),
    (PLAIN, "temperature", 1j, f"temperature {NUMBER}, not 1j"),
    (PLAIN, "top_p", [0.5, [0.1]], f"top_p {NUMBER}, not "),
    (PLAIN, "top_p", 1e-40, "top_p must be above 0 and at most 1, not 1e-40"),
    (PLAIN, "top_k", 10.0, f"top_k {WHOLE} or None, not 10.0"),
    (PLAIN, "top_k", 10.5, f"top_k {WHOLE} or None, not 10.5"),
    (PLAIN, "top_k", jnp.float32(10), f"top_k {WHOLE} or None, not "),
    (PLAIN, "top_k", True, f"top_k {WHOLE} or None, not True"),
    (PLAIN, "top_k", "10", f"top_k {WHOLE} or None, not '10'"),
    (PLAIN, "top_k", 2**40, f"top_k {WHOLE} or None, not 1099511627776"),
    (
        decode.Lookahead,
        "repetition_penalty",
        np.inf,
        f"repetition_penalty {NUMBER} or None, not inf",
    ),
    (decode.Lookahead, "repetition_penalty", 0, "repetition_penalty must be above 0, not 0"),
    (decode.Wavefront, "momentum", np.array([0.1, np.nan]), f"momentum {NUMBER}, not "),
    (decode.Wavefront, "max_recurrence", np.inf, f"max_recurrence {WHOLE} or None, not inf"),
    (decode.Masked, "grid", 0.5, f"grid must be linear or cosine or {WHOLE[8:]} or None, not 0.5"),
    (
        decode.Masked,
        "grid",
        "square",
        "grid must be linear or cosine or an array of times, not 'square'",
    ),
    (decode.SoftMasked, "token_temperature", 1e-46, "token_temperature must be above 0, not 1e-46"),
]


@pytest.mark.parametrize(("kind", "name", "value", "message"), WRONG)
def test_what_a_knob_cannot_hold_is_refused(kind, name, value, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind().knobs(kind.Knobs(**{name: value}))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuotedKnobs(SamplingKnobs):
    """Knobs whose annotations are texts, as `from __future__ import annotations` makes them."""

    share: "Float[Array, ''] | float" = 0.5
    count: "int" = 2


def test_numbers_have_the_type_of_their_field():
    for number in (
        1,
        True,
        1.0,
        np.int64(1),
        np.float64(1),
        np.asarray(1),
        jnp.int32(1),
        jnp.bfloat16(1),
    ):
        knobs = as_arrays(QuotedKnobs(temperature=number, share=number))
        for x in (knobs.temperature, knobs.share):
            assert (x.dtype, x.shape, x.weak_type) == (np.float32, (), False)
    for number in (3, np.uint8(3), np.asarray(3), jnp.asarray(3)):
        count = as_arrays(QuotedKnobs(count=number)).count
        assert (count.dtype, count.weak_type, int(count)) == (np.int32, False, 3)
    schedule = as_arrays(decode.Wavefront.Knobs(noise=[0, 1], exit_threshold=jnp.array([1, 2, 3])))
    assert schedule.noise.dtype == schedule.exit_threshold.dtype == np.float32


def test_numbers_of_float64_stay_where_they_are_allowed():
    with jax.enable_x64(True):
        knobs = as_arrays(
            SamplingKnobs(temperature=np.float64(0.1), top_p=0.1, min_p=jnp.float64(0.1))
        )
        assert [x.dtype for x in (knobs.temperature, knobs.top_p, knobs.min_p)] == [
            "f8",
            "f4",
            "f8",
        ]
    assert as_arrays(SamplingKnobs(temperature=np.float64(0.1))).temperature.dtype == "f4"


def test_traced_knobs_pass_and_traced_floats_are_no_whole_numbers():
    def temperature(x):
        return as_arrays(SamplingKnobs(temperature=x)).temperature

    assert jax.vmap(temperature)(jnp.arange(3)).dtype == np.float32
    assert jax.grad(temperature)(0.5) == 1
    with pytest.raises(ValueError, match=f"top_k {WHOLE}"):
        jax.vmap(lambda x: as_arrays(SamplingKnobs(top_k=x)))(jnp.ones(3))
