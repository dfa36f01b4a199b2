"""Model folders: shards, digests of blocks, and folders of format 1."""

import dataclasses
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from test_store import CONFIG, TOKENS, assert_same, make_model

from convert.cli import main
from paradec_jax import store
from paradec_jax.config import CausalConfig
from paradec_jax.disk import blocks, format1
from paradec_jax.families import PRESETS, family_named
from paradec_jax.store import StoreError

CAUSAL = dataclasses.replace(PRESETS["test-causal"], qk_norm=True)
CONFIGS = {"recurrent_depth": CONFIG, "causal": CAUSAL}


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


# Format 1


def join(path: str, leaves: dict[str, np.ndarray], config) -> np.ndarray:
    """A parameter of format 1 from those of today."""
    parts = [leaves[name] for name in format1.names(path)]
    if isinstance(config, CausalConfig) and "/attention/" in path:
        return np.concatenate(parts, axis=parts[0].ndim - 2)
    return np.stack(parts, axis=0 if "bias" in path else 1)


def old_paths(config) -> list[str]:
    """Paths that parameters had in format 1."""
    found = []
    for path in flatten_dict(store.expected_shapes(config), sep="/"):
        block, _, last = path.rpartition("/")
        joint = {"q": "qkv", "gate": "gate_up"}.get(last, last)
        if last == "q_bias":
            joint = "bias" if isinstance(config, CausalConfig) else "qk_bias"
        if last not in ("k", "v", "up", "k_bias", "v_bias"):
            found.append(f"{block}/{joint}" if block else joint)
    return found


def write_format_1(folder: Path, model: store.Model, family: str) -> Path:
    """A folder as format 1 had it, with a field that configs no longer have."""
    leaves = flatten_dict(model.params, sep="/")
    old = {
        path: leaves[path] if path in leaves else join(path, leaves, model.config)
        for path in old_paths(model.config)
    }
    folder.mkdir()
    description = {
        "format_version": 1,
        "family": family,
        "config": model.config.to_dict() | {"gone": 3},
        "token_spec": dataclasses.asdict(model.token_spec),
        "sha256": {path: format1.digest(leaf) for path, leaf in old.items()},
    }
    (folder / "config.json").write_text(json.dumps(description))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(epath.Path(folder / "params"), unflatten_dict(old, sep="/"))
    return folder


@pytest.fixture(params=["recurrent_depth", "jacobi"])
def former(request, tmp_path) -> tuple[Path, store.Model]:
    """A folder of format 1 and the model in it; causal models were of family "jacobi"."""
    model = make_model(CONFIGS[family_named(request.param).name])
    return write_format_1(tmp_path / "former", model, request.param), model


def test_former_shapes():
    """Shapes that format 1 had, by hand."""
    c, leaves = CAUSAL, flatten_dict(make_model(CAUSAL).params, sep="/")
    assert join("layer_0/attention/qkv", leaves, c).shape == (c.width, c.heads + 2 * c.kv_heads, c.head_dim)
    assert join("layer_0/attention/bias", leaves, c).shape == (c.heads + 2 * c.kv_heads, c.head_dim)
    assert join("layer_0/mlp/gate_up", leaves, c).shape == (c.width, 2, c.feed_forward)
    c, leaves = CONFIG, flatten_dict(make_model().params, sep="/")
    assert join("core_0/attention/qkv", leaves, c).shape == (c.width, 3, c.heads, c.head_dim)
    assert join("core_0/attention/qk_bias", leaves, c).shape == (2, c.heads, c.head_dim)
    assert "core_0/attention/qk_bias" in old_paths(c) and "core_0/mlp/up" not in old_paths(c)


def test_format_1_is_read_and_migrated(former, tmp_path, capsys):
    folder, model = former
    read = store.load(folder, host=True)
    assert (read.config, read.token_spec, read.family) == (model.config, TOKENS, model.config.family)
    assert_same(read.params, model.params)
    assert main(["migrate", str(folder), str(tmp_path / "new")]) == 0
    assert "migrated" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "config.json").read_text())["format_version"] == 2
    assert_same(store.load(tmp_path / "new").params, model.params)
    assert store.fingerprint(tmp_path / "new") == store.fingerprint(folder)
    low = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), model.params)
    assert_same(store.load(folder, dtype="bfloat16").params, low)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["sha256"].update(embedding="0" * 64), "embedding differs from its digest"),
        (lambda d: d["sha256"].pop("final_norm"), "final_norm is missing"),
        (lambda d: d.pop("sha256"), "no table of digests"),
        (lambda d: d["config"].update(heads=1, kv_heads=1, head_channels=8), "has shape"),
        (lambda d: d["config"].pop("width"), "width"),
        (
            lambda d: d.update(family="mamba"),
            "family .* must be one of recurrent_depth, causal, masked_diffusion, block_diffusion, not 'mamba'",
        ),
    ],
)
def test_format_1_that_is_wrong(former, change, message):
    folder, _ = former
    description = json.loads((folder / "config.json").read_text())
    change(description)
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(StoreError, match=message) as caught:
        store.load(folder)
    assert "\n" not in str(caught.value)


def test_damaged_files_of_format_1_never_load(tmp_path):
    folder = write_format_1(tmp_path / "former", make_model(), "recurrent_depth")
    errors = []
    for file in sorted(path for path in (folder / "params").rglob("*") if path.is_file()):
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
        try:
            assert_same(store.load(folder).params, make_model().params)
        except StoreError as error:
            errors.append(str(error))
        file.write_bytes(content)
    assert len(errors) >= 2 and all("parameter " in e and "\n" not in e for e in errors)
