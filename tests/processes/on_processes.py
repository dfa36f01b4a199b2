"""What several processes do together; run by `launched.py`.

`python on_processes.py FOLDER HEARTBEAT CALLS` with a JSON list of calls, each a list of a function's name and its
arguments; process I leaves the list of what they return in FOLDER/found-I.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from paradec_jax.train.launch import initialize, leave

if __name__ == "__main__":  # before anything asks for a device
    initialize(heartbeat_s=int(sys.argv[2]))

import jax
import numpy as np
import orbax.checkpoint as ocp
from objectives import LENGTH, OBJECTIVES, ROWS, Batches, difference
from on_devices import PROMPTS, bound, plain
from stubs import tiny_causal, tiny_causal_params, tiny_network, tiny_params, tiny_request

import paradec_jax as pd
from paradec_jax.data.endless import Endless
from paradec_jax.data.text import WindowMaker
from paradec_jax.sharding.processes import gathered, put
from paradec_jax.train import Rounds, fit
from paradec_jax.train.agree import wait_for_all

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


class Windows:
    """Windows of a text, and which rows of each batch were made."""

    def __init__(self) -> None:
        self.maker, self.made = WindowMaker(np.arange(3, 30, dtype=np.int32), 5, ROWS, LENGTH, bos=1), []

    def __call__(self, index: int) -> Any:
        return self.maker(index)

    def part(self, index: int, share: Any) -> Any:
        part = self.maker.part(index, share)
        self.made.append((part.first, part.first + len(part.rows["tokens"])))
        return part


def train(
    name: str,
    steps: int,
    mesh: Any,
    text: bool = False,
    optimizer: str = "adamw",
    rounds: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Losses of a run, its last parameters, and the rows that this process made."""
    seen: list[Any] = []
    windows = Windows()
    changes["rounds"] = None if rounds is None else Rounds(rounds, reset_optimizer=True)
    changes["optimizer"] = OBJECTIVES[name].optimizer(optimizer, steps)
    if text:
        changes["data"] = Endless(windows, 0, "digest")
    options = options_of(name, steps, mesh, writers=[lambda step, line: seen.append(line)], **changes)
    state = fit(**options)
    params = [np.asarray(x).tolist() for x in jax.tree.leaves(gathered(state.params))]
    losses = [line["loss"] for line in seen if "loss" in line]
    rates = [line["tokens_per_s"] * line["step_s"] for line in seen if "tokens_per_s" in line]
    return {"losses": losses, "params": params, "made": windows.made, "tokens": rates}


class Watched(Batches):
    """Batches that come slowly; with the one numbered `end_at` the last process asks itself to end."""

    def __init__(self, make: Any, delay: float, end_at: int | None) -> None:
        super().__init__(make)
        self.delay, self.end_at = delay, end_at

    def __next__(self) -> dict[str, np.ndarray]:
        time.sleep(self.delay)
        batch = super().__next__()
        if self.position == self.end_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch


def command(folder: str, steps: int, delay: float = 0.0, end_at: int | None = None) -> dict[str, Any]:
    """A training as a command, whose user reads one sentence of what goes wrong."""
    data = Watched(OBJECTIVES["next token"].batch, delay, end_at)
    try:
        return train("next token", steps, HALF, data=data, folder=folder, checkpoint_every=1, ema_decay=0.9)
    except (ValueError, OSError) as error:
        leave(error)


def unreadable(folder: str, handler: str, alters: bool) -> dict[str, Any]:
    """A run that goes on where the reader of process 1, a class of Orbax, fails once or gives another key."""
    first = {"folder": folder, "checkpoint_every": 1, "data": Batches(OBJECTIVES["next token"].batch)}
    before = train("next token", 3, HALF, **first)["losses"]
    kind = getattr(ocp, handler)
    read, failed = kind.restore, []

    def restore(self: Any, directory: Any, *arguments: Any, **options: Any) -> Any:
        if jax.process_index() == 1 and not failed and directory.name in ("state", "run"):
            failed.append(True)
            if not alters:
                raise OSError("stale file handle")
            tree = read(self, directory, *arguments, **options)
            return tree | {"key": tree["key"] + 1}
        return read(self, directory, *arguments, **options)

    kind.restore = restore
    try:
        again = first | {"data": Batches(OBJECTIVES["next token"].batch), "allow": ("steps", "optimizer")}
        return train("next token", 4, HALF, **again) | {"before": before, "failed": len(failed)}
    finally:
        kind.restore = read


def refused(name: str) -> dict[str, str]:
    """What `fit` says to processes that differ, by what differs."""
    one, mine = OBJECTIVES[name], jax.process_index()
    shifted = jax.tree.map(lambda x: x + mine, one.params())
    cases: dict[str, dict[str, Any]] = {
        "no mesh": {"mesh": None},
        "mesh of its own": {"mesh": pd.make_mesh(1, 2, 1, devices=jax.local_devices())},
        "steps": {"steps": 2 + mine},
        "log": {"log_every": 1 + mine},
        "batches": {"data": Own(one.batch)},
        "parameters": {"params": shifted},
        "broken": {"data": Broken(one.batch)},
        "profile": {"profile": (3, 1) if mine else None},
        "folder": {"folder": "/proc/none"},
    }
    found = {}
    for case, changes in cases.items():
        try:
            fit(**options_of(name, 2, HALF) | changes)
            found[case] = ""
        except (ValueError, OSError, KeyError) as error:
            found[case] = str(error)
    return found


class Drifting(Batches):
    """Batches whose second is each process's own; process 1 may be unable to go back to where it stood."""

    def __init__(self, make: Any, drift: bool = True, lost: bool = False) -> None:
        super().__init__(make)
        self.drift, self.lost = drift, lost

    def __next__(self) -> dict[str, np.ndarray]:
        self.position += 1
        batch = self.make(self.position + 100 * jax.process_index() * (self.drift and self.position == 2))
        return {name: x[:3] for name, x in batch.items()}  # which do not divide over the devices

    def set_state(self, state: int) -> None:
        if self.lost and state and jax.process_index() == 1:
            raise FileNotFoundError("shard-1 is gone")
        super().set_state(state)


def unlucky(state: Any) -> dict[str, float]:
    """An evaluation that one process cannot do."""
    if jax.process_index() == 1:
        raise KeyError("problems")
    return {"loss": 1.0}


def refused_later(name: str, folder: str) -> dict[str, str]:
    """What `fit` says where a folder is not one, and where one process alone fails after the first update."""
    batch, copies = OBJECTIVES[name].batch, pd.make_mesh(2, 1, 2)
    run = {"folder": f"{folder}/run", "checkpoint_every": 1}
    cases: dict[str, dict[str, Any]] = {
        "batch": {"data": Drifting(batch), **run},
        "drift": {"data": Drifting(batch), "folder": f"{folder}/drift", "mesh": copies},
        "data": {"data": Drifting(batch, lost=True), **run},
        "evaluation": {"data": Drifting(batch, drift=False), "evaluate": unlucky, "evaluate_every": 2, **run},
        "elsewhere": {"folder": "run"},
        "nowhere": {"folder": "away"},
    }
    own, found = Path(folder) / f"own-{jax.process_index()}", {}
    own.mkdir()
    if jax.process_index() == 1:
        (own / "run").mkdir()
    os.chdir(own)
    for case, changes in cases.items():
        try:
            fit(**options_of(name, 3, (1, 4, 1)) | changes)
            found[case] = ""
        except (ValueError, OSError, KeyError) as error:
            found[case] = str(error)
    return found


def decode(drivers: list[str]) -> dict[str, Any]:
    """Whether drivers of `Jacobi` give on all devices what they give on one, by own requests and by a global one."""
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


def decode_table(names: list[str], meshes: list[list[int]]) -> dict[str, Any]:
    """What decoders of the laws' table give otherwise on all devices than on one, on each mesh.

    Each has parameters that lie on the mesh and the rows of a global request; stubs, which have none, the rows alone.
    """
    from decoders import ROWS as TABLE

    found: dict[str, Any] = {}
    for name in names:
        decoder, params, real = bound(TABLE[name])
        request, knobs = tiny_request(6, prompts=PROMPTS), TABLE[name].values()
        one = plain(pd.run(decoder, params, request, knobs))
        found[name] = {"real": real}
        for sizes in meshes:
            mesh = pd.make_mesh(*sizes)
            placed = None if params is None else decoder.prepare(put(params, pd.shardings(params, mesh)))
            rows = put(request, pd.row_shardings(request, mesh))
            other = plain(pd.run(decoder, placed, rows, knobs))
            found[name][str(sizes)] = {key: [one[key], other[key]] for key in one if one[key] != other[key]}
    return found


def gradient() -> float:
    """How far the gradient of a rollout on all devices is from that on one."""
    decoder = pd.SoftWavefront(tiny_network(), 20, window=4, inner_recurrence=2)
    request, params, mesh = tiny_request(6, prompts=PROMPTS), tiny_params(), pd.make_mesh(*HALF)

    def loss(params: Any) -> Any:
        _, records = pd.rollout(decoder, params, request, n=6, record=squares)
        return sum(jax.numpy.sum(x) for x in jax.tree.leaves(records))

    one = jax.jit(jax.grad(loss))(params)
    placed = put(params, pd.shardings(params, mesh))
    with jax.set_mesh(mesh):
        other = gathered(jax.jit(jax.grad(loss))(placed))
    return difference(other, one)[0]


def squares(state: Any, info: Any) -> Any:
    del info
    floats = [x for x in jax.tree.leaves(state) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
    return [jax.numpy.sum(x**2) for x in floats]


def generate() -> dict[str, bool]:
    """Whether a bundled model writes the same on all devices, with and without stop strings."""
    mesh, prompts = pd.make_mesh(*HALF), ["Ana has 3 apples.", "Ben has 5 pears and eats 2."]
    model, found = pd.load("tiny-causal"), {}
    for name, stop in (("plain", ()), ("stop", (".",))):
        options = {"max_new_tokens": 12, "samples": 2, "stop_strings": stop}
        one = pd.generate(model, prompts, pd.AutoRegressive(), **options)
        other = pd.generate(model, prompts, pd.AutoRegressive(), mesh=mesh, **options)
        found[name] = (other.text, other.tokens, other.reasons) == (one.text, one.tokens, one.reasons)
    return found


def export(seconds: float) -> float:
    """Seconds until process 0 has done what takes it so many."""
    begun = time.monotonic()
    if jax.process_index() == 0:
        time.sleep(seconds)
    wait_for_all("export")
    return time.monotonic() - begun


if __name__ == "__main__":
    folder, mine = Path(sys.argv[1]), jax.process_index()
    (folder / f"pid-{mine}").write_text(str(os.getpid()))
    found = [globals()[name](*arguments) for name, *arguments in json.loads(sys.argv[3])]
    (folder / f"found-{mine}.json").write_text(json.dumps(found))
