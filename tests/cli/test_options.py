"""Decoders on command lines: one name for each, an option for each choice, what suits a family."""

import dataclasses
import typing

import jax
import pytest
from stub_table import saved

from paradec_jax import cli
from paradec_jax.cli import generate
from paradec_jax.cli.options import NAMES, options_of, rows_of
from paradec_jax.config import CAUSAL_PRESETS
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.disk.folders import ASSETS
from paradec_jax.evaluate.tables import TABLES
from paradec_jax.families import FAMILIES, choose, family_named, family_of, init_params

CONFIG = dataclasses.replace(CAUSAL_PRESETS["test-causal"], vocab_size=384, max_length=256)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    params = init_params(CONFIG, jax.random.key(0))
    return str(saved(tmp_path_factory.mktemp("models") / "causal", CONFIG, params=params))


def test_a_decoder_has_one_name_on_all_command_lines():
    named = set()
    for family in FAMILIES.values():
        named |= family.decoders.keys()
        assert family.baseline in family.decoders
        for setting in TABLES[family.name]:
            assert type(setting.decoder) is type(family.decoders[setting.name])
            assert (setting.name == "multiblock") == (getattr(setting.decoder, "blocks", 1) > 1)
    assert set(NAMES) == named


# A decoder as a text, and what differs from its own defaults, or what is refused.
NAMED = [
    ("causal", None, {}),
    ("causal", "jacobi --block 8 --running", {"block": 8, "running": True}),
    ("causal", "multiblock --spawn=0.25", {"blocks": 2, "spawn": 0.25}),
    ("recurrent_depth", "wavefront --no-warm-start --noise 1", {"warm_start": False, "noise": 1.0}),
    ("masked_diffusion", "masked --grid cosine --steps 8", {"grid": "cosine", "steps": 8}),
    ("block_diffusion", "residual --head zero", {"head": "zero"}),
    ("causal", "jacobi 8", "jacobi takes options such as --temperature 0.5, not 8"),
    ("causal", "jacobi --block x", "--block of jacobi must not be 'x'"),
    ("causal", "jacobi --temperature", "--temperature of jacobi must not be True"),
]


@pytest.mark.parametrize(("family", "text", "want"), NAMED)
def test_a_named_decoder_starts_from_its_own_defaults(family, text, want):
    if isinstance(want, str):
        with pytest.raises(ValueError, match=want):
            choose(family, text)
        return
    setting = choose(family, text)
    assert setting.settings() == Setting("", type(setting.decoder)()).settings() | want
    assert choose(family, text, {"temperature": 0.5}).values.temperature == 0.5


def test_every_choice_of_a_decoder_is_an_option():
    shared = typing.get_type_hints(options_of(None)).keys()
    assert shared >= {"temperature", "top_p"} and "window" not in shared
    usual = {row.name for row in rows_of(None).values()}
    for name in NAMES:
        options = typing.get_type_hints(options_of(name)).keys()
        choices = [row.settings().keys() for row in rows_of(name).values()]
        assert options == set().union(*choices) and (name not in usual or shared <= options)


def test_models_that_commands_take_by_default_are_installed_with_the_package():
    bundled = {name for family in FAMILIES.values() if family.bundled for name in family.decoders}
    usual = [generate._model_for(name) for name in (None, *bundled)]
    # recurrent networks take it as well
    assert generate._model_for("jacobi") in FAMILIES["causal"].bundled
    for name in (*usual, *(name for family in FAMILIES.values() for name in family.bundled)):
        assert (ASSETS / name / "config.json").is_file()


def test_a_decoder_without_a_bundled_model_asks_for_one(monkeypatch):
    none = dataclasses.replace(FAMILIES["block_diffusion"], bundled=())
    monkeypatch.setitem(FAMILIES, "block_diffusion", none)
    with pytest.raises(ValueError, match="no bundled model suits block: name one with --model"):
        generate._model_for("block")


def test_families_are_known_by_their_names():
    assert family_named("causal") is FAMILIES["causal"]
    with pytest.raises(
        ValueError, match=r"family must be one of recurrent_depth, .*, full_attention, not 'x'"
    ):
        family_named("x")
    for family in FAMILIES.values():
        assert all(family_of(preset) is family for preset in family.presets.values())


@pytest.mark.slow
def test_generate_with_every_decoder_of_the_family(causal, capsys):
    texts = {}
    for decoder in (None, "autoregressive", "jacobi"):
        named = [] if decoder is None else [decoder]
        arguments = ["generate", *named, "Ana", "--model", causal, "--max-new-tokens", "6"]
        assert cli.main(arguments) == 0
        texts[decoder], counts = capsys.readouterr()
        assert "tokens a call" in counts and "recurrences" not in counts
    assert len(set(texts.values())) == 1
    assert cli.main([*arguments, "--stream", "--block", "3", "--candidates", "1"]) == 0
    assert capsys.readouterr().out == texts["jacobi"]


def test_what_does_not_suit_the_family(causal, capsys):
    common = ["Ana", "--model", causal]
    for decoder, more, message in (
        (
            "wavefront",
            [],
            "wavefront does not suit a model of family causal; it takes one of autoregressive",
        ),
        ("autoregressive", ["--recurrence", "3"], "--recurrence is no option of autoregressive"),
        (
            "jacobi",
            ["--running", "--blocks", "2"],
            "a running window has no blocks, so --blocks must be 1",
        ),
        ("jacobi", ["--block", "1"], "--block must be at least 2"),
        ("jacobi", ["--spawn", "0.5"], "spawn needs blocks of at least 2, not 1"),
    ):
        assert cli.main(["generate", decoder, *common, *more]) == 1
        assert message in capsys.readouterr().err
