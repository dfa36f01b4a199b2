"""What a checkout can do, as one JSON, so that two checkouts can be compared: nothing may get lost when code moves.

    python tests/ledger.py write [--root CHECKOUT] [--parts names stubs ...] OUT.json
    python tests/ledger.py compare OLD.json NEW.json

The script reads any checkout: the tables of laws from its tests, everything else from its package. On stubs the two
must be equal to the bit; on the bundled models tokens may differ where the two best scores are closer than 1e-4, and
such differences are listed.

| part | what |
|---|---|
| names | public names; lines, functions and classes of each room |
| laws | each row of the table of decoders with the laws it obeys; each objective with the tests that name it |
| golden | each recorded file: its arrays, and the tests that open it (runs the replays) |
| converters | each table: the names of its tensors |
| commands | each command with its options |
| stubs | digest of tokens, lengths, reasons and counts of each row of the table, at temperatures 0 and 1 |
| models | 64 tokens of each decoder on a bundled model, with the smallest gap between the two best scores |
"""

import argparse
import ast
import collections
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEAR = 1e-4
ROOMS = ("paradec_jax", "convert", "experiments", "tests", "notebooks")
PARTS = ("names", "laws", "golden", "converters", "commands", "stubs", "models")
PROMPTS = ((3, 5, 2), (6,), (4, 4, 1, 2, 3))
PROBLEMS = (
    "Question: Ana has 34 apples. Ben has 27 more apples than Ana. How many apples does Ben have?\nAnswer:\n",
    "Question: Tom has 5 pears. He buys 4 more. He gives half of them to Ida. How many has Ida?\nAnswer:\n",
    "Question: Mia has 12 coins. Leo has 3 times as many. How many coins do they have together?\nAnswer:\n",
)
# Model: settings, as they are written in Python with the package as `pd`.
SETTINGS: dict[str, tuple[str, ...]] = {
    "tiny-recurrent-distilled": (
        "pd.Static(recurrence=2)",
        "pd.Adaptive()",
        "pd.SelfSpeculative(recurrence=4, draft_recurrence=1, lookahead=3)",
        "pd.Wavefront(inner_recurrence=1, window=4)",
        "pd.Wavefront(inner_recurrence=1, window=8, headway=8, warm_start=False, prefill_recurrence=1)",
        "pd.Jacobi(block=8, recurrence=1)",
    ),
    "tiny-jacobi": (
        "pd.AutoRegressive()",
        "pd.PromptLookup()",
        "pd.Lookahead()",
        "pd.Jacobi(block=16)",
        "pd.Jacobi(block=16, pool=4)",
        "pd.Jacobi(block=8, running=True)",
        "pd.Jacobi(block=8, blocks=2, pool=2)",
    ),
    "tiny-causal": ("pd.AutoRegressive()",),
    "tiny-sdar": (
        "pd.BlockDenoising(rule='static')",
        "pd.BlockDenoising(rule='threshold')",
        "pd.BlockDenoising(rule='entropy')",
        "pd.BlockDenoising(rule='factor')",
        "pd.Residual()",
        "pd.ResidualSpeculative()",
        "pd.ResidualVeto()",
    ),
    "tiny-mdlm": ("pd.Masked()",),
    "tiny-mdlm-distilled": ("pd.Masked()",),
}


# Reading without running


def of_names(root: Path) -> dict[str, Any]:
    """Public names; lines, files, functions and classes of each room, two folders deep inside the package."""
    import paradec_jax

    rooms: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            kinds = collections.Counter(type(node) for node in ast.walk(ast.parse(text)))
            found = {"files": 1, "lines": text.count("\n"), "classes": kinds[ast.ClassDef]}
            found["functions"] = kinds[ast.FunctionDef] + kinds[ast.AsyncFunctionDef]
            inner = path.relative_to(root).parts
            for name in {room, "/".join(inner[:2]), "/".join(inner[:3])} if room == "paradec_jax" else {room}:
                rooms[name].update(found)
    words = sum(
        len(path.read_text(encoding="utf-8").split())
        for path in tracked(root)
        if path.suffix == ".md" and not path.is_relative_to(root / "tests" / "golden")
    )
    return {
        "public": sorted(paradec_jax.__all__),
        "rooms": {name: dict(found) for name, found in sorted(rooms.items())},
        "words of Markdown": words,
        "bytes tracked": sum(path.stat().st_size for path in tracked(root)),
    }


def tracked(root: Path) -> list[Path]:
    """Files that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    return [root / name for name in listed.stdout.split("\0") if name and (root / name).is_file()]


def ran(root: Path, *words: str, **environment: str) -> str:
    """What a module of a checkout prints."""
    command, environment = [sys.executable, "-m", *words], os.environ | environment
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return done.stdout


PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")


def collected(root: Path, *folders: str) -> list[str]:
    """Ids of all tests in some folders, slow ones included."""
    lines = ran(root, *PYTEST, "--collect-only", *folders).splitlines()
    return [line for line in lines if "::" in line]


def of_laws(root: Path) -> dict[str, Any]:
    """Rows with the laws that name them in their ids; objectives with the tests that mention them; all tests."""
    import decoders

    from paradec_jax import losses

    ids = collected(root, "tests")
    laws: dict[str, list[str]] = {name: [] for name in decoders.ROWS}
    for test in ids:
        if (match := re.fullmatch(r"tests/laws/\w+\.py::(\w+)\[(.+)\]", test)) and match[2] in laws:
            laws[match[2]].append(match[1])
    tests = {path: path.read_text(encoding="utf-8") for path in sorted((root / "tests").rglob("*.py"))}
    named = [name for name in losses.__all__ if name.endswith("_loss")]
    objectives = {
        name: [str(path.relative_to(root)) for path, text in tests.items() if re.search(rf"\b{name}\b", text)]
        for name in named
    }
    by_file = collections.Counter(test.partition("::")[0] for test in ids)
    return {"decoders": laws, "objectives": objectives, "tests": dict(sorted(by_file.items()))}


def of_golden(root: Path) -> dict[str, Any]:
    """Each file of `tests/golden` with its arrays and the tests that opened it; runs the replays once."""
    import numpy as np

    seen = root / ".cache" / "ledger-opened.txt"
    seen.parent.mkdir(exist_ok=True)
    seen.unlink(missing_ok=True)
    path = os.pathsep.join([str(root), str(Path(__file__).parent)])
    ran(root, *PYTEST, "-p", "ledger", "tests/replays", PYTHONPATH=path, LEDGER_SEEN=str(seen))
    opened: dict[str, set[str]] = collections.defaultdict(set)
    for line in seen.read_text(encoding="utf-8").splitlines():
        test, _, path = line.partition("\t")
        opened[path].add(test)
    found = {}
    for path in sorted((root / "tests" / "golden").rglob("*")):
        if path.is_file() and path.name != "README.md":
            name = str(path.relative_to(root))
            arrays = sorted(np.load(path).files) if path.suffix == ".npz" else []
            found[name] = {"arrays": arrays, "opened by": sorted(opened.get(str(path.resolve()), ()))}
    return found


def pytest_configure() -> None:
    """As a plugin of pytest: notes which test file first opens which recorded file."""
    log = os.environ.get("LEDGER_SEEN")
    if log is None:
        return

    def note(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike) and "golden" in str(arguments[0]):
            test = os.environ.get("PYTEST_CURRENT_TEST", "collection").partition("::")[0]
            with os.fdopen(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a") as file:
                file.write(f"{test}\t{Path(arguments[0]).resolve()}\n")

    sys.addaudithook(note)


def of_converters(root: Path) -> dict[str, Any]:
    """The tensors that each converter's table names, for each preset of its family that it takes."""
    del root
    import importlib

    from paradec_jax.families import PRESETS

    found: dict[str, Any] = {}
    for module in ("huginn", "qwen2", "mdlm", "mrp", "sdar"):
        try:
            table = importlib.import_module(f"paradec_jax.convert.{module}").table
        except (ImportError, AttributeError):
            continue
        for name, config in PRESETS.items():
            if name.startswith("test-"):
                try:
                    axes, rows = table(config)
                except (AttributeError, TypeError, ValueError):
                    continue  # of another family
                found[f"{module} {name}"] = {"axes": dict(axes), "rows": sorted(map(repr, rows))}
    return found


def of_commands(root: Path) -> dict[str, Any]:
    """Commands and their options, from what they say of themselves."""

    def helped(*words: str) -> str:
        return ran(root, *words, "--help", COLUMNS="200", TERM="dumb")

    found: dict[str, Any] = {}
    for program in ("paradec_jax.cli",):
        first = re.search(r"\{([\w,-]+)\}", helped(program))
        for command in first[1].split(",") if first else []:
            text = helped(program, command)
            if inner := re.search(r"\{([\w,-]+)\}", text):
                for word in inner[1].split(","):
                    found[f"{program} {command} {word}"] = options(helped(program, command, word))
            found[f"{program} {command}"] = options(text)
    return found


def options(text: str) -> list[str]:
    """Names of options in a help text."""
    return sorted(set(re.findall(r"--[a-z][\w-]*", text)))


# Running


def digest(value: Any) -> str:
    """A short digest of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def of_stubs(root: Path) -> dict[str, str]:
    """Digests of what every row of the table writes on its stubs, at both temperatures."""
    del root
    import numpy as np
    from decoder_rows import BUDGET
    from decoders import ROWS

    from paradec_jax import decode

    found = {}
    for name, row in ROWS.items():
        request = decode.make_request(
            [list(prompt) for prompt in PROMPTS], max_new_tokens=(BUDGET, 2, 5), stop=(0,), seed=5
        )
        for temperature in (0.0, 1.0):
            decoded = decode.run(row.decoder(), row.params, request, row.values(temperature=temperature))
            fields = {
                "tokens": decoded.tokens,
                "lengths": decoded.lengths,
                "reasons": decoded.reasons,
                **decoded.counts,
            }
            found[f"{name} {temperature}"] = digest({k: np.asarray(v).tolist() for k, v in fields.items()})
    return found


def of_models(root: Path) -> dict[str, Any]:
    """What bundled models write, and how near the two best scores of any token written came to each other."""
    del root
    import jax
    import numpy as np

    import paradec_jax as pd

    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        model = pd.load(name)
        for text in settings:
            decoder = eval(text, {"pd": pd})
            prompts = [""] * len(PROBLEMS) if "Masked" in text else list(PROBLEMS)
            gaps: list[float] = []
            with watched(gaps):
                out = pd.generate(model, prompts, decoder, max_new_tokens=64, seed=0)
            jax.effects_barrier()
            tokens = [list(map(int, row)) for row in out.tokens]
            found[f"{name} {text}"] = {
                "tokens": tokens,
                "calls": np.asarray(out.network_calls).tolist(),
                "gap": min(gaps, default=None),
            }
    return found


class watched:
    """Notes the smallest gap between the two best scores of every call that makes logits, while it is entered."""

    def __init__(self, gaps: list[float]) -> None:
        self.gaps = gaps

    def __enter__(self) -> None:
        import jax
        import jax.numpy as jnp

        from paradec_jax import models

        def noted(logits: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(network: Any, params: Any, hidden: Any) -> Any:
                scores = logits(network, params, hidden)
                best = jax.lax.top_k(scores.astype(jnp.float32), 2)[0]
                jax.debug.callback(
                    lambda gap: self.gaps.append(float(gap)), jnp.min(best[..., 0] - best[..., 1])
                )
                return scores

            return wrapper

        jax.clear_caches()
        kinds = [kind for name, kind in vars(models).items() if name.endswith("Network")]
        self.before = [(kind, kind.logits) for kind in kinds]
        for kind, logits in self.before:
            kind.logits = noted(logits)

    def __exit__(self, *_: object) -> None:
        import jax

        for kind, logits in self.before:
            kind.logits = logits
        jax.clear_caches()


# The two commands


def write(root: Path, parts: list[str], out: Path) -> None:
    """Writes the parts; those of an earlier call in the same file stay."""
    ledger = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    os.chdir(root)
    sys.path[:0] = [str(root), str(root / "tests"), str(root / "tests" / "laws")]
    for part in parts:
        print(part, flush=True)
        ledger[part] = globals()[f"of_{part}"](root)
        out.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Prints what differs; 1 where stubs do, or models beyond a near tie."""
    wrong = 0
    for name, was in old["stubs"].items():
        now = new["stubs"].get(name)
        if now != was:
            print(f"stubs: {name}: {was} {'is missing' if now is None else f'became {now}'}")
            wrong += now is not None
    for name, was in old["models"].items():
        now = new["models"].get(name)
        if now is None or now["tokens"] != was["tokens"] or now["calls"] != was["calls"]:
            gap = None if now is None else min(was["gap"], now["gap"])
            print(f"models: {name}: {'missing' if now is None else f'other tokens or calls, gap {gap:.1e}'}")
            wrong += gap is not None and gap >= NEAR
    for part in ("names", "laws", "golden", "converters", "commands"):
        for line in differences(old.get(part, {}), new.get(part, {})):
            print(f"{part}: {line}")
    return int(wrong > 0)


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """What differs between two JSON values, a line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in sorted({*old, *new}):
            place = f"{at} {name}".strip()
            if name not in new:
                found.append(f"- {place}")
            elif name not in old:
                found.append(f"+ {place}")
            else:
                found += differences(old[name], new[name], place)
        return found
    if isinstance(old, list) and isinstance(new, list):
        gone, come = ([x for x in a if x not in b] for a, b in ((old, new), (new, old)))
        return [f"- {at} {x}" for x in gone] + [f"+ {at} {x}" for x in come]
    return [] if old == new else [f"{at}: {old} -> {new}"]


def main() -> int:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("out", type=Path)
    writing.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    writing.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.root.resolve(), given.parts, given.out.resolve())
        return 0
    return compare(*(json.loads(path.read_text(encoding="utf-8")) for path in (given.old, given.new)))


if __name__ == "__main__":
    raise SystemExit(main())
