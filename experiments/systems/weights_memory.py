"""Memory of what is done with weights: export, import, loads, and a training that goes on.

`python -m experiments.systems.weights_memory`. Weights are random and lie in a temporary folder, which is removed.
Each thing runs in a process of its own (`weights_memory_child`) and is compared with the same process idle,
everything imported: `above_idle` is the most that ever lay in memory (VmHWM), pages of files included, and
`anonymous_above_idle` the same without those (RssAnon, looked at every 5 ms). A sharded load runs on four simulated
devices, two by `fsdp` and two by `tensor`, so that matrices are cut along both axes; what it keeps are the arrays.
A training that goes on restores parameters, their average and two moments; `states` counts JAX's living arrays.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro

from experiments.common.record import write_record
from paradec_jax.config import CausalConfig

DEVICES = "--xla_force_host_platform_device_count=4"
MAPPED = ", large blocks mapped"
# Otherwise glibc, once a large block was freed, takes blocks of up to 32 MiB from its heaps and keeps what returns.
MAPS = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
KINDS = ("export", "import", "load", "sharded load", "resume", f"resume{MAPPED}")


@dataclasses.dataclass(frozen=True)
class Options:
    """The shape of the weights; by default 1.2 GB.

    Attributes:
      width, feed_forward, vocab_size, layers: of a causal model with an output matrix of its own.
      state_layers: layers of the one that is trained, whose state is four times its parameters.
      state_vocab_size: its vocabulary.
      heads: of attention.
      param_dtype: of the weights.
      folder: where the temporary folder is made; the system's by default.
      out: where the JSON goes, and a CSV of the same name.
    """

    width: int = 1024
    feed_forward: int = 4096
    vocab_size: int = 49_152
    layers: int = 12
    state_layers: int = 6
    state_vocab_size: int = 8192
    heads: int = 16
    param_dtype: str = "float32"
    folder: Path | None = None
    out: Path = Path("experiments/systems/results/weights_memory.json")


def child(kind: str, config: CausalConfig, folder: Path) -> Any:
    """What a process tells that does one thing."""
    flags = os.environ.get("XLA_FLAGS", "")
    told = os.environ | {"JAX_PLATFORMS": "cpu"}
    told["XLA_FLAGS"] = f"{flags} {DEVICES}" if kind == "sharded load" else flags
    for name in MAPS:
        told.pop(name, None)
    if kind.endswith(MAPPED):
        told |= MAPS
    words = [
        "-m",
        "experiments.systems.weights_memory_child",
        kind.removesuffix(MAPPED),
        json.dumps(config.to_dict()),
        str(folder),
    ]
    done = subprocess.run([sys.executable, *words], env=told, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def config_of(options: Options, layers: int, vocab_size: int) -> CausalConfig:
    """The shape."""
    return CausalConfig(
        vocab_size=vocab_size,
        width=options.width,
        layers=layers,
        heads=options.heads,
        kv_heads=options.heads,
        feed_forward=options.feed_forward,
        max_length=128,
        tie_embeddings=False,
        dtype=options.param_dtype,
        param_dtype=options.param_dtype,
    )


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table."""
    config = config_of(options, options.layers, options.vocab_size)
    trained = config_of(options, options.state_layers, options.state_vocab_size)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        child("make", config, folder)
        weights = (folder / "model" / "network.safetensors").stat().st_size / 2**20
        for kind in KINDS:
            if kind == "resume":
                child("train", trained, folder)
            told = child(kind, trained if kind.startswith("resume") else config, folder)
            rows.append({"kind": kind, **told})
            print(
                "  ".join(
                    f"{key} {value if key == 'kind' else f'{value:.2f}'}" for key, value in rows[-1].items()
                )
            )
            sys.stdout.flush()
        same = child("check", config, folder)
    print(f"weights {weights:.0f} MiB; import gives back what was exported: {same}")
    write_record(options.out, options, {"weights": weights, "same": same, "rows": rows}, lines=rows)


if __name__ == "__main__":
    tyro.cli(main)
