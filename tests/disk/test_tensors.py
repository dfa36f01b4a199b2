"""Tensors that are read when they are asked for, shards of bounded size, and folders that appear
whole.
"""

import os
import stat
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from paradec_jax.disk import tensors
from paradec_jax.disk.folders import MARKER, StoreError, staged
from paradec_jax.disk.tensors import Lazy, open_tensors, write_tensors

ARRAYS = {
    'b/\u00e9"': np.arange(35, dtype=np.float32).reshape(5, 7),
    "a": np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "none": np.zeros((0, 4), np.float32),
    "number": np.array(3.0),
    "z": np.arange(24, dtype=np.float16).reshape(2, 3, 4).transpose(2, 0, 1),
}


def test_arrays_come_back(tmp_path):
    assert write_tensors(tmp_path, "model", ARRAYS) == {"model.safetensors": sorted(ARRAYS)}
    found = open_tensors(tmp_path / "model.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype.name)
        np.testing.assert_array_equal(np.asarray(found[name]), array)
    np.testing.assert_array_equal(found["z"].read((slice(1, 3), slice(None))), ARRAYS["z"][1:3])


def test_a_file_can_be_read_by_those_who_can_read_its_folder(tmp_path):
    for mode in (0o755, 0o700):
        tmp_path.chmod(mode)
        write_tensors(tmp_path, "model", {"a": np.zeros(3, np.float32)})
        assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == mode & 0o666


def test_shards_hold_few_tensors_in_memory(tmp_path, monkeypatch):
    """Each tensor is made once, and what the writer and the readers hold is a shard and a tensor."""
    size, most, made = 2**18, 5 * 2**19, []
    monkeypatch.setattr(tensors, "MAX_SHARD_BYTES", most)

    def make(index):
        made.append(index)
        return np.arange(size, dtype=np.float32).reshape(512, 512).T[index]

    source = {f"t{i:02d}": Lazy((512, 512), "float32", make) for i in range(16)}
    tracemalloc.start()
    files = write_tensors(tmp_path, "model", source)
    lazy = {
        name: tensor for file in files for name, tensor in open_tensors(tmp_path / file).items()
    }
    assert not tracemalloc.reset_peak() and all(
        np.asarray(tensor).size == size for tensor in lazy.values()
    )
    assert tracemalloc.get_traced_memory()[1] < 3 * 2**20
    tracemalloc.reset_peak()
    again = write_tensors(tmp_path, "again", lazy)
    # a shard of two tensors, and one on its way
    assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    tracemalloc.stop()
    assert len(made) == 16 and len(files) == len(again) == 8
    assert list(files)[:2] == [
        "model-00001-of-00008.safetensors",
        "model-00002-of-00008.safetensors",
    ]
    for old, new in zip(files, again, strict=True):
        assert (tmp_path / old).read_bytes() == (tmp_path / new).read_bytes()
        assert sum(array.nbytes for array in load_file(tmp_path / old).values()) <= most
    large = {"a": source["t00"], "b": np.zeros(2**20, np.float32), "c": source["t01"]}
    assert list(write_tensors(tmp_path, "large", large).values()) == [["a"], ["b"], ["c"]]


def test_a_file_stays_open_while_a_tensor_of_it_is_kept(tmp_path):
    write_tensors(tmp_path, "model", ARRAYS)
    kept = open_tensors(tmp_path / "model.safetensors")["z"]
    (tmp_path / "model.safetensors").unlink()
    np.testing.assert_array_equal(kept, ARRAYS["z"])


def test_files_that_are_wrong(tmp_path):
    write_tensors(tmp_path, "model", ARRAYS)
    content, path = (tmp_path / "model.safetensors").read_bytes(), tmp_path / "wrong.safetensors"
    with pytest.raises(StoreError, match=r"wrong\.safetensors is missing"):
        open_tensors(path)
    for damaged in (b"", content[:9], content[:-1], content + b"0", b"\x80\x04\x95" + content[3:]):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="is truncated or not a safetensors file"):
            open_tensors(path)
    (tmp_path / "m.safetensors").mkdir()
    with pytest.raises((StoreError, OSError), match=r"m\.safetensors"):
        write_tensors(tmp_path, "m", ARRAYS)


class TestFolders:
    def test_two_writers_of_one_folder(self, tmp_path):
        with staged(tmp_path / "model") as living:
            with (
                pytest.raises(
                    OSError, match=r"process \d+ on .* is writing to .*/\.model\..*: wait"
                ),
                staged(tmp_path / "model"),
            ):
                pass
            (living / "config.json").touch()
        assert os.listdir(tmp_path) == ["model"]
        assert sorted(os.listdir(tmp_path / "model")) == [MARKER, "config.json"]

    def test_a_second_writer_that_came_unseen_loses(self, tmp_path):
        """It looked before the first one was marked as a writer."""
        theirs = tmp_path / "model" / "theirs"
        with pytest.raises(StoreError, match="exists"), staged(tmp_path / "model"):  # noqa: PT012
            theirs.parent.mkdir()
            theirs.touch()
        assert os.listdir(tmp_path) == ["model"] and os.listdir(tmp_path / "model") == ["theirs"]

    @pytest.mark.parametrize("aside", [False, True])
    def test_what_a_killed_writer_left_goes_with_the_next(self, tmp_path, aside):
        """And a folder that it had put aside comes back first."""
        with staged(tmp_path / "model", run="mine") as folder:
            (folder / "config.json").touch()
        left = tmp_path / ".model.x1"
        (left / "new").mkdir(parents=True)
        (left / MARKER).write_text('{"writes": "model"}')
        if aside:
            (tmp_path / "model").rename(left / "old")
        with pytest.raises(StoreError, match="exists; remove it"), staged(tmp_path / "model"):
            pass
        assert os.listdir(tmp_path) == ["model"]
        with staged(tmp_path / "model", overwrite=True, run="mine"):
            pass
        assert os.listdir(tmp_path / "model") == [MARKER]

    @pytest.mark.parametrize("how", ["of another folder", "a file more", "a link"])
    def test_what_looks_like_a_left_folder_stays(self, tmp_path, how):
        left = tmp_path / ".model.x1"
        place = tmp_path / "elsewhere" if how == "a link" else left
        (place / "new").mkdir(parents=True)
        (place / "new" / "thesis.txt").touch()
        if how == "a link":
            left.symlink_to(place)
        (left / MARKER).write_text(f'{{"writes": "model{"2" * (how == "of another folder")}"}}')
        if how == "a file more":
            (left / "thesis.txt").touch()
        with staged(tmp_path / "model"):
            pass
        assert (left / "new" / "thesis.txt").exists()
