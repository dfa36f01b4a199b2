"""One thing done with weights, in a process of its own; `weights_memory` starts it.

`python -m experiments.systems.weights_memory_child KIND SHAPE FOLDER` prints a JSON object: the most memory
above that of the process while it was idle with everything imported, and what it keeps.
"""

import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paradec_jax as pd
from convert.cli import main as convert
from experiments.systems.memory import reading
from paradec_jax.config import CausalConfig, TokenSpec
from paradec_jax.disk.tensors import Lazy
from paradec_jax.families import parameter_shapes
from paradec_jax.store import Model
from paradec_jax.train import fit

OWN, OTHERS, AGAIN, RUN = "model", "hugging-face", "again", "run"  # folders
PERIOD = 0.005  # seconds between two looks


class Watch:
    """The most that a reading came to while a block ran; `held`, of bytes of JAX's arrays, only on request."""

    def __init__(self, held: bool = False) -> None:
        self._held, self._done = held, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.anonymous, self.arrays = 0.0, 0

    def __enter__(self) -> "Watch":
        gc.collect()
        self.idle = {name: reading(name) for name in ("VmHWM", "VmRSS", "RssAnon")}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.most = reading("VmHWM")

    def _look(self) -> None:
        while not self._done.is_set():
            self.anonymous = max(self.anonymous, reading("RssAnon"))
            if self._held:
                self.arrays = max(self.arrays, sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted()))
            time.sleep(PERIOD)

    def told(self, kept: float = 0.0) -> dict[str, Any]:
        """MiB: the peak above idle, of anonymous pages alone, and what was kept of it."""
        return {
            "idle": self.idle["VmRSS"],
            "above_idle": self.most - self.idle["VmRSS"],
            "anonymous_above_idle": self.anonymous - self.idle["RssAnon"],
            "kept": kept,
        }


def make(config: CausalConfig, folder: Path) -> None:
    """A model folder of random weights, made one parameter at a time."""
    shapes, treedef = jax.tree.flatten(parameter_shapes(config))

    def drawn(seed: int, leaf: Any) -> Lazy:
        def read(place: Any) -> np.ndarray:
            return np.random.default_rng(seed).standard_normal(leaf.shape, np.float32)[place]

        return Lazy(leaf.shape, leaf.dtype, read)

    params = jax.tree.unflatten(treedef, [drawn(i, leaf) for i, leaf in enumerate(shapes)])
    pd.save(folder / OWN, Model(config, params, TokenSpec()))


def command(*words: str | Path) -> dict[str, Any]:
    """A converter's command."""
    with Watch() as watch:
        if code := convert([str(word) for word in words]):
            raise SystemExit(code)
    return watch.told()


def loading(folder: Path, mesh: Any) -> dict[str, Any]:
    """A load on the default device or on a mesh; what is kept are the bytes of all devices' slices."""
    jnp.zeros(()).block_until_ready()
    with Watch() as watch:
        leaves = jax.tree.leaves(pd.load(folder / OWN, mesh=mesh).params)
        jax.block_until_ready(leaves)
    kept = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return watch.told(kept / 2**20)


class Batches:
    """The same batch for ever, with a place in it to save."""

    def __next__(self) -> dict[str, np.ndarray]:
        return {"x": np.ones((1,), np.float32)}

    def get_state(self) -> bytes:
        """Nothing to tell."""
        return b"0"

    def set_state(self, state: bytes) -> None:
        """Nothing to do."""


def squares(params: Any, frozen: Any, batch: Any, key: Any) -> tuple[Any, dict[str, Any]]:
    """A loss."""
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params)), {}


def resuming(config: CausalConfig, folder: Path) -> dict[str, Any]:
    """A finished run, begun again: what is restored are parameters, their average and two moments."""
    # Not by JAX's own initialisation, which leaves pages behind that a restore would use uncounted.
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.5, x.dtype), parameter_shapes(config))
    state = 4 * sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20
    options: dict[str, Any] = {
        "optimizer": optax.adam(1e-3),
        "steps": 1,
        "key": jax.random.key(0),
        "ema_decay": 0.9,
    }
    jax.block_until_ready(params)
    with Watch(held=True) as watch:
        fit(squares, params, Batches(), folder=folder / RUN, progress=False, donate=True, **options)
    told = watch.told(state) | {"parameters": state / 4, "arrays": watch.arrays / 2**20}
    pages = (told["above_idle"] + state / 4) / state
    return told | {"states": watch.arrays / 2**20 / state, "states_of_pages": pages}


def main(kind: str, shape: str, folder: Path) -> Any:
    """Does it."""
    config = CausalConfig(**json.loads(shape))
    kinds: dict[str, Callable[[], Any]] = {
        "make": lambda: make(config, folder),
        "export": lambda: command("export", folder / OWN, folder / OTHERS),
        "import": lambda: command("import", folder / OTHERS, folder / AGAIN),
        "check": lambda: pd.store.fingerprint(folder / OWN) == pd.store.fingerprint(folder / AGAIN),
        "load": lambda: loading(folder, None),
        "sharded load": lambda: loading(folder, pd.make_mesh(fsdp=2, tensor=2)),
        "train": lambda: resuming(config, folder) and None,
        "resume": lambda: resuming(config, folder),
    }
    return kinds[kind]()


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
