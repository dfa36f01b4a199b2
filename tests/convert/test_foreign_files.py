"""What folders of others may hold besides what the converters write: types, buffers, fields, files, prefixes."""

import collections
import dataclasses
import importlib.util
import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from exports import WEIGHTS, assert_same, edit, fails, make_model, make_shards, rewrite
from flax.traverse_util import flatten_dict
from malformed_models import tokenizer_fields
from safetensors.numpy import load_file, save_file
from torch_writer import Harmful, tensor, write_checkpoint

from convert.cli import main
from convert.weights import INDEX
from paradec_jax import store
from paradec_jax.config import TokenSpec
from paradec_jax.families import PRESETS

OWN = TokenSpec(bos=3, stop=(1,), pad=4, mask=31, alignment="own")
NEXT = TokenSpec(bos=3, stop=(1, 2), pad=4)
MODELS = {
    "huginn": (PRESETS["test-recurrent"], NEXT),
    "qwen2": (PRESETS["test-causal"], NEXT),
    "llama": (dataclasses.replace(PRESETS["test-causal"], qkv_bias=False, tie_embeddings=False), NEXT),
    "sdar": (PRESETS["test-sdar"], OWN),
    "mdlm": (PRESETS["test-mdlm"], OWN),
}
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
CONFIG = "config.json"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A Hugging Face folder of each family, with random weights."""
    root = tmp_path_factory.mktemp("foreign")
    for name, (config, spec) in MODELS.items():
        store.save(root / "model" / name, dataclasses.replace(make_model(config), token_spec=spec))
        assert main(["export", str(root / "model" / name), str(root / name)]) == 0
    return root


@pytest.fixture
def copy(exported, tmp_path):
    """Copies a folder to be changed."""
    return lambda name: Path(shutil.copytree(exported / name, tmp_path / "source"))


def imported(folder: Path, *options: str) -> store.Model:
    """The model that the command makes of a folder."""
    target = folder.parent / "taken"
    assert main(["import", str(folder), str(target), "--overwrite", *options]) == 0
    return store.load(target, host=True)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Parameters of a model folder by path."""
    return flatten_dict(store.load(folder, host=True).params, sep="/")


def cast(folder: Path, kind: str, part: str = "") -> None:
    """Casts the tensors whose names hold `part`."""
    rewrite(folder, lambda t: t.update({n: x.astype(TYPES[kind]) for n, x in t.items() if part in n}))


class TestTypes:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize(
        ("options", "kind"),
        [((), "float32"), (("--dtype", "float32"), "float32"), (("--dtype", "bfloat16"), "bfloat16")],
        ids=["default", "float32", "bfloat16"],
    )
    def test_float16(self, name, options, kind, copy, exported):
        source = copy(name)
        cast(source, "float16")
        edit(source / CONFIG, torch_dtype="float16")
        model = imported(source, *options)
        assert (model.config.param_dtype, model.config.dtype) == (kind, kind)
        leaves = flatten_dict(model.params, sep="/")
        for path, before in weights(exported / "model" / name).items():
            want = before.astype(np.float16).astype(TYPES[kind])
            assert leaves[path].dtype == want.dtype and leaves[path].tobytes() == want.tobytes(), path

    def test_float16_is_told(self, copy, capsys):
        source = copy("qwen2")
        edit(source / CONFIG, torch_dtype="torch.half")
        imported(source)
        assert (
            "config.json says float16, in which nothing is computed here: float32" in capsys.readouterr().out
        )

    @pytest.mark.parametrize(
        "kinds", [("float16", "float32"), ("bfloat16", "float16"), ("bfloat16", "float32")]
    )
    def test_several_types_become_the_one_that_loses_nothing(self, kinds, copy):
        source = copy("qwen2")
        for kind, part in zip(kinds, ("self_attn", "mlp"), strict=True):
            cast(source, kind, part)
        whole = load_file(source / WEIGHTS)
        make_shards(source)
        leaves = flatten_dict(imported(source).params, sep="/")
        assert {leaf.dtype.name for leaf in leaves.values()} == {"float32"}
        down = whole["model.layers.0.mlp.down_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(leaves["layer_0/mlp/down"], down.T)

    def test_a_copy_of_the_embedding_in_another_type(self, copy, capsys):
        source = copy("qwen2")
        cast(source, "float16")
        name = "model.embed_tokens.weight"
        rewrite(source, lambda t: t.update({"lm_head.weight": t[name].astype(np.float32)}))
        imported(source)
        rewrite(source, lambda t: t["lm_head.weight"].__setitem__((0, 0), 1.0001))
        assert "lm_head.weight differs from" in fails(capsys, "import", source)

    @pytest.mark.parametrize(
        ("fields", "want"),
        [
            ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
            ({"torch_dtype": "torch.float32"}, "float32"),
            ({"torch_dtype": "float"}, "float32"),
            ({"torch_dtype": None, "dtype": "torch.bfloat16"}, "bfloat16"),
            ({"torch_dtype": "bfloat16", "dtype": "torch.bfloat16"}, "bfloat16"),
            ({"torch_dtype": None}, "float32"),
        ],
        ids=lambda value: str(value),
    )
    def test_names_of_types(self, fields, want, copy, capsys):
        source = copy("qwen2")
        edit(source / CONFIG, **fields)
        assert imported(source).config.dtype == want
        assert capsys.readouterr().out.count("\n") == 1

    def test_of_two_fields_the_newer_one_counts_and_the_other_is_told(self, copy, capsys):
        source = copy("qwen2")
        edit(source / CONFIG, torch_dtype="float32", dtype="bfloat16")
        assert imported(source).config.dtype == "bfloat16"
        assert "contradict each other: dtype = bfloat16, torch_dtype = float32; dtype counts" in (
            capsys.readouterr().out
        )

    def test_of_a_training_config(self, copy):
        source = copy("mdlm")
        fields = json.loads((source / CONFIG).read_text())
        sizes = {"length": fields["model_length"], "hidden_size": fields["hidden_dim"]}
        sizes |= {name: fields[name] for name in ("cond_dim", "n_blocks", "n_heads")}
        (source / CONFIG).write_text(json.dumps({"model": sizes, "dtype": "torch.bfloat16"}))
        assert imported(source).config.dtype == "bfloat16"


def buffers(prefix: str, layer: str) -> dict[str, np.ndarray]:
    """What programs save beside weights, at the root and in a layer."""
    mask, table = np.tril(np.ones((1, 1, 4, 4), np.bool_)), np.ones(2, np.float32)
    return {
        f"{prefix}position_ids": np.arange(4)[None],
        f"{prefix}rotary_emb.original_inv_freq": table,
        f"{prefix}{layer}.self_attn.rotary_emb.inv_freq": table,
        f"{prefix}{layer}.attention.rotary_emb.cos_cached": np.ones((1, 1, 4, 2), np.float16),
        f"{prefix}{layer}.attn.bias": mask,
        f"{prefix}{layer}.attention.bias": mask.astype(np.uint8),
        f"{prefix}{layer}.attn.masked_bias": np.array(-1e4, np.float32),
    }


PLACES = {
    "huginn": ("transformer.", "core_block.0"),
    "qwen2": ("model.", "layers.0"),
    "llama": ("model.", "layers.1"),
    "sdar": ("model.", "layers.0"),
    "mdlm": ("backbone.", "blocks.0"),
}


class TestBuffers:
    @pytest.mark.parametrize("name", MODELS)
    def test_are_left_out(self, name, copy, exported):
        source = copy(name)
        rewrite(source, lambda t: t.update(buffers(*PLACES[name])))
        rewrite(
            source,
            lambda t: t.setdefault("rotary_emb.inv_freq", np.ones(2, np.float32)) if name != "mdlm" else 0,
        )
        assert_same(imported(source), store.load(exported / "model" / name, host=True))

    def test_of_a_checkpoint(self, copy, tmp_path, exported):
        source = copy("mdlm")
        arrays = load_file(source / WEIGHTS) | buffers(*PLACES["mdlm"])
        state = {name: tensor(array) for name, array in arrays.items() if array.ndim}
        write_checkpoint(source / "last.ckpt", {"state_dict": state})
        assert main(["import", str(source / "last.ckpt"), str(tmp_path / "model")]) == 0
        assert_same(
            store.load(tmp_path / "model", host=True), store.load(exported / "model" / "mdlm", host=True)
        )

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("model.layers.0.self_attn.bias", (16,)),
            ("model.layers.0.attn.bias", (1, 4, 4)),
            ("model.layers.0.self_attn.inv_freqs", (2,)),
            ("model.layers.0.mlp.bias", (1, 1, 4, 4)),
        ],
    )
    def test_others_stay_unknown(self, name, shape, copy, capsys):
        source = copy("qwen2")
        rewrite(source, lambda t: t.update({name: np.ones(shape, np.float32)}))
        assert f"tensor {name} in {source} is unknown" in fails(capsys, "import", source)


class TestFields:
    @pytest.mark.parametrize("name", MODELS)
    def test_that_nobody_needs(self, name, copy, exported):
        source = copy(name)
        more = {
            "transformers_version": "5.0.0",
            "_name_or_path": "somewhere",
            "pretraining_tp": 2,
            "use_cache": False,
            "quantization_config": {},
            "an_unheard_of_field": [1, {"a": "b"}],
            "attention_dropout": 0.1,
        }
        fields = json.loads((source / CONFIG).read_text()) | more
        nulls = {"mlp_bias", "use_sliding_window", "bias", "time_conditioning", "n_layers"} & fields.keys()
        (source / CONFIG).write_text(json.dumps(fields | dict.fromkeys(nulls)))
        assert_same(imported(source), store.load(exported / "model" / name, host=True))

    @pytest.mark.parametrize(
        "fields",
        [
            {"use_sliding_window": True, "sliding_window": "null"},
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            {"use_sliding_window": True, "layer_types": ["full_attention"] * 2},
            {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
            {"rope_scaling": {"rope_type": "default", "original_max_position_embeddings": 64}},
            {"pad_token_id": -1},
        ],
        ids=lambda value: str(value),
    )
    def test_that_change_nothing(self, fields, copy, exported):
        source = copy("qwen2")
        edit(source / CONFIG, **fields)
        (source / CONFIG).write_text((source / CONFIG).read_text().replace('"null"', "null"))
        assert_same(imported(source), store.load(exported / "model" / "qwen2", host=True))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"mlp_bias": True}, "mlp_bias .* must be False, not True: it changes what the model computes"),
            ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "use_sliding_window"),
            ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "scales rotary positions"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights .*quant_method gptq"),
            ({"quantization": {"group_size": 64, "bits": 4}}, "quantised weights .quantization."),
        ],
        ids=lambda value: str(value),
    )
    def test_that_change_what_is_computed(self, fields, message, copy, capsys):
        source = copy("qwen2")
        edit(source / CONFIG, **fields)
        assert re.search(message, fails(capsys, "import", source))

    def test_byte_order_marks(self, copy, exported):
        source = copy("qwen2")
        (source / "tokenizer.json").write_text(json.dumps(tokenizer_fields()))
        for name in (CONFIG, "tokenizer.json", "generation_config.json", "tokenizer_config.json"):
            (source / name).write_bytes(b"\xef\xbb\xbf" + (source / name).read_bytes())
        assert_same(imported(source), store.load(exported / "model" / "qwen2", host=True))


def as_torch(source: Path, write, shards: bool) -> None:
    """Puts what `write` makes of tables of tensors in the place of a folder's safetensors."""
    tensors = load_file(source / WEIGHTS)
    (source / WEIGHTS).unlink()
    names = list(tensors)
    parts = {"pytorch_model.bin": names}
    if shards:
        half = len(names) // 2
        parts = {"pytorch_model-1.bin": names[:half], "pytorch_model-2.bin": names[half:]}
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for file, part in parts.items():
        write(source / file, {name: tensors[name] for name in part})


def write_by_hand(path: Path, tensors: dict[str, np.ndarray]) -> None:
    tree = collections.OrderedDict((name, tensor(array)) for name, array in tensors.items())
    tree._metadata = {"": {"version": Harmful()}}  # an attribute, as `state_dict` sets it
    write_checkpoint(path, tree)


class TestFilesOfPyTorch:
    @pytest.mark.parametrize("shards", [False, True])
    @pytest.mark.parametrize("name", MODELS)
    def test_every_family_is_imported(self, name, shards, copy, exported):
        source = copy(name)
        as_torch(source, write_by_hand, shards)
        assert_same(imported(source), store.load(exported / "model" / name, host=True))

    @pytest.mark.peers
    @pytest.mark.slow
    @pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
    @pytest.mark.parametrize("shards", [False, True])
    @pytest.mark.parametrize("name", MODELS)
    def test_what_torch_writes(self, name, shards, copy, exported):
        import torch

        source = copy(name)
        as_torch(
            source, lambda path, t: torch.save({n: torch.from_numpy(x) for n, x in t.items()}, path), shards
        )
        assert_same(imported(source), store.load(exported / "model" / name, host=True))

    def test_what_is_wrong(self, copy, capsys):
        source = copy("qwen2")
        as_torch(source, write_by_hand, True)
        first, second = sorted(source.glob("pytorch_model-*.bin"))
        whole = first.read_bytes()
        write_checkpoint(first, {"model.norm.weight": 3})
        assert "which is not a named tensor" in fails(capsys, "import", source)
        first.write_bytes(second.read_bytes())
        assert "is listed in an index, but" in fails(capsys, "import", source)
        first.write_bytes(whole[:-100])
        assert "damaged or not in PyTorch's zip format" in fails(capsys, "import", source)
        second.unlink()
        assert "is missing, although pytorch_model.bin.index.json lists it" in fails(capsys, "import", source)


class TestFolderSavedTwice:
    def test_an_index_without_shards(self, copy, exported):
        source = copy("qwen2")
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (source / INDEX).write_text(json.dumps(index))
        assert_same(imported(source), store.load(exported / "model" / "qwen2", host=True))

    def test_both_whole(self, copy, exported):
        source = copy("qwen2")
        tensors = load_file(source / WEIGHTS)
        rewrite(source, lambda t: t.update({name: array + 1 for name, array in t.items()}))
        make_shards(source)
        save_file(tensors, source / WEIGHTS)
        (source / "pytorch_model.bin").write_bytes(b"\x80\x04")
        assert_same(imported(source), store.load(exported / "model" / "qwen2", host=True))

    def test_shards_that_are_there_in_part(self, copy, capsys):
        source = copy("qwen2")
        make_shards(source)
        (source / "b.safetensors").unlink()
        assert "b.safetensors is missing, although" in fails(capsys, "import", source)


def renamed(folder: Path, rename) -> None:
    """Gives all tensors other names."""
    rewrite(folder, lambda t: [t.update({rename(name): t.pop(name)}) for name in list(t)])


class TestPrefix:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
    def test_too_much(self, name, prefix, copy, capsys):
        source = copy(name)
        renamed(source, lambda stored: prefix + stored)
        if name == "mdlm" and prefix == "_orig_mod.":  # a wrapper of its program, which is taken off
            imported(source)
        else:
            assert f"every name begins with {prefix!r}: {source} holds {prefix}" in fails(
                capsys, "import", source
            )

    def test_of_a_training_config(self, copy, capsys):
        source = copy("mdlm")
        renamed(source, lambda stored: "module." + stored)
        fields = json.loads((source / CONFIG).read_text())
        edit(source / CONFIG, vocab_size=None, model_type=None, model={"length": fields["model_length"]})
        assert "every name begins with 'module.'" in fails(capsys, "import", source)

    @pytest.mark.parametrize("name", ["qwen2", "llama", "sdar"])
    def test_doubled(self, name, copy, capsys):
        source = copy(name)
        renamed(source, lambda stored: stored.replace("model.", "model.model."))
        told = fails(capsys, "import", source)
        assert "every name begins with 'model.'" in told and "holds model.model.embed_tokens.weight" in told

    @pytest.mark.parametrize("name", ["qwen2", "llama", "sdar"])
    def test_too_little(self, name, copy, capsys):
        source = copy(name)
        rewrite(source, lambda t: t.pop("lm_head.weight", None))
        renamed(source, lambda stored: stored.removeprefix("model."))
        told = fails(capsys, "import", source)
        assert "every name lacks 'model.'" in told and "asks for model.embed_tokens.weight" in told

    def test_a_name_that_fits_by_chance(self, copy, capsys):
        source = copy("qwen2")
        rewrite(source, lambda t: t.update({"module.model.norm.weight": t.pop("model.norm.weight")}))
        assert "tensor model.norm.weight is missing" in fails(capsys, "import", source)
