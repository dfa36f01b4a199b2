"""What several processes do together; run by `launched.py`.

`python on_processes.py FOLDER HEARTBEAT CALLS` with a JSON list of calls, each a list of a function's name and its
arguments; process I leaves the list of what they return in FOLDER/found-I.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from paradec_jax.train.launch import initialize

if __name__ == "__main__":  # before anything asks for a device
    initialize(heartbeat_s=int(sys.argv[2]))

import jax
import numpy as np
from objectives import OBJECTIVES, Batches

import paradec_jax as pd
from paradec_jax.sharding.processes import gathered
from paradec_jax.train import fit

HALF = (1, 2, 2)


class Own(Batches):
    """Batches of the process's own."""

    def __next__(self) -> dict[str, np.ndarray]:
        self.position += 1
        return self.make(self.position + 100 * jax.process_index())


def options_of(name: str, steps: int, mesh: Any, **changes: Any) -> dict[str, Any]:
    one = OBJECTIVES[name]
    options = {
        "loss": one.loss(),
        "params": one.params(),
        "data": Batches(one.batch),
        "frozen": one.frozen(),
        "teacher": one.teacher(),
        "optimizer": one.optimizer("adamw", steps),
        "steps": steps,
        "key": jax.random.key(3),
        "log_every": 1,
        "progress": False,
        "mesh": None if mesh is None else pd.make_mesh(*mesh),
    }
    return options | changes


def train(name: str, steps: int, mesh: Any, folder: str | None) -> dict[str, Any]:
    """Losses of a run, and its last parameters."""
    seen: list[float] = []
    state = fit(**options_of(name, steps, mesh, folder=folder, writers=[lambda step, line: keep(seen, line)]))
    params = [np.asarray(x).tolist() for x in jax.tree.leaves(gathered(state.params))]
    return {"losses": seen, "params": params, "step": int(state.step)}


def keep(seen: list[float], line: Any) -> None:
    if "loss" in line:
        seen.append(line["loss"])


def refused(name: str) -> dict[str, str]:
    """What `fit` says to processes that differ, by what differs."""
    one, mine = OBJECTIVES[name], jax.process_index()
    shifted = jax.tree.map(lambda x: x + mine, one.params())
    cases: dict[str, dict[str, Any]] = {
        "no mesh": {"mesh": None},
        "mesh of its own": {"mesh": pd.make_mesh(1, 2, 1, devices=jax.local_devices())},
        "steps": {"steps": 2 + mine},
        "log": {"log_every": 1 + mine},
        "data": {"data": Own(one.batch)},
        "parameters": {"params": shifted},
        "folder": {"folder": "/proc/none"},
    }
    found = {}
    for case, changes in cases.items():
        try:
            fit(**options_of(name, 2, HALF) | changes)
            found[case] = ""
        except (ValueError, OSError) as error:
            found[case] = str(error)
    return found


if __name__ == "__main__":
    folder, mine = Path(sys.argv[1]), jax.process_index()
    (folder / f"pid-{mine}").write_text(str(os.getpid()))
    found = [globals()[name](*arguments) for name, *arguments in json.loads(sys.argv[3])]
    (folder / f"found-{mine}.json").write_text(json.dumps(found))
