"""Checkpoints of a run: Orbax, asynchronous, atomic, verified when read."""

import contextlib
import json
import logging
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from paradec_jax import facts
from paradec_jax.io import atomic_write_text, hold, holder_of, one_sentence, read_object
from paradec_jax.objective import Metrics
from paradec_jax.train.identity import check_allowed, checksums, difference
from paradec_jax.train.loop import Call, Hook
from paradec_jax.train.processes import PeerLost, all_or_none, check_same
from paradec_jax.train.step import TrainState

NEWEST = 2  # checkpoints that stay


class SaveFailed(OSError):
    """A checkpoint could not be written, for want of room as a rule; those before it stay."""


class NoneReadable(RuntimeError):
    """A folder has checkpoints, and none of them can be read."""


class Checkpoint(Hook):
    """Saves the state every so many updates and after the last one; a later call goes on from the
    newest.

    FOLDER/checkpoints/STEP appears whole or not at all. FOLDER/run.json says what the run is
    (`identity_of`) and where it was computed. Another run is refused, and so is a second writer
    (FOLDER/.holder is locked). A checkpoint that cannot be read, or has other checksums than when
    it was saved, is passed over and renamed `STEP.unreadable`.

    Args:
      folder: folder of the run, on a local or mounted file system that all processes share; made if
        missing.
      every: updates between checkpoints, of which the `NEWEST` stay.
      allow: names of `identity.NAMES`, the parts in which the call may differ from the run that it
        goes on with.
    """

    _hook: Any = None  # for errors that nobody can catch, before the first one

    def __init__(self, folder: str | Path, *, every: int = 1000, allow: Sequence[str] = ()) -> None:
        check_allowed(allow)
        self.folder, self.every = Path(folder).resolve(), every
        self.allow, self._places = tuple(allow), self.folder / "checkpoints"
        self._manager: Any = None
        self._held = contextlib.ExitStack()

    def begin(self, run: Call, state: TrainState) -> TrainState:
        primary, computed = jax.process_index() == 0, []
        with all_or_none():
            if primary:
                # Its former holder may have saved until now.
                self._held.enter_context(hold(self.folder))
                computed = (
                    compare(self.folder, run.identity, self.allow) if steps_in(self._places) else []
                )
        steps = steps_in(self._places)
        check_same({"the folder": [holder_of(self.folder), steps[-1:]]}, "all must share it")
        if steps:
            state, data_state = restore(self._places, state)
            run.saved = self._places / str(state.step)
            with all_or_none():
                run.data.set_state(data_state)
                for step in steps:
                    if primary and step > int(state.step):
                        aside = self._places / f"{step}.unreadable"
                        shutil.rmtree(aside, ignore_errors=True)
                        (self._places / str(step)).rename(aside)
        with all_or_none():
            if primary:
                mesh = None if run.mesh is None else dict(run.mesh.shape)
                here = {"from_update": int(state.step) + 1, "mesh": mesh, **facts.facts()}
                text = json.dumps(
                    {"identity": run.identity, "computed": [*computed, here]}, indent=2
                )
                atomic_write_text(self.folder / "run.json", text + "\n")
        # Where it cannot write, it says so at length, and the error below once. Callbacks come
        # after the close too.
        if Checkpoint._hook is None:
            Checkpoint._hook = hook = sys.unraisablehook
            sys.unraisablehook = lambda error: (
                "loop is closed" in str(error.exc_value) or hook(error)
            )
            for name in ("absl", "asyncio"):
                logging.getLogger(name).addFilter(
                    lambda line: "orbax" not in f"{line.pathname} {line.msg}"
                )
        options = ocp.CheckpointManagerOptions(max_to_keep=NEWEST, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(
            self._places, options=options, item_names=("state", "run")
        )
        return super().begin(run, state)

    def after(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        if step % self.every == 0 or step == self.run.steps:
            self._save(step, state)
        return False

    def end(self, step: int, state: TrainState) -> None:
        if self.run.saved != self._places / str(step):
            self._save(step, state)
        with self._saving():
            self._manager.wait_until_finished()

    def close(self) -> None:
        with self._held:
            if self._manager is not None:
                with self._saving():
                    self._manager.close()
        self._manager = None

    def _save(self, step: int, state: TrainState) -> None:
        self.run.check()
        # the log's means end here, so that a resumed run writes the same lines
        self.run.write(step, {})
        tree, place = to_arrays(state), self.run.data.get_state()
        data = {"bytes": place.decode("latin-1")} if isinstance(place, bytes) else {"json": place}
        body = {"data": data, "arrays": checksums(tree)}
        # Copies of arrays on several processes drift apart where these train on different batches.
        check_same(body, f"update {step} is not saved; all must train on the same batches")
        document = ocp.args.JsonSave({"crc32": _crc32(body), "body": body})
        with self._saving():
            args = ocp.args.Composite(state=ocp.args.StandardSave(tree), run=document)
            self._manager.save(step, args=args)
        self.run.saved = self._places / str(step)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Says in one sentence what went wrong: Orbax raises errors of many kinds, some of many
        lines.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                raise  # another process is gone
            reason = (
                "no space left on device"
                if "No space left" in str(error)
                else one_sentence(error, 120)
            )
            raise SaveFailed(
                f"a checkpoint could not be written to {self.folder} ({reason}); those before it stay, and the same "
                "command goes on from them"
            ) from error


def restore(folder: Path, state: TrainState) -> tuple[TrainState, Any]:
    """The newest state in a folder that can be read, and the data state saved with it; raises
    NoneReadable.

    Arrays take the places of those of `state`, which are given away, so that there is never a
    second state in memory.
    """
    kind, tree = jax.random.key_impl(state.key), to_arrays(state)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    for x in jax.tree.leaves((state, tree)):
        x.delete()
    reasons = []
    for step in reversed(steps_in(folder)):
        place = folder / str(step)
        try:
            with all_or_none():  # what one process cannot read, the others do not wait for
                body, tree = read(place, target)
            with all_or_none():
                if checksums(tree) != body["arrays"]:
                    raise OSError("arrays have other checksums than when they were saved")
        except PeerLost:
            raise
        except Exception as error:
            tree = {}  # before the next one is read
            reasons.append(f"{place}: {type(error).__name__}: {one_sentence(error)}")
            warnings.warn(f"cannot read checkpoint {reasons[-1]}", RuntimeWarning, stacklevel=2)
            continue
        data = body["data"]
        data_state = data["bytes"].encode("latin-1") if "bytes" in data else data["json"]
        key = jax.random.wrap_key_data(tree.pop("key"), impl=kind)
        return TrainState(**({"ema": None} | tree), key=key), data_state
    raise NoneReadable(f"none of the checkpoints in {folder} can be read:\n" + "\n".join(reasons))


def read(place: Path, target: Any) -> tuple[Any, Any]:
    """JSON document and arrays of a checkpoint.

    By Orbax's handlers, not by its manager, whose barriers would wait for ever for a process that
    cannot read.
    """
    run = ocp.JsonCheckpointHandler().restore(place / "run", args=ocp.args.JsonRestore())
    if run["crc32"] != _crc32(run["body"]):
        raise OSError("its JSON document has another checksum than when it was saved")
    # Of what is read and not yet placed there is at most one array, or as much as the largest one
    # takes.
    most = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(target)) + 4096
    handler = ocp.StandardCheckpointHandler(restore_concurrent_gb=most / 1e9)  # type: ignore[arg-type]
    return run["body"], handler.restore(place / "state", args=ocp.args.StandardRestore(target))


def _crc32(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def steps_in(folder: Path) -> list[int]:
    """Updates of the checkpoints in a folder, ascending."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def to_arrays(state: TrainState) -> dict[str, Any]:
    """The arrays of a state by the names of its fields, its key as words."""
    arrays = {name: x for name, x in vars(state).items() if x is not None}
    return arrays | {"key": jax.random.key_data(state.key)}


def compare(folder: Path, identity: dict[str, Any], allow: Sequence[str]) -> list[dict[str, Any]]:
    """Where the run of a folder was computed so far; raises ValueError where it is another run."""
    begun = read_object(folder / "run.json")
    if not {"identity", "computed"} <= begun.keys():
        raise ValueError(
            f"{folder}/run.json is broken or of an earlier version: choose another folder"
        )
    before = begun["identity"]
    names = [name for name in identity if before.get(name) != identity[name] and name not in allow]
    if names:
        others = ", ".join(difference(name, before.get(name), identity[name]) for name in names)
        then = f"choose another folder, or go on with allow={(*allow, *names)}"
        raise ValueError(one_sentence(f"{folder} was begun with other {others}: {then}"))
    return begun["computed"]
