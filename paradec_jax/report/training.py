"""One step of training as model FLOP utilisation."""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paradec_jax.families import init_params, network_of
from paradec_jax.losses import next_token_loss, recurrent_loss
from paradec_jax.models import update_flops
from paradec_jax.report.parts import Part, Result, Table, Task, duration, percent
from paradec_jax.report.sizes import Training, bytes_of, with_dtype
from paradec_jax.report.timing import REPEATS, once, products, turns
from paradec_jax.train import TrainState, make_train_step

STATES = 8  # times the weights that there are at once at most: gradients, two moments, updates, old and new


def loss_of(network: Any, training: Training) -> Any:
    """The family's own objective; of a recurrent shape at a fixed depth, all of it with gradient."""
    if "recurrences" not in network.counters:
        return next_token_loss(network)
    depth = jnp.asarray(training.recurrence, jnp.int32)
    return recurrent_loss(network, lambda key, step: depth, training.recurrence)


def batch_of(network: Any, training: Training, seed: int) -> dict[str, Any]:
    """Random tokens, each with the next one as its target."""
    shape = training.batch, training.length + 1
    tokens = np.random.default_rng(seed).integers(0, network.vocab_size, shape).astype(np.int32)
    weights = np.ones((training.batch, training.length), np.float32)
    return jax.device_put({"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights})


def measure_step(training: Training, task: Task) -> dict[str, Any] | None:
    """Seconds of a step of Adam, state and batch on the device; None, and a line, where it does not fit."""
    config, what = with_dtype(training.config, task.sizes.dtype), f"a step of {training.name}"
    network = network_of(config)
    logits = 4 * 4 * training.batch * training.length * network.vocab_size
    depth = training.recurrence
    flops = update_flops(network, training.batch, training.length, depth, depth)
    if not task.fits(STATES * bytes_of(config) + logits, what):
        return None
    if not task.has(4 * flops / products(config.dtype, REPEATS), what):
        return None
    with task.survives(what):
        params = init_params(config, jax.random.key(task.sizes.seed))
        task.saw(params)
        optimizer = optax.adam(1e-4)
        key = jax.random.key(task.sizes.seed)
        state = TrainState.create(params, optimizer, key)
        update, batch = make_train_step(loss_of(network, training), optimizer), batch_of(network, training, 0)
        metrics: dict[str, Any] = {}

        def step() -> Any:
            nonlocal state, metrics
            state, metrics = update(state, None, batch)
            return metrics

        first, second = once(step), once(step)
        seconds = turns({"": step}, task.sizes.passes, lambda: task.left() < second)[""]
        task.passed(len(seconds), what)
        if not bool(metrics["finite"]):
            task.leave(f"the update of {what}", "the loss was not finite")
        rate = products(config.dtype, REPEATS)
        return {
            "shape": training.name,
            "batch": training.batch,
            "length": training.length,
            "recurrence": training.recurrence if "recurrences" in network.counters else None,
            "seconds": seconds,
            "compile_seconds": max(first - second, 0.0),
            "flops": flops,
            "flops_per_second": rate,
            "utilisation": flops / statistics.median(seconds) / rate,
            "utilisation_range": [flops / max(seconds) / rate, flops / min(seconds) / rate],
        }
    return None


def measure(task: Task) -> Result:
    """One row a shape."""
    found = [measure_step(training, own) for training, own in task.each(task.sizes.train)]
    return {"dtype": task.sizes.dtype, "rows": [row for row in found if row is not None]}


def tables(result: Result) -> list[Table]:
    """One line a shape."""
    rows = []
    for row in result["rows"]:
        low, high = row["utilisation_range"]
        positions = row["batch"] * row["length"] / statistics.median(row["seconds"])
        depth = "" if row["recurrence"] is None else f", r = {row['recurrence']}"
        line = [f"{row['shape']}{depth}", f"{row['batch']} x {row['length']}"]
        line += [duration(statistics.median(row["seconds"])), f"{positions:.0f}", f"{row['flops'] / 1e9:.1f}"]
        rows.append([*line, f"{percent(row['utilisation'])} [{percent(low)}, {percent(high)}]"])
    columns = (
        "shape",
        "rows x positions",
        "a step",
        "positions/s",
        "GFLOP",
        "of the product rate [passes' range]",
    )
    return [
        Table(
            f"A step of training, {result['dtype']}, Adam",
            columns,
            rows,
            "The range is that of all passes. Model FLOP utilisation: operations by formula (forward, twice as many "
            "backward, attention over all pairs), over what products of two large square matrices were measured to "
            "do here, not over what a data sheet says.",
        )
    ]


TRAINING = Part("training", "A step of training", 1.0, measure, tables)
