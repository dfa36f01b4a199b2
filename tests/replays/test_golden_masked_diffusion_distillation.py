"""Recorded arrays of the original self-distillation: targets, divergences, gradients, one update
and its average.
"""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from marks import over
from recorded import equal, exported, graded, near, part_of
from recorded_masked_diffusion import (
    arrays,
    assert_close,
    assert_gradients,
    assert_log_probs,
    model,
    student,
)

from paradec_jax.convert import mdlm
from paradec_jax.decode.rules.subs import subs
from paradec_jax.losses.masked_diffusion import read
from paradec_jax.losses.self_distillation import (
    DistillationRules,
    Teacher,
    divergence,
    self_distillation_loss,
)
from paradec_jax.train import adamw, update_ema

GRIDS = {"official": "released", "paper": "paper"}
MODES = {"kl_bwd": "kld", "kl_fwd": "forward_kl", "mse": "mse", "tvd": "tvd"}
TAG = r"(?P<sampler>ancestral|analytic)_m(?P<jump>\d)_(?P<grid>official|paper)"


def tags(suffix: str) -> list[str]:
    """Tags of the recorded runs that have an array of this name."""
    found = [re.fullmatch(rf"({TAG})_{suffix}", name) for name in arrays("sdtt_targets")]
    return [match[1] for match in found if match]


def rules_of(tag: str, **changes) -> DistillationRules:
    match = re.fullmatch(TAG, tag)
    return DistillationRules(jump=int(match["jump"]), grid=GRIDS[match["grid"]], **changes)


def round_of(step, jump: int) -> int:
    """The round whose steps have the recorded size."""
    return round(np.log(float(step) * 1024 / (1 - 1e-5)) / np.log(jump))


def step_of(tag: str):
    """The step size of the recorded round."""
    rules = rules_of(tag)
    return rules.step_size(round_of(arrays("sdtt_targets")[f"{tag}_dt"], rules.jump))


@cache
def taught(tag: str):
    """Head inputs, the text before each step, and log-probabilities of the targets."""
    network, params, spec = model()
    want, rules = arrays("sdtt_targets"), rules_of(tag)
    noised = jnp.asarray(want["xt"], jnp.int32)

    @jax.jit
    def call(params, step):
        times, uniforms = jnp.asarray(want["t_start"]), jnp.asarray(want["u"])
        teacher = Teacher(network, params, rules, spec.mask)
        kept, before = teacher.targets(noised, times, step, jax.random.key(0), uniforms)
        return kept, before, subs(network.logits(params, kept), noised, spec.mask)

    return jax.tree.map(
        np.asarray, call(params, step_of(tag if tag in tags("dt") else "ancestral_m2_official"))
    )


def test_every_recorded_array_is_compared():
    parts = [
        "dt",
        "ts",
        "target",
        "x_before_each_step",
        r"loss_(mse|tvd|kl_fwd|kl_bwd)(_f64)?",
        r"tv_dist\w+",
    ]
    of_runs = [
        name for name in arrays("sdtt_targets") if re.fullmatch(rf"{TAG}_({'|'.join(parts)})", name)
    ]
    shared = {"x0", "xt", "t_start", "u", "min_relative_margin", "student_log_probs"}
    assert arrays("sdtt_targets").keys() == shared | set(of_runs)
    rest = r"loss_(kl_bwd|kl_fwd|mse|tvd)|xt?|x0|x_after_first_teacher_step|t|u_\w+|dt|min_relative_margin"
    for name in arrays("sdtt_loss"):
        assert re.fullmatch(rest + r"|grad.*|after_adamw/.*|ema_after_1_update/.*", name), name


@over(tags("dt"), argument="tag")
def test_steps_and_times(tag):
    want, rules = arrays("sdtt_targets"), rules_of(tag)
    step = step_of(tag)
    near(step, want[f"{tag}_dt"], rtol=1e-6)
    times = rules.teacher_times(jnp.asarray(want["t_start"]), step)
    near(times, want[f"{tag}_ts"], atol=1e-6)


@over(tags("x_before_each_step"), argument="tag")
def test_text_before_each_step(tag):
    """The analytic sampler, which is the ancestral one here, had drawn the same tokens."""
    equal(taught(tag)[1], arrays("sdtt_targets")[f"{tag}_x_before_each_step"])


@over(tags("target"), argument="tag")
def test_targets(tag):
    want = arrays("sdtt_targets")
    hidden = want["xt"] == model()[2].mask
    assert_log_probs(taught(tag)[2][hidden], want[f"{tag}_target"][hidden])


@cache
def said():
    """The student's raw logits on the noised text."""
    network, _, _ = model()
    noised = jnp.asarray(arrays("sdtt_targets")["xt"], jnp.int32)
    return jax.jit(lambda p: network.logits(p, read(network, p, noised)))(student())


def test_student():
    want, mask = arrays("sdtt_targets"), model()[2].mask
    got = np.asarray(subs(said(), jnp.asarray(want["xt"]), mask))
    assert_log_probs(got, want["student_log_probs"])


def mean_divergence(tag: str, kind: str, released: bool) -> float:
    network, params, spec = model()
    rules = rules_of(tag, divergence=kind, released=released)
    values = np.asarray(
        divergence(said(), network.logits(params, jnp.asarray(taught(tag)[0])), spec.mask, rules)
    )
    return float(values[arrays("sdtt_targets")["xt"] == spec.mask].mean())


@over(MODES, argument="mode")
@over(tags("loss_mse"), argument="tag")
def test_divergences(tag, mode):
    got, want = mean_divergence(tag, MODES[mode], released=True), arrays("sdtt_targets")
    loose = 1e-3 if mode in ("mse", "tvd") else 1e-4
    near(got, want[f"{tag}_loss_{mode}"], rtol=loose)
    near(got, want[f"{tag}_loss_{mode}_f64"], rtol=loose)


@over(tags("tv_dist_unused_helper"), argument="tag")
def test_total_variation(tag):
    want = arrays("sdtt_targets")[f"{tag}_tv_dist_unused_helper"]
    near(mean_divergence(tag, "tvd", released=False), want, rtol=1e-4)


# One update, end to end


def batch_of() -> dict:
    want = arrays("sdtt_loss")
    return {
        "tokens": jnp.asarray(want["x0"], jnp.int32),
        "times": jnp.asarray(want["t"]),
        "mask_uniforms": jnp.asarray(want["u_mask"]),
        "teacher_uniforms": jnp.asarray(want["u_teacher"]),
    }


@cache
def result_of(mode: str):
    """Loss, metrics and gradients."""
    network, params, spec = model()
    rules = DistillationRules(grid="released", divergence=MODES[mode], released=True)
    objective = self_distillation_loss(network, spec, rules, dropout=False, chunk=7)
    frozen = {"teacher": params, "round": jnp.int32(round_of(arrays("sdtt_loss")["dt"], 2))}
    return graded(objective, student(), frozen, batch_of())


def tensors_of(tree) -> dict[str, np.ndarray]:
    return exported(mdlm, model()[0].config, tree)


@over(MODES, argument="mode")
def test_loss(mode):
    loss, metrics, _ = result_of(mode)
    want = arrays("sdtt_loss")[f"loss_{mode}"]
    near(loss, want, rtol=1e-3 if mode in ("mse", "tvd") else 1e-4)
    near(metrics["teacher_steps"], (1 - 1e-5) / arrays("sdtt_loss")["dt"], rtol=1e-5)


def test_noised_text_and_the_teachers_first_step():
    network, params, spec = model()
    want, rules = arrays("sdtt_loss"), DistillationRules(grid="released")
    hidden = want["u_mask"] < 0.999 * want["t"][:, None]
    equal(np.where(hidden, spec.mask, want["x0"]), want["xt"])
    step = rules.step_size(round_of(want["dt"], rules.jump))
    near(step, want["dt"], rtol=1e-6)
    noised, t, uniforms = (jnp.asarray(want[name]) for name in ("xt", "t", "u_teacher"))
    noised = noised.astype(jnp.int32)
    _, before = jax.jit(
        lambda params: Teacher(network, params, rules, spec.mask).targets(
            noised, t, step, jax.random.key(0), uniforms
        )
    )(params)
    equal(before[1], want["x_after_first_teacher_step"])


def test_gradients():
    assert_gradients(result_of("kl_bwd")[2], arrays("sdtt_loss"))


def test_one_update_and_its_average():
    want, before = arrays("sdtt_loss"), student()
    optimizer = adamw(6e-5, 10, b2=0.999, weight_decay=0.0)

    @jax.jit
    def updated(grads, before):
        updates, _ = optimizer.update(grads, optimizer.init(before), before)
        after = optax.apply_updates(before, updates)
        return after, update_ema(before, after, jnp.int32(0), 0.9999)

    after, average = updated(result_of("kl_bwd")[2], before)
    for part, tree in (("after_adamw", after), ("ema_after_1_update", average)):
        tensors, arrays_of = tensors_of(tree), part_of(want, f"{part}/")
        assert arrays_of
        for name, array in arrays_of.items():
            assert_close(tensors[name], array, 1e-6)
