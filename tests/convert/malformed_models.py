"""Whole models in every form that commands read, to be spoilt: see `malformed_cases`."""

import dataclasses
import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file
from torch_writer import Harmful, tensor, write_checkpoint

from convert.cli import main
from paradec_jax import store
from paradec_jax.config import TokenSpec
from paradec_jax.families import PRESETS

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SPECS = {
    "recurrent": ("test-recurrent", TokenSpec(bos=3, stop=(1, 2), pad=4)),
    "causal": ("test-causal", TokenSpec(stop=(1, 2), pad=4)),
    "blocks": ("test-sdar", TokenSpec(stop=(1,), pad=4, mask=31, alignment="own")),
    "denoiser": ("test-mdlm", TokenSpec(bos=3, pad=4, mask=31, alignment="own")),
}


def tokenizer_fields() -> dict[str, Any]:
    """A tokenizer.json whose words are the letters and a few more, 32 in all."""
    words = ["?", *"abcdefghijklmnopqrstuvwxyz", "one", "two", "three", "four", "five"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": "?",
        },
    }


def write_models(root: Path) -> None:
    """Writes model folders, what is exported of them, a checkpoint of Lightning, and a recording.

    ::

        model, recurrent, blocks   folders of models, with a tokenizer; `model` is causal, with a template
        qwen2, huginn, sdar        exports of them
        ckpt/last.ckpt             weights of a denoiser, its config.json beside them
        recording/logits.npz       what `model` is compared with
    """
    (root / "tokenizer.json").write_text(json.dumps(tokenizer_fields()))
    built = {name: _model(name, root) for name in SPECS}
    for name, folder in (("causal", "model"), ("recurrent", "recurrent"), ("blocks", "blocks")):
        store.save(root / folder, built[name])
    store.save(root / "denoiser", built["denoiser"])
    exports = {"model": "qwen2", "recurrent": "huginn", "blocks": "sdar", "denoiser": "mdlm"}
    for source, target in exports.items():
        assert main(["export", str(root / source), str(root / target)]) == 0
    (root / "ckpt").mkdir()
    weights = load_file(root / "mdlm" / "model.safetensors")
    state = OrderedDict((name, tensor(array)) for name, array in weights.items())
    write_checkpoint(root / "ckpt" / "last.ckpt", {"state_dict": state, "callbacks": Harmful()})
    shutil.copy(root / "mdlm" / "config.json", root / "ckpt" / "config.json")
    shutil.copy(root / "mdlm" / "model.safetensors", root / "ckpt" / "plain.safetensors")
    (root / "recording").mkdir()
    np.savez(root / "recording" / "logits.npz", **recording())


def recording(**changes: Any) -> dict[str, np.ndarray]:
    """Arrays of a recording, of the right shapes."""
    arrays = {"input_ids": np.array([[1, 2, 3]]), "logits": np.zeros((1, 3, 32), np.float32)}
    return {name: np.asarray(array) for name, array in (arrays | changes).items() if array is not None}


def _model(name: str, root: Path) -> store.Model:
    preset, spec = SPECS[name]
    config = PRESETS[preset]
    rng = np.random.default_rng(0)
    shapes = store.expected_shapes(config)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    tokenizer = store.Tokenizer.from_file(root / "tokenizer.json")
    model = store.Model(config, params, spec, tokenizer)
    return dataclasses.replace(model, chat_template=TEMPLATE) if name == "causal" else model
