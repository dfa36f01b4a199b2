"""Texts with gaps, texts from nothing, and what is seen of a canvas: functions and commands."""

import dataclasses

import jax
import numpy as np
import pytest
from marks import slow
from small_tokenizers import letters
from stubs import StubCausal, StubDenoiser

import paradec_jax as pd
from experiments.replicas import ReleasedMasked
from paradec_jax import cli
from paradec_jax.config import MASKED_DIFFUSION_PRESETS, TokenSpec
from paradec_jax.families import parameter_shapes
from paradec_jax.store import Model, save

STUB = StubDenoiser(sharpness=30.0)
CONFIG = MASKED_DIFFUSION_PRESETS["test-mdlm"]
CAUSAL = {"decoder": pd.AutoRegressive(StubCausal()), "knobs": None}
COLD = pd.Masked.Knobs(temperature=0.0, steps=4)


TOKENIZER = letters(*"abcdefghijk")  # the mask is the last


def expected(text: str) -> str:
    """What the stub makes of a text in which "_" is a mask."""
    filled = STUB.expected([None if c == "_" else "abcdefghij".index(c) for c in text])
    return "".join("abcdefghij"[token] for token in filled)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, {}, TokenSpec(mask=STUB.mask, alignment="own", stop=(0,)), TOKENIZER)


def fill(model: Model, pieces, **options) -> pd.Generation:
    return pd.infill(model, pieces, **{"decoder": pd.Masked(STUB), "knobs": COLD, **options})


def test_gaps_are_filled_around_what_is_given(model):
    out = fill(model, ["d", 2, "ea", 3], log_probs=True)
    assert out.text == [expected("d__ea___")] == ["dfheaceg"]
    assert out.tokens == [["abcdefghij".index(c) for c in out.text[0]]]
    assert out.reasons == [pd.Reason.BUDGET], "a stop token, given or not, ends nothing"
    assert out.log_probs is not None and len(out.log_probs[0]) == 5
    np.testing.assert_allclose(out.log_probs[0], 0, atol=1e-2)
    assert 1 <= out.network_calls[0] <= 4
    assert out.tokens_per_call[0] == pytest.approx(5 / out.network_calls[0])


def test_several_texts_and_samples_draw_apart_and_the_same_in_any_batch(model):
    flat = pd.Masked(StubDenoiser(sharpness=0.0))
    texts = [["d", 4], [2, "e", 7, "b"]]
    both = pd.infill(model, texts, flat, samples=3, seed=1)
    assert len(both.text) == 6 and len(set(both.text)) == 6
    assert [len(text) for text in both.text] == [5] * 3 + [11] * 3
    assert pd.infill(model, texts[1], flat, samples=3, seed=1).text == both.text[3:]
    assert pd.infill(model, texts[1], flat, samples=3, seed=2).text != both.text[3:]


def test_texts_begin_with_nothing(model):
    out = pd.generate(model, ["", "d"], pd.Masked(STUB), knobs=COLD, max_new_tokens=4)
    assert out.text == [expected("____"), expected("d____")[1:]]
    with pytest.raises(
        ValueError, match="prompt 0 has no token and the model no bos to start from"
    ):
        pd.generate(model, [""], pd.AutoRegressive(StubCausal()), max_new_tokens=4)


@pytest.mark.parametrize(
    ("decoder", "knobs"),
    [
        (pd.Masked(STUB), COLD),
        slow(ReleasedMasked(STUB, steps=4), ReleasedMasked.Knobs(temperature=0.0)),
    ],
)
def test_a_begin_of_text_that_is_the_stop_token_too_ends_no_row_where_it_is_given(
    model, decoder, knobs
):
    """As in GPT-2's vocabulary: a row from nothing begins with it, and ends where it is generated."""
    both = dataclasses.replace(
        model, token_spec=TokenSpec(bos=0, mask=STUB.mask, alignment="own", stop=(0,))
    )
    out = pd.generate(both, ["", "a", "c"], decoder, knobs=knobs, max_new_tokens=9)
    wanted = [
        expected("a" + "_" * 9)[1:],
        expected("aa" + "_" * 9)[2:],
        expected("ac" + "_" * 9)[2:],
    ]
    assert [len(text.partition("a")[0]) for text in wanted] == [4, 4, 3]
    assert ["".join("abcdefghij"[token] for token in row) for row in out.tokens] == [
        text.partition("a")[0] + "a" for text in wanted
    ]
    assert out.reasons == [pd.Reason.STOP] * 3
    filled = pd.infill(both, ["a", 3, "a", 2], decoder, knobs=knobs)
    assert filled.text == [expected("aa___a__")] and filled.reasons == [pd.Reason.BUDGET]


def test_texts_may_be_longer_than_the_model_in_windows(model):
    short = StubDenoiser(sharpness=30.0, max_length=8)
    free = Model(CONFIG, {}, TokenSpec(mask=short.mask, alignment="own"), TOKENIZER)
    strided, knobs = pd.Strided(short, stride=3), pd.Strided.Knobs(temperature=0.0, steps=4)
    out = pd.generate(free, ["d"], strided, knobs=knobs, max_new_tokens=20)
    assert out.text == [expected("d" + "_" * 20)[1:]]
    out = pd.infill(free, ["d", 12, "e", 5], strided, knobs=knobs)
    assert len(out.text[0]) == 19 and out.text[0][0] == "d" and out.text[0][13] == "e"
    with pytest.raises(
        ValueError, match="19 tokens, more than the 8 positions the model was built for"
    ):
        pd.infill(free, ["d", 12, "e", 5], pd.Masked(short))


@pytest.mark.parametrize(
    ("pieces", "options", "message"),
    [
        (["de"], {}, "the text has no gap: put a number of tokens between its pieces"),
        (["d", 0], {}, "gap must be at least 1, not 0"),
        (["d", 64], {}, "65 tokens, more than the 64 positions the model was built for"),
        (["d", 2, "k"], {}, "row 0 gives the mask token 10 at position 3"),
        (["d", 2], {"samples": 0}, "samples must be at least 1, not 0"),
        (["d", 2], CAUSAL, "decodes networks of alignment 'next', but this one's is 'own'"),
    ],
)
def test_bad_input_is_named(model, pieces, options, message):
    with pytest.raises(ValueError, match=message):
        fill(model, pieces, **options)


def test_decoders_that_append_fill_no_holes():
    model = Model(CONFIG, {}, TokenSpec(), TOKENIZER)
    with pytest.raises(
        ValueError, match="AutoRegressive appends tokens, so it cannot fill the holes"
    ):
        pd.infill(model, ["d", 2], pd.AutoRegressive(StubCausal()))


# The command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(CONFIG))
    spec = TokenSpec(mask=STUB.mask, alignment="own")
    save(tmp_path / "tiny", Model(CONFIG, params, spec, TOKENIZER))
    monkeypatch.setattr(Model, "network", STUB)
    return str(tmp_path / "tiny")


def command(folder: str, *words: str) -> int:
    return cli.main(["generate", "masked", *words, "--model", folder, "--temperature", "0"])


def test_the_command_writes_from_nothing_from_a_prompt_and_into_gaps(folder, capsys):
    for words, want in (
        (["--max-new-tokens", "5"], expected("_____")),
        (["d", "--max-new-tokens", "5"], expected("d_____")[1:]),
        (["d[2]ea[3]", "--gaps"], expected("d__ea___")),
        (["d[2]ea[3]", "--gaps", "--stream"], expected("d__ea___")),
    ):
        assert command(folder, *words) == 0
        out, err = capsys.readouterr()
        assert out == want + "\n" and "5 tokens in" in err


def test_a_terminal_shows_the_canvas(folder, capsys, monkeypatch):
    console = cli.watch.Console
    terminal = {"force_terminal": True, "color_system": "standard"}
    monkeypatch.setattr(cli.watch, "Console", lambda **options: console(**options, **terminal))
    assert (
        command(folder, "d[2]ea[3]", "--gaps", "--stream", "--delay", "0", "--order", "single") == 0
    )
    out = capsys.readouterr().out
    assert "d__ea___" in out and expected("d__ea___") in out
    assert (
        len({picture for picture in out.replace("\x1b", "\n").split("\n") if "_" in picture}) >= 5
    )


def test_the_command_names_bad_input(folder, capsys):
    for words, message in (
        (["de", "--gaps"], "--gaps needs a gap in the prompt"),
        (
            ["d[2]", "--gaps", "--max-new-tokens", "3"],
            "so --stop and --max-new-tokens must not be given",
        ),
        (["d[2]", "--gaps", "--order", "mood"], "order must be one of random, single"),
        (["d", "--max-new-tokens", "5", "--steps", "0"], "steps must be at least 1, not 0"),
    ):
        assert command(folder, *words) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("paradec: ") and message in err and err.count("\n") == 1
