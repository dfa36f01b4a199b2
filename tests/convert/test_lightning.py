"""Checkpoints of Lightning: which weights are read, what stays inert, and one sentence for each that is damaged."""

import contextlib
import json
import re
from collections import OrderedDict
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from exports import fails
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

from convert import mdlm, torch_files
from convert.cli import main
from convert.engine import ConvertError, in_memory, read_json
from paradec_jax import store

GOLDEN = Path(__file__).parents[1] / "golden" / "masked_diffusion"
ROPE = f"backbone.{mdlm.ROPE}"


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """The recorded weights, in the order of their registration."""
    layout = json.loads((GOLDEN / "key_layout.json").read_text())
    stored = load_file(GOLDEN / "model.safetensors")
    return {name: stored[name] for name in layout["state_dict"]}


def tree_of(tensors: dict[str, np.ndarray]) -> dict:
    """What a checkpoint holds: weights, their averages (half of them here), settings, and the state of a run."""
    averages = [tensor(array / 2) for name, array in tensors.items() if name != ROPE]
    return {
        "state_dict": OrderedDict((name, tensor(array)) for name, array in tensors.items()),
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
    return in_memory(mdlm.read(GOLDEN, read_json(GOLDEN / "config.json")))


def imported(source: Path, *options: str) -> store.Model:
    target = source.with_name("model")
    assert main(["import", str(source), str(target), *options]) == 0
    return store.load(target, host=True)


def assert_times(found: store.Model, want: store.Model, factor: float) -> None:
    assert (found.config, found.token_spec) == (want.config, want.token_spec)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b * np.float32(factor)), found.params, want.params
    )


@pytest.mark.parametrize(
    ("options", "factor"), [((), 1), (("--weights", "raw"), 1), (("--weights", "ema"), 0.5)]
)
def test_weights_are_chosen_by_name(source, want, options, factor):
    assert_times(imported(source, *options), want, factor)


@pytest.mark.parametrize("prefix", ["backbone.", "backbone.backbone.", "backbone._orig_mod.", ""])
@pytest.mark.parametrize("protocol", [2, 4])
def test_wrappers_and_protocols(tensors, want, tmp_path, prefix, protocol):
    tree = tree_of(tensors)
    tree["state_dict"] = {
        name.replace("backbone.", prefix): Parameter(value) for name, value in tree["state_dict"].items()
    }
    assert_times(imported(write_checkpoint(tmp_path / "a.ckpt", tree, protocol=protocol)), want, 1)


def test_sizes_may_lie_beside_the_file(tensors, want, tmp_path, capsys):
    tree = tree_of(tensors)
    del tree["hyper_parameters"]
    source = write_checkpoint(tmp_path / "last.ckpt", tree)
    assert "does not tell the model's sizes; put its config.json beside it" in fails(capsys, "import", source)
    (tmp_path / "config.json").write_text((GOLDEN / "config.json").read_text())
    assert_times(imported(source), want, 1)


def test_nothing_that_a_pickle_names_is_called(source):
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


@pytest.mark.parametrize("name", CALLS)
def test_no_opcode_calls_what_it_names(name, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr("os.system", ran.append)
    with torch_files.Archive(write_checkpoint(tmp_path / "a.ckpt", {}, data_pkl=CALLS[name])) as archive:
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
        "state_dict": {
            "columns": Tensor(shared, 2, (4, 5), (1, 4)),
            "number": Tensor(shared, 7, (), ()),
            "nothing": Tensor(shared, 24, (0, 3), (3, 1)),
            "half": Tensor(half, 1, (3,), (1,)),
        }
    }
    with torch_files.Archive(write_checkpoint(tmp_path / "a.ckpt", tree)) as archive:
        found = torch_files.state_dict(archive, lambda name: name)
        np.testing.assert_array_equal(found.read("columns"), numbers[2:22].reshape(5, 4).T)
        np.testing.assert_array_equal(found.read("columns", slice(1, 3)), numbers[2:22].reshape(5, 4).T[1:3])
        assert found.read("number") == 7 and found.read("nothing").shape == (0, 3)
        assert found.dtype("half") == "bfloat16" and found.read("half").tolist() == [1, 2, 3]
        assert found.shape("columns") == (4, 5) and found.dtype("number") == "float32"


# Damaged files


def changed(**changes):
    """A checkpoint whose tree has other entries; None removes one."""

    def write(path: Path, tensors) -> None:
        tree = tree_of(tensors) | changes
        write_checkpoint(path, {name: value for name, value in tree.items() if value is not None})

    return write


def replaced(**files):
    """A checkpoint in which files of the archive have another content; None removes one."""

    def write(path: Path, tensors) -> None:
        write_checkpoint(path, tree_of(tensors), **files)

    return write


def cut(path: Path, tensors) -> None:
    write_checkpoint(path, tree_of(tensors))
    path.write_bytes(path.read_bytes()[:-200])


def flipped(path: Path, tensors) -> None:
    """One bit of the embedding."""
    write_checkpoint(path, tree_of(tensors))
    content = bytearray(path.read_bytes())
    content[content.index(tensors["backbone.vocab_embed.embedding"].tobytes()) + 100] ^= 1
    path.write_bytes(content)


def short_list(path: Path, tensors) -> None:
    tree = tree_of(tensors)
    tree["ema"]["shadow_params"].pop()
    write_checkpoint(path, tree)


def edited(**arrays):
    """A checkpoint with other tensors in its state_dict; None removes one."""

    def write(path: Path, tensors) -> None:
        tree = tree_of(tensors)
        for name, array in arrays.items():
            full = f"backbone.{name.replace('__', '.')}"
            tree["state_dict"].pop(full, None)
            if array is not None:
                tree["state_dict"][full] = tensor(array)
        write_checkpoint(path, tree)

    return write


UNKNOWN = b"\x80\x02c__main__\nf\n\x82\x01."  # an extension's number
ENDLESS = b"\x80\x02]q\x00(h\x00"
PAST = {"state_dict": {"a": Tensor(Storage(np.zeros(3, np.float32)), 1, (3,), (1,))}}


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path, _: path.write_bytes(b""), "missing, damaged or not in PyTorch's zip format"),
        (
            lambda path, _: path.write_bytes(b"\x80\x02}."),
            "missing, damaged or not in PyTorch's zip format",
        ),
        (cut, "missing, damaged or not in PyTorch's zip format"),
        (flipped, r"data/0 in .* is damaged \(Bad CRC-32"),
        (replaced(data_pkl=None), "a zip file, but not of PyTorch: it has no data.pkl"),
        (replaced(data_pkl=ENDLESS), "data.pkl in .* is damaged"),
        (replaced(data_pkl=b"\x80\x02q\x07."), "data.pkl in .* is damaged"),
        (replaced(data_pkl=b"\x80\x02h\x07."), "data.pkl in .* is damaged"),
        (replaced(data_pkl=b"\x80\x02}}s."), "data.pkl in .* is damaged"),
        (replaced(data_pkl=UNKNOWN), "data.pkl in .* is damaged"),
        (replaced(data_0=None), "lacks data/0, although its data.pkl refers to it"),
        (replaced(data_0=b"1234"), "data/0 in .* is not as long as its data.pkl says"),
        (replaced(byteorder=b"big"), "not little-endian"),
        (changed(state_dict=None), "has no state_dict: not a checkpoint of Lightning"),
        (changed(state_dict={"a": 3}), "holds 'a' among its weights, which is not a named tensor"),
        (changed(hyper_parameters=3), "does not tell the model's sizes"),
        (edited(output_layer__linear__bias=None), "tensor output_layer.linear.bias is missing"),
        (edited(extra=np.zeros(2, np.float32)), "tensor extra in .* is unknown"),
        (edited(blocks__0__norm1__weight=np.ones(3, np.float32)), r"norm1.weight has shape \(3,\)"),
        (edited(blocks__0__norm1__weight=np.ones(64, np.int64)), "is int64"),
        (edited(sigma_map__mlp__0__weight=None), "a denoiser without layers that modulate is not supported"),
        (
            edited(rotary_emb__inv_freq=np.ones(8, np.float32)),
            "holds other frequencies than those of base 10000",
        ),
    ],
)
def test_files_that_are_wrong(tensors, tmp_path, capsys, write, message):
    source = tmp_path / "last.ckpt"
    write(source, tensors)
    assert re.search(message, fails(capsys, "import", source))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (changed(ema=None), "has no averaged weights"),
        (changed(ema={"shadow_params": [3]}), "has no averaged weights"),
        (short_list, "has 29 tensors, but the model has 30 parameters"),
    ],
)
def test_averages_that_are_wrong(tensors, tmp_path, capsys, write, message):
    source = tmp_path / "last.ckpt"
    write(source, tensors)
    assert re.search(message, fails(capsys, "import", source, "--weights", "ema"))
    assert main(["import", str(source), str(tmp_path / "model"), "--weights", "raw"]) == 0


def test_a_tensor_past_the_end_of_its_storage(tmp_path):
    with torch_files.Archive(write_checkpoint(tmp_path / "a.ckpt", PAST)) as archive:
        found = torch_files.state_dict(archive, lambda name: name)
        with pytest.raises(ConvertError, match=r"not as long as its data.pkl says"):
            found.read("a")


def test_weights_of_other_sources(tmp_path, capsys):
    assert main(["import", str(GOLDEN), str(tmp_path / "model"), "--weights", "ema"]) == 1
    assert "--weights chooses those of a .ckpt file" in capsys.readouterr().err
