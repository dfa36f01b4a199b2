"""The budget of each room: a room that is full is made simpler before something is added.

Lines are those of Python files, comments and docstrings included.
"""

import ast
import subprocess
from pathlib import Path

import pytest

import paradec_jax

ROOT = Path(__file__).parents[2]
# Rooms of the package, which hold all of its files, and their lines.
ROOMS = {
    ("config", "nn", "models", "noise", "sharding"): 4_300,
    ("decode",): 8_200,
    ("losses",): 2_200,
    ("train",): 2_600,
    ("data",): 1_800,
    ("evaluate",): 2_800,
    ("store", "disk", "io"): 1_600,
    ("families", "generate", "infill", "chat", "tokenizer", "facts"): 1_450,
    ("cli",): 950,
    ("__init__", "objective", "stop_strings", "timing"): 550,
}
FOLDERS = {"paradec_jax": 26_500, "convert": 2_350, "experiments": 17_500, "tests": 30_000}
NAMES = 1_850  # functions and classes of the package, with methods and inner functions
PUBLIC = 50
WORDS = 20_000  # of Markdown, but for the descriptions of recorded arrays
RESULTS = 120  # files in folders named `results`
BYTES = 52 * 2**20  # of all tracked files


def lines(files: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def tracked() -> list[Path]:
    """Files that git tracks and that are there."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("room", ROOMS, ids=" ".join)
def test_lines_of_a_room(room):
    files = [path for path in python("paradec_jax") if room_of(path) in room]
    count = lines(files)
    assert 0 < count <= ROOMS[room]


def python(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    """The folder or the module of the package that a file is in."""
    return path.relative_to(ROOT / "paradec_jax").with_suffix("").parts[0]


def test_every_file_of_the_package_is_in_a_room():
    assert {room_of(path) for path in python("paradec_jax")} <= {name for room in ROOMS for name in room}


@pytest.mark.parametrize("folder", FOLDERS)
def test_lines_of_a_folder(folder):
    count = lines(python(folder))
    assert 0 < count <= FOLDERS[folder]


def test_functions_and_classes_of_the_package():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in python("paradec_jax")]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    count = sum(isinstance(node, kinds) for tree in trees for node in ast.walk(tree))
    assert 0 < count <= NAMES


def test_public_names():
    count = len(paradec_jax.__all__)
    assert 0 < count <= PUBLIC


def test_words_of_markdown():
    pages = [
        path for path in tracked() if path.suffix == ".md" and not path.is_relative_to(ROOT / "tests/golden")
    ]
    count = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
    assert 0 < count <= WORDS


def test_result_files():
    count = sum("results" in path.parent.parts for path in tracked())
    assert 0 < count <= RESULTS


def test_bytes_of_tracked_files():
    count = sum(path.stat().st_size for path in tracked())
    assert 0 < count <= BYTES
