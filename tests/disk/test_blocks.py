"""Slices that are read block by block, and files that are written tensor by tensor."""

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from stubs import tiny_causal, tiny_causal_params

from paradec_jax.config import TokenSpec
from paradec_jax.disk import blocks, writing
from paradec_jax.disk.folders import StoreError
from paradec_jax.disk.parts import PartFiles
from paradec_jax.disk.tensors import Lazy, TensorFiles
from paradec_jax.families import parameter_shapes
from paradec_jax.store import Model, load, opened, save

SHAPES = [(), (0, 3), (7,), (5, 6), (4, 3, 5), (2, 3, 2, 4)]


@pytest.fixture(params=[8, 40, 64, 2**20], ids=lambda size: f"{size} bytes")
def block(request, monkeypatch) -> int:
    """Blocks of a size that divides nothing."""
    monkeypatch.setattr(blocks, "BLOCK", request.param)
    return request.param


def seen(array, wanted, dtype="float32"):
    """Slices of an array as they are read, and the numbers of the blocks that were looked at."""
    data, looked = array.reshape(-1).view(np.uint8), []

    def fill(place, buffer):
        buffer[:] = data[place : place + buffer.nbytes].data

    def check(number, one):
        looked.append(number)
        step = blocks.BLOCK // array.itemsize
        np.testing.assert_array_equal(one, array.reshape(-1)[number * step :][: one.size])

    return blocks.read_slices(fill, array.shape, array.dtype, wanted, dtype, check), looked


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_slices_are_those_of_numpy(shape, block):
    rng = np.random.default_rng(0)
    array = rng.normal(size=shape).astype(np.float32)
    for _ in range(30):
        wanted = [tuple(tuple(map(int, sorted(rng.integers(0, n + 1, 2)))) for n in shape) for _ in range(3)]
        found, looked = seen(array, wanted)
        for spans, one in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(one, array[tuple(slice(*span) for span in spans)])
            assert not one.size or one.ctypes.data % blocks.ALIGNMENT == 0
        hit = np.zeros(shape, bool)
        for spans in wanted:
            hit[tuple(slice(*span) for span in spans)] = True
        step = block // 4
        assert not array.size or looked == sorted({int(i) // step for i in np.flatnonzero(hit)})


def test_numbers_are_cast_as_numpy_does(block):
    array = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    ((found,), _) = seen(array, [((1, 4), (2, 5))], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found, array[1:4, 2:5].astype(ml_dtypes.bfloat16))


def digests(array: np.ndarray) -> list[str]:
    """SHA-256 of each block of an array's bytes; of nothing one."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()
    places = range(0, max(len(data), 1), blocks.BLOCK)
    return [hashlib.sha256(data[place : place + blocks.BLOCK]).hexdigest() for place in places]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 40])
def test_digests_do_not_depend_on_pieces(size, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 16)
    array = np.arange(size, dtype=np.float32)
    digester = blocks.Digester()
    for begin in range(0, size, 3):
        digester.update(array[begin : begin + 3])
    assert digester.finish() == digests(array)
    assert len(digests(array)) == max(-(-size // 4), 1)


ARRAYS = {
    'b/\u00e9"': np.arange(35, dtype=np.float32).reshape(5, 7),
    "a": np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "none": np.zeros((0, 4), np.float32),
    "number": np.array(3.0),
    "z": np.arange(24, dtype=np.float16).reshape(2, 3, 4),
}


def test_a_file_is_byte_for_byte_the_librarys(tmp_path, block):
    (tmp_path / "own").mkdir()
    lazy = {name: Lazy.of(array) for name, array in ARRAYS.items()}
    file, written = writing.write_tensors(tmp_path / "own", lazy, 10**6)
    save_file(ARRAYS, tmp_path / "library", metadata={"format": "pt"})
    assert (tmp_path / "own" / file).read_bytes() == (tmp_path / "library").read_bytes()
    assert written == {name: digests(array) for name, array in ARRAYS.items()}
    with safe_open(tmp_path / "own" / file, "numpy") as found:
        assert found.metadata() == {"format": "pt"}
    with TensorFiles({tmp_path / "own" / file: []}) as files:
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(files.read(name), array)
            assert files.header(name) == (array.shape, array.dtype.name)


def test_strides_and_types_are_those_promised(tmp_path, block):
    array = np.random.default_rng(0).normal(size=(5, 6, 7))
    lazy = {"a": Lazy((7, 5, 6), np.dtype(np.float32), lambda place: array.transpose(2, 0, 1)[place])}
    shown = []
    writing.write_tensors(tmp_path, lazy, 10**6, check=lambda name, one: shown.append((name, one.size)))
    want = array.transpose(2, 0, 1).astype(np.float32)
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["a"], want)
    np.testing.assert_array_equal(lazy["a"][...], want)
    assert {name for name, _ in shown} == {"a"} and sum(size for _, size in shown) == array.size
    assert len(shown) == 1 if block == 2**20 else max(size for _, size in shown) <= max(block // 4, 6)
    with pytest.raises(ValueError, match=r"has shape .* but expected .*\[tensor a\]"):
        writing.write_tensors(tmp_path, {"a": Lazy((5,), np.dtype("float32"), lambda _: array)}, 10**6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model in blocks of 64 bytes."""
    monkeypatch.setattr(blocks, "BLOCK", 64)
    save(tmp_path / "model", Model(tiny_causal().config, tiny_causal_params(), TokenSpec()))
    return tmp_path / "model"


def flip(folder, name, place):
    """Changes a byte of a parameter."""
    path = folder / "network.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    content[8 + size + json.loads(content[8 : 8 + size])[name]["data_offsets"][0] + place] ^= 1
    path.write_bytes(content)


def part_of(folder) -> PartFiles:
    config = tiny_causal().config
    part = json.loads((folder / "config.json").read_text())["parts"]["network"]
    return PartFiles(folder, config, part, flatten_dict(parameter_shapes(config), sep="/"))


def test_a_slice_is_compared_with_the_digests_of_its_own_blocks(folder):
    params = flatten_dict(tiny_causal_params(), sep="/")
    rows, width = params["embedding"].shape
    flip(folder, "embedding", 4 * width * (rows - 1))
    with part_of(folder) as part:
        cut = {path: [((0, 1), *((0, n) for n in leaf.shape[1:]))] for path, leaf in params.items()}
        for path, (found,) in part.each(cut.__getitem__):
            np.testing.assert_array_equal(found, params[path][:1])
        with pytest.raises(StoreError, match="model: parameter embedding differs from its digests"):
            dict(part.each(lambda path: [((rows - 1, rows), *cut[path][0][1:])]))
    with pytest.raises(StoreError, match="embedding differs from its digests"):
        load(folder)
    assert load(folder, verify=False).params["embedding"].shape == (rows, width)


def test_a_column_is_compared_with_all_of_its_blocks(folder):
    flip(folder, "embedding", 4)  # in the second column, and in a block of the first one
    with part_of(folder) as part, pytest.raises(StoreError, match="embedding differs"):
        dict(part.each(lambda path: [((0, 1),) * len(part.expected[path].shape)]))


def test_all_headers_are_checked_before_any_number(folder, monkeypatch):
    def reads(*_):
        raise AssertionError("a number is read")

    monkeypatch.setattr(TensorFiles, "_fill", reads)
    description = json.loads((folder / "config.json").read_text())
    recorded = description["parts"]["network"]["sha256"]
    last = max(recorded)
    recorded[last] = recorded[last][:-1]
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(StoreError, match=f"parameter {last} differs from its digests"):
        load(folder)
    arrays = load_file(folder / "network.safetensors")
    save_file(arrays | {last: arrays[last].astype(np.float16)}, folder / "network.safetensors")
    with pytest.raises(StoreError, match=f"parameter {last} is float16"):
        load(folder)


def test_parameters_of_an_opened_model_are_read_when_they_are_indexed(folder):
    params = tiny_causal_params()
    flip(folder, "embedding", 0)
    with opened(folder) as model:
        np.testing.assert_array_equal(model.params["final_norm"][...], params["final_norm"])
        leaf = model.params["layer_0"]["attention"]["q"]
        np.testing.assert_array_equal(leaf[1, ...], params["layer_0"]["attention"]["q"][1])
        with pytest.raises(StoreError, match="model: parameter embedding differs"):
            model.params["embedding"][...]


INDICES = [
    (),
    ...,
    -1,
    np.int64(1),
    (-1, ...),
    (0, slice(1, 3), None),
    (1, [0, 2]),
    (slice(None), 1),
    (True, ...),
    None,
]
INDICES += [np.array(1), np.array([1, 0])]


@pytest.mark.parametrize("place", INDICES, ids=str)
def test_parameters_of_an_opened_model_are_indexed_like_arrays(folder, place):
    whole = np.asarray(tiny_causal_params()["layer_0"]["attention"]["q"])
    with opened(folder) as model:
        found = model.params["layer_0"]["attention"]["q"][place]
        assert found.shape == whole[place].shape and found.flags.c_contiguous
        np.testing.assert_array_equal(found, whole[place])


def test_an_index_beyond_an_opened_parameter_is_refused_as_of_an_array(folder):
    with opened(folder) as model:
        norm = model.params["final_norm"]
        for place in (norm.shape[0], -norm.shape[0] - 1, (0, 0), 0.5, "a"):
            with pytest.raises(IndexError):
                norm[place]
