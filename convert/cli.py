"""Command line of the converters."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from tyro.conf import Positional, arg
from tyro.extras import SubcommandApp

from convert import check as checking
from convert import huginn, mdlm, qwen2, sdar, torch_check
from convert.engine import ConvertError, read_json
from convert.fields import check_plain
from convert.words import check_words, json_if_there, read_special, write_words
from paradec_jax import store
from paradec_jax.chat import DEFAULT, named_templates
from paradec_jax.chat import check as check_template
from paradec_jax.disk.folders import staged
from paradec_jax.disk.tensors import TAKEN_BY, finite
from paradec_jax.io import WRONG_INPUT, one_sentence
from paradec_jax.tokenizer import Tokenizer

ARCHITECTURES: tuple[ModuleType, ...] = (huginn, qwen2, sdar, mdlm)
LIGHTNING = ".ckpt"
Source = Positional[Annotated[Path, arg(metavar="SRC")]]
Target = Positional[Annotated[Path, arg(metavar="DST")]]
app = SubcommandApp()


@app.command(name="import")
def import_model(
    src: Source,
    dst: Target,
    tokenizer: Path | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    weights: Literal["raw", "ema"] | None = None,
    block: int | None = None,
    mask: int | None = None,
    alignment: Literal["own", "next"] | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
) -> int:
    """Converts a Hugging Face folder, or a denoiser's Lightning checkpoint, to a model folder, whole or not at all.

    Args:
      src: folder with config.json and safetensors, or else pytorch_model.bin; or a .ckpt. No pickle is run.
      dst: model folder to write.
      tokenizer: a tokenizer.json; the one in SRC by default, where there is one.
      dtype: type of the stored parameters; by default as in the file, and float32, which loses nothing, where that
        has float16 or several types.
      weights: of a .ckpt, "raw" for the weights that were trained (the default), "ema" for their moving averages.
      block: of block diffusion, tokens of a block; those that config.json names by default, or else 4.
      mask: of block diffusion, id of the mask; the one that config.json names by default, or else 151669.
      alignment: of block diffusion, the token that logits are about: "own" for that of their position (the default,
        SDAR's), "next" for the one after it.
      allow_nonfinite: take weights that are NaN or infinite.
      overwrite: replace a model folder at DST.
    """
    given = {"block": block, "mask": mask, "alignment": alignment}
    of_blocks = {name: value for name, value in given.items() if value is not None}
    if src.suffix == LIGHTNING and src.is_file():
        _refuse(of_blocks, src)
        reading = mdlm.read_checkpoint(src, weights or "raw", dtype)
    else:
        if weights is not None:
            raise ConvertError(f"--weights chooses those of a {LIGHTNING} file, but {src} is none")
        reading = _read_folder(src, dtype, of_blocks, tokenizer)
    if tokenizer is None and (src / "tokenizer.json").is_file():
        tokenizer = src / "tokenizer.json"
    with reading as model:
        if tokenizer is not None:
            words = Tokenizer.from_file(tokenizer)
            check_words(src, tokenizer, words)
            model = dataclasses.replace(model, tokenizer=words)
        store.save(dst, model if allow_nonfinite else _finite(model), overwrite=overwrite)
        return _report("imported", model, dst)


@app.command(name="export")
def export_model(
    src: Source,
    dst: Target,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
) -> int:
    """Converts a model folder to a Hugging Face folder, whole or not at all.

    Args:
      src: model folder, or the name of a bundled model.
      dst: folder to write.
      allow_nonfinite: take weights that are NaN or infinite.
      overwrite: replace a folder with a config.json at DST.
    """
    model = store.opened(src, allow_nonfinite=allow_nonfinite)
    module = _find("family", {module.FAMILY: module for module in ARCHITECTURES}, model.family)
    with staged(dst, overwrite=overwrite) as folder:
        module.write(folder, model)
        write_words(folder, model)
        if model.chat_template is not None:
            (folder / store.CHAT_TEMPLATE).write_text(model.chat_template, encoding="utf-8", newline="")
    return _report("exported", model, dst)


@app.command(name="check")
def check_model(
    src: Source,
    logits: Path | None = None,
    torch: Annotated[Path | None, arg(metavar="FOLDER")] = None,
    tolerance: float = 5e-5,
    allow_nonfinite: bool = False,
) -> int:
    """Compares a model's logits, computed in float32, with recorded ones.

    Args:
      src: model folder, or the name of a bundled model.
      logits: an .npz with input_ids and logits (of a denoiser those of all columns, before any is ruled out; of block
        diffusion those of one call on the whole text); of a recurrent model perhaps init_state, and logits_r<n> or
        logits and num_steps.
      torch: instead, a Hugging Face folder that is run in PyTorch (a separate process), with its own model code
        where transformers does not know the model.
      tolerance: largest absolute difference allowed.
      allow_nonfinite: take weights that are NaN or infinite.
    """
    if logits is not None and torch is None:
        recorded = _read_arrays(logits)
    elif torch is not None and logits is None:
        recorded = torch_check.record(torch)
    else:
        raise ConvertError("exactly one of --logits and --torch must be given")
    model = store.load(src, dtype="float32", allow_nonfinite=allow_nonfinite)
    passed = True
    for name, error in checking.errors(model, recorded):
        good = error <= tolerance  # false for NaN
        passed &= good
        print(f"{name}: largest absolute error {error:.2e}, {'ok' if good else f'above {tolerance:.0e}'}")
    return 0 if passed else 1


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 1, with one sentence on stderr, for input that is wrong."""
    try:
        return app.cli(args=args, prog="python -m convert", description="Weight converters.")
    except WRONG_INPUT as error:
        told = str(error).replace(TAKEN_BY, "; --allow-nonfinite takes them")  # as each command calls it
        print(f"error: {one_sentence(told or error)}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _read_folder(
    src: Path, dtype: str | None, of_blocks: Mapping[str, Any], words: Path | None
) -> Iterator[store.Model]:
    """The model of a Hugging Face folder, without its tokenizer; `of_blocks` is told to block diffusion alone."""
    if not src.is_dir():
        raise ConvertError(f"there is no folder {src}; give the one that holds config.json and weights")
    fields = mdlm.flat(read_json(src / "config.json"))
    check_plain(fields)
    kinds = {kind: module for module in ARCHITECTURES for kind in module.MODEL_TYPES}
    module = _find("model_type", kinds, fields.get("model_type"))
    if module is not sdar:
        _refuse(of_blocks, src)
    more = (
        {"words": words} if module in (qwen2, sdar) else {}
    )  # the others' configs say what texts begin with
    with module.read(src, fields, dtype, **of_blocks, **more) as model:
        template, special = _read_chat_template(src), read_special(src)
        yield dataclasses.replace(model, chat_template=template, special_tokens=special)


def _refuse(of_blocks: Mapping[str, Any], src: Path) -> None:
    """Refuses options of block diffusion."""
    for name in of_blocks:
        raise ConvertError(f"--{name} is for models of block diffusion, but {src} holds another")


def _find(field: str, known: dict[str, ModuleType], value: object) -> ModuleType:
    """The architecture of that name."""
    if str(value) not in known:
        raise ConvertError(f"{field} must be one of {', '.join(known)}, not {value!r}")
    return known[str(value)]


def _read_chat_template(folder: Path) -> str | None:
    """The template of a Hugging Face folder: a file of its own, or else that of tokenizer_config.json."""
    file, path = folder / store.CHAT_TEMPLATE, folder / "tokenizer_config.json"
    given = json_if_there(path).get("chat_template")
    try:
        if file.is_file():
            path, given = file, file.read_bytes().decode()
        templates = named_templates(given)
        if len(templates) > 1 and DEFAULT not in templates:
            raise ValueError(f"it has no chat template called {DEFAULT}, only {', '.join(templates)}")
        template = templates.get(DEFAULT, next(iter(templates.values()), None))
        if template is not None:
            check_template(template)
    except ValueError as error:
        raise ConvertError(f"{path}: {error}") from error
    return template


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # NumPy raises whatever its readers do
        raise ConvertError(f"{path} is missing, or not an .npz file of plain arrays ({error})") from error


def _finite(source: Any) -> Any:
    """A model, or a head, whose parameters refuse to be NaN or infinite when they are read."""
    leaves = {path: finite(path, leaf) for path, leaf in flatten_dict(source.params, sep="/").items()}
    changes: dict[str, Any] = {"params": unflatten_dict(leaves, sep="/")}
    if getattr(source, "head", None) is not None:
        changes["head"] = _finite(source.head)
    return dataclasses.replace(source, **changes)


def _report(verb: str, model: store.Model, folder: Path) -> int:
    trees = [model.params] if model.head is None else [model.params, model.head.params]
    count = sum(math.prod(leaf.shape) for tree in trees for leaf in flatten_dict(tree).values())
    kinds = f"{model.config.param_dtype}, computing in {model.config.dtype}"
    print(f"{verb} {count:,} parameters ({kinds}) to {folder}")
    return 0
