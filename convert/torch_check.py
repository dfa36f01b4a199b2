"""Records logits of the original PyTorch code, in a process of its own, for `convert check`.

Only this file touches PyTorch and transformers, and only in the child process. Loading a release of a recurrent
model runs the Python code that lies in its folder; causal models are run by transformers itself.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from convert import mdlm, sdar
from convert.engine import ConvertError, read_json
from convert.qwen2 import MODEL_TYPES

RECURRENCES = (1, 2, 4, 8)
BATCH, LENGTH = 2, 12


def record(folder: Path) -> dict[str, np.ndarray]:
    """Recorded arrays of the model in a Hugging Face folder.

    `input_ids` and `logits` of a causal model; `input_ids`, `init_state` and `logits_r<n>` of a recurrent one.

    Args:
      folder: a causal model, or a release with its own model code (`auto_map` in config.json).

    Raises:
      ConvertError: when PyTorch or transformers is not installed, the code is missing, or it fails.
    """
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        raise ConvertError(
            f"--torch needs {' and '.join(absent)}, not installed here; use --logits FILE instead"
        )
    fields = read_json(folder / "config.json")
    if fields.get("model_type") in (*mdlm.MODEL_TYPES, *sdar.MODEL_TYPES):
        raise ConvertError(f"the model code of {folder} runs on a GPU alone; use --logits FILE instead")
    known = fields.get("model_type") in MODEL_TYPES
    if not known and "auto_map" not in fields:
        raise ConvertError(
            f"{folder} holds no model code (config.json has no auto_map); use the release's own folder"
        )
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.npz"
        command = [sys.executable, "-m", "convert.torch_check", str(folder.resolve()), str(out), str(known)]
        child = subprocess.run(
            command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True, check=False
        )
        if child.returncode or not out.is_file():
            reason = (child.stderr.strip() or "no message").splitlines()[-1]
            raise ConvertError(f"the original model code of {folder} failed: {reason}")
        with np.load(out, allow_pickle=False) as arrays:
            return dict(arrays)


def _child(folder: str, out: str, known: str) -> None:
    record_of = _causal if known == "True" else _recurrent
    np.savez(out, **record_of(folder, np.random.default_rng(0)))  # type: ignore[arg-type]


def _causal(folder: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    tokens = rng.integers(0, model.config.vocab_size, (BATCH, LENGTH))
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.float().numpy()
    return {"input_ids": tokens, "logits": logits}


def _recurrent(folder: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).float().eval()
    vocabulary = min(model.config.vocab_size, 65_504)  # no special tokens of the release
    tokens = rng.integers(0, vocabulary, (BATCH, LENGTH))
    state = rng.normal(size=(BATCH, LENGTH, model.config.n_embd)).astype(np.float32)
    arrays: dict[str, np.ndarray] = {"input_ids": tokens, "init_state": state}
    with torch.no_grad():
        for r in RECURRENCES:
            output = model(torch.from_numpy(tokens), input_states=torch.from_numpy(state), num_steps=r)
            arrays[f"logits_r{r}"] = output.logits.float().numpy()
    return arrays


if __name__ == "__main__":
    _child(*sys.argv[1:])
