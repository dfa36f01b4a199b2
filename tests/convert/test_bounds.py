"""Files whose sizes lie: each is refused in one sentence, soon, and without the memory that it asks
for.
"""

import dataclasses
import functools
import io
import os
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from exports import CONFIG, WEIGHTS, edit, json_in, make_model, rows
from marks import over
from torch_writer import Storage, Tensor, write_checkpoint

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.convert import gguf as convert_gguf
from paradec_jax.convert.gguf import from_pieces
from paradec_jax.text.tokenizer import Tokenizer

# A refusal takes well below a second of processor time, with imports a few: work that grows with a
# size that lies takes minutes on any machine.
SECONDS, ROOM = 60, 2**30
READS = 50_000  # in the place of 2,000,000, which take seconds
pack, text = struct.pack, lambda value: struct.pack("<Q", len(value)) + value


def gguf(metadata: bytes, *tensors: bytes, fields: int = 1, count: int | None = None) -> bytes:
    """A file whose tensors have 64 bytes of numbers."""
    counts = len(tensors) if count is None else count, fields
    head = b"GGUF" + pack("<IQQ", 3, *counts) + metadata + b"".join(tensors)
    return head + bytes(-len(head) % 32 + 64)


def array(kind: int, size: int, data: bytes = b"") -> bytes:
    return text(b"x.y") + pack("<IIQ", 9, kind, size) + data


def tensor(name: bytes, offset: int, *sizes: int) -> bytes:
    return text(name) + pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, offset)


KIND = text(b"general.architecture") + pack("<I", 8) + text(b"llama")
A = tensor(b"a", 0, 8)
GGUF = {  # contents, by a part of the sentence
    "beyond the end": [
        gguf(array(7, 2**40)),
        gguf(array(9, 2**60, pack("<IQ", 9, 0))),
        gguf(array(8, 2**63, bytes(80))),
        gguf(KIND, text(b"a") + pack("<I", 2**32 - 1)),
        gguf(KIND, tensor(b"a", 64, 8)),
        gguf(array(0, 2 * READS, bytes(2 * READS))),
    ],
    "damaged": [
        gguf(KIND, fields=2**62),
        gguf(KIND, A, count=2**62),
        gguf(KIND, *(tensor(b"%d" % i, 0, 0) for i in range(10**5))),
        gguf(array(9, 1, pack("<IQ", 9, 1) * 5000)),
        gguf(KIND, tensor(b"a", 0, 2**33, 2**33)),
    ],
    "lies over another one, beyond the file": [
        gguf(KIND, tensor(b"a", 0, 16), tensor(b"b", 32, 8)),
        gguf(KIND, tensor(b"a", 2**64 - 32, 8)),
        gguf(KIND, tensor(b"a", 4, 8)),
    ],
}


def refused(capsys, source: Path, sentence: str, *more: str):
    begun = time.process_time()
    assert main(["generate", "autoregressive", "a", "--model", str(source), *more]) == 1
    out, err = capsys.readouterr()
    assert sentence in err and err.count("\n") == 1 and not out
    assert time.process_time() - begun < SECONDS


@over(GGUF, argument="sentence")
def test_headers_of_gguf(sentence, tmp_path, capsys, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setattr(convert_gguf, "MOST_READS", READS)
    for content in GGUF[sentence]:
        (tmp_path / "a.gguf").write_bytes(content)
        refused(capsys, tmp_path / "a.gguf", sentence)


@pytest.mark.slow
def test_more_values_than_are_read(tmp_path, capsys):
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(gguf(array(0, 3 * 10**6, bytes(3 * 10**6))))
    refused(capsys, tmp_path / "a.gguf", "beyond the end")


DOUBLED = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
LONG = "than its length explains"
PICKLES = [  # and a part of the sentence
    (b"\x80\x02}r" + pack("<I", 4 * 10**8) + b".", LONG),
    (b"}p400000000\n.", LONG),
    (b"\x80\x04\x95" + pack("<Q", 2**40) + b"}.", LONG),
    (b"\x80\x04\x8e" + pack("<Q", 2**40) + b"a.", "damaged"),
    (b"\x80\x02}K\x01\x85q\x00" + DOUBLED + b"K\x01s.", LONG),
    (b"\x80\x02}K\x01\x85" + b"2\x86" * 60 + b"K\x01s.", LONG),
    (b"\x80\x02" + b"ca\nb\n0" * 20_000 + b"}.", LONG),
    (b"\x80\x04" + b"\x8f" * 2_000_000 + b".", LONG),
    (None, "compresses nothing"),
]


def written(path: Path, content: bytes | None) -> str:
    """A file of PyTorch with that pickle, or with one gigabyte in a megabyte."""
    if content is not None:
        return str(write_checkpoint(path, {}, data_pkl=content))
    path.write_bytes(gigabyte())
    return str(path)


@functools.cache
def gigabyte() -> bytes:
    """An archive of a megabyte."""
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", bytes(10**9))
    return buffer.getvalue()


ARCHIVE = r"""
import pathlib, re, sys
from paradec_jax.convert.torch_files import Archive, ConvertError
for path in sys.argv[1:]:
    try: Archive(pathlib.Path(path))
    except ConvertError: print("refused")
print(1024 * int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1]))  # its own alone
"""


def test_memory_is_bounded(tmp_path):
    paths = [written(tmp_path / f"{i}.bin", content) for i, (content, _) in enumerate(PICKLES)]
    out = subprocess.run(
        [sys.executable, "-c", ARCHIVE, *paths], capture_output=True, check=True
    ).stdout
    *lines, memory = out.split()
    assert lines == [b"refused"] * len(paths) and int(memory) < ROOM


def in_torch(write):
    """A file of PyTorch in the place of the safetensors."""

    def apply(folder: Path):
        (folder / WEIGHTS).unlink()
        write(folder / "pytorch_model.bin")

    return apply


def piped(door: str):
    return lambda folder: pipe(folder / door)


def pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def twice(path: Path):
    write_checkpoint(path, {})
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr(file.namelist()[-1], b"")


REPEATED = Tensor(Storage(np.ones(1, np.float32)), 0, (10**6, 10**6), (0, 0))


def header(change):
    """Another header of the safetensors."""

    def apply(folder: Path):
        content = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        (folder / WEIGHTS).write_bytes(text(change(content[8:end].rstrip())) + content[end:])

    return apply


TYPES = [*["full_attention", "sliding_attention"] * 150_000, "full_attention"]
MANY = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": TYPES,
    "num_hidden_layers": len(TYPES),
}
DOORS = (CONFIG, "tokenizer.json", "chat_template.jinja")
FOLDERS = [  # layout, change, and a part of the sentence
    ("qwen2", lambda folder: edit(folder, **MANY), "layer_types"),
    ("qwen2", header(lambda h: h[:-1] + b"," + h[1:]), "a name twice"),
    ("qwen2", header(lambda h: h + b" " * 2**24), "bytes"),
    (
        "qwen2",
        header(lambda h: h[:-1] + b"".join(b',"%d":0' % i for i in range(10**5)) + b"}"),
        "names, and",
    ),
    *(
        (kind, lambda at: os.truncate(at / CONFIG, 3 * 2**30), "bytes, and")
        for kind in ("qwen2", "own")
    ),
    ("qwen2", in_torch(twice), "repeats no name"),
    *(
        ("qwen2", in_torch(lambda path, it=it: written(path, it)), sentence)
        for it, sentence in PICKLES
    ),
    (
        "qwen2",
        in_torch(lambda path: write_checkpoint(path, {"a": REPEATED})),
        "more numbers than its storage",
    ),
    ("qwen2", in_torch(pipe), ""),
    *(("own", piped(door), "") for door in (*DOORS, "network.safetensors")),
    *(("qwen2", piped(door), "") for door in (*DOORS, "tokenizer_config.json", WEIGHTS)),
]


@pytest.fixture
def model(tmp_path) -> Path:
    """A model folder with a tokenizer that has one token more than the embedding has rows."""
    words = pd.load("tiny-causal").tokenizer._backend
    made = make_model("llama", vocab_size=words.get_vocab_size())
    words.add_special_tokens(["<|one|>"])
    pd.save(tmp_path / "model", dataclasses.replace(made, tokenizer=Tokenizer(words)))
    return tmp_path / "model"


@rows("sizes", "layout", "changes", "sentence")
def test_configs(layout, changes, sentence, copy, model, capsys):
    source = model if layout in ("shape", "model") else copy(layout)
    if layout == "shape":
        parts = json_in(source)["parts"]
        parts["network"]["config"] |= changes
        changes = {"parts": parts}
    edit(source, **changes)
    refused(capsys, source, sentence)


@over(FOLDERS, argument="case")
def test_headers_and_doors(case, copy, model, capsys):
    layout, change, sentence = case
    change(source := model if layout == "own" else copy(layout))
    refused(capsys, source, sentence)


def test_pipes_at_other_doors(model, tmp_path, capsys):
    refused(capsys, pipe(tmp_path / "a.gguf"), "no regular file")
    train = ["train", "sft", "--model", str(model), "--out", str(tmp_path / "run"), "--data"]
    adapter = pipe(tmp_path / "adapter_config.json").parent
    for command in (
        ["generate", "a", "--model", str(model), "--adapter", str(adapter)],
        [*train, str(pipe(tmp_path / "a.jsonl"))],
        [*train, "/dev/zero"],
        ["check", str(model), "--logits", str(pipe(tmp_path / "a.npz"))],
    ):
        assert main(command) == 1 and "no regular file" in capsys.readouterr().err
    (adapter / "adapter_config.json").unlink()
    (adapter / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 3, "peft_type": "LORA"}')
    pipe(adapter / "adapter_model.safetensors")
    refused(capsys, model, "no regular file", "--adapter", str(adapter))
    assert main(["compare", ""]) == 1 and "must have a name" in capsys.readouterr().err


def test_tokens_without_rows_and_long_pieces(model):
    words = pd.load(model).tokenizer
    assert words.decode(words.encode("a b")) == "a b"
    for call in (lambda: words.encode("a<|one|>"), lambda: words.encode_batch(["a", "<|one|>"])):
        with pytest.raises(
            ValueError, match=r"holds '<\|one\|>', a token for which the model has no row"
        ):
            call()
    with pytest.raises(ValueError, match="a piece of 3000000 characters is longer than 256"):
        from_pieces({"a" * 3_000_000: 0, "u": 1}, {"a" * 3_000_000: 0.0}, "u", True)
    many = {f"{i:0256}": i for i in range(10**4)}
    with pytest.raises(
        ValueError, match="the list of pieces of 2560000 characters is longer than 2500000"
    ):
        from_pieces(many, many, "u", True)
