"""A small problem to train on, and a short run: batches that resume, a loss that needs key and step
number.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.objective import Objective, drawn, weighted
from paradec_jax.train import Checkpoint, Log, Preempt, TrainState, adamw, fit, make_train_step

STEPS = 12


class Batches:
    """Resumable batches whose state is bytes; from batch `bad` on, one input is NaN."""

    def __init__(self, bad: int | None = None, delay: float = 0.0, width: int = 3):
        self.position, self.bad, self.delay, self.width = 0, bad, delay, width

    def __next__(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.position)
        inputs = rng.normal(size=(4, self.width)).astype(np.float32)
        if self.bad is not None and self.position >= self.bad:
            inputs[0, 0] = np.nan
        self.position += 1
        time.sleep(self.delay)
        return {"inputs": inputs, "tokens": rng.integers(5, size=(4, 3))}

    def get_state(self) -> bytes:
        return json.dumps(self.position).encode()

    def set_state(self, state: bytes):
        self.position = json.loads(state)


def initial_params(width: int = 3, hidden: int = 5) -> dict:
    w = jax.random.normal(jax.random.key(7), (width, hidden))
    mlp = {"kernel": w.T, "bias": jnp.zeros(width)}
    return {"embedding": w, "mlp": mlp, "norm": {"scale": jnp.ones(width)}}


def sums(params, frozen, batch, key):
    """Noisy denoising regression whose noise needs the key and whose scale needs the step number."""
    x = batch["inputs"] * params["norm"]["scale"]
    noise = jax.random.normal(key, ()) / (1 + batch["step"])
    y = jnp.tanh(x @ params["embedding"]) @ params["mlp"]["kernel"] + params["mlp"]["bias"]
    rows = jnp.mean((y - batch["inputs"] + noise) ** 2, axis=-1)
    return {
        "loss": weighted(rows, batch.get("weights", jnp.ones(len(rows)))),
        "noise": drawn(noise),
    }


loss = Objective(sums)


def hooks(folder: Path | None, *, log: int = 3, save: int = 4, **of_checkpoint) -> list[Any]:
    """A line every three updates and a checkpoint every four, unless told otherwise; none without a
    folder.
    """
    if folder is None:
        return []
    return [
        Log(folder, every=log),
        Checkpoint(folder, every=save, **of_checkpoint),
        Preempt(),
    ]


def train(
    folder: Path | None,
    data=None,
    params=None,
    *,
    objective=loss,
    optimizer=None,
    steps: int = STEPS,
    key: int = 1,
    ema_decay: float | None = 0.9,
    teacher=None,
    use=None,
    of_hooks=None,
    **of_step,
) -> TrainState:
    """Twelve updates, by the hooks of `hooks(folder)` unless others are to be used."""
    optimizer = adamw(1e-2, STEPS, warmup=3, cooldown=4) if optimizer is None else optimizer
    params = initial_params() if params is None else params
    ema = ema_decay is not None
    state = TrainState.create(params, optimizer, jax.random.key(key), ema=ema, teacher=teacher)
    step = make_train_step(objective, optimizer, ema_decay=ema_decay, **of_step)
    use = hooks(folder, **of_hooks or {}) if use is None else use
    return fit(step, state, data or Batches(), steps=steps, hooks=use)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of the log."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses_of(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines_of(folder) if "loss" in line]


def assert_same(a: TrainState, b: TrainState):
    jax.tree.map(
        np.testing.assert_array_equal,
        *(vars(s) | {"key": jax.random.key_data(s.key)} for s in (a, b)),
    )


def python(module: str, code: str, **environment: str) -> subprocess.Popen:
    """A process that runs code with a module of the tests as `t`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", f"import {module} as t; {code}"]
    return subprocess.Popen(command, cwd=Path(__file__).parent, env=environment)
