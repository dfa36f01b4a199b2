"""Laws of every objective: its parts add up to the whole, and padding is told by lengths, not by a token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from objectives import MASKED, OBJECTIVES, ROWS, SPEC, difference, three, unequal

from paradec_jax import losses
from paradec_jax.noise import Times
from paradec_jax.train import TrainState, make_train_step


def loss_of(name: str):
    """The table's loss; without what depends on the number of rows of a batch."""
    row = OBJECTIVES[name]
    if name == "consistency":  # every divisor of the whole batch that the rules know
        rules = losses.ConsistencyRules(over="batch")
        return losses.consistency_loss(row.network(), SPEC, rules, chunk=3)
    if name == "masked diffusion":
        rules = losses.BoundRules(times=Times("plain"))
        return losses.masked_diffusion_loss(row.network(), MASKED, rules, chunk=3)
    return row.loss()


DRAWN = (
    "stepwise",
    "recurrent consistency",
    "self-distillation",
)  # their draws are those of each micro-batch


@functools.cache
def update(name: str, accumulate: int):
    """Parameters and metrics after one update of plain descent at a rate of 1."""
    row, batch = OBJECTIVES[name], unequal(name)
    optimizer = optax.sgd(1.0)
    state = TrainState.create(row.params(), optimizer, jax.random.key(0), teacher=row.teacher())
    state, metrics = make_train_step(loss_of(name), optimizer, accumulate=accumulate)(
        state, row.frozen(), batch
    )
    return jax.tree.map(np.asarray, (state.params, metrics))


def by_hand(name: str):
    """The same in two micro-batches, from the sums of each, with the keys that the step gives them."""
    row, batch, loss = OBJECTIVES[name], unequal(name), loss_of(name)
    key = jax.random.fold_in(jax.random.key(0), 0)
    frozen = row.frozen()
    if row.teacher() is not None:
        frozen = {"teacher": row.teacher(), "round": jnp.int32(0)}

    def value(params):
        half, parts = ROWS // 2, []
        for i in range(2):
            rows = {k: x if not np.ndim(x) else x[i * half : (i + 1) * half] for k, x in batch.items()}
            parts.append(loss.sums(params, frozen, rows | {"step": 0}, jax.random.fold_in(key, i)))
        return loss.value(jax.tree.map(jnp.add, *parts))

    params = row.params()
    (found, metrics), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(params)
    return jax.tree.map(jnp.subtract, params, grads), metrics | {"loss": found}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_add_up_to_the_batch(name):
    """Gradient and metrics are those of the whole, though half of the micro-batches count nothing."""
    params, metrics = update(name, 2)
    before = OBJECTIVES[name].params()
    assert difference(params, before)[0] > 1e-3, "nothing was trained"
    wanted = by_hand(name) if name in DRAWN else update(name, 1)
    moved = [jax.tree.map(np.subtract, found, before) for found in (params, wanted[0])]
    assert difference(*moved)[0] < 2e-4
    for key, value in wanted[1].items():
        np.testing.assert_allclose(metrics[key], value, rtol=2e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", ["next token", "residual"])
def test_the_first_pass_over_micro_batches_runs_no_network(name):
    """It wants weights, which depend on no parameters: its share of the products of an update is none."""
    row, optimizer = OBJECTIVES[name], optax.sgd(1.0)

    def products(accumulate: int) -> int:
        state = TrainState.create(row.params(), optimizer, jax.random.key(0))
        step = make_train_step(loss_of(name), optimizer, accumulate=accumulate)
        text = step.lower(state, row.frozen(), unequal(name)).compile().as_text()
        return (
            text.count(" dot(") + text.count("__onednn$matmul") + text.count('custom_call_target="__cublas')
        )

    assert 0 < products(2) <= products(1)


# Padding


PAIRS = [name for name, row in OBJECTIVES.items() if "pairs" in row.batch(1)]


def loss_with(name: str, pad: int, chunk: int | None = None):
    spec, network = dataclasses.replace(SPEC, pad=pad), OBJECTIVES[name].network()
    if name == "consistency":
        return losses.consistency_loss(network, spec, chunk=chunk)
    if name == "cllm":
        return losses.cllm_loss(network, spec, chunk=chunk)
    rules = losses.ConsistencyRules(context="clean", ar_weight=2.0)
    return losses.recurrent_consistency_loss(network, three, 2, spec, rules)


def stopping(name: str) -> dict[str, np.ndarray]:
    """Every answer ends in the stop token, at the end of its last block; the noisy copy has it once too."""
    batch = dict(OBJECTIVES[name].batch(1))
    clean, noisy = batch["clean"].copy(), batch["noisy"].copy()
    clean[:, -1, -1], noisy[:, -1, 0] = SPEC.stop[0], SPEC.stop[0]
    batch["prompt"] = batch["prompt"].copy()
    batch["prompt"][0, 1] = SPEC.stop[0]  # a turn of a chat ends
    return batch | {"clean": clean, "noisy": noisy}


@pytest.mark.parametrize("name", PAIRS)
def test_a_stop_token_that_is_also_the_padding_is_trained(name):
    batch, row = stopping(name), OBJECTIVES[name]
    if name == "cllm":
        batch["prompt"][0, 1] = 5  # what follows a stop token of the prompt is filled up with padding

    def graded(pad):
        loss = jax.jit(jax.value_and_grad(loss_with(name, pad), has_aux=True))
        return loss(row.params(), None, batch | {"step": 0}, jax.random.key(0))

    (other, apart), (same, shared) = graded(0), graded(SPEC.stop[0])
    np.testing.assert_allclose(other[0], same[0], rtol=1e-6)
    assert difference(shared, apart)[0] < 1e-6


@pytest.mark.parametrize("name", PAIRS)
def test_padding_of_a_batch_is_where_it_says(name):
    """Marked positions count nowhere, whatever lies there; nothing else is taken for padding."""
    batch, row = stopping(name), OBJECTIVES[name]
    real = np.ones(batch["noisy"].shape, bool)
    real[1, -1, 1:] = False
    marked = batch | {"noisy_real": real, "clean_real": real, "step": 0}
    loss = jax.jit(jax.value_and_grad(loss_with(name, SPEC.stop[0]), has_aux=True))

    def graded(fill, given):
        changed = {key: np.where(real, batch[key], fill) for key in ("noisy", "clean")}
        return loss(row.params(), None, given | changed, jax.random.key(0))

    one, other = graded(7, marked), graded(SPEC.stop[0], marked)
    if name != "cllm":  # whose next-token term is over the whole row, as released
        assert difference(one[1], other[1])[0] < 1e-6
    assert (
        difference(one[1], graded(7, marked | {"noisy_real": real | True, "clean_real": real | True})[1])[0]
        > 1e-4
    )
