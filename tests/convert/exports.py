"""Models of random weights, changes to what is exported of them, and a command that must fail."""

import dataclasses
import functools
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from paradec_jax import store
from paradec_jax.cli import main
from paradec_jax.config import ResidualHeadConfig, RopeScaling, TokenSpec
from paradec_jax.convert import weights
from paradec_jax.families import PRESETS, parameter_shapes

TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text())
GOLDEN = Path(__file__).parents[1] / "golden"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
NEXT = TokenSpec(bos=3, stop=(1, 2), pad=4)
OWN = TokenSpec(bos=3, stop=(1, 2), pad=4, mask=31, alignment="own")
RECURRENT, CAUSAL = PRESETS["test-recurrent"], PRESETS["test-causal"]
SDAR = dataclasses.replace(PRESETS["test-sdar"], head_channels=6, block=8)
DYNAMIC = RopeScaling(kind="dynamic", factor=4.0, original=32)
LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, original=16, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = RopeScaling(
    kind="yarn", factor=8.0, original=16, beta_slow=1.0, attention_factor=1.3, truncate=False
)
WINDOWS: dict[str, Any] = {"layers": 5, "sliding_window": 6, "sliding_layers": (True, False)}
HALF = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
UNTIED = {"qk_bias": False, "tie_embeddings": False}
SHIFTED = dataclasses.replace(OWN, alignment="next")
FULL = PRESETS["test-full"]
recurrent, causal, sdar, full = (
    functools.partial(dataclasses.replace, one) for one in (RECURRENT, CAUSAL, SDAR, FULL)
)
# The first word of a name is the family's, or the model type's, layout.
MODELS: dict[str, tuple[Any, TokenSpec]] = {
    "huginn": (RECURRENT, NEXT),
    "huginn bfloat16": (recurrent(**HALF, prelude_layers=2), NEXT),
    "huginn untied": (
        recurrent(remat="iteration", rope_base=1234.5, norm_eps=1e-5, **UNTIED),
        NEXT,
    ),
    "qwen2": (CAUSAL, NEXT),
    "qwen2 untied bfloat16": (causal(**HALF, tie_embeddings=False), NEXT),
    "qwen3": (causal(qkv_bias=False, qk_norm=True, head_channels=6, norm_eps=1e-5), NEXT),
    "qwen3 biases": (causal(qk_norm=True, tie_embeddings=False), NEXT),
    "llama": (causal(qkv_bias=False, tie_embeddings=False, rope_base=1234.5, kv_heads=4), NEXT),
    "llama every bias": (causal(out_bias=True, mlp_bias=True, rope_scaling=DYNAMIC), NEXT),
    "llama llama3": (causal(qkv_bias=False, rope_scaling=LLAMA3), NEXT),
    "qwen2 windows, yarn": (causal(**WINDOWS, rope_scaling=YARN), NEXT),
    "qwen3 every bias": (causal(qk_norm=True, out_bias=True), NEXT),
    "sdar": (SDAR, OWN),
    "sdar next, several lengths": (sdar(blocks=(4, 8)), SHIFTED),
    "sdar padded": (sdar(origin="padded"), OWN),
    "sdar bfloat16": (sdar(**HALF), OWN),
    "sdar tied, biases": (sdar(tie_embeddings=True, qkv_bias=True, block=4), OWN),
    "Fast_dLLM_Qwen": (sdar(qk_norm=False, qkv_bias=True, block=32), SHIFTED),
    "sdar head": (SDAR, OWN),
    "sdar head bfloat16": (sdar(**HALF), OWN),
    "llada": (full(qkv_bias=False, tie_embeddings=False), OWN),
    "llada tied, next": (full(qkv_bias=False, kv_heads=4), SHIFTED),
    "Dream": (full(tie_embeddings=False), SHIFTED),
    "a2d-qwen2": (full(rope_scaling=DYNAMIC), OWN),
    "a2d-qwen3": (full(qkv_bias=False, qk_norm=True, head_channels=6), OWN),
    "CoDA bfloat16": (full(**HALF, qkv_bias=False, qk_norm=True, tie_embeddings=False), SHIFTED),
    "mdlm": (PRESETS["test-mdlm"], OWN),
    "mdlm bfloat16": (dataclasses.replace(PRESETS["test-mdlm"], **HALF, dropout=0.0), OWN),
}
FAMILIES = ("huginn", "qwen2", "llama", "sdar", "llada", "Dream", "mdlm")


def make_model(name: str = "huginn", **changes) -> store.Model:
    """The model of that name, its weights drawn; `changes` are fields of its config."""
    config, spec = MODELS[name]
    config = dataclasses.replace(config, **changes)
    head = None
    if "head" in name:
        shape = ResidualHeadConfig.of(config, 3 if "bfloat16" in name else 1)
        head = store.ResidualHead(shape, drawn(shape))
    return store.Model(config, drawn(config), spec, head=head)


def drawn(config) -> dict[str, Any]:
    """Random parameters."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: rng.normal(size=s.shape).astype(s.dtype), parameter_shapes(config)
    )


def exported(model: store.Model, root: Path, *options: str) -> Path:
    """The Hugging Face folder that the command makes of a model."""
    store.save(root / "model", model)
    assert main(["export", str(root / "model"), str(root / "exported"), *options]) == 0
    return root / "exported"


def imported(folder: Path, *options: str) -> store.Model:
    """The model that the command makes of a folder, or a file."""
    target = folder.parent / "imported"
    assert main(["import", str(folder), str(target), "--overwrite", *options]) == 0
    return store.load(target)


def recorded(name: str, root: Path) -> Path:
    """A copy of a folder of recorded weights; "head" is the residual head beside its backbone, as
    it is released.
    """
    folder = root / "source"
    folder.mkdir()
    source = GOLDEN / ("block_diffusion" if name == "head" else name)
    for file in (CONFIG, WEIGHTS):
        shutil.copyfile(source / file, folder / file)
    if name == "head":
        rewrite(folder, lambda tensors: tensors.update(load_file(source / "mrp.safetensors")))
        edit(folder / CONFIG, **json.loads((source / "mrp_config.json").read_text()))
    return folder


def rows(name: str, *parts: str):
    """The mark of a test of each row of a table, whose parts have these names; JSON is read."""
    table = [
        [json.loads(x) if str(x).startswith(("{", "[")) else x for x in row] for row in TABLES[name]
    ]
    return pytest.mark.parametrize(parts, table)


def json_in(path: Path) -> dict[str, Any]:
    """The fields of a JSON file, of a folder those of its config.json."""
    return json.loads((path / CONFIG if path.is_dir() else path).read_text())


def edit(path: Path, **fields):
    """Sets fields of a JSON file, or of a folder's config.json; None removes one."""
    values = {name: x for name, x in (json_in(path) | fields).items() if x is not None}
    (path / CONFIG if path.is_dir() else path).write_text(json.dumps(values))


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]):
    """Applies `change` to the dict of tensors in model.safetensors."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def make_shards(folder: Path):
    """Splits the weights into a.safetensors, b.safetensors and an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def assert_same(a: store.Model, b: store.Model):
    assert (a.config, a.token_spec) == (b.config, b.token_spec)
    assert (a.head is None) == (b.head is None)
    trees = [(a.params, b.params)]
    if a.head is not None and b.head is not None:
        assert a.head.config == b.head.config
        trees.append((a.head.params, b.head.params))
    for pair in trees:
        left, right = (flatten_dict(tree, sep="/") for tree in pair)
        assert left.keys() == right.keys()
        for path in left:
            assert left[path].dtype == right[path].dtype, path
            assert np.asarray(left[path]).tobytes() == np.asarray(right[path]).tobytes(), path


def fails(capsys, command: str, source: Path, *options: str) -> str:
    """Runs a command that must exit 1 with one sentence and leave nothing behind; returns the
    sentence.
    """
    target = source.parent / "target"
    before = sorted(source.parent.iterdir())
    capsys.readouterr()
    assert main([command, str(source), str(target), *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("paradec: ") and err.count("\n") == 1
    assert sorted(source.parent.iterdir()) == before
    return err
