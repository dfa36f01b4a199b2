"""Models of random weights, changes to what is exported of them, and a command that must fail."""

import json
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from convert import weights
from convert.cli import main
from paradec_jax import store
from paradec_jax.config import RecurrentDepthConfig, TokenSpec
from paradec_jax.families import PRESETS

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "recurrent_depth"
CONFIG = PRESETS["test-recurrent"]
WEIGHTS = "model.safetensors"
WTE = "transformer.wte.weight"
QKV = "transformer.core_block.1.attn.Wqkv.weight"


def make_model(config: RecurrentDepthConfig = CONFIG) -> store.Model:
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), store.expected_shapes(config))
    return store.Model(config, params, TokenSpec(bos=3, stop=(1, 2), pad=4))


def export_random(folder: Path) -> Path:
    """Exports random weights to a Hugging Face folder."""
    store.save(folder / "model", make_model())
    assert main(["export", str(folder / "model"), str(folder / "exported")]) == 0
    return folder / "exported"


def edit(path: Path, **fields) -> None:
    """Sets fields of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def rewrite(folder: Path, change) -> None:
    """Applies `change` to the dict of tensors in model.safetensors."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def make_shards(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def assert_same(a: store.Model, b: store.Model) -> None:
    assert (a.config, a.token_spec) == (b.config, b.token_spec)
    left, right = flatten_dict(a.params, sep="/"), flatten_dict(b.params, sep="/")
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].dtype == right[path].dtype, path
        assert np.asarray(left[path]).tobytes() == np.asarray(right[path]).tobytes(), path


def fails(capsys, command: str, source: Path, *options: str) -> str:
    """Runs a command that must exit 1 with one sentence and leave nothing behind; returns the sentence."""
    target = source.parent / "target"
    before = sorted(source.parent.iterdir())
    capsys.readouterr()
    assert main([command, str(source), str(target), *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert sorted(source.parent.iterdir()) == before
    return err
