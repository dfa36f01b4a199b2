"""Who may import whom: the dependency directions of the design, read from the source, and what no
file uses.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "paradec_jax"

# What a part may import of the package besides itself; a dotted name admits that module alone.
# Parts of `decode` are its storeys: `rules` stands on the ground, `machine` on the rules, the
# families beside each other on both, those of canvases on `canvas` as well.
BELOW = {"config", "noise", "nn.cache", "nn.masks", "nn.precision"}
BELOW |= {"sharding.mesh", "sharding.processes", "sharding.rules"}
RULES = {"decode.rules", *BELOW}
FAMILY = {"decode.machine", *RULES}
ON_CANVAS = {"decode.canvas", *FAMILY}
ALLOWED = {
    "config": set(),
    "convert": set(),  # says where the converters of a checkout lie
    "facts": set(),
    "io": set(),
    "objective": set(),
    "records": set(),
    "text": {"config", "io"},
    "disk": {"io"},
    "sharding": set(),
    "nn": {"config", "sharding.rules"},
    "noise": {"config"},
    "models": {"config", "nn", "decode.machine.network", "sharding.axes", "sharding.rules"},
    "decode.rules": BELOW,
    "decode.machine": RULES,
    "decode.autoregressive": FAMILY,
    "decode.recurrent": FAMILY,
    "decode.causal": FAMILY,
    "decode.canvas": FAMILY,
    "decode.masked": ON_CANVAS,
    "decode.block": ON_CANVAS,
    "losses": {"config", "decode", "noise", "nn.copies", "nn.masks", "nn.precision", "objective"},
    "data": {"config", "decode", "disk", "io", "noise", "text"},
    "evaluate": {
        "config",
        "data",
        "decode",
        "facts",
        "families",
        "generate",
        "io",
        "noise",
        "store",
        "text",
    },
    "train": {"facts", "io", "objective", "sharding"},
}
# these may import everything of the package
TOP = {
    "__init__",
    "cli",
    "families",
    "generate",
    "infill",
    "objectives",
    "store",
}
MAY_USE_FLAX = {"disk", "models", "nn", "sharding", *TOP}
# The one file that reads pickles, with stand-ins for every name in them.
READS_PICKLES = ROOT / "convert" / "torch_files.py"
KNOW_CONVERTERS = [
    ROOT / PACKAGE / name for name in ("store/folder.py", "cli/__init__.py", "objectives/run.py")
]
NEVER_CALLED = ["eval", "exec", "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler"]
FORBIDDEN = ("flax.nnx", "flax.training", "pickle", "cloudpickle", "dill", "joblib")
FILES = sorted(
    path for part in (PACKAGE, "convert", "experiments") for path in (ROOT / part).rglob("*.py")
)


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = path.relative_to(ROOT).with_suffix("").parts
            package = parts[: -node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to; of `decode` its storey."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:2]) if parts[0] == "decode" else parts[0]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in FILES if p.is_relative_to(ROOT / PACKAGE)], ids=ids)
def test_direction(path):
    part = part_of(path)
    gate = part == "decode.__init__"  # hands out what the storeys have
    assert gate or part in ALLOWED or part in TOP, f"{part} has no place in the table of directions"
    for name in imports(path):
        assert not within(name, "experiments"), name
        assert not within(name, f"{PACKAGE}.convert") or path in KNOW_CONVERTERS, name
        if not within(name, PACKAGE):
            continue
        inner = name.removeprefix(f"{PACKAGE}.")
        if part in TOP or (gate and within(inner, "decode")):
            continue
        assert any(within(inner, allowed) for allowed in {part, "records", *ALLOWED[part]}), (
            f"{part} imports {name}"
        )


# What a folder outside of the package may import of `experiments` and of the package; None for all
# of it.
OUTSIDE: dict[str, tuple[set[str], set[str] | None]] = {
    "convert": (
        set(),
        {
            "config",
            "convert",
            "disk",
            "io",
            "models",
            "nn.adapters",
            "store.lora",
            "store.model",
            "text",
        },
    ),
    "experiments/replicas": (
        {"decoders", "replicas"},
        {"config", "decode", "losses", "nn", "noise"},
    ),
    "experiments/decoders": ({"decoders"}, None),
    "experiments/common": ({"common", "tasks"}, None),
}


@pytest.mark.parametrize(
    ("folder", "path"),
    [(folder, path) for folder in OUTSIDE for path in FILES if path.is_relative_to(ROOT / folder)],
    ids=lambda value: ids(value) if isinstance(value, Path) else None,
)
def test_what_stands_outside_knows_what_it_may(folder, path):
    studies, package = OUTSIDE[folder]
    for name in imports(path):
        if within(name, "experiments"):
            assert any(within(name, f"experiments.{study}") for study in studies), name
        if within(name, PACKAGE) and package is not None and path.stem != "__main__":
            commands = path == ROOT / "convert" / "cli.py" and within(name, f"{PACKAGE}.store")
            assert commands or any(within(name, f"{PACKAGE}.{part}") for part in package), name


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_nothing_forbidden(path):
    names = list(imports(path))
    forbidden = [module for module in FORBIDDEN if module != "pickle" or path != READS_PICKLES]
    for name in names:
        assert not any(within(name, module) for module in forbidden), name
        assert name != "__future__.annotations", "annotations are read at run time"
        own = path.parent == ROOT / "convert" and path.stem != "__main__"
        assert own or not within(name, "convert"), (
            "it is paradec_jax.convert: two copies would not know each other"
        )
    if path.is_relative_to(ROOT / PACKAGE):
        assert not any(within(name, "torch") or within(name, "transformers") for name in names)
        if part_of(path).partition(".")[0] not in MAY_USE_FLAX:
            assert not any(within(name, "flax") for name in names)
    for name, call in calls(path):
        assert name not in NEVER_CALLED, name
        if name in ("np.load", "numpy.load", "jnp.load"):
            assert not any(
                k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in call.keywords
            )
