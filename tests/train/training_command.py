"""A training as a command, which faults befall: on one device, or on several that hold parts of its
parameters.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from noisy_regression import STEPS, Batches, initial_params, train

import paradec_jax as pd
from paradec_jax.train import NoneReadable, NonFiniteLoss, TrainState, adamw
from paradec_jax.train.checkpoint import restore

LONG = 60  # seconds for a process to begin
FULL = "ballast"
# of the problem on several devices: its shards are too large to lie within metadata
WIDTH, HIDDEN = (
    8,
    512,
)
# Without the second, collectives of simulated devices may wait for each other for ever in jaxlib
# 0.10.
FLAGS = "--xla_force_host_platform_device_count={} --xla_cpu_enable_concurrency_optimized_scheduler=false"


class Filling(Batches):
    """Takes all the room of a file system while batch `at` is made, once there is a checkpoint of
    update 4.
    """

    def __init__(self, folder: Path, at: int):
        super().__init__()
        self.folder, self.at = folder, at

    def __next__(self) -> dict[str, np.ndarray]:
        if self.position == self.at:
            while not (self.folder / "run" / "checkpoints" / "4").exists():
                time.sleep(0.01)
            with contextlib.suppress(OSError), (self.folder / FULL).open("wb", buffering=0) as file:
                while file.write(b"\0" * 4096):
                    pass
        return super().__next__()


class Ending(Batches):
    """Batches of which the one numbered `end_at` asks the process to end."""

    end_at: int | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        batch = super().__next__()
        if self.position == self.end_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch


def placed(devices: int) -> dict:
    """Parameters split over so many devices."""
    mesh = pd.make_mesh(1, -1, 1, devices=jax.devices()[:devices])
    split = {"embedding": jax.P("fsdp"), "kernel": jax.P(None, "fsdp")}
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(
            x, jax.NamedSharding(mesh, split.get(path[-1].key, jax.P()))
        ),
        initial_params(WIDTH, HIDDEN),
    )


def command(
    folder: str,
    steps: int = STEPS,
    delay: float = 0.1,
    full_at: int = 0,
    devices: int = 0,
    end_at: int | None = None,
):
    """A training as a command: errors of its user are one sentence."""
    try:
        if full_at:
            data: Filling | Ending = Filling(Path(folder).parent, full_at)
        else:
            data = Ending(delay=delay, width=WIDTH if devices else 3)
            data.end_at = end_at
        every = {"save": 1 if delay else 4, "log": 1}
        train(Path(folder), data, placed(devices) if devices else None, steps=steps, of_hooks=every)
    except (ValueError, OSError, NonFiniteLoss, NoneReadable) as error:
        raise SystemExit(str(error)) from None


def simulated(devices: int) -> dict[str, str]:
    """The environment of a process with so many devices; all of a test's have as many, of which
    each may use some.
    """
    told = {"PYTHONPATH": os.pathsep.join(sys.path)}
    if devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS.format(devices)}"
        told |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64"}
    return os.environ | told


@contextlib.contextmanager
def started(folder: Path, **options):
    """The command as a process, killed at the end of the block if it lives, with all it says in
    `said`.
    """
    with said_of(folder).open("w") as said:
        code = f"import os, sys; os.dup2({said.fileno()}, 2); t.command({str(folder)!r}, **{options!r})"
        os.set_inheritable(said.fileno(), True)
        process = subprocess.Popen(
            [sys.executable, "-c", f"import training_command as t; {code}"],
            cwd=Path(__file__).parent,
            env=simulated(options.get("devices", 0)),
            pass_fds=(said.fileno(),),
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def ended(folder: Path, **options) -> int:
    with started(folder, **options) as process:
        return process.wait(LONG)


def said_of(folder: Path) -> Path:
    """A file beside the folder's parent, which may be a file system that is full."""
    return folder.parent.with_name(f"{folder.parent.name}.said")


def told(folder: Path) -> list[str]:
    """What the command said, without the warnings of libraries."""
    lines = said_of(folder).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("WARNING", "I0", "W0", "E0"))]


def wait_for(process: subprocess.Popen, ready: Callable[[], bool]) -> bool:
    """Waits until `ready()`; False where the process ended before."""
    begun = time.monotonic()
    while not ready():
        if process.poll() is not None:
            return False
        assert time.monotonic() - begun < LONG
        time.sleep(0.005)
    return True


def end_of(folder: Path) -> TrainState:
    """The state of the newest checkpoint of a run on several devices, on one."""
    optimizer = adamw(1e-2, STEPS, warmup=3, cooldown=4)
    state = TrainState.create(initial_params(WIDTH, HIDDEN), optimizer, jax.random.key(1), ema=True)
    return restore(folder / "checkpoints", state)[0]
