"""`paradec train` on a tiny Llama of random weights: trains, resumes to the bit, refuses in one
sentence.
"""

import json

import jax
import numpy as np
import pytest
from commands import weights, words

import paradec_jax as pd
from paradec_jax.cli import main


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(words(source, folder, "--held-out", source / "data.jsonl")) == 0
    return folder


def test_a_run_ends_in_a_model_and_what_it_is_worth(source, whole):
    model, start = pd.load(whole / "model"), pd.load(source / "llama")
    assert model.config.param_dtype == "bfloat16" and model.chat_template
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype, dict(model.params), dict(start.params))
    )
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["part"] == "sft" and lines[-1]["examples"] == 50
    assert lines[-1]["after"]["loss"] < lines[-1]["before"]["loss"]
    assert len(pd.generate(model, ["x 1 "], max_new_tokens=4).text) == 1


@pytest.mark.slow
def test_a_call_whose_minutes_are_over_goes_on(source, whole, tmp_path, capsys):
    held_out = ("--held-out", source / "data.jsonl")
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(words(source, tmp_path / "run", *held_out, "--minutes", 0))
        assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "0 minutes are over after 2 of 6 updates of sft: the same command goes on" in said
    assert main(words(source, tmp_path / "run", *held_out)) == 0
    assert weights(tmp_path / "run") == weights(whole)
    said = capsys.readouterr().out
    assert "of messages by the template's prefixes" in said and "held out: loss" in said


@pytest.mark.slow
def test_upper_layers_packed_rows_and_an_average(source, whole, tmp_path):
    options = ("--layers", 0.5, "--packed", "--optimizer", "muon", "--ema", 0.9, "--accumulate", 2)
    run = words(source, tmp_path / "run", *options, "--precision", "mixed", updates=2)
    assert main(run) == 0
    folders = (source / "llama", tmp_path / "run" / "model", whole / "model")
    before, after, base = (pd.load(folder).params for folder in folders)
    same = {
        name: jax.tree.all(jax.tree.map(np.array_equal, before[name], after[name]))
        for name in before
    }
    assert same["embedding"] and same["head"] and same["layer_0"] and not same["layer_1"]
    assert main([*run, "--blend", "0.5", "--base", str(folders[2])]) == 0
    half = pd.load(folders[1]).params
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(c, (a + b) / 2, 0.02, 1e-4), base, after, half
    )


REFUSED = [
    (
        ("--model", "tiny-sdar"),
        "sft trains models of family causal, and tiny-sdar is of block_diffusion",
    ),
    (("--accumulate", 1000000), "--accumulate must be at most "),
    (("--length", 65), "length must be from 2 to the 64 positions of the model, not 65"),
    (("--layers", 1.5), "--layers must be at most 1, not 1.5"),
    (("--epochs", -1), "--epochs must be at least 0, not -1.0"),
    (("--base", "none"), "--base wants --blend below 1, and no --lora"),
    (("--base", "tiny-jacobi", "--blend", 0.5), "base must be a model of one shape with"),
    (("--data", "none.jsonl"), "there is no file none.jsonl"),
    (("--out", "WHOLE"), "was begun with other --seed: choose another folder with --out"),
    (
        ("--out", "WHOLE", "--allow", "data", "--layers", 0.5),
        "was begun with other --layers: choose",
    ),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refusals(source, whole, options, reason, tmp_path, capsys):
    options = [whole if word == "WHOLE" else word for word in options]
    assert main(words(source, tmp_path / "run", "--seed", 1, *options)) == 1
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1


FROZEN = (
    "--layers",
    0.5,
    "--block",
    4,
    8,
    "--teacher",
    "frozen",
    "--context",
    "nc_ic",
    "--problems",
    9,
)
ADAPTED = ("--lora", 4, "--cllm", "--rehearse", 0, "--data", "PROMPTS")


@pytest.mark.slow
@pytest.mark.parametrize("options", [ADAPTED, FROZEN])
def test_jacobi_from_messages(source, tmp_path, options, capsys):
    """In bfloat16, with an average, from prompts alone; and in two rounds."""
    options = [source / "prompts.jsonl" if word == "PROMPTS" else word for word in options]
    more = ("--held-out", source / "data.jsonl", "--precision", "bfloat16", "--ema", 0.9, *options)
    assert main(words(source, tmp_path, *more, objective="jacobi", updates=2)) == 0
    *_, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (
        last["examples"] == 50 and last["after"]["nats a token"] != last["before"]["nats a token"]
    )
    out = capsys.readouterr().out
    assert "round-0: 4 rows together, of 4 asked, take " in out and " GB at most, 0 of " in out
    assert out.count("held out, Jacobi: ") == 4
    assert (
        pd.load(tmp_path / "model").decoder
        == f"jacobi --block {8 if options[0] == '--layers' else 4} --running"
    )
    before, after = (pd.load(folder).params for folder in (source / "llama", tmp_path / "model"))
    changed = ~np.asarray(jax.tree.leaves(jax.tree.map(np.array_equal, dict(before), dict(after))))
    assert (
        changed.any()
        and not changed.all()
        and (tmp_path / "adapter").exists() == ("--lora" in options)
    )


@pytest.mark.slow
def test_an_adapter_lies_beside_the_merged_model(source, tmp_path):
    """Also where the call ended after its first update and went on; of the upper half of the
    layers, half of it.
    """
    options = ("--lora", 2, "--layers", 0.5, "--blend", 0.5)
    with pytest.raises(SystemExit):
        main(words(source, tmp_path, "--minutes", 0, *options, updates=3))
    assert main(words(source, tmp_path, *options, updates=3)) == 0
    assert main(words(source, tmp_path / "whole", *options, updates=3)) == 0
    assert weights(tmp_path) == weights(tmp_path / "whole")
    start, trained = pd.load(source / "llama").params, pd.load(tmp_path / "model").params
    same = jax.tree.map(np.array_equal, dict(start), dict(trained))
    assert not any(jax.tree.leaves(same.pop("layer_1")["mlp"])) and all(jax.tree.leaves(same))
    merged = pd.load(source / "llama", adapter=tmp_path / "adapter").params
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(trained), strict=True):
        assert a.dtype == b.dtype == "bfloat16"
        np.testing.assert_allclose(
            a.astype(np.float32), b.astype(np.float32), rtol=2**-7, atol=1e-6
        )
