"""Recorded losses and gradients of the original recurrent-depth program."""

import re
from functools import cache

import jax.numpy as jnp
import numpy as np
from marks import over
from recorded import exported, graded
from recorded_recurrent_depth import arrays, assert_close, model, names, network, params

from paradec_jax.convert import huginn
from paradec_jax.losses import poisson_lognormal, recurrent_loss

LOSS = 2e-5


@cache
def gradients_of(tag: str):
    """Loss, and gradients under the names and in the layout of the original program."""
    want = arrays("training")
    constant, carried = map(int, re.fullmatch(r"n(\d+)_k(\d+)", tag).groups())
    objective = recurrent_loss(network("shared"), poisson_lognormal(1.0), carried)
    batch = {
        "tokens": jnp.asarray(want["input_ids"]),
        "targets": jnp.asarray(np.maximum(want["labels"], 0)),
        "weights": jnp.asarray(want["labels"] >= 0, jnp.float32),
        "state": jnp.asarray(want["init_state"]),
        "recurrence": jnp.int32(constant + carried),
        "step": jnp.int32(0),
    }
    loss, _, grads = graded(objective, params(), None, batch)
    return loss, exported(huginn, model().config, grads)


@over(names("training", r"loss_\w+"))
def test_loss(name):
    loss, _ = gradients_of(name.removeprefix("loss_"))
    assert abs(loss - float(arrays("training")[name])) <= LOSS


@over(names("training", r"grad_\w+::.*"))
def test_gradient(name):
    tag, parameter = name.removeprefix("grad_").split("::")
    want = arrays("training")[name]
    assert_close(gradients_of(tag)[1][parameter], want, 1e-4 * np.abs(want).max() + 1e-6)


@over(names("training", r"gradnorm_(?!names$)\w+"))
def test_gradient_norms(name):
    grads = gradients_of(name.removeprefix("gradnorm_"))[1]
    parameters = arrays("training")["gradnorm_names"].tolist()
    assert sorted(parameters) == sorted(grads)
    want = arrays("training")[name]
    got = np.array(
        [np.linalg.norm(grads[parameter].astype(np.float64)) for parameter in parameters]
    )
    share = np.abs(got - want) / (1e-4 * want + 1e-6)  # of the tolerance
    assert share.max() <= 1, (
        f"{parameters[share.argmax()]}: {got[share.argmax()]}, {want[share.argmax()]}"
    )
