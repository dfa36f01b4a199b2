"""What several processes do together; run by `launched.py`.

`python on_processes.py FOLDER HEARTBEAT CALLS` with a JSON list of calls, each a list of a
function's name and its arguments; process I leaves the list of what they return in
FOLDER/found-I.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from paradec_jax.train.processes import initialize, leave

if __name__ == "__main__":  # before anything asks for a device
    initialize(heartbeat_s=int(sys.argv[2]))

import jax
import numpy as np
from loss_table import LENGTH, OBJECTIVES, ROWS, Batches, fitted
from on_devices import PROMPTS, plain
from stubs import tiny_causal, tiny_causal_params, tiny_request

import paradec_jax as pd
from paradec_jax.data.endless import Endless
from paradec_jax.data.text import WindowMaker
from paradec_jax.sharding.processes import gathered, put
from paradec_jax.train import Checkpoint, Hook, Log, Preempt, Rounds

HALF = (1, 2, 2)


class Own(Batches):
    """Batches of the process's own."""

    def __next__(self) -> dict[str, np.ndarray]:
        self.position += 1
        return self.make(self.position + 100 * jax.process_index())


class Broken(Batches):
    """Batches that process 1 cannot make."""

    def __next__(self) -> dict[str, np.ndarray]:
        if jax.process_index() == 1:
            raise KeyError("rows")
        return super().__next__()


class Seen(Hook):
    """Keeps every line, on process 0."""

    def __init__(self):
        self.lines: list[Any] = []

    def write(self, step: int, values):
        self.lines.append(values)


class Windows:
    """Windows of a text, and which rows of each batch were made."""

    def __init__(self):
        self.maker, self.made = (
            WindowMaker(np.arange(3, 30, dtype=np.int32), 5, ROWS, LENGTH, bos=1),
            [],
        )

    def __call__(self, index: int):
        return self.maker(index)

    def part(self, index: int, share):
        part = self.maker.part(index, share)
        self.made.append((part.first, part.first + len(part.rows["tokens"])))
        return part


def train(
    name: str,
    steps: int,
    mesh,
    text: bool = False,
    optimizer: str = "adamw",
    rounds: int | None = None,
    data=None,
    folder: str | None = None,
    ema_decay: float | None = None,
) -> dict[str, Any]:
    """Losses of a run, its last parameters, and the rows that this process made."""
    seen, windows = Seen(), Windows()
    hooks = [Log(folder, every=1), seen]
    if folder is not None:
        hooks += [Checkpoint(folder, every=1), Preempt()]
    state = fitted(
        name,
        steps,
        None if mesh is None else pd.make_mesh(*mesh),
        data=Endless(windows, 0, "digest") if text else data,
        optimizer=optimizer,
        ema_decay=ema_decay,
        rounds=None if rounds is None else Rounds(rounds, reset_optimizer=True),
        hooks=hooks,
    )
    params = [np.asarray(x).tolist() for x in jax.tree.leaves(gathered(state.params))]
    losses = [line["loss"] for line in seen.lines if "loss" in line]
    rates = [line["tokens_per_s"] * line["step_s"] for line in seen.lines if "tokens_per_s" in line]
    return {"losses": losses, "params": params, "made": windows.made, "tokens": rates}


class Watched(Batches):
    """Batches that come slowly; with the one numbered `end_at` the last process asks itself to end."""

    def __init__(self, make, delay: float, end_at: int | None):
        super().__init__(make)
        self.delay, self.end_at = delay, end_at

    def __next__(self) -> dict[str, np.ndarray]:
        time.sleep(self.delay)
        batch = super().__next__()
        if self.position == self.end_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch


def command(
    folder: str, steps: int, delay: float = 0.0, end_at: int | None = None
) -> dict[str, Any]:
    """A training as a command, whose user reads one sentence of what goes wrong."""
    data = Watched(OBJECTIVES["next token"].batch, delay, end_at)
    try:
        return train("next token", steps, HALF, data=data, folder=folder, ema_decay=0.9)
    except (ValueError, OSError) as error:
        leave(error)


def refused(name: str) -> dict[str, str]:
    """What `fit` says to processes that differ, by what differs."""
    one, mine = OBJECTIVES[name], jax.process_index()
    mesh = pd.make_mesh(*HALF)
    calls = {
        "no mesh": lambda: fitted(name, 2, None),
        "mesh of its own": lambda: fitted(
            name, 2, pd.make_mesh(1, 2, 1, devices=jax.local_devices())
        ),
        "steps": lambda: fitted(name, 2 + mine, mesh),
        "batches": lambda: fitted(name, 2, mesh, data=Own(one.batch)),
        "parameters": lambda: fitted(
            name, 2, mesh, params=jax.tree.map(lambda x: x + mine, one.params())
        ),
        "broken": lambda: fitted(name, 2, mesh, data=Broken(one.batch)),
    }
    found = {}
    for case, function in calls.items():
        try:
            function()
            found[case] = ""
        except (ValueError, OSError, KeyError) as error:
            found[case] = str(error)
    return found


def decode(drivers: list[str]) -> dict[str, Any]:
    """Whether drivers of `Jacobi` give on all devices what they give on one, by own requests and by
    a global one.
    """
    mesh, request = pd.make_mesh(*HALF), tiny_request(6, prompts=PROMPTS)
    decoder, params = pd.Jacobi(tiny_causal(), 20, block=4), tiny_causal_params()
    one = plain(pd.run(decoder, params, request))
    placed = put(params, pd.shardings(params, mesh))
    rows = put(request, pd.row_shardings(request, mesh))
    calls = {
        "run": lambda: pd.run(decoder, placed, request),
        "run, by rows": lambda: pd.run(decoder, placed, rows),
        "trace": lambda: pd.trace(decoder, placed, request, n=8)[0],
        "serve": lambda: pd.serve(decoder, placed, rows, rows=2, every=2).decoded,
        "stream": lambda: gathered(
            decoder.finish([state for state, _ in pd.stream(decoder, placed, rows)][-1])
        ),
    }
    found = {name: plain(calls[name]()) == one for name in drivers}
    return found


if __name__ == "__main__":
    folder, mine = Path(sys.argv[1]), jax.process_index()
    (folder / f"pid-{mine}").write_text(str(os.getpid()))
    found = [globals()[name](*arguments) for name, *arguments in json.loads(sys.argv[3])]
    (folder / f"found-{mine}.json").write_text(json.dumps(found))
