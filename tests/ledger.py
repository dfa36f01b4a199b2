"""What the decoders of a checkout write, as one JSON, so that two checkouts can be compared after
code has moved.

    python tests/ledger.py write [--root CHECKOUT] [--parts stubs models] OUT.json
    python tests/ledger.py compare OLD.json NEW.json

The script reads any checkout: the table of decoders from its tests, all else from its package. On
stubs the two must be equal to the bit; on the bundled models tokens may differ where the two best
scores are closer than 1e-4, and such differences are listed.

| part | what |
|---|---|
| stubs | digest of tokens, lengths, reasons and counts of each row of the table, at temperatures 0 and 1 |
| models | 64 tokens of each decoder on a bundled model, with the smallest gap between the two best scores |
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

NEAR = 1e-4
PARTS = ("stubs", "models")
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
    ),
    "tiny-mdlm": ("pd.Masked()",),
    "tiny-mdlm-distilled": ("pd.Masked()",),
}


def digest(value) -> str:
    """A short digest of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def of_stubs() -> dict[str, str]:
    """Digests of what every row of the table writes on its stubs, at both temperatures."""
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
            decoded = decode.run(
                row.decoder(), row.params, request, row.values(temperature=temperature)
            )
            fields = {
                "tokens": decoded.tokens,
                "lengths": decoded.lengths,
                "reasons": decoded.reasons,
                **decoded.counts,
            }
            found[f"{name} {temperature}"] = digest(
                {k: np.asarray(v).tolist() for k, v in fields.items()}
            )
    return found


def of_models() -> dict[str, Any]:
    """What bundled models write, and how near the two best scores of any token written came to each
    other.
    """
    import numpy as np

    import paradec_jax as pd

    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        model = pd.load(name)
        for text in settings:
            decoder = eval(text, {"pd": pd})
            prompts = [""] * len(PROBLEMS) if "Masked" in text else list(PROBLEMS)
            with watched() as gaps:
                out = pd.generate(model, prompts, decoder, max_new_tokens=64, seed=0)
            tokens = [list(map(int, row)) for row in out.tokens]
            found[f"{name} {text}"] = {
                "tokens": tokens,
                "calls": np.asarray(out.network_calls).tolist(),
                "gap": min(gaps, default=None),
            }
    return found


@contextlib.contextmanager
def watched() -> Iterator[list[float]]:
    """The smallest gaps between the two best scores of every call inside that makes logits."""
    import jax
    import jax.numpy as jnp

    from paradec_jax import models

    gaps: list[float] = []

    def noted(logits: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(network, params, hidden):
            scores = logits(network, params, hidden)
            best = jax.lax.top_k(scores.astype(jnp.float32), 2)[0]
            jax.debug.callback(
                lambda gap: gaps.append(float(gap)), jnp.min(best[..., 0] - best[..., 1])
            )
            return scores

        return wrapper

    jax.clear_caches()
    kinds = [kind for name, kind in vars(models).items() if name.endswith("Network")]
    with contextlib.ExitStack() as patches:
        for patch in [mock.patch.object(kind, "logits", noted(kind.logits)) for kind in kinds]:
            patches.enter_context(patch)
        yield gaps
        jax.effects_barrier()
    jax.clear_caches()


# The two commands


def write(root: Path, parts: list[str], out: Path):
    """Writes the parts; those of an earlier call in the same file stay."""
    ledger = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    os.chdir(root)
    sys.path[:0] = [str(root), str(root / "tests"), str(root / "tests" / "laws")]
    for part in parts:
        print(part, flush=True)
        ledger[part] = globals()[f"of_{part}"]()
        out.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Prints what differs; 1 where stubs do, or models beyond a near tie."""
    wrong = 0
    for name, was in old["stubs"].items():
        now = new["stubs"].get(name)
        if now != was:
            print(f"stubs: {name}: {was} {'is missing' if now is None else f'became {now}'}")
            wrong += now is not None
    for name, was in old.get("models", {}).items():
        now = new["models"].get(name)
        if now is None or now["tokens"] != was["tokens"] or now["calls"] != was["calls"]:
            gap = None if now is None else min(was["gap"], now["gap"])
            print(
                f"models: {name}: {'missing' if now is None else f'other tokens or calls, gap {gap:.1e}'}"
            )
            wrong += gap is not None and gap >= NEAR
    return int(wrong > 0)


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
    return compare(
        *(json.loads(path.read_text(encoding="utf-8")) for path in (given.old, given.new))
    )


if __name__ == "__main__":
    raise SystemExit(main())
