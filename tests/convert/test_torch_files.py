"""Files of PyTorch: what is read, what stays inert, one sentence for each that is damaged; buffers
beside weights.
"""

import collections
import contextlib
import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from exports import CONFIG, FAMILIES, WEIGHTS, assert_same, imported, json_in, make_model, rewrite
from exports import GOLDEN as ALL_GOLDEN
from marks import over, peers
from safetensors.numpy import load_file
from torch_writer import (
    Harmful,
    Parameter,
    Storage,
    Tensor,
    nested_fields,
    settings,
    tensor,
    write_checkpoint,
)

from paradec_jax import store
from paradec_jax.convert import mdlm, torch_files
from paradec_jax.convert.engine import ConvertError

GOLDEN = ALL_GOLDEN / "masked_diffusion"
ROPE = f"backbone.{mdlm.ROPE}"


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """The recorded weights, in the order of their registration."""
    layout = json_in(GOLDEN / "key_layout.json")
    stored = load_file(GOLDEN / WEIGHTS)
    return {name: stored[name] for name in layout["state_dict"]}


def tree_of(tensors: dict[str, np.ndarray]) -> dict:
    """What a checkpoint holds: weights, their averages (half of them here), settings, and the state
    of a run.
    """
    averages = [tensor(array / 2) for name, array in tensors.items() if name != ROPE]
    return {
        "state_dict": collections.OrderedDict(
            (name, tensor(array)) for name, array in tensors.items()
        ),
        "ema": {"decay": 0.9999, "num_updates": 12, "shadow_params": averages},
        "hyper_parameters": {"config": settings(nested_fields(GOLDEN)), "tokenizer": Harmful()},
        "callbacks": Harmful(),
        "epoch": 3,
    }


@pytest.fixture
def source(tensors, tmp_path) -> Path:
    return write_checkpoint(tmp_path / "last.ckpt", tree_of(tensors))


@pytest.fixture(scope="module")
def want() -> store.Model:
    return store.load(GOLDEN)


def assert_times(found: store.Model, want: store.Model, factor: float):
    assert (found.config, found.token_spec) == (want.config, want.token_spec)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b * np.float32(factor)),
        found.params,
        want.params,
    )


class TestLightning:
    @over([((), 1), (("--weights", "ema"), 0.5)], argument="options, factor")
    def test_weights_are_chosen_by_name(self, source, want, options, factor):
        assert_times(imported(source, *options), want, factor)

    @over(["backbone.", "backbone.backbone.", "backbone._orig_mod.", ""], argument="prefix")
    @over([2, 4], argument="protocol")
    def test_wrappers_and_protocols(self, tensors, want, tmp_path, prefix, protocol):
        tree = tree_of(tensors)
        state = tree["state_dict"].items()
        tree["state_dict"] = {
            name.replace("backbone.", prefix): Parameter(value) for name, value in state
        }
        assert_times(
            imported(write_checkpoint(tmp_path / "a.ckpt", tree, protocol=protocol)), want, 1
        )

    def test_sizes_may_lie_beside_the_file(self, tensors, want, tmp_path, refused):
        source = write_checkpoint(tmp_path / "a.ckpt", tree_of(tensors) | {"hyper_parameters": 3})
        sentence = "does not tell the model's sizes; put its config.json beside it"
        assert sentence in refused(source)
        (tmp_path / CONFIG).write_text((GOLDEN / CONFIG).read_text())
        assert_times(imported(source), want, 1)

    @over(
        [None, {"shadow_params": [3]}, {"shadow_params": [tensor(np.ones(2, np.float32))] * 29}],
        argument="averages",
    )
    def test_averages_that_are_wrong(self, tensors, tmp_path, refused, averages):
        source = write_checkpoint(tmp_path / "a.ckpt", tree_of(tensors) | {"ema": averages})
        sentence = "has no averages of the model's 30 parameters"
        assert sentence in refused(source, "--weights", "ema")
        imported(source, "--weights", "raw")

    def test_settings(self, source):
        with torch_files.Archive(source) as archive:
            harmful, hyper = archive.tree["callbacks"], archive.tree["hyper_parameters"]
            assert isinstance(harmful, torch_files.Inert) and type(harmful).__name__ == "system"
            assert isinstance(hyper["config"], torch_files.Inert)
            found = torch_files.hyper_parameters(archive)
        nested = nested_fields(GOLDEN)
        assert found["model"] == nested["model"] and found["training"] == nested["training"]
        assert found["time_conditioning"] is False


CALLS = {  # each would call os.system
    "reduce": b"cos\nsystem\n(S'true'\ntR.",
    "instance": b"(S'true'\nios\nsystem\n.",
    "object": b"(cos\nsystem\nS'true'\no.",
    "new object": b"\x80\x02cos\nsystem\n(S'true'\nt\x81.",
    "name on the stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93(S'true'\ntR.",
    "by getattr": b"cbuiltins\ngetattr\n(cos\nos\nS'system'\ntR(S'true'\ntR.",
    "state of a stand-in": b"cos\nsystem\n(S'true'\ntRccopyreg\n__reduce_ex__\n(S'true'\ntRb.",
}


@over(CALLS)
def test_no_opcode_calls_what_it_names(name, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr("os.system", ran.append)
    with torch_files.Archive(
        write_checkpoint(tmp_path / "a.ckpt", {}, data_pkl=CALLS[name])
    ) as archive:
        assert isinstance(archive.tree, torch_files.Inert) and not ran


def test_a_pickle_cannot_change_the_stand_ins_of_others(tmp_path):
    """State that is put into a class, or into a function, stays with that one."""
    for module, name in ((b"os", b"system"), (b"torch._utils", b"_rebuild_tensor_v2")):
        spoilt = b"\x80\x02c" + module + b"\n" + name + b"\nN}U\x05stateK\x01s\x86b."
        path = write_checkpoint(tmp_path / "a.ckpt", {}, data_pkl=spoilt)
        with contextlib.suppress(ConvertError):
            torch_files.Archive(path).__exit__(None, None, None)
    assert torch_files.Inert.state is None and torch_files.Inert().state is None


def test_views_of_a_storage(tmp_path):
    """Offsets, strides and types, of tensors that share their numbers."""
    numbers = np.arange(24, dtype=np.float32)
    shared, half = Storage(numbers), Storage(np.arange(4).astype(ml_dtypes.bfloat16))
    tree = {
        "columns": Tensor(shared, 2, (4, 5), (1, 4)),
        "number": Tensor(shared, 7, (), ()),
        "nothing": Tensor(shared, 24, (0, 3), (3, 1)),
        "half": Tensor(half, 1, (3,), (1,)),
        "past the end": Tensor(shared, 22, (3,), (1,)),
    }
    with torch_files.Archive(
        write_checkpoint(tmp_path / "a.ckpt", {"state_dict": tree})
    ) as archive:
        found = torch_files.state_dict(archive, str)
        columns = numbers[2:22].reshape(5, 4).T
        np.testing.assert_array_equal(found.read("columns"), columns)
        np.testing.assert_array_equal(found.tensors["columns"].read(slice(1, 3)), columns[1:3])
        assert found.read("number") == 7 and found.read("nothing").shape == (0, 3)
        assert found.tensors["half"].dtype == "bfloat16" and found.read("half").tolist() == [
            1,
            2,
            3,
        ]
        assert (found.tensors["columns"].shape, found.tensors["columns"].dtype) == (
            (4, 5),
            "float32",
        )
        with pytest.raises(ConvertError, match=r"not as long as its data.pkl says"):
            found.read("past the end")


# Damaged files


def changed(**changes):
    """A checkpoint whose tree has other entries."""
    return lambda path, tensors: write_checkpoint(path, tree_of(tensors) | changes)


def replaced(**files):
    """A checkpoint in which files of the archive have another content; None removes one."""
    return lambda path, tensors: write_checkpoint(path, tree_of(tensors), **files)


def edited(name: str, array: np.ndarray | None):
    """A checkpoint with another tensor of that name; None removes it."""

    def write(path: Path, tensors):
        tree = tree_of(tensors)
        tree["state_dict"].pop(f"backbone.{name}", None)
        if array is not None:
            tree["state_dict"][f"backbone.{name}"] = tensor(array)
        write_checkpoint(path, tree)

    return write


def cut(path: Path, tensors):
    write_checkpoint(path, tree_of(tensors))
    path.write_bytes(path.read_bytes()[:-200])


def flipped(path: Path, tensors):
    """One bit of the embedding."""
    write_checkpoint(path, tree_of(tensors))
    content = bytearray(path.read_bytes())
    content[content.index(tensors["backbone.vocab_embed.embedding"].tobytes()) + 100] ^= 1
    path.write_bytes(content)


NO_ZIP = "missing, damaged or not in PyTorch's zip format"


@over(
    [
        (lambda path, _: path.write_bytes(b"\x80\x02}."), NO_ZIP),
        (cut, NO_ZIP),
        (flipped, r"data/0 in .* is damaged \(Bad CRC-32"),
        (replaced(data_pkl=None), "a zip file, but not of PyTorch: it has no data.pkl"),
        (replaced(data_pkl=b"\x80\x02]q\x00(h\x00"), "data.pkl in .* is damaged"),  # no end
        (replaced(data_0=None), "lacks data/0, although its data.pkl refers to it"),
        (replaced(byteorder=b"big"), "not little-endian"),
        (
            lambda path, t: write_checkpoint(
                path, {"hyper_parameters": tree_of(t)["hyper_parameters"]}
            ),
            "has no state_dict",
        ),
        (changed(state_dict=3), "has no table of tensors where its weights should be"),
        (
            changed(state_dict={"a": Harmful()}),
            "holds 'a' among its weights, which is not a named tensor",
        ),
        (edited("output_layer.linear.bias", None), "tensor output_layer.linear.bias is missing"),
        (edited("blocks.0.norm1.weight", np.ones(3, np.float32)), r"norm1.weight has shape \(3,\)"),
        (
            edited(mdlm.ROPE, np.ones(8, np.float32)),
            "inv_freq contradicts rotary positions of base 10000",
        ),
    ],
    argument="write, message",
)
def test_files_that_are_wrong(tensors, tmp_path, refused, write, message):
    source = tmp_path / "last.ckpt"
    write(source, tensors)
    assert re.search(message, refused(source))


# Weights of Hugging Face folders


def as_torch(source: Path, write, shards: bool):
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


def write_by_hand(path: Path, tensors: dict[str, np.ndarray]):
    tree = collections.OrderedDict((name, tensor(array)) for name, array in tensors.items())
    tree._metadata = {"": {"version": Harmful()}}  # an attribute, as `state_dict` sets it
    write_checkpoint(path, tree)


@over([False, True], argument="shards")
@over(FAMILIES)
class TestFolders:
    def test_every_family_is_imported(self, name, shards, copy):
        source = copy(name)
        as_torch(source, write_by_hand, shards)
        assert_same(imported(source), make_model(name))

    @peers("torch")
    @pytest.mark.slow
    def test_what_torch_writes(self, name, shards, copy):
        import torch

        def write(path: Path, tensors: dict[str, np.ndarray]):
            torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, path)

        source = copy(name)
        as_torch(source, write, shards)
        assert_same(imported(source), make_model(name))


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


class TestBuffers:
    @over(
        [
            ("huginn", ("transformer.", "core_block.0")),
            ("qwen2", ("model.", "layers.0")),
            ("mdlm", ("backbone.", "blocks.0")),
        ],
        argument="name, places",
    )
    def test_are_left_out(self, name, places, copy):
        source = copy(name)
        rewrite(source, lambda t: t.update(buffers(*places)))
        assert_same(imported(source), make_model(name))
        if name == "mdlm":
            state = {
                key: tensor(array)
                for key, array in load_file(source / WEIGHTS).items()
                if array.ndim
            }
            write_checkpoint(source / "last.ckpt", {"state_dict": state})
            assert_same(imported(source / "last.ckpt"), make_model(name))

    @over(
        [("model.layers.0.self_attn.bias", (16,)), ("model.layers.0.mlp.bias", (1, 1, 4, 4))],
        argument="name, shape",
    )
    def test_others_stay_unknown(self, name, shape, copy, refused):
        source = copy("qwen2")
        rewrite(source, lambda t: t.update({name: np.ones(shape, np.float32)}))
        assert f"tensor {name} in {source} is unknown" in refused(source)


def raw(tensors):
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    for name in list(tensors):
        tensors["_orig_mod._original_module." + name] = tensors.pop(name)


@over(
    [
        pytest.param(raw, id="names of the raw checkpoints"),
        lambda t: t.update(freqs_cis=t["freqs_cis"].astype(ml_dtypes.bfloat16)),
        lambda t: t.pop("freqs_cis"),
    ],
    argument="change",
)
def test_forms_of_the_recurrent_release(change, copy):
    source = copy("huginn")
    rewrite(source, change)
    assert_same(imported(source), make_model())
