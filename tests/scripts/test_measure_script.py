"""The script that measures, on tiny models and made-up files: results, records, refusals."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.benchmarks import measure as script
from paradec_jax.config import MASKED_DIFFUSION_PRESETS, TokenSpec
from paradec_jax.data import build_tokenizer
from paradec_jax.evaluate.judge import judge_texts
from paradec_jax.evaluate.lambada import lambada, read_passages
from paradec_jax.families import init_params
from paradec_jax.store import Model, load, save

TEXTS = ("Ana has 3 apples and 4 pears.", "Ben has 12 pears. Cal has 7.", "Dan has 3 apples and 9 pears.")


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory):
    """A denoiser of random weights on the tokenizer of the word problems, the mask after its tokens."""
    tokenizer = build_tokenizer()
    size = tokenizer.vocab_size + 1
    config = dataclasses.replace(MASKED_DIFFUSION_PRESETS["test-mdlm"], vocab_size=size)
    spec = TokenSpec(bos=1, stop=(2,), mask=size - 1, alignment="own")
    folder = tmp_path_factory.mktemp("models") / "denoiser"
    save(folder, Model(config, init_params(config, jax.random.key(0)), spec, tokenizer))
    return str(folder)


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(capsys, *words):
    code = script.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return json.loads(out) if code == 0 else (code, err)


def test_last_words_of_both_kinds(models, denoiser, tmp_path, capsys):
    path = lines(tmp_path / "passages.jsonl", [{"text": text} for text in TEXTS])
    exact = run(capsys, "lambada", path, "--model", models[0], "--limit", "2")
    assert (exact["passages"], exact["likelihood"], exact["draws"]) == (2, "exact", None)
    bound = run(capsys, "lambada", path, "--model", denoiser, "--draws", "4", "--out", tmp_path / "out.json")
    assert (bound["passages"], bound["likelihood"], bound["draws"]) == (3, "bound", 4)
    assert bound["perplexity"] == lambada(load(denoiser), read_passages(path), draws=4).perplexity
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["result"] == bound and record["options"]["draws"] == 4 and "device" in record["facts"]


def test_choices(models, denoiser, tmp_path, capsys):
    question = {"context": "Ana has", "choices": [" 3 apples", " 4 pears"], "answer": 1}
    path = lines(tmp_path / "questions.jsonl", [question, question | {"answer": 0}])
    for kind, *more in (("exact", models[0]), ("bound", denoiser, "--draws", "4")):
        found = run(capsys, "choices", path, "--model", *more)
        assert found["accuracy"] == 0.5 and found["questions"] == 2 and found["likelihood"] == kind


def test_drawn_texts(models, tmp_path, capsys):
    path = lines(tmp_path / "drawn.jsonl", [{"text": text} for text in TEXTS])
    real = tmp_path / "real.txt"
    real.write_text(" ".join(TEXTS) * 5)
    found = run(capsys, "texts", path, "--judge", models[0], "--definition", "sdtt", "--real", real)
    judged = judge_texts(load(models[0]), TEXTS, definition="sdtt")
    assert found["judge_perplexity"] == judged.perplexity and found["interval"] == list(judged.interval)
    assert found["fourgram_entropy"] == judged.variety.fourgram_entropy and len(found["distinct"]) == 4
    assert found["reverse_perplexity"] > 1 and found["reverse_smoothing"] == "witten-bell"
    assert run(capsys, "texts", path, "--judge", models[0])["reverse_perplexity"] is None


def test_features(tmp_path, capsys):
    rng = np.random.default_rng(0)
    paths = [tmp_path / "reference.npy", tmp_path / "sampled.npy"]
    for path in paths:
        np.save(path, rng.normal(size=(40, 4)))
    found = run(capsys, "mauve", *paths)
    assert found["clusters"] == 4 and 0 < found["mean"] <= 1 and len(found["scores"]) == 5


def test_refusals(models, denoiser, tmp_path, capsys):
    path = lines(tmp_path / "passages.jsonl", [{"text": text} for text in TEXTS])
    np.save(tmp_path / "ids.npy", np.arange(3))
    for words, sentence in (
        (["lambada", tmp_path / "none.jsonl", "--model", models[0]], "there is no file"),
        (["lambada", path, "--model", models[0], "--limit", "0"], "--limit must be at least 1"),
        (["lambada", path, "--model", denoiser, "--draws", "1"], "draws must be at least 2"),
        (["lambada", path, "--model", models[0], "--draws", "4"], "the likelihoods of this one are exact"),
        (["texts", path, "--judge", denoiser], "a judge must be a model that predicts the next token"),
        (["texts", path, "--judge", models[0], "--definition", "mean"], "definition must be one of"),
        (["mauve", tmp_path / "none.npy", tmp_path / "none.npy"], "there is no file"),
        (["mauve", tmp_path / "ids.npy", tmp_path / "ids.npy"], "floating-point numbers"),
        (["texts", path, "--judge", models[0], "--out", tmp_path / "no" / "x.json"], "--out cannot write"),
    ):
        code, err = run(capsys, *words)
        assert code == 1 and sentence in err
