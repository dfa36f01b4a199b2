"""What stands where a command would write stays as it is, to the byte, unless this program wrote it
there.
"""

import json
import shutil
from pathlib import Path

import pytest

from paradec_jax import store
from paradec_jax.cli import main
from paradec_jax.cli.output import PLACE, ROW, TEMPLATE
from paradec_jax.disk.folders import ASSETS, MARKER, StoreError, staged
from paradec_jax.io import hold
from paradec_jax.objectives import OBJECTIVES
from paradec_jax.objectives.folder import claim, name_of
from paradec_jax.store import digest_of
from paradec_jax.train.hooks import truncate

START = str(ASSETS / "tiny-jacobi")
PARTS = {name: "round-0" if name == "jacobi" else name for name in OBJECTIVES}
# Where each command writes a folder, and its words; what it reads is not there, or must not be
# read.
FOLDERS = [
    *[(f"train {name} --out . --model {START} --data none", "model") for name in OBJECTIVES],
    *[(f"train {name} --out . --model {START} --data none", part) for name, part in PARTS.items()],
    (f"train sft --out . --model {START} --data none --lora 2", "adapter"),
    (f"train sft --out run --model {START} --data none", "run/model"),
    (f"train sdtt --out . --model {START} --data none", "round-1"),
    ("train sft --out . --model model --data none", "model"),
    ("import none new --overwrite", "new"),
    ("export none new --overwrite", "new"),
]


def hugging_face(place: Path):
    place.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "optimizer.pt", "notes.txt"):
        (place / name).write_text("{}")


def link(place: Path):
    hugging_face(place.absolute().with_name("victim"))
    place.symlink_to("victim")


def file(place: Path):
    place.parent.mkdir(exist_ok=True)
    place.write_text("mine")


def a_file_more(place: Path):
    with staged(place) as folder:
        (folder / "config.json").write_text("{}")
    (place / "optimizer.pt").write_text("mine")


def other_bytes(place: Path):
    a_file_more(place)
    (place / "optimizer.pt").unlink()
    (place / "config.json").write_text("mine")


def a_lying_marker(place: Path):
    hugging_face(place)
    (place / MARKER).write_text('{"files": 5, "config.json": 5}')


def a_link_inside(place: Path):
    a_file_more(place)
    (place / "config.json").unlink()
    (place / "config.json").symlink_to("optimizer.pt")


def without_marker(place: Path):
    shutil.copytree(START, place)


def everything() -> dict[str, object]:
    """What is below the working folder: the bytes of files, where links lead."""
    paths = sorted(Path().rglob("*"))
    return {
        str(p): p.readlink() if p.is_symlink() else p.is_file() and p.read_bytes() for p in paths
    }


def refused(words: str, capsys) -> str:
    """The one sentence in which a command is refused, which leaves everything as it was."""
    before = everything()
    assert main(words.split()) == 1
    out, err = capsys.readouterr()
    assert (
        everything() == before and not out and err.startswith("paradec: ") and err.count("\n") == 1
    )
    return err


def load(*_, **__):
    raise ValueError("a model is read")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "load", load)


KINDS = [
    hugging_face,
    link,
    file,
    a_file_more,
    other_bytes,
    a_lying_marker,
    a_link_inside,
    without_marker,
]


@pytest.mark.parametrize("foreign", KINDS)
@pytest.mark.parametrize(("words", "place"), FOLDERS)
def test_anothers_folder(words, place, foreign, capsys):
    if foreign is link and "/" in place:
        place = "run"
    foreign(Path(place))
    assert f"{place} exists and " in refused(words, capsys)


PAGE = TEMPLATE.read_text("utf-8").replace(PLACE, "{}")
ROWS = json.dumps([dict.fromkeys(ROW)])
TEXT = json.dumps({"text": "a"}) + "\n"
FILES = [
    (f"train sft --out . --model {START} --data none", "recipe.json", None),
    (f"train sft --out . --model {START} --data none", "metrics.jsonl", None),
    (f"train sft --out . --model {START} --data none", ".holder", None),
    ("generate a --model none --html page", "page", PAGE),
    ("compare none --json rows.json", "rows.json", ROWS),
]


@pytest.mark.parametrize(
    ("words", "place", "own"), FILES, ids=["recipe", "metrics", "holder", "html", "json"]
)
@pytest.mark.parametrize("which", range(9))
def test_anothers_file(words, place, own, which, capsys):
    text = ["", "[]", "{}", "<html>", '{"a": 1}\n', '[{"model": "a"}]', PAGE, ROWS, TEXT][which]
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).write_text(text, encoding="utf-8")
    sentence = refused(words, capsys)
    # an empty one holds nothing
    kept = text == own or (not text and place == ".holder")
    assert ("a model is read" in sentence) == kept and (kept or place in sentence)
    Path(place).rename("victim")
    Path(place).symlink_to(Path("victim").absolute())
    assert place in refused(words, capsys)
    Path(place).unlink()
    Path(place).mkdir()
    assert place in refused(words, capsys)


OPTIONS = {"objective": "sft", "model": "m", "data": "one", "weights": {"m": "1"}}


def test_a_run_is_claimed_once():
    """Also before any of its parts has begun; what it may write to carries its mark."""
    run = Path("run")
    (run / "data").mkdir(parents=True)
    mark, before = claim(run, OPTIONS), (run / "recipe.json").read_bytes()
    for change, allow in ({"data": "two"}, ()), ({"weights": {"m": "2"}}, ("data",)):
        with pytest.raises(
            ValueError, match=r"begun with other (--data|weights of m): choose another folder"
        ):
            claim(run, OPTIONS | change, allow)
    assert claim(run, OPTIONS | {"weights": {"m": "1", "base": "3"}}) == mark
    assert (run / "recipe.json").read_bytes() == before
    for place in (run / "model", run / "adapter", run / "round-0" / "model"):
        with staged(place, run=mark):
            pass
        assert claim(run, OPTIONS) == mark
        with staged(place, overwrite=True):
            pass
        with pytest.raises(StoreError, match="is not of this run"):
            claim(run, OPTIONS)
        shutil.rmtree(place)
    assert claim(Path("other"), OPTIONS) != mark


def test_equal_models_have_equal_digests():
    shutil.copytree(START, "copy")
    Path("copy", MARKER).write_text("{}")
    assert digest_of("copy") == digest_of(START)


def test_no_two_models_have_one_default_folder():
    """Nor has one model two, whatever path leads to it."""
    runs = ("M", "runs/sft-M/model", "runs/jacobi-M/model")
    others = (
        "model",
        "a/M",
        "b/M",
        "a/model",
        "M/model",
        "sft-M",
        "runs/M",
        "runs/M/model",
        "org/M",
        "..",
        ".",
    )
    others += (
        "runs/jacobi-M/round-0/model",
        "runs/jacobi-M/round-1/model",
        "hub/snapshots/0a",
        "M.gguf",
    )
    assert [*map(name_of, runs)] == ["M", "sft-M", "jacobi-M"]
    names = [*map(name_of, runs + others)]
    assert len({*names}) == len(names) and not any("/" in name for name in names)
    for source in runs + others:
        assert name_of(str(Path(source).absolute())) == name_of(source) == name_of(f"{source}/")


def held(folder: Path):
    with hold(folder):
        pass


@pytest.mark.parametrize("write", [held, lambda folder: truncate(folder / "metrics.jsonl", 1)])
def test_no_link_is_followed(write):
    for name in (".holder", "metrics.jsonl"):
        Path(name).symlink_to("victim")
    with pytest.raises(OSError, match="link"):
        write(Path())
    assert not Path("victim").exists()
