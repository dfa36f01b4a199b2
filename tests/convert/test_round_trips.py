"""Import, export, import is the identity for every family; recorded weights and logits;
transformers.
"""

import dataclasses
import re

import numpy as np
import pytest
from exports import (
    GOLDEN,
    MODELS,
    WEIGHTS,
    assert_same,
    exported,
    imported,
    json_in,
    make_model,
    recorded,
)
from marks import over, peers
from safetensors.numpy import load_file

from paradec_jax import store
from paradec_jax.cli import main
from paradec_jax.config import BlockDiffusionConfig, CausalConfig
from paradec_jax.convert import checkpoint, engine, huginn, mdlm, qwen2, sdar, weights
from paradec_jax.convert.weights import INDEX
from paradec_jax.disk import tensors
from paradec_jax.families import PRESETS


@pytest.mark.parametrize("shard", [tensors.MAX_SHARD_BYTES, 2000], ids=["one file", "shards"])
@over(MODELS)
def test_a_model_comes_back_from_an_export(name, shard, tmp_path, monkeypatch):
    model = make_model(name)
    monkeypatch.setattr(tensors, "MAX_SHARD_BYTES", shard)
    folder = exported(model, tmp_path)
    assert_same(imported(folder), model)
    assert (folder / INDEX).is_file() == (not (folder / WEIGHTS).is_file()) == (shard == 2000)
    kind = json_in(folder)["model_type"]
    assert kind == {"huginn": "huginn_raven"}.get(name.split()[0], name.split()[0])
    assert store.fingerprint(tmp_path / "imported") == store.fingerprint(tmp_path / "model")


# Folders, and fields of their config.json that are not written; None: of a release that has many
# more.
QWEN2 = {
    "attention_dropout",
    "initializer_range",
    "max_window_layers",
    "rope_scaling",
    "sliding_window",
}
RECORDED = {
    "recurrent_depth": {"transformers_version"},
    "jacobi": QWEN2,
    "jacobi/overfit": QWEN2,
    "masked_diffusion": set(),
    "block_diffusion": None,
    "head": None,
    "baselines/llada": None,
    "baselines/dream": QWEN2 | {"use_mrope"},
    "full/coda": None,
}


@over(RECORDED)
def test_recorded_weights_are_exported_as_they_came(name, tmp_path, capsys):
    source = recorded(name, tmp_path)
    model = imported(source)
    assert (model.head is not None) == (name == "head")
    want = load_file(source / WEIGHTS)
    count = sum(
        array.size for key, array in want.items() if not key.endswith((huginn.ROPE, mdlm.ROPE))
    )
    assert (
        f"imported {count:,} parameters (float32, computing in float32)" in capsys.readouterr().out
    )
    got = load_file(exported(model, tmp_path) / WEIGHTS)
    assert got.keys() == want.keys()
    for key, array in want.items():
        assert got[key].dtype == array.dtype
        close = {"atol": 2e-6} if key.endswith((huginn.ROPE, mdlm.ROPE)) else {"rtol": 0}
        np.testing.assert_allclose(got[key], array, err_msg=key, **close)
    old, new = (json_in(folder) for folder in (source, tmp_path / "exported"))
    shared = (old.keys() & new.keys()) - {"bos_token_id", "use_cache"}
    assert {key: new[key] for key in shared} == {key: old[key] for key in shared}
    if RECORDED[name] is not None:
        assert old.keys() - new.keys() <= RECORDED[name]
    else:
        assert {"mask_token_id", "rope_theta"} <= shared
        assert ("block_size" in shared) == (model.family == sdar.FAMILY)
    assert ("num_mrp_heads" in new) == (name == "head") and sdar.ALIGNMENT not in new


# Folder, file of logits, names of its two arrays (None: as they are), tolerance.
LOGITS = {
    "recurrent": ("recurrent_depth", "recurrent_depth/forward.npz", None, "5e-5"),
    "random": ("jacobi", "jacobi/random_logits.npz", None, "3e-4"),
    "overfit": ("jacobi/overfit", "jacobi/overfit_logits.npz", None, "1e-4"),
    "masked": ("masked_diffusion", "masked_diffusion/forward.npz", ("xt", "raw_logits"), "1e-4"),
    "block": (
        "block_diffusion",
        "block_diffusion/forward.npz",
        ("full_ids", "full_logits"),
        "2e-4",
    ),
    "llada": ("baselines/llada", "baselines/llada/forward.npz", None, "2e-4"),
    "dream": ("baselines/dream", "baselines/dream/forward.npz", None, "2e-4"),
    "coda": ("full/coda", "full/coda/forward.npz", None, "2e-4"),
}


@pytest.mark.golden
@over([pytest.param(n, marks=[pytest.mark.slow] * (n == "recurrent")) for n in LOGITS])
def test_recorded_logits(name, tmp_path, capsys):
    folder, file, names, tolerance = LOGITS[name]
    path = GOLDEN / file
    imported(recorded(folder, tmp_path))
    if names is not None:
        with np.load(path, allow_pickle=False) as arrays:
            ids, logits = (arrays[one] for one in names)
        path = tmp_path / "logits.npz"
        np.savez(
            path, input_ids=np.atleast_2d(ids), logits=logits.reshape(*np.atleast_2d(ids).shape, -1)
        )
    command = ["check", str(tmp_path / "imported"), "--logits", str(path)]
    capsys.readouterr()
    assert main([*command, "--tolerance", tolerance]) == 0
    lines = capsys.readouterr().out.splitlines()
    want = [f"logits_r{r}" for r in (1, 2, 4, 8)] if name == "recurrent" else ["logits"]
    assert [line.split(":")[0] for line in lines] == want and all(
        line.endswith("ok") for line in lines
    )
    assert main([*command, "--tolerance", "1e-9"]) == 1


class TestReleases:
    """Presets give the numbers of the released config.json, and the other way round."""

    def test_huginn(self):
        config = PRESETS["huginn-0125"]
        fields = huginn.format_config(config)
        assert fields["init_values"]["std"] == pytest.approx(0.0087039, rel=1e-5)
        assert fields["init_values"]["out_proj"] == pytest.approx(0.00053569, rel=1e-5)
        assert fields["init_values"]["embed_scale"] == pytest.approx(72.6636, rel=1e-6)
        assert (fields["effective_expected_depth"], fields["head_dim"]) == (132, 96)
        assert fields["torch_dtype"] == "bfloat16"
        again = huginn.parse_config(fields).to_dict()
        assert (
            again | {"dtype": config.dtype, "param_dtype": config.param_dtype} == config.to_dict()
        )
        assert (
            sum(map(np.prod, engine.table_shapes(huginn.table(config)).values())) == 3_564_976_800
        )

    @over(
        [f"qwen2.5-coder-{size}b" for size in ("0.5", "1.5", "7")]
        + [f"sdar-{n}b" for n in ("1.7", 4, 8)]
    )
    def test_transformers(self, name, tmp_path):
        config, kind = PRESETS[name], name.partition("-")[0].removesuffix(".5")
        fields = qwen2.format_config(config, kind)
        cls = BlockDiffusionConfig if kind == "sdar" else CausalConfig
        again = qwen2.parse_config(fields, cls).to_dict()
        assert (
            again | {"dtype": config.dtype, "param_dtype": config.param_dtype} == config.to_dict()
        )
        assert (fields["max_position_embeddings"], fields["torch_dtype"]) == (32_768, "bfloat16")
        shapes = engine.table_shapes(qwen2.table(config))
        if kind == "sdar":
            assert (fields["head_dim"], fields["attention_bias"]) == (128, False)
            assert len(shapes) == 11 * config.layers + 3
            assert (
                sdar.parse_tokens(
                    tmp_path, fields, config.vocab_size, None, None, (151_669, "own")
                ).mask
                == 151_669
            )
        if name == "qwen2.5-coder-7b":
            assert sum(map(np.prod, shapes.values())) == 7_615_616_512


def test_tensors_are_moved_one_at_a_time(tmp_path, monkeypatch):
    """Import and export know the size of each tensor before they read any, and read one to make
    one.
    """
    seen = []

    def noted(path):
        def noted(name, tensor):
            return dataclasses.replace(
                tensor, read=lambda index: seen.append(name) or tensor.read(index)
            )

        return {name: noted(name, tensor) for name, tensor in tensors.open_tensors(path).items()}

    folder = exported(make_model("qwen3 biases"), tmp_path)
    arrays = load_file(folder / WEIGHTS)
    monkeypatch.setattr(weights, "open_tensors", noted)
    with checkpoint.opened(folder, allow_nonfinite=True) as model:
        lazies = engine.export_tree(model.params, qwen2.table(model.config))
        zeros = [name for name in arrays if name.endswith("o_proj.bias")]
        assert sorted(seen) == sorted(zeros) and sorted([*lazies, *zeros]) == sorted(arrays)
        for name, lazy in lazies.items():
            assert (lazy.shape, lazy.dtype) == (arrays[name].shape, arrays[name].dtype.name)
            seen.clear()
            np.testing.assert_array_equal(np.asarray(lazy), arrays[name])
            assert seen == [name]


@peers("torch", "transformers")
@pytest.mark.slow
class TestTransformers:
    @over([n for n in MODELS if re.match("qwen|llama", n)])
    def test_exported_files_load_with_equal_logits(self, name, tmp_path):
        folder = exported(make_model(name), tmp_path)
        model = str(tmp_path / "model")
        assert main(["check", model, "--torch", str(folder), "--tolerance", "2e-4"]) == 0
