"""A model with a residual head, from texts to texts: the head of its folder is found, or missed in
one sentence.
"""

import dataclasses
import string

import pytest
from small_tokenizers import letters
from stubs import tiny_blocks, tiny_blocks_params, tiny_head, tiny_head_params

import paradec_jax as pd
from paradec_jax import cli
from paradec_jax.config import TokenSpec
from paradec_jax.store import Model, ResidualHead, load, save

SPEC = TokenSpec(mask=31, alignment="own")
TEXTS = ["abcde", "hello", "zz"]


# What the network says beyond letters is spelled by numbers.
TOKENIZER = letters(
    *string.ascii_lowercase, *(f"<{i}>" for i in range(26, tiny_blocks().vocab_size))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its head on disk."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    head = ResidualHead(tiny_head().config, tiny_head_params())
    save(
        path, Model(tiny_blocks().config, tiny_blocks_params(gain=3.0), SPEC, TOKENIZER, head=head)
    )
    return path


@pytest.mark.slow
def test_the_head_of_the_folder_drafts(folder):
    model = load(folder)
    plain = pd.generate(model, TEXTS, pd.BlockDenoising(rule="static"), max_new_tokens=9)
    for head in (None, "zero"):
        decoder = pd.ResidualSpeculative(rule="static", head=head)
        out = pd.generate(model, TEXTS, decoder, max_new_tokens=9, stop_strings=("never",))
        assert out.text == plain.text and out.tokens == plain.tokens
        assert (out.network_calls <= plain.network_calls).all()
        assert ("head_calls" in out.counts) == (head is None)
    direct = pd.generate(model, TEXTS, pd.Residual(rule="static", head_steps=3), max_new_tokens=9)
    assert (direct.network_calls < plain.network_calls).all() and (
        direct.counts["head_calls"] > 0
    ).all()


@pytest.mark.slow
def test_gaps_are_filled_with_the_head(folder):
    model = load(folder)
    pieces = [["ab", 4, "cd"], ["x", 9]]
    plain = pd.infill(model, pieces, pd.BlockDenoising(rule="static"))
    drafted = pd.infill(model, pieces, pd.ResidualSpeculative(rule="static"))
    assert drafted.text == plain.text and (drafted.counts["head_calls"] > 0).all()


def test_a_model_without_a_head_is_told_so(folder):
    model = dataclasses.replace(load(folder), head=None)
    with pytest.raises(
        ValueError, match="Residual asks a residual head, and the model has none: train one, or"
    ):
        pd.generate(model, TEXTS, pd.Residual(), max_new_tokens=2)
    out = pd.generate(model, TEXTS, pd.Residual(head="zero"), max_new_tokens=2)
    assert "head_calls" not in out.counts


@pytest.mark.slow
def test_the_command_takes_the_head_or_none(folder, capsys):
    words = ["--model", str(folder), "--max-new-tokens", "6", "--rule", "static", "hello"]
    said = {}
    for head in ((), ("--head", "zero")):
        assert cli.main(["generate", "residual_speculative", *head, *words]) == 0
        said[head] = capsys.readouterr()
    assert said[()].out == said["--head", "zero"].out
    assert "head calls a token" in said[()].err and "head calls" not in said["--head", "zero"].err
    assert cli.main(["generate", "residual", "--head", "one", *words]) == 1
    assert "head must be a residual head's network, or 'zero', not 'one'" in capsys.readouterr().err
