"""Residual heads beside an SDAR backbone: import, export, import is the identity; the released keys; refusals."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from exports import WEIGHTS, assert_same, edit, fails, rewrite
from safetensors.numpy import load_file, save_file

from convert import mrp, sdar
from convert.cli import main
from convert.engine import ConvertError
from paradec_jax import store
from paradec_jax.config import ResidualHeadConfig, TokenSpec
from paradec_jax.families import PRESETS

GOLDEN = Path(__file__).parents[1] / "golden" / "block_diffusion"
SPEC = TokenSpec(bos=3, stop=(1, 2), pad=4, mask=30, alignment="own")
CONFIG = dataclasses.replace(PRESETS["test-sdar"], head_channels=6, block=8)


def make_model(layers=2, config=CONFIG, **changes) -> store.Model:
    rng = np.random.default_rng(0)
    shape = dataclasses.replace(ResidualHeadConfig.of(config, layers), **changes)

    def drawn(one):
        return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), store.expected_shapes(one))

    head = store.ResidualHead(shape, drawn(shape))
    return store.Model(config, drawn(config), SPEC, head=head)


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder as heads are released: the recorded head beside its backbone."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(load_file(GOLDEN / WEIGHTS) | load_file(GOLDEN / "mrp.safetensors"), folder / WEIGHTS)
    fields = [json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("config", "mrp_config")]
    (folder / "config.json").write_text(json.dumps(fields[0] | fields[1]))
    return folder


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_comes_back_from_an_export(layers, dtype, tmp_path):
    model = make_model(layers, dataclasses.replace(CONFIG, dtype=dtype, param_dtype=dtype))
    store.save(tmp_path / "model", model)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "exported")]) == 0
    assert main(["import", str(tmp_path / "exported"), str(tmp_path / "again")]) == 0
    again = store.load(tmp_path / "again", host=True)
    assert_same(again, model)
    assert again.head.config == model.head.config
    jax.tree.map(np.testing.assert_array_equal, again.head.params, model.head.params)
    assert store.fingerprint(tmp_path / "again") == store.fingerprint(tmp_path / "model")


def test_the_released_keys_come_back(source, tmp_path, capsys):
    assert main(["import", str(source), str(tmp_path / "model")]) == 0
    counted = sum(tensor.size for tensor in load_file(source / WEIGHTS).values())
    assert f"imported {counted:,} parameters" in capsys.readouterr().out
    model = store.load(tmp_path / "model")
    assert (model.head.config.layers, model.head.config.block) == (2, model.config.block)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "exported")]) == 0
    want, found = (load_file(folder / WEIGHTS) for folder in (source, tmp_path / "exported"))
    assert want.keys() == found.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    fields = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (fields["num_nextn_predict_layers"], fields["num_mrp_heads"], fields["model_type"]) == (
        2,
        1,
        "sdar",
    )


def test_a_backbone_alone_has_no_head(source, tmp_path):
    rewrite(source, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(mrp.PREFIX)])
    edit(source / "config.json", num_nextn_predict_layers=None)
    assert main(["import", str(source), str(tmp_path / "model")]) == 0
    assert store.load(tmp_path / "model").head is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_nextn_predict_layers": None}, "field num_nextn_predict_layers is missing"),
        ({"num_nextn_predict_layers": 9}, "no valid residual head: layers of a residual head must be 1 to 8"),
        ({"num_nextn_predict_layers": 3}, r"tensor layers\.2\.\S+ is missing"),
        ({"num_nextn_predict_layers": 1}, r"tensor layers\.1\.\S+ in .* is unknown"),
        ({"num_mrp_heads": 2}, "field num_mrp_heads of config.json must be 1, not 2"),
    ],
)
def test_configs_that_are_wrong(source, capsys, fields, message):
    edit(source / "config.json", **fields)
    assert re.search(message, fails(capsys, "import", source))


def test_tensors_that_are_wrong(source, capsys):
    name = f"{mrp.PREFIX}eh_proj.weight"
    rewrite(source, lambda tensors: tensors.update({name: tensors[name][:, 1:].copy()}))
    assert re.search(r"eh_proj\.weight has shape \(64, 127\)", fails(capsys, "import", source))
    rewrite(source, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(mrp.PREFIX)])
    assert re.search(r"tensor \S+ is missing", fails(capsys, "import", source))


def test_export_of_a_head_of_its_own_shape(tmp_path):
    model = make_model(feed_forward=20)
    store.save(tmp_path / "model", model)
    with pytest.raises(
        ConvertError, match="only a residual head whose blocks have the shape of its backbone's"
    ):
        sdar.write(tmp_path, model, 1000)
