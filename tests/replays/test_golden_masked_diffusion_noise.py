"""Recorded arrays of the original denoiser's noise: schedules, drawn times, its loss and gradients,
the average.
"""

import json
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from marks import over
from recorded import equal, graded, jitted, near
from recorded_masked_diffusion import FOLDER, arrays, assert_close, assert_gradients, model

from paradec_jax.convert import mdlm
from paradec_jax.decode.rules.subs import without_mask
from paradec_jax.losses.cross_entropy import token_losses
from paradec_jax.losses.masked_diffusion import BoundRules, masked_diffusion_loss, noise, read
from paradec_jax.noise import LOGLINEAR, MDLM_TIMES, SDTT_TIMES, Schedule, Times
from paradec_jax.noise.schedules import FORMULAS
from paradec_jax.train import update_ema

SCHEDULE_NAMES = {"cosinesqr": "cosine_squared"}
RULES = {
    "cont": BoundRules(),
    "T1000": BoundRules(steps=1000, released=True),
    "T16": BoundRules(steps=16, released=True),
    "importance": BoundRules(measure="importance", released=True),
    "changeofvar": BoundRules(measure="change_of_variables", released=True),
}


def recorded(kind: str, pattern: str) -> list[str]:
    return [name for name in arrays(kind) if re.fullmatch(pattern, name)]


def test_every_recorded_array_is_compared():
    parts = "|".join(RULES)
    read = [
        *recorded(
            "schedule", r"\w+_(sigma|rate|importance_transform|sigma_min|sigma_max)|[ut]_\w+|t"
        ),
        *recorded("nelbo", rf"({parts})_(loss|nlls|xt|move_chance)|cont_(t|sigma|dsigma|weight)"),
        *recorded("nelbo", r"x0|attention_mask|u_\w+|grad.*"),
        *recorded("ema", r"p\d_\w+|decay\w+_shadow\d"),
    ]
    assert sorted(read) == sorted([*arrays("schedule"), *arrays("nelbo"), *arrays("ema")])


def rate(schedule: Schedule, t):
    """The derivative of the total noise, `w (exp(sigma) - 1)`."""
    return schedule.weight(t) * jnp.expm1(schedule.sigma(t))


@over(recorded("schedule", r"\w+_(sigma|rate|importance_transform)"))
def test_schedule(name):
    kind, what = name.split("_", 1)
    schedule, t = Schedule(SCHEDULE_NAMES.get(kind, kind)), jnp.asarray(arrays("schedule")["t"])
    if what == "importance_transform":
        got, tolerance = schedule.importance(t), {"atol": 1e-5, "rtol": 1e-4}
    elif what == "sigma":
        got, tolerance = schedule.sigma(t), {"atol": 1e-5, "rtol": 1e-4}
    else:
        got, tolerance = rate(schedule, t), {"atol": 3e-4, "rtol": 1e-3}
    near(got, arrays("schedule")[name], **tolerance)


def test_noise_at_both_ends():
    want = arrays("schedule")
    found = FORMULAS["loglinear"].sigmas
    near(found, (want["loglinear_sigma_min"], want["loglinear_sigma_max"]), atol=1e-5, rtol=1e-4)
    near(LOGLINEAR.log_range, (-6.90825, np.log(0.999)), atol=1e-5)


@over(
    [
        ("mdlm_antithetic", MDLM_TIMES),
        ("mdlm_plain", Times("plain", 1e-3)),
        ("mdlm_importance", MDLM_TIMES),
        ("sdtt_antithetic", SDTT_TIMES),
    ],
    argument="name, times",
)
def test_times(name, times):
    uniforms, want = (arrays("schedule")[f"{part}_{name}"] for part in "ut")
    got = times.at(jnp.asarray(uniforms), len(want))
    if name.endswith("importance"):
        got = LOGLINEAR.importance(got)
    near(got, want, atol=1e-5, rtol=1e-4)


def batch_of() -> dict:
    want = arrays("nelbo")
    return {
        "tokens": jnp.asarray(want["x0"], jnp.int32),
        "weights": jnp.asarray(want["attention_mask"]),
        "time_uniforms": jnp.asarray(want["u_t"]),
        "mask_uniforms": jnp.asarray(want["u_mask"]),
    }


@cache
def noised(tag: str):
    """Noised tokens, which are hidden, and the weight of each row."""
    key = jax.random.key(0)
    return jax.tree.map(np.asarray, noise(batch_of(), RULES[tag], model()[2].mask, key, key))


@cache
def result_of(tag: str):
    """Loss, metrics and gradients."""
    network, params, spec = model()
    objective = masked_diffusion_loss(network, spec, RULES[tag], dropout=False, chunk=10)
    return graded(objective, params, None, batch_of())


@jitted
def nll_of(network, params, tokens, targets, mask):
    return token_losses(
        without_mask(network.logits(params, read(network, params, tokens)), mask), targets
    )[0]


@over(RULES, argument="tag")
def test_what_is_hidden(tag):
    want = arrays("nelbo")
    equal(noised(tag)[0], want[f"{tag}_xt"])
    t = RULES[tag].times.at(jnp.asarray(want["u_t"]), len(want["u_t"]))
    near(RULES[tag].at(t)[0], want[f"{tag}_move_chance"][:, 0], rtol=1e-4, atol=1e-6)


def test_weights_of_continuous_time():
    want, schedule = arrays("nelbo"), RULES["cont"].schedule
    t = MDLM_TIMES.at(jnp.asarray(want["u_t"]), len(want["u_t"]))
    near(t, want["cont_t"], atol=1e-6)
    near(schedule.sigma(t), want["cont_sigma"], atol=1e-5, rtol=1e-4)
    near(rate(schedule, t), want["cont_dsigma"], atol=3e-4, rtol=1e-3)
    near(schedule.weight(t), want["cont_weight"], rtol=1e-5)


@over(RULES, argument="tag")
def test_loss_of_each_token(tag):
    """Where the original is not a number, at t = 1 / T, ours is the weight T times the loss."""
    want, (network, params, spec) = arrays("nelbo"), model()
    tokens, hidden, weight = noised(tag)
    nll = np.asarray(nll_of(network, params, jnp.asarray(tokens), batch_of()["tokens"], spec.mask))
    got = weight[:, None] * nll * hidden * want["attention_mask"]
    known = np.isfinite(want[f"{tag}_nlls"])
    undefined = np.isclose(weight, 16, rtol=1e-6) if tag == "T16" else np.zeros(len(weight), bool)
    equal(known.all(axis=1), ~undefined)
    near(got[known], want[f"{tag}_nlls"][known], rtol=1e-4, atol=1e-5)
    assert np.isfinite(got).all()
    loss = got.sum() / want["attention_mask"].sum()
    near(result_of(tag)[0], loss, rtol=1e-5)
    if known.all():
        near(result_of(tag)[0], want[f"{tag}_loss"], rtol=1e-4)
    else:
        assert np.isnan(want[f"{tag}_loss"])


def test_gradients():
    order = json.loads((FOLDER / "key_layout.json").read_text())["parameter_order_for_ema"]
    assert order == mdlm.parameter_order(model()[0].config)
    assert_gradients(result_of("cont")[2], arrays("nelbo"))


@over(
    [("09999", 0.9999, True), ("02", 0.2, True), ("0999_noupd", 0.999, False)],
    argument="name, decay, warmup",
)
def test_average(name, decay, warmup):
    want = arrays("ema")
    ema = {place: jnp.asarray(want[f"p{place}_init"]) for place in (0, 1)}
    for n in range(len(want["p0_sequence"])):
        params = {place: jnp.asarray(want[f"p{place}_sequence"][n]) for place in (0, 1)}
        count = jnp.int32(n if warmup else 2**30)  # long after the warm-up the decay alone rules
        ema = update_ema(ema, params, count, decay)
        for place in (0, 1):
            assert_close(ema[place], want[f"decay{name}_shadow{place}"][n], 1e-6)
