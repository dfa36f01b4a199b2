"""Checkpoints of a run: Orbax, asynchronous, atomic, verified when read."""

import base64
import contextlib
import json
import math
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from paradec_jax.io import one_sentence
from paradec_jax.train.agree import PeerLost, any_of_all, check_same, lost_peer
from paradec_jax.train.state import TrainState, shapes

PyTree = Any

FORMAT = 1


class SaveFailed(OSError):
    """A checkpoint could not be written, for want of room as a rule; those before it stay."""


class NoneReadable(RuntimeError):
    """A folder has checkpoints, and none of them can be read."""


class Checkpoints:
    """The newest `keep` checkpoints of one run, each a folder `FOLDER/STEP` that appears whole or not at all.

    A checkpoint holds the arrays of a TrainState (item `state`; the key as its data words) and one JSON
    document (item `run`): format, versions, position in the data, and shape, dtype and checksum of every
    array. Checksums, because truncated array files fail to decode while altered ones may not.

    Args:
      folder: on a local or mounted file system; made if missing.
      keep: checkpoints to keep, at least 1.
      read_only: never writes, for readers beside a running trainer, whose unfinished saves a writer clears.

    Raises:
      ValueError: if `keep` is less than 1.
    """

    def __init__(self, folder: str | Path, keep: int = 2, *, read_only: bool = False) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.folder = Path(folder).resolve()
        if read_only:
            options = ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
        else:
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "run"))
        self._read_only = read_only
        self._unreadable: list[int] = []

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, PeerLost):  # who is gone would be waited for
            self.close()

    def close(self) -> None:
        """Waits for the save in flight and releases the threads; raises SaveFailed as `wait` does."""
        with self._saving():
            self._manager.close()

    def wait(self) -> None:
        """Waits for the save in flight.

        Raises:
          SaveFailed: it could not be written.
          PeerLost: another process is gone.
        """
        with self._saving():
            self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, ascending, after waiting for the save in flight as `wait` does."""
        self.wait()
        return sorted(set(self._manager.all_steps()) - set(self._unreadable))

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / str(step)

    def save(self, state: TrainState, data_state: Any = None, batch: PyTree = None) -> None:
        """Starts saving; the state may be donated as soon as this returns.

        Folders that the last `restore` could not read are first renamed to `STEP.unreadable`.

        Args:
          state: its step names the checkpoint.
          data_state: what the data iterator's `get_state()` gave: bytes, or anything JSON can hold, NumPy
            numbers and arrays included.
          batch: of the last update, not saved: processes that have copies compare them, as those of the state.

        Raises:
          ValueError: if the state is older than the newest checkpoint, the folder was opened read-only, or processes
            differ in copies of an array or in `data_state`; that state is not saved.
          SaveFailed: this save could not begin, or the one before it could not end.
          PeerLost: another process is gone.
        """
        if self._read_only:
            raise ValueError(f"{self.folder} was opened read-only")
        self.wait()
        self._set_aside()
        tree = _to_arrays(state)
        body = {
            "format": FORMAT,
            "versions": {"jax": jax.__version__, "orbax": ocp.__version__},
            "key": str(jax.random.key_impl(state.key)),
            "data": _encode(data_state),
            "arrays": describe(tree, checksums=True),
        }
        if jax.process_count() > 1:  # copies of arrays on several processes drift apart where batches differ
            told = {"the batch": describe(batch, checksums=True), "copies of arrays": body["arrays"]}
            told["the place in the data"] = body["data"]
            why = f"the state of update {state.step} is not saved; all must train on the same batches"
            check_same(told, why)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(tree), run=ocp.args.JsonSave({"crc32": _crc32(body), "body": body})
        )
        with self._saving():
            saved = self._manager.save(int(state.step), args=args)
        if not saved:
            raise ValueError(f"step {state.step} is not beyond the newest checkpoint in {self.folder}")

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Says in one sentence what went wrong: Orbax raises errors of many kinds, some of many lines.

        What Orbax and asyncio log of it besides is left to the host program's loggers.
        """
        try:
            yield
        except Exception as error:
            if (lost := lost_peer(error)) is not None:
                raise lost from error
            reason = "no space left on device" if "No space left" in str(error) else one_sentence(error, 120)
            raise SaveFailed(
                f"a checkpoint could not be written to {self.folder} ({reason}); those before it stay, and the same "
                "command goes on from them"
            ) from error

    def restore(self, state: TrainState) -> tuple[TrainState, Any]:
        """The newest checkpoint that can be read, and the data state saved with it.

        Warns once for every newer folder that cannot be read. Arrays take the shardings of `state`, so a run
        may resume on another mesh.

        Args:
          state: a state of the same structure, shapes and dtypes, as `TrainState.create` makes, unchanged; or what
            `TrainState.shape` tells of one, so that there is never a second state.

        Raises:
          FileNotFoundError: if the folder has no checkpoint.
          ValueError: if a checkpoint was written for other parameters or another optimizer.
          NoneReadable: if none can be read, with the reason for each.
        """
        steps, reasons = self.steps(), []
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        target = shapes(_to_arrays(state))
        for step in reversed(steps):
            body, error = _tried(self._read_body, step)
            if any_of_all(error is not None):
                reasons.append(self._reject(step, error))
                continue
            self._check_layout(step, body, target, state)
            tree, error = _tried(self._read_arrays, step, target)
            bad = any_of_all(error is not None)
            if not bad:  # checksums of arrays that are spread need all processes
                _, error = _tried(_check_sums, tree, body["arrays"])
                bad = any_of_all(error is not None)
            if bad:
                tree = None  # before the next one is read
                reasons.append(self._reject(step, error))
                continue
            key = jax.random.wrap_key_data(tree.pop("key"), impl=jax.random.key_impl(state.key))
            return TrainState(**({"ema": None} | tree), key=key), _decode(body["data"])
        raise NoneReadable(f"none of the checkpoints in {self.folder} can be read:\n" + "\n".join(reasons))

    # By Orbax's handlers, not by its manager, whose barriers would wait for ever for a process that cannot read.

    def _read_body(self, step: int) -> dict[str, Any]:
        run = ocp.JsonCheckpointHandler().restore(self.path(step) / "run", args=ocp.args.JsonRestore())
        if run["crc32"] != _crc32(run["body"]):
            raise OSError("its JSON document has another checksum than when it was saved")
        return run["body"]

    def _read_arrays(self, step: int, target: PyTree) -> PyTree:
        free = jnp.zeros(()).sharding
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or free), target
        )
        args = ocp.args.StandardRestore(placed)
        handler = ocp.StandardCheckpointHandler(restore_concurrent_gb=_ahead(target))  # type: ignore[arg-type]
        tree = handler.restore(self.path(step) / "state", args=args)
        # Orbax commits every array to its devices; what was free to move (step, counts) must stay so.
        return jax.tree.map(lambda x, t: x if t.sharding else _freed(x), tree, target)

    def _check_layout(self, step: int, body: dict[str, Any], target: PyTree, state: TrainState) -> None:
        where = f"checkpoint {self.path(step)}"
        if body["format"] != FORMAT:
            raise ValueError(f"{where} has format {body['format']}; this version reads {FORMAT}")
        key = str(jax.random.key_impl(state.key))
        if body["key"] != key:
            raise ValueError(f"{where} has a {body['key']} key, the run a {key} key")
        saved = {name: entry[:2] for name, entry in body["arrays"].items()}
        here = describe(target, checksums=False)
        if saved != here:
            name = min(n for n in saved.keys() | here.keys() if saved.get(n) != here.get(n))
            raise ValueError(
                f"{where} was written for other parameters, another optimizer, another teacher or another ema: "
                f"{name} is {saved.get(name, 'missing')} there and {here.get(name, 'missing')} in this run"
            )

    def _reject(self, step: int, error: Exception | None) -> str:
        error = OSError("another process could not read it") if error is None else error
        summary = (str(error).splitlines() or [""])[0]
        reason = f"{self.path(step)}: {type(error).__name__}: {summary}"
        warnings.warn(f"cannot read checkpoint {reason}", RuntimeWarning, stacklevel=3)
        self._unreadable.append(step)
        return reason

    def _set_aside(self) -> None:
        if not self._unreadable:
            return
        if jax.process_index() == 0:
            for step in self._unreadable:
                aside = self.folder / f"{step}.unreadable"
                shutil.rmtree(aside, ignore_errors=True)
                self.path(step).rename(aside)
        multihost_utils.sync_global_devices("set aside unreadable checkpoints")
        self._unreadable = []
        self._manager.reload()


def _ahead(target: PyTree) -> float:
    """Decimal gigabytes that Orbax may hold in this process of what it read and has not placed yet.

    A sixteenth of what this process reads or one whole array, whichever is more: Orbax asks for the saved pieces that
    a shard touches, at most the array, and refuses what is not below the bound. Without one it reads all at once.
    """
    leaves = jax.tree.leaves(target)
    most = max(x.size * x.dtype.itemsize for x in leaves)
    return (max(most, sum(map(_read_here, leaves)) // 16) + 4096) / 1e9


def _read_here(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array that the devices of this process hold, each part once."""
    if x.sharding is None:
        return x.size * x.dtype.itemsize
    parts = {str(index) for index in x.sharding.addressable_devices_indices_map(x.shape).values()}
    return len(parts) * math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _tried(read: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    """What a call returned, or what it raised."""
    try:
        return read(*arguments), None
    except Exception as error:
        return None, error


def _check_sums(tree: PyTree, saved: dict[str, list[Any]]) -> None:
    found = describe(tree, checksums=True)
    if bad := [name for name in saved if found[name] != saved[name]]:
        raise OSError(f"{len(bad)} arrays have other checksums than when they were saved, first {bad[0]}")


def _freed(x: jax.Array) -> jax.Array:
    """The same array on no device in particular; the given one is deleted, so that one at a time is there twice."""
    free = jnp.array(np.asarray(x), copy=True)
    x.delete()
    return free


def _to_arrays(state: TrainState) -> dict[str, PyTree]:
    tree = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    optional = {name: getattr(state, name) for name in ("ema", "ema_count", "teacher", "round")}
    tree |= {name: x for name, x in optional.items() if x is not None}
    return tree | {"key": jax.random.key_data(state.key)}


def describe(tree: PyTree, *, checksums: bool) -> dict[str, list[Any]]:
    """Shape and dtype, and on request the checksum, of every array by its path."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    entries: dict[str, list[Any]] = {name: [list(x.shape), str(x.dtype)] for name, x in leaves.items()}
    if checksums:  # one program an array: the CPU's take as much room as what they add up
        for name, total in jax.device_get({name: _checksum(x) for name, x in leaves.items()}).items():
            entries[name].append(int(total))
    return entries


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    """sum_i (2 i + 1) bits_i mod 2^32 of an array, on its devices: no change of one word goes unseen."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):  # not a ravelled iota, which would gather a sharded array
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
    return jnp.sum((2 * index + 1) * bits, dtype=jnp.uint32)


def _crc32(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _encode(data_state: Any) -> dict[str, Any]:
    if isinstance(data_state, bytes):
        return {"bytes": base64.b64encode(data_state).decode()}
    return {"json": json.loads(json.dumps(data_state, default=lambda x: x.tolist()))}


def _decode(encoded: dict[str, Any]) -> Any:
    return base64.b64decode(encoded["bytes"]) if "bytes" in encoded else encoded["json"]
