"""Writes tensors as safetensors, one at a time: one file, or shards with an index.

The library's own writer wants all tensors of a file in memory. The format is simple: the length of a header (8
bytes, little-endian), the header (JSON: type, shape and place of each tensor; padded by spaces to a multiple of 8),
the bytes of all tensors without gaps. Files are byte for byte those of the library.

Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import chex
import numpy as np

from paradec_jax.disk import blocks
from paradec_jax.disk.tensors import DTYPES, INDEX, Lazy

CODES = {name: code for code, name in DTYPES.items()}
ORDER = ("float64", "float32", "bfloat16", "float16")  # in which the library puts tensors of several types


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Lazy],
    max_shard_bytes: int,
    stem: str = "model",
    check: Callable[[str, np.ndarray], None] = lambda name, block: None,
) -> tuple[str, dict[str, list[str]]]:
    """Writes one safetensors file, or shards of at most `max_shard_bytes` (or one tensor) and their index.

    Args:
      folder: where to.
      tensors: by name; each is made, written and dropped.
      max_shard_bytes: what a file holds at most.
      stem: how the names of files begin.
      check: is shown what is written, in blocks, with the tensor's name.

    Returns:
      The name of the file, or of the index, and the digests of all tensors.
    """
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name in sorted(tensors):
        if tensors[name].nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensors[name].nbytes
    if len(shards) == 1:
        file = f"{stem}.safetensors"
        return file, _write_shard(folder / file, tensors, shards[0], check)
    weight_map: dict[str, str] = {}
    digests: dict[str, list[str]] = {}
    for i, names in enumerate(shards, start=1):
        file = f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        digests |= _write_shard(folder / file, tensors, names, check)
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}{INDEX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return f"{stem}{INDEX}", digests


def _write_shard(
    path: Path,
    tensors: Mapping[str, Lazy],
    names: Sequence[str],
    check: Callable[[str, np.ndarray], None],
) -> dict[str, list[str]]:
    """Writes one file; the digests of its tensors."""
    names = sorted(names, key=lambda name: (ORDER.index(np.dtype(tensors[name].dtype).name), name))
    digests = {}
    with path.open("wb") as file:
        file.write(_header({name: tensors[name] for name in names}))
        for name in names:
            digester = blocks.Digester()
            array, promised = tensors[name].read(...), tuple(tensors[name].shape)
            chex.assert_shape(array, promised, custom_message=f"tensor {name}", exception_type=ValueError)
            for piece in _pieces(array, tensors[name].dtype):
                check(name, piece)
                file.write(piece.reshape(-1).view(np.uint8).data)
                digester.update(piece)
            digests[name] = digester.finish()
    return digests


def _header(tensors: Mapping[str, Lazy]) -> bytes:
    """The bytes before those of the tensors."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        code = CODES[np.dtype(tensor.dtype).name]
        fields[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(array: np.ndarray, dtype: Any) -> Iterator[np.ndarray]:
    """An array's numbers in their order, in contiguous pieces of about a block and of that type."""
    array = array if array.ndim else array.reshape(1)
    row = math.prod(array.shape[1:]) * np.dtype(dtype).itemsize
    if row > blocks.BLOCK and array.ndim > 1:
        for one in array:
            yield from _pieces(one, dtype)
        return
    rows = max(blocks.BLOCK // max(row, 1), 1)
    for begin in range(0, len(array), rows):
        with np.errstate(over="ignore"):  # what becomes infinite is for `check`
            yield np.ascontiguousarray(array[begin : begin + rows], dtype)
