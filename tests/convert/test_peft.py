"""Adapters: merged equals unmerged, PEFT's layout both ways, and what is refused."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import exported, make_model
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.convert import engine, peft
from paradec_jax.families import matrix_axes
from paradec_jax.lora import init_lora, merge
from paradec_jax.store import StoreError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANK, SCALE = 3, 2.5


def drawn(model: pd.Model, params=None) -> dict:
    """An adapter whose B is not zero."""
    adapter = init_lora(
        model.params if params is None else params, matrix_axes(model.config), RANK, jax.random.key(0)
    )
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), adapter)


def written(model: pd.Model, root: Path, params=None) -> Path:
    """The adapter in a folder, beside the model in another."""
    pd.save(root / "model", model)
    peft.write(root / "adapter", model.config, drawn(model, params), SCALE, "org/name")
    return root / "adapter"


def hugging_face(model: pd.Model) -> dict[str, np.ndarray]:
    """Weights by the names of the Hugging Face folder."""
    axes, rows = peft.TABLES[model.family](model.config)
    return {
        name: np.asarray(lazy, np.float64)
        for name, lazy in engine.export_tree(model.params, rows, axes).items()
    }


@pytest.mark.parametrize("name", ["huginn", "qwen3", "llama", "sdar", "mdlm", "qwen2 untied bfloat16"])
def test_merged_is_unmerged_in_their_layout(name, tmp_path):
    """W x + s B (A x) with what the folder holds, of every module; the merged model in memory, and loaded."""
    model = make_model(name)
    folder = written(model, tmp_path)
    fields, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    want = hugging_face(model)
    for key in (key for key in tensors if key.endswith("lora_A.weight")):
        module = key.removesuffix(".lora_A.weight").removeprefix(peft.HOLDER).removeprefix("backbone.")
        kind = module.rpartition(".")[2]
        rank = fields["rank_pattern"].get(kind, fields["r"])
        alpha = fields["alpha_pattern"].get(kind, fields["lora_alpha"])
        a, b = (tensors[key.replace("lora_A", side)].astype(np.float64) for side in ("lora_A", "lora_B"))
        assert {kind, module} & {*fields["target_modules"]} and len(a) == rank
        want[f"{module}.weight"] = want[f"{module}.weight"] + alpha / rank * b @ a
    assert sum(np.any(want[key] != value) for key, value in hugging_face(model).items()) == len(tensors) // 2
    joined = dataclasses.replace(model, params=jax.jit(merge)(model.params, drawn(model), SCALE))
    loaded = pd.load(tmp_path / "model", adapter=folder)
    close = {"rtol": 2**-8, "atol": 1e-6} if "bfloat16" in name else {"rtol": 1e-5, "atol": 1e-5}
    for merged in (joined, loaded):
        got = hugging_face(merged)
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, err_msg=key, **close)
    for path, leaf in flatten_dict(loaded.params, sep="/").items():
        assert leaf.dtype == flatten_dict(model.params, sep="/")[path].dtype


def test_a_checkpoint_rounds_once(tmp_path):
    """A bfloat16 checkpoint read in float32 keeps small changes; on a mesh the sums are the same."""
    model = make_model("qwen2 untied bfloat16")
    folder = written(model, tmp_path)
    wide = pd.load(tmp_path / "model", dtype="float32", adapter=folder, mesh=pd.make_mesh())
    narrow = pd.load(tmp_path / "model", adapter=folder)
    for a, b in zip(jax.tree.leaves(wide.params), jax.tree.leaves(narrow.params), strict=True):
        assert (a.astype(jnp.bfloat16) == b).all()
    assert any((a != a.astype(jnp.bfloat16)).any() for a in jax.tree.leaves(wide.params))


def test_training_joins_by_the_same_sum(tmp_path):
    """B = 0 changes nothing and has the only gradients; trained adapters of one layer are written by full names."""
    model = make_model("llama")
    tokens = jnp.arange(6)[None]

    def loss(adapter, params):
        output = model.network.forward(merge(params, adapter), tokens, tokens)
        return model.network.logits(params, output.hidden).var()

    upper = {"layer_1": model.params["layer_1"]}
    adapter = init_lora(upper, matrix_axes(model.config), RANK, jax.random.key(0))
    before, gradient = jax.jit(jax.value_and_grad(loss))(adapter, model.params)
    assert before == jax.jit(loss)({}, model.params) and adapter.keys() == upper.keys()
    for path, leaf in flatten_dict(gradient, sep="/").items():
        assert bool(jnp.any(leaf)) == path.endswith("lora_b"), path
    names = json.loads((written(model, tmp_path, upper) / CONFIG).read_text())["target_modules"]
    assert len(names) == 7 and all(name.startswith("model.layers.1.") for name in names)
    with pytest.raises(ValueError, match=r"rank of an adapter must be 1 to 16 .* not 17"):
        init_lora(upper, matrix_axes(model.config), 17, jax.random.key(0))


def edited(folder: Path, **fields) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"use_rslora": True}, RANK**0.5),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 5 * SCALE * RANK, "q_proj": SCALE}}, 5.0),
        ({"r": 8, "rank_pattern": {"[a-z]+_proj": RANK}, "lora_dropout": 0.1, "use_dora": False}, 1.0),
    ],
)
def test_scales(fields, factor, tmp_path):
    model = make_model("llama")
    folder = written(model, tmp_path)
    edited(folder, **fields)
    q = peft.read(folder, model.config)["layer_1"]["attention"]["q"]
    own = drawn(model)["layer_1"]["attention"]["q"]
    np.testing.assert_allclose(
        q["lora_b"] @ q["lora_a"], factor * SCALE * own["lora_b"] @ own["lora_a"], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "field use_dora of .* is True, but only plain LoRA is read"),
        ({"bias": "all"}, "field bias"),
        ({"modules_to_save": ["lm_head"]}, "field modules_to_save"),
        ({"init_lora_weights": "pissa"}, "field init_lora_weights"),
        ({"peft_type": "LOHA"}, "field peft_type"),
        ({"field_of_tomorrow": 1}, "field field_of_tomorrow"),
        ({"r": 4}, r"is no adapter of this model: .*lora_A.weight has shape \(3, 24\), but .* \(4, 24\)"),
        ({"lora_alpha": None}, "field lora_alpha of adapter_config.json must be a number above 0, not None"),
    ],
)
def test_what_is_not_plain_is_refused(fields, message, tmp_path):
    model = make_model("llama")
    folder = written(model, tmp_path)
    edited(folder, **fields)
    with pytest.raises(StoreError, match=message):
        pd.load(tmp_path / "model", adapter=folder)


def test_the_adapter_of_another_model_is_refused(tmp_path, capsys):
    written(make_model("llama"), tmp_path)
    pd.save(tmp_path / "wide", make_model("llama", width=24))
    pd.save(tmp_path / "flat", make_model("llama", layers=1))
    for name in ("wide", "flat"):
        command = ["generate", "Hi", "--model", str(tmp_path / name), "--adapter", str(tmp_path / "adapter")]
        assert main(command) == 1
        out, err = capsys.readouterr()
        assert out == "" and "is no adapter of this model: tensor " in err and err.count("\n") == 1


def test_half_a_pair_or_a_number_that_is_none_is_refused(tmp_path):
    model = make_model("llama")
    path = written(model, tmp_path) / WEIGHTS
    tensors = load_file(path)
    name = next(key for key in tensors if key.endswith("lora_B.weight"))
    save_file(tensors | {name: tensors[name] * np.nan}, path)
    with pytest.raises(StoreError, match="NaN"):
        pd.load(tmp_path / "model", adapter=path.parent)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(StoreError, match=r"lora_B\.weight is missing"):
        pd.load(tmp_path / "model", adapter=path.parent)


TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft"))


@pytest.mark.peers
@pytest.mark.skipif(not TORCH, reason="torch, transformers and peft are not installed")
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_peft_reads_what_is_written_and_the_other_way_round(kind, tmp_path):
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "exported").float().eval()

    def equal(model: pd.Model, other: torch.nn.Module):
        tokens = np.arange(12).reshape(2, 6)
        with torch.no_grad():
            want = other(torch.from_numpy(tokens)).logits.numpy()
        output = model.network.forward(model.params, tokens, np.broadcast_to(np.arange(6), (2, 6)))
        np.testing.assert_allclose(
            model.network.logits(model.params, output.hidden), want, atol=2e-4, rtol=1e-3
        )
        return want

    model = make_model(kind.lower())
    exported(model, tmp_path)
    peft.write(tmp_path / "ours", model.config, drawn(model), 0.01, "org/name")
    ours = pd.load(tmp_path / "exported", adapter=tmp_path / "ours")
    changed = equal(ours, PeftModel.from_pretrained(base(), tmp_path / "ours"))
    assert np.abs(changed - equal(model, base())).max() > 0.1
    torch.manual_seed(0)
    options = {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "init_lora_weights": False}
    theirs = get_peft_model(base(), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    theirs.save_pretrained(tmp_path / "theirs")
    equal(pd.load(tmp_path / "exported", adapter=tmp_path / "theirs"), theirs.eval())
