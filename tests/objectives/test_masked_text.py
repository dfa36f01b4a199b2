"""`paradec train masked` on a tiny denoiser of random weights."""

import jax
import numpy as np
import pytest
from commands import ran, refused

import paradec_jax as pd
from paradec_jax.data.text import WindowMaker
from paradec_jax.losses.masked_diffusion import MDLM, noise


@pytest.mark.slow
def test_a_denoiser_learns_from_windows(source, tmp_path):
    last = ran(source, tmp_path, "--lora", 2, "--name", "cosine", objective="masked")
    assert last["after"]["nats a token"] < last["before"]["nats a token"]
    model = pd.load(tmp_path / "model")
    assert len(pd.generate(model, ["x 1 "], pd.Masked(), max_new_tokens=8).text) == 1


@pytest.mark.slow
def test_a_causal_model_learns_to_fill_a_canvas(source, tmp_path, capsys):
    options = ("--model", source / "llama", "--sft", "--length", 64, "--name", "ratio")
    last = ran(source, tmp_path, *options, "--cart", 0.3, objective="masked")
    model = pd.load(tmp_path / "model")
    assert (model.family, model.token_spec.alignment, model.token_spec.mask) == (
        "full_attention",
        "next",
        2,
    )
    assert capsys.readouterr().out.count("the mask is token 2 (</s>)") == 1
    assert last["after"]["nats a token"] < last["before"]["nats a token"]
    assert len(pd.generate(model, ["x 1 "], max_new_tokens=8).text) == 1


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["teacher", "data"])
def test_a_model_learns_to_have_several_blocks_in_flight(source, tmp_path, labels):
    options = ("--model", source / "llama", "--sft", "--length", 64, "--name", "ratio")
    ran(source, tmp_path / "whole", *options, objective="masked")
    options = ("--model", tmp_path / "whole" / "model", "--sft", "--length", 64, "--lora", 2)
    options += ("--forcing", 4, "--labels", labels, "--certainty", 0.1)
    last = ran(source, tmp_path / "blocks", *options, objective="masked")
    assert last["after"]["nats a hidden token"] < 1.1 * last["before"]["nats a hidden token"]
    model = pd.load(tmp_path / "blocks" / "model")
    assert model.decoder == "in_flight --length 4"
    assert len(pd.generate(model, ["x 1 "], max_new_tokens=8).text) == 1


def test_what_does_not_count_is_never_hidden():
    counted = np.arange(40) % 5 > 1
    make = WindowMaker(np.arange(40, dtype=np.int32), seed=0, rows=8, length=12, counted=counted)
    batch = make(3)
    np.testing.assert_array_equal(batch["weights"], counted[batch["tokens"]])
    noised, hidden, _ = noise(batch, MDLM, 99, *jax.random.split(jax.random.key(0)))
    np.testing.assert_array_equal(hidden, noised == 99)
    assert hidden.any() and not hidden[~batch["labelled"]].any() and make.batches == 1


def test_refusals(source, tmp_path, capsys):
    options = {
        "--packed": "packed is no option of masked",
        "--floor=2": "floor must be in (0, 1)",
        "--alignment=next": "alignment and mask are options of a causal model",
        "--cart=2": "cart must be at most 1, not 2",
        "--forcing=4": "forcing needs a model of full attention, not of masked_diffusion",
    }
    for option, reason in options.items():
        assert (
            refused(source, tmp_path / option, option, objective="masked")
            and reason in capsys.readouterr().err
        )
