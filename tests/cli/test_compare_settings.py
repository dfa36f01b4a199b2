"""Every bundled setting through `paradec compare --json`, and one name for each decoder on all command lines."""

import dataclasses
import functools
import inspect
import math
import typing

import jax
import numpy as np
import pytest
from stub_table import KEYS, put_settings, strict
from stubs import StubCausal, StubDenoiser, StubHead, StubNetwork

from paradec_jax import cli
from paradec_jax.cli import generate
from paradec_jax.cli.compare import compare_command
from paradec_jax.cli.options import NAMES, options_of, rows_of
from paradec_jax.config import ResidualHeadConfig
from paradec_jax.data import build_tokenizer, token_spec
from paradec_jax.decode import Residual
from paradec_jax.disk.bundled import ASSETS
from paradec_jax.families import EVERY_STEP, FAMILIES, family_named, family_of, parameter_shapes
from paradec_jax.store import Model, ResidualHead, save

TINY = {"recurrent_depth": "test-recurrent", "causal": "test-causal", "block_diffusion": "test-sdar"}
STUBS = {
    "recurrent_depth": StubNetwork,
    "causal": StubCausal,
    "block_diffusion": functools.partial(StubDenoiser, block=4),
}
CANVAS = {"mask": 383, "alignment": "own"}  # facts of a stub that fills masks


def infinite(setting):
    """Names of the knobs that are infinite."""
    knobs = setting.decoder.Knobs() if setting.knobs is None else setting.knobs
    values = {field.name: getattr(knobs, field.name) for field in dataclasses.fields(knobs)}
    return {name for name, value in values.items() if isinstance(value, float) and math.isinf(value)}


ANSWERING = [name for name, family in FAMILIES.items() if family.texts is None]


@pytest.mark.parametrize("family", ANSWERING)
def test_every_bundled_setting_is_strict_json(family, tmp_path, capsys, monkeypatch):
    config = dataclasses.replace(FAMILIES[family].presets[TINY[family]], vocab_size=384, max_length=256)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(config))
    spec, head = token_spec(), None
    if family == "block_diffusion":
        spec, shape = dataclasses.replace(spec, **CANVAS), ResidualHeadConfig.of(config, layers=1)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(shape))
        head = ResidualHead(shape, zeros)
        of = StubDenoiser(block=4, vocab_size=384, max_length=256)
        monkeypatch.setattr(ResidualHead, "network", StubHead(of))
    save(tmp_path / "tiny", Model(config, params, spec, build_tokenizer(), head=head))
    monkeypatch.setattr(Model, "network", STUBS[family](vocab_size=384, max_length=256))
    sizes = ["--problems", "1", "--steps", "2", "2", "--timed", "1"]
    assert cli.main(["compare", "--family", family, "--model", str(tmp_path / "tiny"), *sizes, "--json"]) == 0
    rows, settings = strict(capsys.readouterr().out), FAMILIES[family].settings
    assert [row["decoder"] for row in rows] == [setting.name for setting in settings]
    assert all(set(KEYS) <= row.keys() and row["family"] == family for row in rows)
    for row, setting in zip(rows, settings, strict=True):
        assert all(row["settings"][name] is None for name in infinite(setting))
        if family != "recurrent_depth":  # drafts change no token, and the stub fills masks in any order alike
            assert row["equals_greedy"] == 1.0


def test_without_a_head_its_rivals_remain(tmp_path, capsys, monkeypatch):
    """Decoders that ask the model's head are left out, and that is said; those with the zero head stay."""
    family = FAMILIES["block_diffusion"]
    rows = tuple(s for s in family.settings if s.baseline or type(s.decoder) is Residual)[:3]
    put_settings(monkeypatch, family.name, rows)
    config = dataclasses.replace(family.presets["test-sdar"], vocab_size=384, max_length=256)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(config))
    spec = dataclasses.replace(token_spec(), **CANVAS)
    save(tmp_path / "tiny", Model(config, params, spec, build_tokenizer()))
    monkeypatch.setattr(Model, "network", StubDenoiser(block=4, vocab_size=384, max_length=256))
    sizes = ["--problems", "1", "--steps", "2", "2", "--timed", "1"]
    words = ["compare", "--family", family.name, "--model", str(tmp_path / "tiny"), *sizes, "--json"]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    told = [(row["decoder"], row["settings"].get("head")) for row in strict(said.out)]
    assert told == [("block", None), ("residual", "zero")]
    assert "has no residual head: decoders that ask one are left out" in said.err


def test_some_bundled_settings_are_infinite():
    waves = [s for s in FAMILIES["recurrent_depth"].settings if "exit_threshold" in infinite(s)]
    assert waves and all(setting.settings()["exit_threshold"] is None for setting in waves)
    assert math.isinf(EVERY_STEP)


def test_a_decoder_has_one_name_on_all_command_lines():
    named = {}
    for family in FAMILIES.values():
        named |= family.decoders
        assert {setting.name for setting in family.settings} == family.decoders.keys()
        for setting in family.settings:
            assert type(setting.decoder) is type(family.decoders[setting.name])
            assert "multiblock" not in family.decoders or (setting.name == "multiblock") == (
                getattr(setting.decoder, "blocks", 1) > 1
            )
    assert set(NAMES) == named.keys()


def test_every_choose_a_decoder_is_an_option():
    shared = typing.get_type_hints(options_of(None)).keys()
    assert shared >= {"temperature", "top_p"} and "window" not in shared
    usual = {family.settings[-1].name for family in FAMILIES.values()}
    for name in NAMES:
        options = typing.get_type_hints(options_of(name)).keys()
        choices = [row.settings().keys() - {"cache"} for row in rows_of(name).values()]
        assert options == set().union(*choices) and (name not in usual or shared <= options)


def test_models_that_commands_take_by_default_are_installed_with_the_package():
    names = [name for name in (None, *NAMES) if any(FAMILIES[family].bundled for family in rows_of(name))]
    assert {None, "wavefront", "jacobi"} <= set(names)
    usual = [generate._model_for(name) for name in names]
    assert generate._model_for("jacobi") in FAMILIES["causal"].bundled  # recurrent networks take it as well
    for name in (*usual, *(name for family in FAMILIES.values() for name in family.bundled)):
        assert (ASSETS / name / "config.json").is_file()


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "masked", "--max-new-tokens", "3"],
        ["compare", "--family", "masked_diffusion"],
        ["compare", "--family", "block_diffusion"],
    ],
)
def test_a_family_without_bundled_models_asks_for_one(words, capsys, monkeypatch):
    family = FAMILIES["masked_diffusion"]
    texts = dataclasses.replace(family.texts, judge=None, rivals=())
    monkeypatch.setitem(FAMILIES, family.name, dataclasses.replace(family, bundled=(), texts=texts))
    blocks = dataclasses.replace(FAMILIES["block_diffusion"], bundled=())
    monkeypatch.setitem(FAMILIES, blocks.name, blocks)
    assert cli.main(words) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "is bundled yet: give --model" in err


def test_families_are_known_by_their_names():
    told = inspect.signature(compare_command).parameters["family"].annotation
    assert set(typing.get_args(told)) == set(FAMILIES)
    assert family_named("causal") is FAMILIES["causal"]
    with pytest.raises(
        ValueError,
        match="family must be one of recurrent_depth, causal, masked_diffusion, block_diffusion, not 'x'",
    ):
        family_named("x")
    for family in FAMILIES.values():
        assert all(family_of(preset) is family for preset in family.presets.values())
