"""Adapters: merged equals unmerged, PEFT's layout both ways, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import edit, exported, json_in, make_model, rows
from flax.traverse_util import flatten_dict
from marks import over, peers
from safetensors.numpy import load_file, save_file

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.convert import checkpoint, engine, peft
from paradec_jax.families import matrix_axes
from paradec_jax.nn.adapters import init_lora
from paradec_jax.store import StoreError
from paradec_jax.store.lora import merge

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANK, SCALE = 3, 2.5


def drawn(model: pd.Model, params=None) -> dict:
    """An adapter whose B is not zero."""
    key, rng = jax.random.key(0), np.random.default_rng(1)
    adapter = init_lora(params or model.params, matrix_axes(model.config), RANK, key)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), adapter)


def written(model: pd.Model, root: Path, params=None) -> Path:
    """The adapter in a folder, beside the model in another."""
    pd.save(root / "model", model)
    peft.write(root / "adapter", model.config, drawn(model, params), SCALE, "org/name")
    return root / "adapter"


def hugging_face(model: pd.Model) -> dict[str, np.ndarray]:
    """Weights by the names of the Hugging Face folder."""
    tensors = engine.export_tree(
        model.params, checkpoint.BY_FAMILY[model.family].table(model.config)
    )
    return {name: np.asarray(lazy, np.float64) for name, lazy in tensors.items()}


@over(["huginn", "qwen3", "llama", "sdar", "llada", "mdlm", "qwen2 untied bfloat16"])
def test_merged_is_unmerged_in_their_layout(name, tmp_path):
    """W + s B A with what the folder holds, of every module: the parameters joined in training, and
    those loaded.
    """
    model = make_model(name)
    folder = written(model, tmp_path)
    fields, tensors = json_in(folder / CONFIG), load_file(folder / WEIGHTS)
    want = hugging_face(model)
    for key in (key for key in tensors if key.endswith("lora_A.weight")):
        module = (
            key.removesuffix(".lora_A.weight").removeprefix(peft.HOLDER).removeprefix("backbone.")
        )
        kind = module.rpartition(".")[2]
        rank = fields["rank_pattern"].get(kind, fields["r"])
        alpha = fields["alpha_pattern"].get(kind, fields["lora_alpha"])
        a, b = (
            tensors[key.replace("lora_A", side)].astype(np.float64) for side in ("lora_A", "lora_B")
        )
        assert {kind, module} & {*fields["target_modules"]} and len(a) == rank
        want[f"{module}.weight"] = want[f"{module}.weight"] + alpha / rank * b @ a
    assert (
        sum(np.any(want[key] != value) for key, value in hugging_face(model).items())
        == len(tensors) // 2
    )
    joined = dataclasses.replace(model, params=jax.jit(merge)(model.params, drawn(model), SCALE))
    loaded = pd.load(tmp_path / "model", adapter=folder)
    for merged in (joined, loaded):
        for key, value in hugging_face(merged).items():
            close = {"rtol": 2**-8 if "bfloat16" in name else 1e-5, "atol": 1e-5}
            np.testing.assert_allclose(value, want[key], err_msg=key, **close)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype, loaded.params, dict(model.params))
    assert all(jax.tree.leaves(same))


def test_a_checkpoint_rounds_once(tmp_path):
    """A bfloat16 checkpoint read in float32 keeps small changes, on a mesh too."""
    folder = written(make_model("qwen2 untied bfloat16"), tmp_path)
    wide = pd.load(tmp_path / "model", dtype="float32", adapter=folder, mesh=pd.make_mesh()).params
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    loaded = pd.load(tmp_path / "model", adapter=folder).params
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, narrow, loaded)))
    assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, narrow, wide)))


def test_training_begins_where_the_model_is(tmp_path):
    """B = 0 changes nothing and has the only gradients; an adapter of one layer is written by full
    names.
    """
    model, tokens = make_model("llama"), jnp.arange(6)[None]

    def loss(adapter, params):
        output = model.network.forward(merge(params, adapter, SCALE), tokens, tokens)
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


PATTERNS = {"layers.1.self_attn.q_proj": 5 * SCALE * RANK, "q_proj": SCALE}
EVERY = (
    r"^model\.layers\.0\.mlp\.up_proj$|q_proj|k_proj|v_proj|o_proj|gate_proj|mlp\.up_proj|down_proj"
)
SCALES = [  # fields, and the factor of a change's size
    ({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}, 1.0),
    ({"alpha_pattern": dict(reversed(PATTERNS.items()))}, 1 / RANK),
    ({"use_rslora": True}, RANK**0.5),
    ({"alpha_pattern": PATTERNS}, 5.0),
    (
        {
            "r": 8,
            "rank_pattern": {EVERY: RANK},
            "lora_dropout": 0.1,
            "use_dora": False,
        },
        1.0,
    ),
]


@rows("adapters", "fields", "sentence")
def test_fields_that_are_refused(fields, sentence, tmp_path):
    folder = written(make_model("llama"), tmp_path)
    edit(folder / CONFIG, **fields)
    with pytest.raises(StoreError, match=sentence):
        pd.load(tmp_path / "model", adapter=folder)


@over(SCALES, argument="fields, factor")
def test_fields(fields, factor, tmp_path):
    model = make_model("llama")
    folder = written(model, tmp_path)
    edit(folder / CONFIG, **fields)
    read, made = (
        one["layer_1"]["attention"]["q"] for one in (peft.read(folder, model.config), drawn(model))
    )
    want = factor * SCALE * made["lora_b"] @ made["lora_a"]
    np.testing.assert_allclose(read["lora_b"] @ read["lora_a"], want, rtol=1e-5, atol=1e-5)


def test_tensors_of_another_model_or_none_are_refused(tmp_path, capsys):
    path = written(make_model("llama"), tmp_path) / WEIGHTS
    pd.save(tmp_path / "wide", make_model("llama", width=24))
    pd.save(tmp_path / "flat", make_model("llama", layers=1))
    pd.save(tmp_path / "full", make_model("llada"))
    for name in ("wide", "flat", "full"):
        assert (
            main(["generate", "Hi", "--model", str(tmp_path / name), "--adapter", str(path.parent)])
            == 1
        )
        out, err = capsys.readouterr()
        assert out == "" and "is no adapter of this model" in err and err.count("\n") == 1
    tensors = load_file(path)
    name = next(key for key in tensors if key.endswith("lora_B.weight"))
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    for now, message in (
        (others | {name: tensors[name] * np.nan}, "NaN"),
        (others, r"lora_B\.weight is missing"),
        ({}, "holds no tensor of an adapter"),
        ({key: array * np.float32(1e30) for key, array in tensors.items()}, "NaN or infinite"),
        (others | {name: tensors[name].astype(np.int32)}, "is I32, but weights must be"),
    ):
        save_file(now, path)
        with pytest.raises(StoreError, match=message):
            pd.load(tmp_path / "model", adapter=path.parent)


def test_a_line_where_modules_have_no_tensors(tmp_path, capsys):
    model = make_model("llama")
    folder = written(model, tmp_path, {"layer_1": model.params["layer_1"]})
    edit(folder / CONFIG, target_modules=["q_proj", "up_proj"])
    capsys.readouterr()
    pd.load(tmp_path / "model", adapter=folder)
    line = "names 2 modules of which it holds no tensors, such as model.layers.0.self_attn.q_proj"
    assert line in capsys.readouterr().err


def test_other_forms_of_an_adapter(tmp_path, capsys):
    folder = written(make_model("llama"), tmp_path)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(StoreError, match="is a pickle, which is never unpickled"):
        peft.read(folder, make_model("llama").config)
    for command in (["generate", "Hi", "--model"], ["import"], ["export"]):
        more = [str(tmp_path / "out")] * (command[0] != "generate")
        assert main([*command, str(folder), *more]) == 1
        assert "holds an adapter; name its base model" in capsys.readouterr().err


@peers("torch", "transformers", "peft")
@over(["float32", "bfloat16"], argument="dtype")
@over(["llama", "qwen3"], argument="kind")
def test_peft_reads_what_is_written_and_the_other_way_round(kind, dtype, tmp_path):
    """Adapters of float32 over a base of either type, computed in float32, not merged on PEFT's
    side.
    """
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    model, tokens = make_model(kind, dtype=dtype, param_dtype=dtype), np.arange(12).reshape(2, 6)
    base = exported(model, tmp_path)

    def other():
        return AutoModelForCausalLM.from_pretrained(base).float().eval()

    def theirs_equal_ours(network: torch.nn.Module, adapter: Path | None):
        with torch.no_grad():
            theirs = network(torch.from_numpy(tokens)).logits.numpy()
        ours = pd.load(base, dtype="float32", adapter=adapter)
        output = ours.network.forward(ours.params, tokens, np.broadcast_to(np.arange(6), (2, 6)))
        logits = ours.network.logits(ours.params, output.hidden)
        np.testing.assert_allclose(logits, theirs, atol=2e-4, rtol=1e-3)
        return theirs

    peft.write(tmp_path / "ours", model.config, drawn(model), 0.01, "org/name")
    changed = theirs_equal_ours(
        PeftModel.from_pretrained(other(), tmp_path / "ours"), tmp_path / "ours"
    )
    assert np.abs(changed - theirs_equal_ours(other(), None)).max() > 0.1
    torch.manual_seed(0)
    options = {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2},
        "init_lora_weights": False,
    }
    network = get_peft_model(
        other(), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    )
    network.save_pretrained(tmp_path / "theirs")
    theirs_equal_ours(network.eval(), tmp_path / "theirs")
