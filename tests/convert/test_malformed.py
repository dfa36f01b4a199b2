"""Damage of every kind, and the sentence that names it; writers that fail or are killed; nothing is
left behind.
"""

import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from exports import (
    CONFIG,
    GOLDEN,
    WEIGHTS,
    assert_same,
    fails,
    imported,
    make_model,
    make_shards,
    recorded,
    rewrite,
)
from marks import over
from safetensors.numpy import load_file, save_file
from torch_writer import Harmful

from paradec_jax import cli, store
from paradec_jax.cli import main
from paradec_jax.convert import huginn, torch_check, weights
from paradec_jax.convert.weights import INDEX
from paradec_jax.store import StoreError

ROOT = Path(__file__).parents[2]
QKV = "transformer.core_block.1.attn.Wqkv.weight"
QUERY, HEAD = "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def put(file: str, content: str | bytes):
    """Damage: another content of a file."""
    content = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / file).write_bytes(content)


def change(edited):
    """Damage: other tensors."""
    return lambda folder: rewrite(folder, edited)


def renamed(old: str, new: str):
    """Damage: other beginnings of names of tensors."""
    return lambda folder: rewrite(
        folder,
        lambda t: [t.update({re.sub(f"^{old}", new, name): t.pop(name)}) for name in list(t)],
    )


def index(**placed: str):
    """Damage: shards, and an index that places some tensors elsewhere."""

    def apply(folder: Path):
        make_shards(folder)
        content = json.loads((folder / INDEX).read_text())["weight_map"]
        (folder / INDEX).write_text(json.dumps({"weight_map": content | placed if placed else {}}))

    return apply


def words(size: int) -> str:
    vocabulary = {str(i): i for i in range(size)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0")).to_str()


RULE = {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False}
# How a folder is damaged, a part of the sentence, and the layout where it is not that of Qwen2.
DAMAGE = {
    "a tensor is missing": (change(lambda t: t.pop(QKV)), f"tensor {QKV} is missing", "huginn"),
    "a tensor too many": (
        change(lambda t: t.update(extra=t[QUERY])),
        "tensor extra in .* is unknown",
    ),
    "a shape": (
        change(lambda t: t.update({QUERY: t[QUERY][1:]})),
        r"has shape \(15, 16\).*\(16, 16\)",
    ),
    "float64": (
        change(lambda t: t.update({QUERY: t[QUERY].astype(float)})),
        "is float64; choose .* dtype",
    ),
    "integers": (
        change(lambda t: t.update({QUERY: t[QUERY].astype(np.int8)})),
        "is I8, but weights must be",
    ),
    "infinite": (
        change(lambda t: t[QUERY].fill(np.inf)),
        "NaN or infinite; allow_nonfinite takes them",
    ),
    "a tied copy": (
        change(lambda t: t.update({HEAD: t[EMBEDDING] + 1})),
        "differs from .*embed_tokens",
    ),
    "twice": (
        change(lambda t: t.update({huginn.RAW + QKV: t[QKV]})),
        f"{QKV} occurs twice",
        "huginn",
    ),
    "a prefix": (renamed("", "text."), r"is missing from .* it holds text\.", "sdar"),
    "hidden": (
        change(lambda t: t.update({f"module.{HEAD}": t[HEAD]})),
        f"{HEAD} occurs twice",
        "llama",
    ),
    "cut": (
        lambda f: put(WEIGHTS, (f / WEIGHTS).read_bytes()[:-100])(f),
        f"{WEIGHTS} is truncated",
    ),
    "no JSON": (put(CONFIG, "{"), "config.json is not valid JSON"),
    "a list": (put(CONFIG, "[]"), "config.json", "mdlm"),
    "no UTF-8": (put("generation_config.json", b"\xff\xfe"), "generation_config.json"),
    "no config": (lambda f: (f / CONFIG).unlink(), "config.json is missing", "sdar"),
    "no weights": (
        lambda f: (f / WEIGHTS).unlink(),
        "neither model.safetensors nor pytorch_model.bin",
    ),
    "a pickle": (
        lambda f: (f / WEIGHTS).rename(f / "model.pt"),
        "model.pt is a pickle, which is never",
    ),
    "a pickle inside": (
        put(WEIGHTS, b"\x80\x04\x95" + bytes(range(100, 200))),
        "not a safetensors file",
    ),
    "no folder": (shutil.rmtree, "there is no model"),
    "index: a tensor": (index(extra="b.safetensors"), "tensor extra is listed in an index, but"),
    "index: a path": (index(**{EMBEDDING: "../b.safetensors"}), "which is no file name"),
    "index: a shard": (
        index(**{QKV: "c.safetensors"}),
        "shard .*c.safetensors is missing",
        "huginn",
    ),
    "index: nothing": (index(), "no weight_map"),
    "another tokenizer": (
        put("tokenizer.model", ""),
        r"model is not read: save a tokenizer\.json .* --token",
    ),
    "no tokenizer": (put("tokenizer.json", "{}"), "not a tokenizer"),
    "a pattern": (
        put("tokenizer.json", json.dumps(json.loads(words(9)) | {"pre_tokenizer": RULE})),
        "token",
    ),
    "an id beyond": (
        put("tokenizer.json", words(300)),
        "the token id 299, but .* vocabulary ends at 31",
    ),
    "a template": (put("chat_template.jinja", "{% for"), "chat_template.jinja: .*"),
}


@over(DAMAGE)
def test_one_sentence_and_nothing_left(name, copy, refused):
    damage, sentence, *layout = DAMAGE[name]
    source = copy(*layout or ["qwen2"])
    damage(source)
    assert re.search(sentence, refused(source).strip())


@over(
    [
        ("qwen2", "model.", ""),
        ("qwen2", "", "module."),
        ("llama", "", "base_model.model."),
        ("llama", "model.layers.", "model._orig_mod.layers."),
        ("sdar", "model.", "module.model.model."),
    ],
    argument="name, old, new",
)
def test_prefixes_that_carry_nothing(name, old, new, copy, capsys):
    source = copy(name)
    renamed(re.escape(old), new)(source)
    make_shards(source)
    capsys.readouterr()
    assert_same(imported(source), make_model(name))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{new}" in err and " is read as " in err


def test_a_tokenizer_from_elsewhere(copy, tmp_path, refused):
    source = copy("qwen2")
    (source / "tokenizer.model").touch()  # passed over where another one is named
    for size in (32, 300):
        (tmp_path / f"{size}.json").write_text(words(size))
    assert "no tokenizer" in refused(source, "--tokenizer", str(tmp_path / "none.json"))
    assert "token id 299" in refused(source, "--tokenizer", str(tmp_path / "300.json"))
    tokenizer = imported(source, "--tokenizer", str(tmp_path / "32.json")).tokenizer
    assert tokenizer is not None and tokenizer.encode("31") == [31]


def test_a_flag_takes_weights_that_are_no_numbers(copy, tmp_path, capsys):
    source, target = copy("qwen2"), tmp_path / "model"
    rewrite(source, lambda t: t[EMBEDDING].__setitem__((3, 3), np.nan))
    assert main(["import", str(source), str(target), "--allow-nonfinite"]) == 0
    sentence = "embedding holds numbers that are NaN or infinite"
    assert sentence in fails(capsys, "export", target)
    with pytest.raises(StoreError, match=sentence):
        store.load(target)
    assert np.isnan(store.load(target, allow_nonfinite=True).params["embedding"]).sum() == 1


def test_what_was_saved_twice_counts_once(copy):
    source = copy("qwen2")
    tensors = load_file(source / WEIGHTS)
    rewrite(source, lambda t: t.update({name: array + 1 for name, array in t.items()}))
    make_shards(source)
    (source / "b.safetensors").unlink()
    save_file(tensors, source / WEIGHTS)
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert_same(imported(source), make_model("qwen2"))


# Changes to recorded arrays, and a part of the sentence.
RECORDINGS = {
    "no ids": ({"input_ids": None}, "array input_ids must hold integers"),
    "ids beyond": ({"input_ids": np.array([[1, 128]])}, "beyond the vocabulary of 128"),
    "no logits": ({"logits_r1": None}, "no array logits, nor logits_r<n>"),
    "no recurrence": (
        {"logits_r0": np.zeros((1, 2, 128))},
        "of 0 recurrences, but must be of 1 to",
    ),
    "a shape": (
        {"logits_r1": np.zeros((1, 2, 99))},
        r"of shape \(1, 2, 128\), not float64 \(1, 2, 99\)",
    ),
    "objects": ({"input_ids": np.array([Harmful()], object)}, "not an .npz file of plain arrays"),
}


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    """The recorded recurrent model, imported."""
    imported(recorded("recurrent_depth", folder := tmp_path_factory.mktemp("check")))
    return folder / "imported"


@over(RECORDINGS)
def test_recordings_that_are_wrong(name, golden, tmp_path, capsys):
    changes, sentence = RECORDINGS[name]
    arrays = {"input_ids": np.array([[1, 2]]), "logits_r1": np.zeros((1, 2, 128))} | changes
    np.savez(
        tmp_path / "logits.npz",
        **{key: array for key, array in arrays.items() if array is not None},
    )
    assert main(["check", str(golden), "--logits", str(tmp_path / "logits.npz")]) == 1
    assert re.search(sentence, capsys.readouterr().err)


def test_check(golden, tmp_path, capsys, monkeypatch):
    path = tmp_path / "logits.npz"
    command = ["check", str(golden), "--logits", str(path)]
    np.savez(
        path, input_ids=np.array([[1, 2, 3]]), logits=np.zeros((1, 3, 128), np.float32), num_steps=1
    )
    assert main(command) == 1 and "above 5e-05" in capsys.readouterr().out
    assert main([*command, "--tolerance", "1e3"]) == 0
    np.savez(
        path, input_ids=np.array([[1, 2, 3]]), logits=np.full((1, 3, 128), np.nan), num_steps=1
    )
    assert main([*command, "--tolerance", "1e3"]) == 1
    for options, sentence in (
        ([], "exactly one of --logits and --torch"),
        (["--logits", str(tmp_path / "none.npz")], "is missing, or not an .npz file"),
        (["--torch", str(GOLDEN / "recurrent_depth")], "holds no model code"),
        (["--torch", str(GOLDEN / "masked_diffusion")], "is not run; use --logits"),
        (["--torch", str(GOLDEN / "jacobi")], "the original model code of .* failed: no torch"),
    ):
        with monkeypatch.context() as patch:
            failed = subprocess.CompletedProcess([], 1, stderr="Traceback\nno torch\n")
            patch.setattr(torch_check.subprocess, "run", lambda *_, failed=failed, **__: failed)
            assert main(["check", str(golden), *options]) == 1
        assert re.search(sentence, capsys.readouterr().err)


@over(
    [
        ("a \udcff b", ()),
        ("To be", ("--max-new-tokens", "99999999999")),
        ("To be", ("--seed", str(10**30))),
        ("To be", ("--stop", "")),
        ("a [3] b", ("--gaps",)),
    ],
    argument="prompt, options",
)
def test_prompts_that_are_wrong(prompt, options, capsys):
    with contextlib.suppress(SystemExit):  # an option that the parser refuses
        assert cli.main(["generate", prompt, "--model", "tiny-jacobi", *options]) == 1
    assert "Traceback" not in capsys.readouterr().err


# Writers that fail


def test_failure_while_writing_leaves_nothing(copy, folders, capsys, refused, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    source = copy("qwen2")
    with monkeypatch.context() as patch:
        patch.setattr(store.folder, "write_tensors", full)
        assert "No space left" in refused(source)
    model = Path(shutil.copytree(folders / "qwen2" / "model", source.parent / "model"))
    monkeypatch.setattr(weights, "write_tensors", full)
    assert "No space left" in fails(capsys, "export", model)


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.cluster
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_killed_converters(kind, folders, tmp_path, record_property):
    """At 10 random moments: a folder is whole or absent; SIGTERM leaves nothing, the next writer
    clears the rest.
    """
    work = tmp_path / "work"
    words = ["import", str(folders / "qwen2" / "exported"), str(work / "model")]
    program = [sys.executable, "-m", "convert", *words]
    work.mkdir()
    begun = time.monotonic()
    subprocess.run(program, cwd=ROOT, check=True)
    whole, length = listed(work), time.monotonic() - begun
    rng = random.Random(0)
    for _ in range(10):
        shutil.rmtree(work)
        work.mkdir()
        child = subprocess.Popen(program, cwd=ROOT)
        time.sleep(rng.uniform(0, length))
        child.send_signal(kind)
        code = child.wait()
        if kind == signal.SIGTERM:
            assert code in (0, -kind, 128 + kind) and listed(work) in ([], whole)
        if (work / "model").exists():
            store.load(work / "model")
        assert main([*words, "--overwrite"]) == 0 and listed(work) == whole
    record_property(
        "cluster", {"part": "killed converters", "what": kind.name, "cases": 10, "held": 10}
    )


def test_the_module_is_a_program(tmp_path):
    command = [
        sys.executable,
        "-m",
        "convert",
        "import",
        str(tmp_path / "none"),
        str(tmp_path / "model"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"paradec: there is no model {tmp_path / 'none'}")
    assert not list(tmp_path.iterdir())
