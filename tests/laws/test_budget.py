"""The budget of each room: a room that is full is made simpler before something is added.

A room is measured in Python tokens without comments, docstrings and line ends, so that wrapping,
naming and explaining cost nothing.
"""

import ast
import io
import subprocess
import tokenize
from pathlib import Path

import pytest

import paradec_jax

ROOT = Path(__file__).parents[2]
# Rooms of the package, which hold all of its files, and their tokens: at most three in a hundred more
# than they hold.
ROOMS = {
    ("config", "nn", "models", "noise", "sharding"): 35_400,
    ("decode",): 62_900,
    ("losses",): 13_800,
    ("train",): 9_900,
    ("data",): 9_900,
    ("objectives",): 13_200,
    ("evaluate",): 11_750,
    ("text",): 5_400,
    ("store", "disk", "io"): 6_200,
    ("families", "generate", "infill", "facts"): 5_050,
    ("cli",): 9_700,
    ("__init__", "convert", "objective", "records"): 705,
}
FOLDERS = {"paradec_jax": 182_000, "convert": 22_000, "experiments": 116_000, "tests": 300_000}
NAMES = 1_710  # functions and classes of the package, with methods and inner functions
PUBLIC = 55
STEP = 40  # lines of a decoder's `step`
ELSEWHERE = {  # names from other files that it reads, those of its private methods included
    "AutoRegressive": 7,
    "Static": 9,
    "Adaptive": 14,
    "SelfSpeculative": 12,
    "Wavefront": 15,
    "SoftWavefront": 16,
    "PromptLookup": 4,
    "Jacobi": 6,
    "Lookahead": 19,
    "Drafted": 17,
    "Masked": 14,
    "SoftMasked": 6,
    "Strided": 4,
    "SemiAutoregressive": 9,
    "Wino": 16,
    "Prophet": 10,
    "Planned": 9,
    "SpeculativeDenoising": 10,
    "BlockDenoising": 4,
    "SoftBlock": 14,
    "Residual": 11,
    "ResidualSpeculative": 17,
    "SelfVerified": 19,
    "MultiBlock": 8,
}
LIBRARIES = {"jax", "jnp", "lax", "np", "dataclasses", "functools"}
WORDS = 21_500  # of Markdown, but for the descriptions of recorded arrays
RESULTS = 110  # files in folders named `results`
BYTES = 52 * 2**20  # of all tracked files


LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def tokens(files: list[Path]) -> int:
    return sum(tokens_of(path.read_text(encoding="utf-8")) for path in files)


def tokens_of(text: str) -> int:
    """Tokens of a program that say something to the interpreter."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [
        node.body[0] for node in ast.walk(ast.parse(text)) if isinstance(node, kinds) and node.body
    ]
    docstrings = {(first.lineno, first.col_offset) for first in bodies if is_text(first)}
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT and token.start not in docstrings for token in found)


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a literal text, as docstrings are."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def tracked() -> list[Path]:
    """Files that git tracks and that are there."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("room", ROOMS, ids=" ".join)
def test_tokens_of_a_room(room):
    files = [path for path in python("paradec_jax") if room_of(path) in room]
    count = tokens(files)
    assert 0 < count <= ROOMS[room]


def python(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    """The folder or the module of the package that a file is in."""
    return path.relative_to(ROOT / "paradec_jax").with_suffix("").parts[0]


def test_every_file_of_the_package_is_in_a_room():
    assert {room_of(path) for path in python("paradec_jax")} <= {
        name for room in ROOMS for name in room
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_tokens_of_a_folder(folder):
    count = tokens(python(folder))
    assert 0 < count <= FOLDERS[folder]


def test_functions_and_classes_of_the_package():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in python("paradec_jax")]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    count = sum(isinstance(node, kinds) for tree in trees for node in ast.walk(tree))
    assert 0 < count <= NAMES


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_step_is_read_in_one_file(name):
    """What a step calls in its own file, private methods and nested functions among them, is read
    as a part of it.
    """
    (path,) = (
        file for file in python("paradec_jax/decode") if f"class {name}(" in file.read_text()
    )
    tree, own = ast.parse(path.read_text()), functions(path)
    others = {
        name for file in python("paradec_jax/decode") if file != path for name in functions(file)
    } - own.keys()
    (step,) = (item for item in own[name].body if getattr(item, "name", "") == "step")
    found, waiting, seen = set(), [step], {"step"}
    while waiting:
        names = named(waiting.pop(), modules_of(tree))
        found |= names & others
        waiting += [own[name] for name in (names & own.keys()) - seen]
        seen |= names
    assert step.end_lineno - step.lineno < STEP
    assert 0 < len(found) <= ELSEWHERE[name], sorted(found)


def functions(path: Path) -> dict[str, ast.AST]:
    """Functions, methods and classes of a file by name."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {
        node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)
    }


def modules_of(tree: ast.Module) -> set[str]:
    """Names that a file imports from the package, modules among them."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        alias.name
        for node in imports
        if node.module.startswith("paradec_jax")
        for alias in node.names
    }


def named(function: ast.AST, modules: set[str]) -> set[str]:
    """Names that a function calls, those of libraries left out, and those that it takes from a
    module.
    """
    found: set[str] = set()
    if isinstance(function, ast.ClassDef):
        return found
    for node in (inner for part in function.body for inner in ast.walk(part)):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name):
            found.add(called.id)
        elif isinstance(called, ast.Attribute) and root(called) not in LIBRARIES:
            found.add(called.attr)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in modules:
            found.add(node.attr)
    return found


def root(node: ast.AST) -> str:
    """The name that a chain of attributes, calls and subscripts begins with."""
    while not isinstance(node, ast.Name):
        inner = getattr(node, "value", None) or getattr(node, "func", None)
        if not isinstance(inner, ast.AST):
            return ""
        node = inner
    return node.id


def test_public_names():
    count = len(paradec_jax.__all__)
    assert 0 < count <= PUBLIC


def test_words_of_markdown():
    pages = [
        path
        for path in tracked()
        if path.suffix == ".md" and not path.is_relative_to(ROOT / "tests/golden")
    ]
    count = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
    assert 0 < count <= WORDS


def test_result_files():
    count = sum("results" in path.parent.parts for path in tracked())
    assert 0 < count <= RESULTS


def test_bytes_of_tracked_files():
    count = sum(path.stat().st_size for path in tracked())
    assert 0 < count <= BYTES
