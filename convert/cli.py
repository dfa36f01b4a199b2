"""The commands of the converters: `paradec import`, `export` and `check`."""

import math
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from flax.traverse_util import flatten_dict
from tyro.conf import Positional, arg

from paradec_jax import store
from paradec_jax.config.bounds import check_numbers
from paradec_jax.disk.folders import CHAT_TEMPLATE, check_replaceable, locate, staged
from paradec_jax.io import regular
from paradec_jax.store.model import Model

from . import check as checking
from . import torch_check
from .checkpoint import BY_FAMILY, opened
from .engine import ConvertError
from .words import write_words

Source = Positional[Annotated[Path, arg(metavar="SRC")]]
Target = Positional[Annotated[Path, arg(metavar="DST")]]


def import_model(
    src: Source,
    dst: Target,
    tokenizer: Path | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    weights: Literal["raw", "ema"] | None = None,
    kind: Literal["bd3lm", "mdlm"] | None = None,
    block: int | None = None,
    mask: int | None = None,
    alignment: Literal["own", "next"] | None = None,
    origin: Literal["start", "padded"] | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
) -> int:
    """Converts a released checkpoint to a model folder, whole or not at all.

    Args:
      src: Hugging Face folder with safetensors, or else pytorch_model.bin; its name on the Hub,
        org/name[@revision]; a .gguf file; or a denoiser's .ckpt of Lightning. No pickle is run.
      dst: model folder to write.
      tokenizer: a tokenizer.json; the one in SRC by default, where there is one.
      dtype: type of the stored parameters; by default as in the file, and float32, which loses
        nothing, where that has float16 or several types.
      weights: of a .ckpt, "raw" for the weights that were trained (the default), "ema" for their
        moving averages.
      kind: how it was trained where config.json does not say it, "bd3lm" block by block or "mdlm"
        with full attention: of types a2d-qwen3 and a2d-qwen2, and of qwen2 where it is no causal
        model but Open-dCoder.
      block: of block diffusion, tokens of a block; by default those of config.json, or else 4
        (SDAR) or 32.
      mask: of block diffusion and full attention, id of the mask; by default that of the folder's
        files, or else, of block diffusion, of the release.
      alignment: of block diffusion and full attention, the token that logits are about: "own" for that of their
        position (as of SDAR), "next" for the one after it (as of Fast-dLLM v2); by default that of
        the model type.
      origin: of block diffusion, where the blocks of a text count from: "start" for position 0 (by
        default), "padded" for the end of the prompt, in both directions, as in the published sampler
        of a2d.
      allow_nonfinite: take weights that are NaN or infinite.
      overwrite: replace a folder at DST that these commands or a training wrote, as they wrote it.
    """
    check_replaceable(dst, overwrite)
    names = {"kind": kind, "block": block, "mask": mask, "alignment": alignment, "origin": origin}
    with opened(
        locate(src), dtype, tokenizer, weights, names, allow_nonfinite=allow_nonfinite
    ) as model:
        store.save(dst, model, overwrite=overwrite)
        return _report("imported", model, dst)


def export_model(
    src: Source, dst: Target, allow_nonfinite: bool = False, overwrite: bool = False
) -> int:
    """Converts a model folder to a Hugging Face folder, whole or not at all.

    Args:
      src: model folder, or the name of a bundled model.
      dst: folder to write.
      allow_nonfinite: take weights that are NaN or infinite.
      overwrite: replace a folder at DST that these commands or a training wrote, as they wrote it.
    """
    check_replaceable(dst, overwrite)
    model = store.opened(src, allow_nonfinite=allow_nonfinite)
    with staged(dst, overwrite=overwrite) as folder:
        BY_FAMILY[model.family].write(folder, model)
        write_words(folder, model)
        if model.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(model.chat_template, encoding="utf-8", newline="")
    return _report("exported", model, dst)


def check_model(
    src: Source,
    logits: Path | None = None,
    torch: Annotated[Path | None, arg(metavar="FOLDER")] = None,
    tolerance: float = 5e-5,
    allow_nonfinite: bool = False,
) -> int:
    """Compares a model's logits, computed in float32, with recorded ones.

    Args:
      src: model folder, the name of a bundled model, or what `import` takes.
      logits: an .npz with input_ids and logits (of a denoiser those of all columns, before any is
        ruled out; of block diffusion those of one call on the whole text); of a recurrent model
        perhaps init_state, and logits_r<n> or logits and num_steps.
      torch: instead, a Hugging Face folder that is run in PyTorch (a separate process), with its
        own model code where transformers does not know the model.
      tolerance: largest absolute difference allowed.
      allow_nonfinite: take weights that are NaN or infinite.
    """
    check_numbers(check_model, locals(), {})
    if (logits is None) == (torch is None):
        raise ConvertError("exactly one of --logits and --torch must be given")
    recorded = torch_check.record(torch) if torch else _read_arrays(logits or Path())
    model = store.load(src, dtype="float32", allow_nonfinite=allow_nonfinite)
    failed = 0
    for name, error in checking.errors(model, recorded):
        failed |= not error <= tolerance  # true for NaN
        word = "ok" if error <= tolerance else f"above {tolerance:.0e}"
        print(f"{name}: largest absolute error {error:.2e}, {word}")
    return failed


COMMANDS = {"import": import_model, "export": export_model, "check": check_model}


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(regular(path), allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # NumPy raises whatever its readers do
        raise ConvertError(
            f"{path} is missing, or not an .npz file of plain arrays ({error})"
        ) from error


def _report(verb: str, model: Model, folder: Path) -> int:
    trees = [part.params for part in (model, model.head) if part is not None]
    count = sum(math.prod(leaf.shape) for tree in trees for leaf in flatten_dict(tree).values())
    kinds = f"{model.config.param_dtype}, computing in {model.config.dtype}"
    print(f"{verb} {count:,} parameters ({kinds}) to {folder}")
    return 0
