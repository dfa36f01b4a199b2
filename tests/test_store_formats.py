"""Model folders: shards, digests of blocks, fingerprints."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from test_store import CONFIG, assert_same, make_model

from paradec_jax import store
from paradec_jax.disk import blocks
from paradec_jax.store import StoreError


def shard(folder: Path) -> list[str]:
    """Saves in shards of one or two tensors; returns the files' names."""
    store.save(folder, make_model(), max_shard_bytes=2000)
    return sorted(path.name for path in folder.glob("*.safetensors"))


def drop(weight_map: dict[str, str], file: str) -> None:
    """Takes a file out of an index."""
    for name in [name for name, of in weight_map.items() if of == file]:
        del weight_map[name]


class TestShards:
    def test_round_trip(self, tmp_path):
        files = shard(tmp_path / "model")
        assert len(files) > 10 and files[0] == f"network-00001-of-{len(files):05d}.safetensors"
        index = json.loads((tmp_path / "model" / "network.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files
        assert_same(store.load(tmp_path / "model").params, make_model().params)
        store.save(tmp_path / "whole", make_model())
        assert store.fingerprint(tmp_path / "whole") == store.fingerprint(tmp_path / "model")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: drop(m, m["adapter"]), "adapter is missing"),
            (lambda m: m.update(adapter="../a"), "places tensor adapter in '../a', which is no file name"),
            (lambda m: m.update(adapter="a.safetensors"), r"shard .*a\.safetensors is missing"),
            (lambda m: m.update(more=m["adapter"]), "tensor more is listed in an index, but .* not hold it"),
            (lambda m: m.clear(), "no weight_map"),
        ],
    )
    def test_index_that_is_wrong(self, tmp_path, change, message):
        shard(tmp_path / "model")
        path = tmp_path / "model" / "network.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))
        with pytest.raises(StoreError, match=message) as caught:
            store.load(tmp_path / "model")
        assert "\n" not in str(caught.value)

    def test_lost_files(self, tmp_path):
        files = shard(tmp_path / "model")
        (tmp_path / "model" / files[3]).unlink()
        with pytest.raises(StoreError, match=f"shard .*{files[3]} is missing"):
            store.load(tmp_path / "model")
        (tmp_path / "model" / "network.safetensors.index.json").write_text("{")
        with pytest.raises(StoreError, match="missing or not valid JSON"):
            store.load(tmp_path / "model")


def test_each_block_has_a_digest_of_its_own(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 16)
    array = np.arange(10, dtype=np.float32)
    found = blocks.digests(array)
    assert len(found) == 3 and found[:2] == blocks.digests(array[:8])
    changed = blocks.digests(np.where(array == 5, -1, array).astype(np.float32))
    assert [a == b for a, b in zip(found, changed, strict=True)] == [True, False, True]
    assert len(blocks.digests(array[:0])) == 1


def test_fingerprints_tell_models_apart(tmp_path):
    model, found = make_model(), []
    params = flatten_dict(model.params, sep="/")
    other = unflatten_dict(params | {"adapter": params["adapter"] + 1}, sep="/")
    shapes = ({}, {"rope_base": 7.0}, {"mean_recurrence": 5})
    models = [dataclasses.replace(model, config=dataclasses.replace(CONFIG, **shape)) for shape in shapes]
    for i, each in enumerate([*models, dataclasses.replace(model, params=other)]):
        store.save(tmp_path / str(i), each)
        found.append(store.fingerprint(tmp_path / str(i)))
    assert len(set(found)) == 4
    store.save(
        tmp_path / "idle", dataclasses.replace(model, config=dataclasses.replace(CONFIG, remat="iteration"))
    )
    assert store.fingerprint(tmp_path / "idle") == found[0]
