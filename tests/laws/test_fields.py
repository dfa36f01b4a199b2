"""Nothing is accepted and ignored: each field of configs, knobs and options is read by some program
(law 12).
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE = ("decoders", "replicas")  # folders of experiments with decoders
DECODERS = [
    *(ROOT / "paradec_jax" / "decode").rglob("*.py"),
    *(path for folder in OUTSIDE for path in (ROOT / "experiments" / folder).glob("*.py")),
]
FILES = sorted({*(ROOT / "paradec_jax").rglob("*.py"), *DECODERS})
KINDS = ("dataclass", "pytree", "choices", "record")  # of `paradec_jax.records` the last three
CHECKS = ("__post_init__", "check", "to_dict")  # what they read of their own class is no use of it


def dataclasses_in(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            any(kind in ast.unparse(d) for kind in KINDS) for d in node.decorator_list
        ):
            yield node


def fields_of(node: ast.ClassDef) -> list[str]:
    """Names of the fields, but for class variables and the mark of keyword-only ones."""
    return [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and item.target.id != "_"
        and "ClassVar" not in ast.unparse(item.annotation)
    ]


def reads(tree: ast.AST, owner: str | None = None) -> Iterator[tuple[str, str | None, str | None]]:
    """Every attribute that is read: its name, the class and the method that read it."""

    def visit(node: ast.AST, owner: str | None, method: str | None) -> Iterator:
        for child in ast.iter_child_nodes(node):
            inner, inside = owner, method
            if isinstance(child, ast.ClassDef):
                inner, inside = child.name, None
            elif isinstance(child, ast.FunctionDef) and method is None:
                inside = child.name
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
                yield child.attr, owner, method
            yield from visit(child, inner, inside)

    return visit(tree, owner, None)


def unread(trees: list[ast.Module]) -> list[str]:
    """Fields that nothing reads but the checks of their own class."""
    read: dict[str, set[tuple[str | None, str | None]]] = {}
    for tree in trees:
        for name, owner, method in reads(tree):
            read.setdefault(name, set()).add((owner, method))
    found = []
    for tree in trees:
        for node in dataclasses_in(tree):
            for field in fields_of(node):
                uses = [(o, m) for o, m in read.get(field, ()) if o != node.name or m not in CHECKS]
                if not uses:
                    found.append(f"{node.name}.{field}")
    return found


def test_every_field_is_read():
    """Of options whatever can be set: configs, knobs, decoders, settings; results are the reader's
    affair.
    """
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    kinds = ("Config", "Knobs", "Options", "Rounds", "Rules", "Setting", "Spec")
    found = [name for name in unread(trees) if is_choice(name.partition(".")[0], kinds)]
    assert found == []


def is_choice(name: str, suffixes: tuple[str, ...]) -> bool:
    """A class whose fields a caller chooses: by its name, or a decoder or a network."""
    return name.endswith((*suffixes, "Network")) or name in decoders()


@functools.cache
def decoders() -> set[str]:
    """Names of all decoders of the package and of `experiments`, by their base."""
    return {
        node.name
        for path in DECODERS
        for node in dataclasses_in(ast.parse(path.read_text(encoding="utf-8")))
        if node.name == "DecoderBase"
        or any(ast.unparse(base).endswith(("DecoderBase", "Decoder")) for base in node.bases)
    }


@pytest.mark.parametrize(
    ("use", "want"),
    [
        ("", ["ThingConfig.depth"]),
        ("def f(config):\n    return config.depth\n", []),
        ("def f(config):\n    config.depth = 1\n", ["ThingConfig.depth"]),
    ],
)
def test_the_scan_sees_what_it_should(use, want):
    source = """
@dataclasses.dataclass(frozen=True)
class ThingConfig:
    depth: int = 1

    def __post_init__(self):
        if self.depth < 1:
            raise ValueError
"""
    assert unread([ast.parse(source + use)]) == want
    assert len(decoders()) > 12
