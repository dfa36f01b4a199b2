"""`paradec train` on a tiny Llama of random weights: trains, resumes to the bit, refuses in one sentence."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from small_tokenizers import byte_level
from stubs.tiny import drawn

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.config import CausalConfig, TokenSpec
from paradec_jax.families import init_params

ROOT = Path(__file__).parents[2]
SHAPE = {"width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "feed_forward": 24, "qkv_bias": False}
TEMPLATE = "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)

JACOBI = ("--block", 4, "--new-tokens", 8, "--rows", 4)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Hugging Face folder in bfloat16, and 50 lines."""
    root, words = tmp_path_factory.mktemp("source"), byte_level()
    half = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    config = CausalConfig(vocab_size=words.vocab_size, max_length=64, tie_embeddings=False, **SHAPE, **half)
    spec, params = TokenSpec(stop=(words.id_of("<|im_end|>"),)), drawn(init_params, config, 0)
    pd.save(root / "ours", pd.Model(config, params, spec, words, TEMPLATE))
    assert main(["export", str(root / "ours"), str(root / "llama")]) == 0
    with (root / "data.jsonl").open("w") as file:
        for i in range(25):
            pair = [("user", f"a b {i}"), ("assistant", f"b a {i}")]
            talk = {"messages": [{"role": role, "content": text} for role, text in pair]}
            lines = (talk, {"prompt": f"x {i} ", "response": f"is {i}"})
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return root


def words(source, folder, *options, updates=6, objective="sft"):
    told = ["train", objective, "--model", source / "llama", "--data", source / "data.jsonl", "--out", folder]
    told += ["--updates", updates, "--batch-tokens", 256, "--learning-rate", 1e-2, *options]
    return [str(word) for word in told]


def weights(folder):
    return {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")}


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(words(source, folder, "--held-out", source / "data.jsonl")) == 0
    return folder


def test_a_run_ends_in_a_model_and_what_it_is_worth(source, whole):
    model, start = pd.load(whole / "model"), pd.load(source / "llama")
    assert model.config.param_dtype == "bfloat16" and model.chat_template == TEMPLATE
    assert jax.tree.map(lambda x: x.dtype, model.params) == jax.tree.map(
        lambda x: x.dtype, dict(start.params)
    )
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["part"] == "sft" and lines[-1]["examples"] == 50
    assert lines[-1]["after"]["loss"] < lines[-1]["before"]["loss"]
    assert len(pd.generate(model, ["x 1 "], max_new_tokens=4).text) == 1


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


def test_upper_layers_packed_rows_and_an_average(source, tmp_path):
    options = ("--layers", 0.5, "--packed", "--optimizer", "muon", "--ema", 0.9, "--accumulate", 2)
    assert main(words(source, tmp_path / "run", *options, "--precision", "mixed", updates=2)) == 0
    before, after = (pd.load(folder).params for folder in (source / "llama", tmp_path / "run" / "model"))
    same = {name: jax.tree.all(jax.tree.map(np.array_equal, before[name], after[name])) for name in before}
    assert same["embedding"] and same["head"] and same["layer_0"] and not same["layer_1"]


REFUSED = [
    (("--model", "tiny-sdar"), "sft trains models of family causal, and tiny-sdar is of block_diffusion"),
    (("--length", 65), "length must be from 2 to the 64 positions of the model, not 65"),
    (("--layers", 1.5), "layers must be from 0 to 1, not 1.5"),
    (("--epochs", -1), "epochs must be from 0 to inf, not -1.0"),
    (("--data", "none.jsonl"), "there is no file none.jsonl"),
    (("--out", "WHOLE"), "was begun with other seed: choose another folder"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_refusals(source, whole, options, reason, tmp_path, capsys):
    options = [whole if word == "WHOLE" else word for word in options]
    assert main(words(source, tmp_path / "run", "--seed", 1, *options)) == 1
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1


def started(source, folder, *options, launcher=(), **kinds):
    path = {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")}
    program = [sys.executable, "-m", "paradec_jax.cli", *words(source, folder, *options, **kinds)]
    return subprocess.Popen([*launcher, *program], cwd=ROOT, env=os.environ | path)


BOTH = pytest.mark.parametrize(("objective", "options"), [("sft", ()), ("jacobi", JACOBI)])
SHARD, SAVED = "round-0/trajectories/shard-00003.npy", "checkpoints/3"
PLACES = {"sft": [f"sft/{SAVED}"], "jacobi": [SHARD, f"round-0/{SAVED}"]}


@pytest.mark.slow
@BOTH
def test_kill_9_changes_no_bit(source, tmp_path, objective, options):
    often = {"updates": 40, "objective": objective}
    assert main(words(source, tmp_path / "whole", *options, **often)) == 0
    for place in PLACES[objective]:
        process = started(source, tmp_path / "run", *options, "--checkpoint-every", 1, **often)
        while not (tmp_path / "run" / place).exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL and not (tmp_path / "run" / "model").exists()
    assert started(source, tmp_path / "run", *options, **often).wait() == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.slow
@BOTH
def test_two_processes_have_the_losses_of_one(source, tmp_path, objective, options):
    """On as many devices, of which the rows of a batch are a multiple."""
    losses = []
    for count in "12":
        launcher = [sys.executable, "-m", "experiments.launch.local", "--processes", count]
        launcher += ["--devices", str(2 // int(count)), "--"]
        more = (*options, "--held-out", source / "data.jsonl", "--cluster.fsdp", 2, "--layers", 0.5)
        process = started(source, tmp_path / count, *more, launcher=launcher, objective=objective)
        assert process.wait() == 0
        first, *_, last = map(json.loads, (tmp_path / count / "metrics.jsonl").read_text().splitlines())
        losses.append([first["loss"], *last["before"].values(), *last["after"].values()])
    assert np.allclose(*losses, rtol=1e-5)


FROZEN = ("--layers", 0.5, "--block", 4, 8, "--teacher", "frozen", "--context", "nc_ic", "--problems", 9)
ADAPTED = ("--lora", 4, "--cllm", "--rehearse", 0)


@pytest.mark.parametrize("options", [ADAPTED, pytest.param(FROZEN, marks=pytest.mark.slow)])
def test_jacobi_from_messages(source, tmp_path, options):
    """In bfloat16, with an average; and in two rounds."""
    more = ("--held-out", source / "data.jsonl", "--precision", "bfloat16", "--ema", 0.9, *options)
    assert main(words(source, tmp_path, *JACOBI, *more, objective="jacobi", updates=2)) == 0
    *_, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert last["examples"] == 50 and last["after"]["nats a token"] != last["before"]["nats a token"]
    before, after = (pd.load(folder).params for folder in (source / "llama", tmp_path / "model"))
    changed = ~np.asarray(jax.tree.leaves(jax.tree.map(np.array_equal, dict(before), dict(after))))
    assert changed.any() and not changed.all() and (tmp_path / "adapter").exists() == ("--lora" in options)


def test_an_adapter_lies_beside_the_merged_model(source, tmp_path):
    """Also where the call ended after its first update and went on; of the upper half of the layers."""
    options = ("--lora", 2, "--layers", 0.5)
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
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=2**-7, atol=1e-6)
