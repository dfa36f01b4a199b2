"""Records logits of the original PyTorch code, in a process of its own, for `paradec check`.

Only this file touches PyTorch and transformers, and only in the child process. Loading a release of
a recurrent model runs the Python code that lies in its folder; causal models are run by
transformers itself.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from paradec_jax.disk.folders import ASSETS

from . import full, mdlm, sdar
from .engine import ConvertError, read_json
from .qwen2 import MODEL_TYPES

RECURRENCES = (1, 2, 4, 8)
BATCH, LENGTH = 2, 12


def record(folder: Path) -> dict[str, np.ndarray]:
    """Recorded arrays of the model in a Hugging Face folder.

    `input_ids` and `logits` of a causal model; `input_ids`, `init_state` and `logits_r<n>` of a
    recurrent one.

    Args:
      folder: a causal model, or a release with its own model code (`auto_map` in config.json).

    Raises:
      ConvertError: when PyTorch or transformers is not installed, the code is missing, or it fails.
    """
    fields = read_json(folder / "config.json")
    if fields.get("model_type") in (*mdlm.MODEL_TYPES, *sdar.MODEL_TYPES, *full.MODEL_TYPES):
        raise ConvertError(f"the model code of {folder} is not run; use --logits FILE instead")
    known = fields.get("model_type") in MODEL_TYPES
    if not known and "auto_map" not in fields:
        raise ConvertError(
            f"{folder} holds no model code (config.json has no auto_map); use the release's own folder"
        )
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.npz"
        module = "paradec_jax.convert.torch_check"
        command = [sys.executable, "-m", module, *map(str, (folder.resolve(), out, known))]
        child = subprocess.run(command, cwd=ASSETS.parents[1], stderr=subprocess.PIPE, text=True)
        if child.returncode or not out.is_file():
            reason = (child.stderr.strip() or "no message").splitlines()[-1]
            raise ConvertError(f"the original model code of {folder} failed: {reason}")
        with np.load(out, allow_pickle=False) as arrays:
            return dict(arrays)


def _child(folder: str, out: str, known: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    own: dict[str, Any] = {"trust_remote_code": True}
    options = {"attn_implementation": "eager"} if known == "True" else own
    model = AutoModelForCausalLM.from_pretrained(folder, **options).float().eval()
    rng = np.random.default_rng(0)
    # no special tokens of the recurrent release
    tokens = rng.integers(0, min(model.config.vocab_size, 65_504), (BATCH, LENGTH))
    arrays: dict[str, np.ndarray] = {"input_ids": tokens}
    of_step: dict[str, dict[str, Any]] = {"logits": {}}
    if known != "True":
        state = rng.normal(size=(BATCH, LENGTH, model.config.n_embd)).astype(np.float32)
        arrays["init_state"] = state
        of_step = {
            f"logits_r{r}": {"input_states": torch.from_numpy(state), "num_steps": r}
            for r in RECURRENCES
        }
    with torch.no_grad():
        for name, more in of_step.items():
            arrays[name] = model(torch.from_numpy(tokens), **more).logits.float().numpy()
    np.savez(out, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    _child(*sys.argv[1:])
