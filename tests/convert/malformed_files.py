"""Weights, tokenizers, checkpoints and recordings that are wrong: see `malformed_cases`."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from malformed_changes import (
    DEEP,
    OWN,
    SENTINEL,
    WEIGHTS,
    Case,
    Change,
    bytes_of,
    cut,
    flip,
    splice,
    tensors_of,
    text_of,
    without,
)
from malformed_models import recording, tokenizer_fields
from torch_writer import write_checkpoint


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """All that have to do with files other than JSON of configs."""
    yield from _weights(rng)
    yield from _tokenizers()
    yield from _checkpoints(rng)
    yield from _recordings(rng)


def _weights(rng: np.random.Generator) -> Iterator[Case]:
    """Tensors: files cut, flipped and spliced, values that are no numbers, headers that lie."""
    files = (
        ("import", "qwen2", WEIGHTS),
        ("import", "huginn", WEIGHTS),
        ("generate", "model", OWN),
        ("check", "model", OWN),
    )
    for command, base, file in files:
        for share in rng.uniform(0, 0.99, 4):
            yield Case(f"{command} {base} weights cut at {share:.3f}", command, base, cut(file, share))
        for length in (7, 2**40, 2**63):
            header = struct.pack("<Q", length)
            yield Case(
                f"{command} {base} weights: header of {length}",
                command,
                base,
                bytes_of(file, lambda content, header=header: content.__setitem__(slice(8), header)),
            )
    for command, base, file in files[2:]:
        for place in rng.uniform(0, 1, 6):
            mask = int(rng.integers(1, 256))
            change = flip(file, place, mask)
            yield Case(
                f"{command} {base} weights: flip {mask} at {place:.4f}",
                command,
                base,
                change,
                sure=place > 0.5,
            )
        for place in rng.uniform(0, 1, 3):
            yield Case(
                f"{command} {base} weights: splice at {place:.4f}",
                command,
                base,
                splice(file, place, 64),
                sure=place > 0.6,
            )
    for place in rng.uniform(0.001, 0.15, 8):  # in the header
        mask = int(rng.integers(1, 256))
        name, change = f"import qwen2 weights: flip {mask} at {place:.4f}", flip(WEIGHTS, place, mask)
        yield Case(name, "import", "qwen2", change, sure=False)
    embedding = "model.embed_tokens.weight"
    for value in (np.nan, np.inf, -np.inf):
        yield _tensor(f"a number that is {value}", lambda t, v=value: t[embedding].__setitem__((3, 3), v))
    yield _tensor("a missing tensor", lambda t: t.pop(embedding))
    yield _tensor("another tensor", lambda t: t.update(more=t[embedding].copy()))
    yield _tensor("a long name", lambda t: t.update({"x" * 100_000: t[embedding].copy()}))
    yield _tensor("lines in a name", lambda t: t.update({"a\nb\x1b[31mc": t[embedding].copy()}))
    yield _tensor("whole numbers", lambda t: t.update({embedding: t[embedding].astype(np.int32)}))
    yield _tensor("a scalar", lambda t: t.update({embedding: np.array(1, np.float32)}))
    yield _tensor("no numbers", lambda t: t.update({embedding: np.zeros((0, 16), np.float32)}))
    yield _tensor(
        "float64 beyond float32",
        lambda t: t.update({embedding: np.full(t[embedding].shape, 1e300)}),
        "--dtype",
        "float32",
    )
    index, alone = "model.safetensors.index.json", without(WEIGHTS)
    maps: dict[str, Any] = {
        "empty": {},
        "a list": [],
        "a path": {embedding: "../../x.safetensors"},
        "a number": {embedding: 3},
        "a missing shard": {embedding: "a.safetensors"},
        "itself": {embedding: index},
    }
    for name, weight_map in maps.items():
        change = alone(text_of(index, json.dumps({"weight_map": weight_map})))
        yield Case(f"index: {name}", "import", "qwen2", change)
    yield Case("index: deep", "import", "qwen2", alone(text_of(index, DEEP)))
    for name in ("pytorch_model.bin", "model.pt"):
        yield Case(f"a pickle {name}", "import", "qwen2", _pickle_instead(name))


def _tensor(name: str, change: Callable[[dict[str, np.ndarray]], Any], *options: str) -> Case:
    return Case(f"tensors: {name}", "import", "qwen2", tensors_of(WEIGHTS, change), options=options)


class _Runs:
    """What a real unpickler would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {SENTINEL}",)


def _pickle_instead(name: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(_Runs()))

    return apply


def _tokenizers() -> Iterator[Case]:
    """tokenizer.json, a case a kind."""
    rule = {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False}
    words = {f"w{i}": i for i in range(31)}
    changes: dict[str, dict[str, Any]] = {
        "a pattern that is none": {"pre_tokenizer": rule},
        "an id of 32": {"model": {"type": "WordLevel", "vocab": words | {"z": 32}, "unk_token": "w0"}},
        "an unknown model": {"model": {"type": "Oracle"}},
    }
    for name, fields in changes.items():
        text = json.dumps(tokenizer_fields() | fields)
        for command, base in (("import", "qwen2"), ("generate", "model")):
            yield Case(f"{command} tokenizer: {name}", command, base, text_of("tokenizer.json", text))
    yield Case("tokenizer: deep", "import", "huginn", text_of("tokenizer.json", DEEP))
    yield Case("tokenizer: half of it", "import", "qwen2", cut("tokenizer.json", 0.5))


def _checkpoints(rng: np.random.Generator) -> Iterator[Case]:
    """Checkpoints of Lightning."""
    file = "last.ckpt"

    def yielded(name: str, change: Change, sure: bool = True) -> Case:
        return Case(f"ckpt: {name}", "import", "ckpt", change, sure, source=file)

    for share in rng.uniform(0, 0.99, 2):
        yield yielded(f"cut at {share:.3f}", cut(file, share))
    for place in rng.uniform(0, 1, 4):
        mask = int(rng.integers(1, 256))
        yield yielded(f"flip {mask} at {place:.4f}", flip(file, place, mask), sure=False)
    yield yielded("no zip", text_of(file, b"\x80\x04\x95" + bytes(100)))
    yield yielded("code alone", text_of(file, pickle.dumps(_Runs())))
    trees: dict[str, Any] = {
        "code as weights": {"state_dict": _Runs()},
        "code among weights": {"state_dict": {"a": _Runs()}},
        "a list": [1, 2],
        "weights as text": {"state_dict": "x"},
    }
    for name, tree in trees.items():
        yield yielded(name, lambda folder, tree=tree: write_checkpoint(folder / file, tree) and None)


def _recordings(rng: np.random.Generator) -> Iterator[Case]:
    """Recorded logits."""
    file = "logits.npz"

    def arrays(**changes: Any) -> Change:
        return lambda folder: np.savez(folder / file, **recording(**changes))

    changes = {
        "no ids": arrays(input_ids=None),
        "no logits": arrays(logits=None),
        "ids as numbers": arrays(input_ids=np.ones((1, 3))),
        "ids beyond": arrays(input_ids=np.array([[1, 2, 32]])),
        "ids below": arrays(input_ids=np.array([[1, 2, -1]])),
        "no rows": arrays(input_ids=np.zeros((0, 3), int), logits=np.zeros((0, 3, 32))),
        "a row too long": arrays(input_ids=np.ones((1, 129), int), logits=np.zeros((1, 129, 32))),
        "logits of another shape": arrays(logits=np.zeros((1, 3, 31))),
        "logits as texts": arrays(logits=np.full((1, 3, 32), "x")),
        "logits that are complex": arrays(logits=np.zeros((1, 3, 32), complex)),
        "objects": lambda folder: np.savez(
            folder / file, input_ids=np.array([_Runs()], dtype=object), logits=np.zeros((1, 3, 32))
        ),
        "one array": text_of(file, _npy()),
        "a bomb": _recorded_bomb,
        "a header that lies": lambda folder: _header(folder, "(10000000000, 10000)"),
        "a header that is no Python": lambda folder: _header(folder, "((((" * 500),
        "a header with code": lambda folder: _header(folder, f"__import__('os').system('touch {SENTINEL}')"),
    }
    for name, change in changes.items():
        yield Case(f"recording: {name}", "check", "recording", change, source=file)
    for share in rng.uniform(0, 0.99, 4):
        yield Case(f"recording cut at {share:.3f}", "check", "recording", cut(file, share), source=file)


def _npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def _recorded_bomb(folder: Path) -> None:
    with (
        zipfile.ZipFile(folder / "logits.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("input_ids.npy", "w", force_zip64=True) as file,
    ):
        for _ in range(40):
            file.write(bytes(2**24))


def _header(folder: Path, shape: str) -> None:
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    with zipfile.ZipFile(folder / "logits.npz", "w") as archive:
        archive.writestr("input_ids.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
