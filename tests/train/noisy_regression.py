"""A small problem to train on, and a short run: batches that resume, a loss that needs key and step number."""

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
from paradec_jax.train import TrainState, adamw, fit

STEPS = 12


class Batches:
    """Resumable batches whose state is bytes; from batch `bad` on, one input is NaN."""

    def __init__(self, bad: int | None = None, delay: float = 0.0, width: int = 3) -> None:
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

    def set_state(self, state: bytes) -> None:
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
    return {"loss": weighted(rows, batch.get("weights", jnp.ones(len(rows)))), "noise": drawn(noise)}


loss = Objective(sums)


def train(folder: Path | None, data: Batches | None = None, params: Any = None, **changes) -> TrainState:
    """Twelve updates, a checkpoint every four, unless told otherwise."""
    options = {
        "optimizer": adamw(1e-2, STEPS, warmup=3, cooldown=4),
        "steps": STEPS,
        "key": jax.random.key(1),
        "checkpoint_every": 4,
        "log_every": 3,
        "ema_decay": 0.9,
        "progress": False,
    }
    params = initial_params() if params is None else params
    return fit(loss, params, data or Batches(), folder=folder, **options | changes)


def python(module: str, code: str, **environment: str) -> subprocess.Popen:
    """A process that runs code with a module of the tests as `t`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", f"import {module} as t; {code}"]
    return subprocess.Popen(command, cwd=Path(__file__).parent, env=environment)
