"""Model folders, with a residual head too: round trips, atomic writes, one clear error for each
damage.
"""

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
from safetensors.numpy import load_file, save_file

from paradec_jax import store
from paradec_jax.config import ResidualHeadConfig, TokenSpec
from paradec_jax.disk import folders, tensors
from paradec_jax.families import PRESETS, parameter_shapes
from paradec_jax.store import Model, ResidualHead, StoreError
from paradec_jax.store import folder as model_folder
from paradec_jax.store.model import sampling_of
from paradec_jax.text.tokenizer import Tokenizer

CONFIG = PRESETS["test-recurrent"]
BLOCKS = dataclasses.replace(PRESETS["test-sdar"], block=8)
HEAD = ResidualHeadConfig.of(BLOCKS, layers=2)
TOKENS = TokenSpec(bos=3, stop=(1, 2), pad=4, mask=31, alignment="own")
WEIGHTS = "network.safetensors"


def drawn(config, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: rng.normal(size=s.shape).astype(s.dtype), parameter_shapes(config)
    )


def make_model(config=CONFIG, seed=0) -> Model:
    return Model(config, drawn(config, seed), TOKENS)


def with_head(seed=7, backbone=None) -> Model:
    return dataclasses.replace(
        make_model(BLOCKS), head=ResidualHead(HEAD, drawn(HEAD, seed), backbone)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "model"
    store.save(folder, make_model())
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(folder: Path, change, part="network"):
    """Applies `change` to the object in config.json and to a part of it."""
    description = json.loads((folder / "config.json").read_text())
    change(description, description["parts"][part])
    (folder / "config.json").write_text(json.dumps(description))


def assert_same(a, b):
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
        dataclasses.replace(
            CONFIG, qk_bias=False, tie_embeddings=False, rope_base=1e4, remat="iteration"
        ),
        dataclasses.replace(PRESETS["test-mdlm"], dropout=0.3, remat="layer"),
        BLOCKS,
    ],
    ids=["plain", "bfloat16", "untied", "denoiser", "blocks"],
)
def test_load_gives_back_what_save_got(config, tmp_path):
    model = make_model(config)
    store.save(tmp_path / "new" / "model", model)
    again = store.load(tmp_path / "new" / "model")
    assert (again.config, again.token_spec, again.tokenizer, again.head) == (
        config,
        TOKENS,
        None,
        None,
    )
    assert again.family == config.family and again.network.vocab_size == config.vocab_size
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(again.params))
    assert_same(again.params, model.params)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["model"]


def test_dtype_casts_parameters_and_computation(saved):
    model = store.load(saved, dtype="bfloat16")
    assert (model.config.dtype, model.config.param_dtype) == ("bfloat16", "bfloat16")
    assert_same(
        model.params, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_model().params)
    )
    with pytest.raises(StoreError, match="dtype must be one of float32, bfloat16"):
        store.load(saved, dtype="int8")


def test_parameters_of_an_opened_model_are_read_when_they_are_asked_for(saved):
    model, want = store.opened(saved), make_model().params
    assert not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(model.params))
    assert_same(jax.tree.map(np.asarray, model.params), want)


def test_tokenizer_travels_along(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    store.save(tmp_path / "model", dataclasses.replace(make_model(), tokenizer=Tokenizer(backend)))
    assert store.load(tmp_path / "model").tokenizer.encode("b") == [1]
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(StoreError, match=r"tokenizer\.json"):
        store.load(tmp_path / "model")


def test_a_penalty_that_changes_nothing_is_not_set():
    for none in (None, 1, 1.0):
        assert sampling_of({"repetition_penalty": none}) == {}
    assert sampling_of({"repetition_penalty": 1.1}) == {"repetition_penalty": 1.1}


def test_sampling_and_decoder_travel_along_and_change_no_fingerprint(tmp_path):
    given = {"sampling": {"temperature": 0.7, "top_k": 20}, "decoder": "block --rule static"}
    for name, more in (("plain", {}), ("given", given)):
        store.save(tmp_path / name, dataclasses.replace(make_model(BLOCKS), **more))
    model = store.load(tmp_path / "given")
    assert {name: getattr(model, name) for name in given} == given
    assert store.fingerprint(tmp_path / "plain") == store.fingerprint(tmp_path / "given")
    with pytest.raises(StoreError, match="kind is for checkpoints of others"):
        store.load(tmp_path / "given", kind="bd3lm")


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
            monkeypatch.setattr(model_folder, "write_tensors", fail)
        else:
            rename = Path.rename
            monkeypatch.setattr(
                Path, "rename", lambda a, b: fail() if a.name == "new" else rename(a, b)
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
            (adapter[1:], r"adapter is float32 \(31, 16\).* asks for float32 \(32, 16\)"),
            (adapter.astype(np.float16), "adapter is float16"),
        ):
            params = model.params | {"adapter": wrong}
            with pytest.raises(StoreError, match=message):
                store.save(tmp_path / "model", dataclasses.replace(model, params=params))
        assert not list(tmp_path.iterdir())


class TestLoad:
    def test_hugging_face_folder_names_the_command(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "huginn_raven"}')
        with pytest.raises(StoreError, match=f"paradec import {tmp_path} DST"):
            store.opened(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d, p: d.update(format_version=3), "has format_version 3, not 2"),
            (lambda d, p: p.update(family="mamba"), "family.*recurrent_depth.*'mamba'"),
            (lambda d, p: p.pop("config"), r"config\.json lacks 'config'"),
            (lambda d, p: p["config"].update(depth=3), "unexpected keyword argument 'depth'"),
            (lambda d, p: p["config"].update(width="16"), "width must be a whole number, not '16'"),
            (lambda d, p: p["config"].update(heads=3), "3 heads"),
            (lambda d, p: p["config"].update(dtype="float8"), "dtype must be one of"),
            (lambda d, p: d["token_spec"].update(pad=99), "99, which is no id"),
            (lambda d, p: d["token_spec"].update(alignment="previous"), "alignment"),
            (
                lambda d, p: p["config"].update(vocab_size=64),
                r"embedding is float32 \(32, 16\).*\(64, 16\)",
            ),
            (lambda d, p: p["config"].update(qk_bias=False), "k_bias is there"),
            (
                lambda d, p: p["config"].update(param_dtype="bfloat16"),
                "is float32 .* asks for bfloat16",
            ),
            (
                lambda d, p: p["weights"].update({WEIGHTS: "0" * 64}),
                f"{WEIGHTS} differs from its digest",
            ),
            (lambda d, p: d.pop("parts"), r"config\.json lacks 'parts'"),
            (lambda d, p: d["parts"].update(teacher=p), "part 'teacher', unknown to this version"),
            (
                lambda d, p: p.update(weights=WEIGHTS),
                "weights of network must be files with SHA-256",
            ),
            (
                lambda d, p: p.update(weights={"../x.safetensors": "0"}),
                "must be files .* not {'../x",
            ),
            (
                lambda d, p: d.update(sampling={"top_k": -1}),
                "sampling .* of config.json: top_k must be at least 1",
            ),
            (
                lambda d, p: d.update(decoder="jacobi --blok 8"),
                "decoder of config.json: --blok is no option",
            ),
            (
                lambda d, p: d.update(decoder=["jacobi"]),
                "does not suit a model of family recurrent_depth",
            ),
        ],
    )
    def test_config_that_is_wrong(self, copy, change, message):
        edit(copy, change)
        with pytest.raises(StoreError, match=message) as caught:
            store.load(copy)
        assert "\n" not in str(caught.value) and str(copy) in str(caught.value)

    def test_missing_files(self, copy):
        with pytest.raises(StoreError, match=r"config\.json is neither a folder"):
            store.load(copy / "config.json")
        (copy / WEIGHTS).unlink()
        with pytest.raises(StoreError, match=f"{WEIGHTS} is missing"):
            store.load(copy)
        (copy / "config.json").unlink()
        with pytest.raises(StoreError, match=r"no config\.json"):
            store.load(copy)

    def test_a_changed_byte_and_numbers_that_are_none(self, copy):
        before = (copy / WEIGHTS).read_bytes()
        (copy / WEIGHTS).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        for read in (store.load, store.opened):
            with pytest.raises(StoreError, match=f"{WEIGHTS} differs from its digest"):
                read(copy)
        params = make_model().params
        params["final_norm"][0] = np.nan
        (copy / WEIGHTS).write_bytes(before)  # others are not overwritten
        store.save(copy, dataclasses.replace(make_model(), params=params), overwrite=True)
        with pytest.raises(
            StoreError, match="parameter final_norm holds numbers that are NaN or infinite"
        ):
            store.load(copy)
        assert_same(store.load(copy, allow_nonfinite=True).params, params)


def test_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "MAX_SHARD_BYTES", 2000)
    store.save(tmp_path / "model", make_model())
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 10 and files[0] == f"network-00001-of-{len(files):05d}.safetensors"
    assert_same(store.load(tmp_path / "model").params, make_model().params)
    arrays = load_file(tmp_path / "model" / files[3])
    save_file({name: array + 1 for name, array in arrays.items()}, tmp_path / "model" / files[3])
    with pytest.raises(StoreError, match=f"{files[3]} differs from its digest"):
        store.load(tmp_path / "model")
    (tmp_path / "model" / files[3]).unlink()
    with pytest.raises(StoreError, match=f"{files[3]} is missing"):
        store.load(tmp_path / "model")


def test_fingerprints_tell_models_apart(tmp_path):
    model, found = make_model(), []
    other = model.params | {"adapter": model.params["adapter"] + 1}
    shapes = ({}, {"rope_base": 7.0}, {"mean_recurrence": 5}, {"remat": "iteration"})
    models = [
        dataclasses.replace(model, config=dataclasses.replace(CONFIG, **shape)) for shape in shapes
    ]
    blocks = [make_model(dataclasses.replace(BLOCKS, block=block)) for block in (4, 8)]
    for i, each in enumerate([*models, dataclasses.replace(model, params=other), *blocks]):
        store.save(tmp_path / str(i), each)
        found.append(store.fingerprint(tmp_path / str(i)))
    assert found[3] == found[0] and len(set(found)) == 6  # what changes no output is not counted


def test_bundled_models_by_name(tmp_path, monkeypatch):
    for name, folder in folders.bundled().items():
        assert folders.locate(name) == folder
        assert (
            json.loads((folder / "config.json").read_text())["format_version"]
            == model_folder.FORMAT_VERSION
        )
    monkeypatch.setattr(folders, "CHECKOUT", tmp_path / "nowhere")
    with pytest.raises(
        StoreError,
        match=r"no model tiny-recurrent: .* bundled are tiny-causal, .* \(a checkout has more",
    ):
        store.load("tiny-recurrent")
    monkeypatch.chdir(tmp_path)
    assert store.load("tiny-causal").family == "causal"


@pytest.fixture(scope="module")
def headed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "model"
    store.save(folder, with_head())
    return folder


class TestHead:
    def test_it_comes_back_and_is_known_by_its_backbone(self, headed, tmp_path):
        """By the fingerprint of a folder of the backbone alone; a folder's own fingerprint counts
        the head.
        """
        model, again = with_head(), store.load(headed)
        assert (again.config, again.head.config) == (BLOCKS, HEAD)
        assert again.head.network.config == HEAD and again.network.block == again.head.network.block
        assert_same(again.params, model.params)
        assert_same(again.head.params, model.head.params)
        store.save(tmp_path / "plain", make_model(BLOCKS))
        alone = store.fingerprint(tmp_path / "plain")
        assert again.head.backbone == alone != store.fingerprint(headed)
        for name, one in {
            "again": again,
            "named": with_head(backbone=alone),
            "other": with_head(seed=8),
        }.items():
            store.save(tmp_path / name, one)
            assert (store.fingerprint(tmp_path / name) == store.fingerprint(headed)) == (
                name != "other"
            )

    def test_rounded_numbers_are_another_backbone(self, headed, tmp_path):
        model = store.load(headed, dtype="bfloat16")
        assert {leaf.dtype.name for leaf in jax.tree.leaves((model.params, model.head.params))} == {
            "bfloat16"
        }
        assert model.head.config.param_dtype == model.head.config.dtype == "bfloat16"
        assert model.head.backbone is None
        store.save(tmp_path / "half", model)
        assert store.load(tmp_path / "half").head.backbone not in (
            None,
            store.load(headed).head.backbone,
        )
        assert store.load(headed, dtype="float32").head.backbone == store.load(headed).head.backbone

    def test_save_refuses_what_does_not_belong_together(self, headed, tmp_path):
        model, causal = store.load(headed), PRESETS["test-causal"]
        other = dataclasses.replace(HEAD, block=4)
        incomplete = {name: leaf for name, leaf in model.head.params.items() if name != "fusion"}
        for changes, message in (
            ({"params": drawn(BLOCKS, 1)}, "another backbone .fingerprint [0-9a-f]{12}. than"),
            (
                {"config": dataclasses.replace(BLOCKS, rope_base=5.0)},
                "was trained on another backbone",
            ),
            (
                {"head": dataclasses.replace(model.head, config=other)},
                "has block 4, but the backbone has 8",
            ),
            (
                {"config": causal, "params": drawn(causal)},
                "writes blocks, but one of family causal does not",
            ),
            ({"head": ResidualHead(HEAD, incomplete)}, "parameter fusion is missing"),
        ):
            with pytest.raises(StoreError, match=message) as caught:
                store.save(tmp_path / "new", dataclasses.replace(model, **changes))
            assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d, part: part.pop("backbone"), r"config\.json lacks 'backbone'"),
            (
                lambda d, part: part.update(backbone="0"),
                "was trained on another backbone .fingerprint 0.",
            ),
            (lambda d, part: part.update(family="causal"), "unexpected keyword argument"),
            (lambda d, part: part["config"].update(layers=9), "must be 1 to 8, not 9"),
            (lambda d, part: part["config"].update(layers=1), "layer_1.* is there"),
            (lambda d, part: part["config"].update(block=2), "has block 2, but the backbone has 8"),
        ],
    )
    def test_config_that_is_wrong(self, headed, tmp_path, change, message):
        shutil.copytree(headed, tmp_path / "model")
        edit(tmp_path / "model", change, "residual_head")
        with pytest.raises(StoreError, match=message) as caught:
            store.load(tmp_path / "model")
        assert "\n" not in str(caught.value)
