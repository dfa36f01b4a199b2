"""Benchmarks over local files: every task reaches a score, and right answers are told from wrong ones."""

import contextlib
import gzip
import io
import json
import os
import sys
from pathlib import Path

import pytest

from experiments.lm_eval import judges, run

DATA = os.environ.get("PARADEC_DATA")
FUNCTION = {
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="generated code is run on Linux only")


def task(number):
    return {
        "task_id": number,
        "text": f"Write a function that adds {number}.",
        "code": f"def add(x):\r\n    return x + {number}",
        "test_setup_code": "y = add(0)" if number == 12 else "",  # which uses the candidate's code
        "test_list": [f"assert add({i}) == {i + number}" for i in range(4)],
    }


@needs_linux
def test_code_is_judged_by_its_tests():
    assert judges.humaneval(FUNCTION, ["    return 2 * x\n"]) == {"pass@1": 1.0}
    assert judges.humaneval(FUNCTION, ["    return x\n"]) == {"pass@1": 0.0}


def test_wrong_options_are_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        run.Options("gsm8k", tmp_path / "none.jsonl", "tiny-causal")
    with pytest.raises(ValueError, match="--shots 5 needs a file of solved examples"):
        run.Options("gsm8k", Path(__file__), "tiny-causal", shots=5)


@pytest.mark.peers
@needs_linux
@pytest.mark.parametrize("sanitized", [False, True])
def test_tasks_of_mbpp(tmp_path, monkeypatch, sanitized):
    """Three solved tasks of the same file come before each; those of the test split alone are asked."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    rows = [task(n) for n in (1, 2, 3, 4, 10, 11, 12, 510, 511)]
    if sanitized:
        kept = ("task_id", "code", "test_list")
        rows = [
            {k: row[k] for k in kept} | {"prompt": row["text"], "test_imports": ["import math"]}
            for row in rows
        ]
    found = list(judges.mbpp_docs(datasets.Dataset.from_list(rows)))
    assert len(found) == 3
    prompt = found[0]["prompt"]
    assert prompt.count("[BEGIN]") == 4 and prompt.count("[DONE]") == 3 and prompt.endswith("[BEGIN]\n")
    assert "def add(x):\n    return x + 2\n[DONE]\n\nYou are" in prompt and "\r" not in prompt
    assert "assert add(2) == 13" in prompt and "assert add(3) == 14" not in prompt
    for number, right in ((12, 1.0), (11, 0.0)):
        assert judges.mbpp(found[1], [task(number)["code"]]) == {"pass@1": right}


@pytest.mark.peers
def test_boxed_answers_are_compared(tmp_path):
    pytest.importorskip("lm_eval")
    right = {"answer": "\\frac{1}{2}"}
    for text, score in (("So \\boxed{3}, no: $\\boxed{\\frac12}$.", 1.0), ("\\boxed{2}", 0.0), ("1/2", 0.0)):
        assert judges.math500(right, [text]) == {"exact_match": score}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of 2,048 positions with the Qwen tokenizer, in a folder."""
    import jax
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from paradec_jax.config import CausalConfig, TokenSpec
    from paradec_jax.families import init_params
    from paradec_jax.store import Model, save
    from paradec_jax.tokenizer import Tokenizer

    source = Path(DATA) / "tokenizers" / "qwen"
    backend = tokenizers.Tokenizer(
        models.BPE.from_file(str(source / "vocab.json"), str(source / "merges.txt"))
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    tokenizer = Tokenizer(backend)
    end = tokenizer.id_of("<|endoftext|>")
    config = CausalConfig(
        vocab_size=151_936, width=16, layers=1, heads=2, kv_heads=1, feed_forward=32, max_length=2048
    )
    spec = TokenSpec(stop=(end,), pad=end)
    folder = tmp_path_factory.mktemp("models") / "random"
    save(folder, Model(config, init_params(config, jax.random.key(0)), spec, tokenizer))
    return folder


@pytest.mark.peers
@needs_linux
@pytest.mark.skipif(DATA is None, reason="PARADEC_DATA names no folder of benchmark files")
@pytest.mark.parametrize(
    ("name", "file", "scores"),
    [
        ("gsm8k", "gsm8k/test.jsonl", ("exact_match,strict", "exact_match,flexible")),
        ("humaneval", "humaneval/HumanEval.jsonl.gz", ("pass@1,none",)),
        ("mbpp", "mbpp/mbpp.jsonl", ("pass@1,none",)),
        ("mbpp", "mbpp/sanitized-mbpp.json", ("pass@1,none",)),
        ("lambada", "lambada/lambada_test.jsonl", ("perplexity,none", "acc,none")),
        ("math500", None, ("exact_match,none",)),
    ],
)
def test_five_items_of_each_file_reach_a_score(model, tmp_path, monkeypatch, name, file, scores):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    pytest.importorskip("lm_eval")
    if file is None:  # no such file may be handed on: an item of our own
        path = tmp_path / "math.jsonl"
        path.write_text(json.dumps({"problem": "What is $1 + 1$?", "answer": "2"}) + "\n")
    else:
        path = Path(DATA) / file
    more = {"shots": 3, "examples": path.with_name("train.jsonl")} if name == "gsm8k" else {}
    out = tmp_path / "out.json"
    options = run.Options(name, path, str(model), limit=5, execute=True, rows=5, out=out, **more)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run.main(options)
    told = json.loads(out.read_text())
    (found,), (samples,) = told["results"].values(), told["samples"].values()
    assert len({sample["doc_id"] for sample in samples}) == (1 if file is None else 5)
    for score in scores:
        assert isinstance(found[score], float) and f"{score}: " in printed.getvalue()
    assert found[scores[-1]] == 0.0, "a random model is never right"


@pytest.mark.peers
@needs_linux
@pytest.mark.skipif(DATA is None, reason="PARADEC_DATA names no folder of benchmark files")
def test_reference_answers_are_right():
    """Every thirtieth item of each file of code, with the code that comes with it."""
    datasets = pytest.importorskip("datasets")
    with gzip.open(Path(DATA) / "humaneval" / "HumanEval.jsonl.gz", "rt") as lines:
        for doc in [json.loads(line) for line in lines][::30]:
            assert judges.humaneval(doc, [doc["canonical_solution"]])["pass@1"], doc["task_id"]
    lines = (Path(DATA) / "mbpp" / "mbpp.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    asked = [row for row in rows if row["task_id"] in judges.TASKS]
    docs = judges.mbpp_docs(datasets.Dataset.from_list(rows))
    assert len(docs) == len(asked) == 500
    for i in (*range(0, 500, 60), 356):  # the setup of the last one needs the candidate's code
        assert judges.mbpp(docs[i], [asked[i]["code"]])["pass@1"], asked[i]["task_id"]
