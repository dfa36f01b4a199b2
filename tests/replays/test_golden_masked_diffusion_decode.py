"""Recorded sampling of the original programs of MDLM and SDTT: single draws, steps, whole texts,
what they cost.

Sizes, steps and strides are read from the arrays.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import over
from reading import read
from recorded import equal, near
from recorded_masked_diffusion import FOLDER, arrays, model

from experiments.replicas import RecordedRaces, ReleasedMasked, ReleasedStrided
from experiments.replicas import masked_rules as rules
from paradec_jax import decode
from paradec_jax.decode.rules.race import race, reverse_weights
from paradec_jax.decode.rules.subs import subs

PROGRAMS = {  # name in the files: the decoder's options
    "mdlm_ddpm": {"program": "mdlm", "sampler": "ancestral"},
    "mdlm_ddpm_cache": {"program": "mdlm", "sampler": "cached"},
    "mdlm_analytic": {"program": "mdlm", "sampler": "analytic"},
    "sdtt_ancestral": {"program": "sdtt", "sampler": "ancestral"},
    "sdtt_analytic": {"program": "sdtt", "sampler": "analytic"},
    "sdtt_prompted": {"program": "sdtt", "sampler": "ancestral"},
}
TRAJECTORIES = sorted(path.stem for path in FOLDER.glob("traj_*.npz"))


def recorded() -> list[tuple[str, str]]:
    """Every trajectory of every file."""
    return [(f, name) for f in TRAJECTORIES for name in PROGRAMS if f"{name}_final" in arrays(f)]


def test_categorical_draws():
    """Ties, zeros and negative weights, uniforms from 0 to the largest float below 1."""
    want = arrays("categorical")
    got = race(jnp.asarray(want["probs"])[None], jnp.asarray(want["u"])[None])[0]
    equal(got, want["index_float32"])
    denominator = 1e-10 - jnp.log(jnp.asarray(want["u"]) + 1e-10)
    near(denominator, want["denom_float32"], rtol=1e-6, atol=1e-12)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(want[name], jnp.float64)[None] for name in ("probs", "u")}
        equal(race(wide["probs"], wide["u"])[0], want["index_float64"])
        denominator = 1e-10 - jnp.log(wide["u"][0] + 1e-10)
        near(denominator, want["denom_float64"], rtol=1e-12)


@cache
def probabilities() -> jax.Array:
    """Of the tokens, given the state of steps.npz."""
    network, params, spec = model()
    tokens = jnp.asarray(arrays("steps")["x"], jnp.int32)
    with jax.default_matmul_precision("highest"):
        return jnp.exp(subs(read(network, params, tokens)[0], tokens, spec.mask))


def steps_of() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, int]:
    want = arrays("steps")
    t = jnp.asarray(want["t"])
    return (
        jnp.asarray(want["x"], jnp.int32),
        t,
        t - np.float32(want["dt"]),
        jnp.asarray(want["u"]),
        model()[2].mask,
    )


def ancestral(p, x, t, s, mask):
    return reverse_weights(p, rules.mask_probability(t), rules.mask_probability(s), mask)


WEIGHTS = {
    "mdlm_ddpm": ancestral,
    "mdlm_ddpm_cache": lambda p, x, t, s, m: reverse_weights(p, t, s, m),
    "mdlm_analytic": rules.analytic_weights,
    "mdlm_denoiser": lambda p, x, t, s, m: rules.analytic_weights(p, x, t, None, m),
    "sdtt_ancestral": ancestral,
    "sdtt_analytic": rules.analytic_weights,
}


@over(WEIGHTS)
def test_steps(name):
    want, (x, t, s, u, mask) = arrays("steps"), steps_of()
    weights = WEIGHTS[name](probabilities(), x, t, s, mask)
    masked = np.asarray(x == mask)
    if f"{name}_q" in want:
        near(weights[masked], want[f"{name}_q"][masked], atol=1e-4)
    drawn = np.asarray(race(weights, u))
    if "analytic" in name or "denoiser" in name:
        equal(drawn, want[f"{name}_x_next"], err_msg="clean positions are drawn too")
    equal(np.where(masked, drawn, x), want[f"{name}_x_next"])


def test_the_final_denoise_is_an_argmax():
    x, *_, mask = steps_of()
    best = jnp.argmax(probabilities(), axis=-1)
    equal(jnp.where(x == mask, best, x), arrays("steps")["sdtt_final_denoise_x_next"])


def state_and_info(state, info):
    return state.rows.tokens, info


@over(recorded(), argument="file, name")
def test_trajectories(file, name):
    network, params, spec = model()
    want = arrays(file)
    states, final = want[f"{name}_x_before_each_step"], want[f"{name}_final"]
    (steps, batch, length), options = states.shape, PROGRAMS[name]
    equal(rules.linspace(1.0, rules.LAST, steps + 1), want["timesteps"])
    recorded = RecordedRaces(races=jnp.asarray(want["u"].transpose(1, 0, 2, 3)))
    given = states[0] != spec.mask
    if name == "sdtt_prompted":  # which forces a last token as well
        prompt = want["sdtt_prompt"]
        assert given[:, : len(prompt)].all() and (states[0][:, : len(prompt)] == prompt).all()
        request = decode.make_request(states[0], given=given, max_new_tokens=0, recorded=recorded)
    else:
        assert not given.any()
        request = decode.make_request(
            np.zeros((batch, 0)), max_new_tokens=length, recorded=recorded
        )
    decoder = ReleasedMasked(network, length, spec, steps=steps, **options)
    with jax.default_matmul_precision("highest"):
        result, (canvases, infos) = decode.trace(
            decoder, params, request, n=steps + 1, record=state_and_info
        )
    equal(np.asarray(canvases)[: steps - 1], states[1:])
    equal(result.tokens, final)
    assert (result.reasons == decode.Reason.BUDGET).all()
    if f"{name}_nfe" in want:
        assert result.network_calls.tolist() == [int(want[f"{name}_nfe"])] * batch
        moved = np.asarray(infos.changed)[: steps - 1].sum()
        assert options["sampler"] != "cached" or result.network_calls[0] == 2 + moved
    if f"{name}_ran_final_denoise" in want:
        assert (
            result.network_calls.tolist()
            == [steps + bool(want[f"{name}_ran_final_denoise"])] * batch
        )


def test_sliding_windows():
    network, params, spec = model()
    want = arrays("semi_ar")
    states, u = want["x_before_each_step"], want["u"]
    windows, steps, batch, length = states.shape
    stride, total = int(want["stride_length"]), want["final_tokens"].shape[1]
    assert windows == want["num_strides"] + 1 and total == length + stride * want["num_strides"]
    races = u.transpose(2, 0, 1, 3, 4).reshape(batch, windows * steps, length, -1)
    request = decode.make_request(
        np.zeros((batch, 0)), max_new_tokens=total, recorded=RecordedRaces(races=jnp.asarray(races))
    )
    decoder = ReleasedStrided(
        network, total, spec, steps=round(1 / float(want["dt"])), stride=stride, width=length
    )
    with jax.default_matmul_precision("highest"):
        result, (canvases, infos) = decode.trace(
            decoder, params, request, n=windows * (steps + 1), record=state_and_info
        )
    equal(result.tokens, want["final_tokens"])
    assert int(np.asarray(infos.changed).sum()) == want["sampling_steps"]
    lengths = rules.tokens_before(np.asarray(result.tokens), int(want["eos_id"]))
    equal(lengths, want["sequence_lengths"])
    canvases = np.asarray(canvases).reshape(windows, steps + 1, batch, -1)
    for w in range(windows):
        seen = canvases[w, : steps - 1, :, w * stride : w * stride + length]
        equal(seen, states[w, 1:], err_msg=f"window {w}")


def test_every_array_is_read():
    """So that none of a folder is left out in silence."""
    known = {
        f"{name}_{kind}" for name in PROGRAMS for kind in ("x_before_each_step", "final", "nfe")
    }
    known |= {f"{name}_ran_final_denoise" for name in PROGRAMS}
    known |= {"sdtt_prompt", "timesteps", "dt", "u", "min_relative_margin"}
    for file in TRAJECTORIES:
        assert arrays(file).keys() <= known, file
        count = len(arrays(file)["timesteps"]) - 1
        assert float(arrays(file)["dt"]) == pytest.approx((1 - rules.LAST) / count)
    assert TRAJECTORIES
    read = {f"{name}_x_next" for name in WEIGHTS} | {
        "mdlm_ddpm_q",
        "mdlm_analytic_q",
        "sdtt_final_denoise_x_next",
    }
    assert arrays("steps").keys() == read | {"x", "t", "dt", "u", "min_relative_margin"}
