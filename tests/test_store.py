"""Model folders: round trips, atomic writes, and one clear error for each way of being broken."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax.traverse_util import flatten_dict

from paradec_jax import store
from paradec_jax.config import TokenSpec
from paradec_jax.disk import bundled
from paradec_jax.families import PRESETS
from paradec_jax.store import Model, StoreError

CONFIG = PRESETS["test-recurrent"]
BLOCKS = dataclasses.replace(PRESETS["test-sdar"], block=8)
TOKENS = TokenSpec(bos=3, stop=(1, 2), pad=4)
WEIGHTS, INDEX = "network.safetensors", "network.safetensors.index.json"


def make_model(config=CONFIG, seed=0) -> Model:
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), store.expected_shapes(config))
    return Model(config, params, TOKENS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "model"
    store.save(folder, make_model())
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(folder: Path, change) -> None:
    """Applies `change` to the object in config.json and to the network's part of it."""
    description = json.loads((folder / "config.json").read_text())
    change(description, description["parts"]["network"])
    (folder / "config.json").write_text(json.dumps(description))


def assert_same(a, b) -> None:
    a, b = flatten_dict(a, sep="/"), flatten_dict(b, sep="/")
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype, path
        assert np.asarray(a[path]).tobytes() == np.asarray(b[path]).tobytes(), path


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, param_dtype="bfloat16", dtype="bfloat16"),
        dataclasses.replace(CONFIG, qk_bias=False, tie_embeddings=False, rope_base=1e4, remat="iteration"),
        dataclasses.replace(PRESETS["test-mdlm"], dropout=0.3, remat="layer"),
        BLOCKS,
    ],
    ids=["plain", "bfloat16", "untied", "denoiser", "blocks"],
)
def test_load_gives_back_what_save_got(config, tmp_path):
    model = make_model(config)
    store.save(tmp_path / "new" / "model", model)
    again = store.load(tmp_path / "new" / "model")
    assert (again.config, again.token_spec, again.tokenizer) == (config, TOKENS, None)
    assert again.family == config.family and again.network.vocab_size == config.vocab_size
    assert_same(again.params, model.params)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["model"]


def test_mask_alignment_and_block_length_travel_along(tmp_path):
    spec, model = TokenSpec(bos=3, stop=(1, 2), pad=4, mask=31, alignment="next"), make_model(BLOCKS)
    store.save(tmp_path / "model", dataclasses.replace(model, token_spec=spec))
    again = store.load(tmp_path / "model", host=True)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(again.params))
    assert (again.family, again.token_spec) == ("block_diffusion", spec)
    assert (again.network.visibility, again.network.block) == ("block", 8)


def test_dtype_casts_parameters_and_computation(saved):
    model = store.load(saved, dtype="bfloat16")
    assert (model.config.dtype, model.config.param_dtype) == ("bfloat16", "bfloat16")
    assert_same(model.params, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_model().params))


def test_tokenizer_travels_along(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    store.save(tmp_path / "model", dataclasses.replace(make_model(), tokenizer=store.Tokenizer(backend)))
    assert store.load(tmp_path / "model").tokenizer.encode("b") == [1]
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(StoreError, match=r"tokenizer\.json"):
        store.load(tmp_path / "model")


def test_bare_name_finds_a_bundled_model(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "assets" / "bundled")
    monkeypatch.setattr(bundled, "ASSETS", tmp_path / "assets")
    monkeypatch.setattr(bundled, "CHECKOUT", tmp_path / "checkout")
    monkeypatch.chdir(tmp_path)
    assert store.load("bundled").config == CONFIG
    with pytest.raises(StoreError, match=r"no model folder nowhere.*bundled: bundled"):
        store.load("nowhere")


class TestSave:
    def test_refuses_an_existing_folder_unless_told(self, copy):
        other = make_model(seed=1)
        with pytest.raises(StoreError, match="exists"):
            store.save(copy, other)
        assert_same(store.load(copy).params, make_model().params)
        store.save(copy, other, overwrite=True)
        assert_same(store.load(copy).params, other.params)
        assert [p.name for p in copy.parent.iterdir()] == ["model"]

    def test_never_overwrites_what_is_no_model(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(StoreError, match="not a model folder"):
            store.save(tmp_path, make_model(), overwrite=True)
        with pytest.raises(StoreError, match="not a folder"):
            store.save(tmp_path / "thesis.tex", make_model(), overwrite=True)
        assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]

    @pytest.mark.parametrize("moment", ["write", "rename"])
    def test_failure_leaves_nothing_new_and_the_old_intact(self, copy, monkeypatch, moment):
        def fail(*_, **__):
            raise KeyboardInterrupt

        if moment == "write":
            monkeypatch.setattr(store, "write_tensors", fail)
        else:
            rename = Path.rename
            monkeypatch.setattr(
                Path, "rename", lambda a, b: fail() if a.suffix == ".tmp" and a.is_dir() else rename(a, b)
            )
        for folder, overwrite in ((copy.parent / "new", False), (copy, True)):
            with pytest.raises(KeyboardInterrupt):
                store.save(folder, make_model(seed=1), overwrite=overwrite)
        monkeypatch.undo()
        assert [p.name for p in copy.parent.iterdir()] == ["model"]
        assert_same(store.load(copy).params, make_model().params)

    def test_refuses_parameters_that_contradict_the_config(self, tmp_path):
        model = make_model()
        adapter = model.params["adapter"]
        for wrong, message in (
            (adapter[1:], r"adapter has shape \(31, 16\).*\(32, 16\)"),
            (adapter.astype(np.float16), "adapter is float16"),
        ):
            with pytest.raises(StoreError, match=message):
                store.save(
                    tmp_path / "model", dataclasses.replace(model, params=model.params | {"adapter": wrong})
                )
        assert not list(tmp_path.iterdir())


class TestLoad:
    def test_hugging_face_folder_names_the_command(self, tmp_path):
        (tmp_path / "model.safetensors").touch()
        command = f"python -m convert import {tmp_path} DST"
        with pytest.raises(StoreError, match=command):
            store.load(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "huginn_raven"}')
        with pytest.raises(StoreError, match=command):
            store.load(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d, p: d.update(format_version=3), "has format 3, but this version reads format 2 alone"),
            (lambda d, p: d.pop("format_version"), "no format_version"),
            (lambda d, p: p.update(family="mamba"), "family.*recurrent_depth.*'mamba'"),
            (lambda d, p: p.pop("config"), "config of .* must be a JSON object"),
            (lambda d, p: p.pop("sha256"), "no table of digests"),
            (lambda d, p: p["config"].update(depth=3), "unknown field 'depth'"),
            (lambda d, p: p["config"].update(width="16"), "width .* type int, not '16'"),
            (lambda d, p: p["config"].update(heads=3), "3 heads"),
            (lambda d, p: p["config"].update(dtype="float8"), "dtype must be one of"),
            (lambda d, p: d["token_spec"].update(pad=99), "99, which is no id"),
            (lambda d, p: d["token_spec"].update(stop=5), "stop .* must be a list, not 5"),
            (lambda d, p: d["token_spec"].update(alignment="previous"), "alignment"),
            (lambda d, p: p["config"].update(vocab_size=64), r"embedding has shape \(32, 16\).*\(64, 16\)"),
            (lambda d, p: p["config"].update(qk_bias=False), "k_bias is there"),
            (lambda d, p: p["config"].update(param_dtype="bfloat16"), "is float32, but the config asks"),
            (lambda d, p: p["sha256"].update(adapter=["0" * 64]), "adapter differs from its digests"),
            (lambda d, p: p["sha256"].pop("final_norm"), "final_norm is missing"),
            (lambda d, p: d.pop("parts"), "no part called network"),
            (lambda d, p: d["parts"].update(teacher=p), "part 'teacher', unknown to this version"),
            (lambda d, p: p.pop("weights"), "weights of .* must be the name of a file, not None"),
            (lambda d, p: p.update(weights="../x.safetensors"), "must be the name of a file, not '../x"),
        ],
    )
    def test_config_that_is_wrong(self, copy, change, message):
        edit(copy, change)
        with pytest.raises(StoreError, match=message) as caught:
            store.load(copy)
        assert "\n" not in str(caught.value)

    def test_missing_parts(self, copy):
        with pytest.raises(StoreError, match="is a file"):
            store.load(copy / "config.json")
        (copy / WEIGHTS).unlink()
        with pytest.raises(StoreError, match=f"{WEIGHTS} is missing"):
            store.load(copy)
        (copy / "config.json").unlink()
        with pytest.raises(StoreError, match=r"no config\.json"):
            store.load(copy)
        with pytest.raises(StoreError, match="dtype"):
            store.load(copy, dtype="int8")

    @pytest.mark.slow
    def test_damaged_parameter_files_never_load(self, copy):
        """Whatever byte is hit or lost, the load fails with one sentence, or the parameters are still right."""
        content = (copy / WEIGHTS).read_bytes()
        errors = []
        for at in range(0, len(content), 997):
            for damaged in (content[:at], content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]):
                (copy / WEIGHTS).write_bytes(damaged)
                try:
                    assert_same(store.load(copy, host=True).params, make_model().params)
                except StoreError as error:
                    errors.append(str(error))
        assert len(errors) >= 1.9 * len(content) / 997
        assert all("\n" not in error for error in errors)


def test_shards(tmp_path):
    store.save(tmp_path / "model", make_model(), max_shard_bytes=2000)
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 10 and files[0] == f"network-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert_same(store.load(tmp_path / "model").params, make_model().params)
    store.save(tmp_path / "whole", make_model())
    assert store.fingerprint(tmp_path / "whole") == store.fingerprint(tmp_path / "model")
    (tmp_path / "model" / files[3]).unlink()
    with pytest.raises(StoreError, match=f"shard .*{files[3]} is missing"):
        store.load(tmp_path / "model")


def test_fingerprints_tell_models_apart(tmp_path):
    model, found = make_model(), []
    other = model.params | {"adapter": model.params["adapter"] + 1}
    shapes = ({}, {"rope_base": 7.0}, {"mean_recurrence": 5}, {"remat": "iteration"})
    models = [dataclasses.replace(model, config=dataclasses.replace(CONFIG, **shape)) for shape in shapes]
    blocks = [make_model(dataclasses.replace(BLOCKS, block=block)) for block in (4, 8)]
    for i, each in enumerate([*models, dataclasses.replace(model, params=other), *blocks]):
        store.save(tmp_path / str(i), each)
        found.append(store.fingerprint(tmp_path / str(i)))
    assert found[3] == found[0] and len(set(found)) == 6  # what changes no output is not counted


def test_bundled_models_by_name():
    """Those of the wheel and those of the checkout, all in the newest format."""
    installed = [path.parent for path in bundled.ASSETS.glob("*/config.json")]
    others = [path.parent for path in bundled.CHECKOUT.glob("*/assets/*/config.json")]
    assert {folder.name for folder in others} == set(bundled.ONLY_IN_CHECKOUT)
    for folder in (*installed, *others):
        assert bundled.locate(folder.name) == folder
        assert json.loads((folder / "config.json").read_text())["format_version"] == store.FORMAT_VERSION


def test_an_installed_package_says_where_the_other_models_are(tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "CHECKOUT", tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"tiny-recurrent is not installed .* experiments/\*/assets of"):
        store.load("tiny-recurrent")
    assert store.load("tiny-causal").family == "causal"
