"""Command lines of `paradec train` on the tiny models of the fixture `source`, and what their runs
leave.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from paradec_jax.cli import main

ROOT = Path(__file__).parents[2]
STARTS = {
    "sft": "llama",
    "jacobi": "llama",
    "draft": "llama",
    "blocks": "llama",
    "recurrent": "recurrent",
    "head": "sdar",
}
STARTS |= {"masked": "denoiser", "sdtt": "denoiser"}
OPTIONS = {
    "sft": (),
    "jacobi": ("--block", 4, "--new-tokens", 8, "--rows", 4),
    "draft": ("--masks", 2, "--rank", 2, "--new-tokens", 8, "--rows", 4, "--anchors", 4),
    "recurrent": ("--mean", 2, "--first-mean", 1),
    "blocks": ("--blocks", 4, 2, "--look-back", "--alignment", "own"),
    "masked": ("--length", 16),
    "head": ("--depth", 1, "--init", "inherited"),
    "sdtt": ("--length", 16, "--rounds", 2, "--first-steps", 8, "--ema", 0.9),
}


def words(source, folder, *options, updates=6, objective="sft"):
    told = [
        "train",
        objective,
        "--model",
        source / STARTS[objective],
        "--data",
        source / "data.jsonl",
    ]
    told += ["--out", folder, "--updates", updates, "--batch-tokens", 256, "--learning-rate", 1e-2]
    return [str(word) for word in (*told, *OPTIONS[objective], *options)]


def ran(source, folder, *options, **kinds):
    """The last line of the log of a run on the held-out lines, which are those of the data."""
    assert main(words(source, folder, "--held-out", source / "data.jsonl", *options, **kinds)) == 0
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def refused(source, folder, *options, **kinds):
    """Whether a command line is refused, by the command or by its parser."""
    try:
        return main(words(source, folder, *options, **kinds)) != 0
    except SystemExit as ended:
        return ended.code != 0


def weights(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*/*.safetensors")}


def started(source, folder, *options, launcher=(), **kinds):
    path = {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")}
    program = [sys.executable, "-m", "paradec_jax.cli", *words(source, folder, *options, **kinds)]
    return subprocess.Popen([*launcher, *program], cwd=ROOT, env=path | os.environ)
