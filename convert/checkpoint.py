"""A checkpoint in memory: a Hugging Face folder, a GGUF file, or a denoiser's checkpoint of Lightning."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.chat import CHAT_TEMPLATE, DEFAULT, named_templates
from paradec_jax.chat import check as check_template
from paradec_jax.disk.tensors import finite
from paradec_jax.model import Model
from paradec_jax.tokenizer import Tokenizer

from . import huginn, mdlm, qwen2, sdar
from .engine import ConvertError, read_json
from .fields import check_plain
from .words import WORDS, check_words, json_if_there, read_special

ARCHITECTURES: tuple[ModuleType, ...] = (huginn, qwen2, sdar, mdlm)
GGUF, LIGHTNING = ".gguf", ".ckpt"


@contextlib.contextmanager
def opened(
    path: Path,
    dtype: str | None = None,
    *,
    tokenizer: Path | None = None,
    weights: str | None = None,
    of_blocks: Mapping[str, Any] | None = None,
    allow_nonfinite: bool = False,
) -> Iterator[Model]:
    """The whole model, its parameters read when they are asked for, tokenizer and chat template included.

    Args:
      path: folder with config.json and weights, or a file that ends in .gguf or .ckpt.
      dtype: type of the parameters; that of `engine.common_dtype` by default.
      tokenizer: a tokenizer.json in the place of the checkpoint's own.
      weights: of a .ckpt, "raw" (the default) or "ema".
      of_blocks: of block diffusion, `block`, `mask` and `alignment` of `sdar.read`.
      allow_nonfinite: whether parameters may be NaN or infinite; a StoreError otherwise, when they are read.

    Raises:
      ConvertError: when the checkpoint is not that of one complete, supported model.
    """
    words = path / WORDS if tokenizer is None and (path / WORDS).is_file() else tokenizer
    with _read(path, dtype, tokenizer, weights, of_blocks or {}) as model:
        if words is not None:
            model = dataclasses.replace(model, tokenizer=Tokenizer.from_file(words))
            check_words(path, words, model.tokenizer)
        yield model if allow_nonfinite else _finite(model)


def architecture(field: str, value: object, names: str) -> ModuleType:
    """The converter among whose `names` (MODEL_TYPES or FAMILY) the value of a field is."""
    known: dict[str, ModuleType] = {}
    for module in ARCHITECTURES:
        own = getattr(module, names)
        known |= dict.fromkeys([own] if isinstance(own, str) else own, module)
    if str(value) not in known:
        raise ConvertError(f"{field} must be one of {', '.join(known)}, not {value!r}")
    return known[str(value)]


@contextlib.contextmanager
def _read(
    path: Path, dtype: str | None, tokenizer: Path | None, weights: str | None, of_blocks: Mapping[str, Any]
) -> Iterator[Model]:
    """As `opened`, without the tokenizer of a folder; `of_blocks` is told to block diffusion alone."""
    if path.suffix == LIGHTNING and path.is_file():
        _refuse(of_blocks, path)
        with mdlm.read_checkpoint(path, weights or "raw", dtype) as model:
            yield model
        return
    if weights is not None:
        raise ConvertError(f"--weights chooses those of a {LIGHTNING} file, but {path} is none")
    if path.suffix == GGUF and path.is_file():
        from . import gguf

        _refuse(of_blocks, path)
        with gguf.read(path, dtype) as model:
            yield model
        return
    if not path.is_dir():
        raise ConvertError(f"{path} is neither a folder nor a file that ends in {GGUF} or {LIGHTNING}")
    fields = mdlm.flat(read_json(path / "config.json"))
    check_plain(fields)
    module = architecture("model_type", fields.get("model_type"), "MODEL_TYPES")
    if module is not sdar:
        _refuse(of_blocks, path)
    # The others' configs say what texts begin with.
    more = {"words": tokenizer} if module in (qwen2, sdar) else {}
    with module.read(path, fields, dtype, **of_blocks, **more) as model:
        template, special = _read_chat_template(path), read_special(path)
        yield dataclasses.replace(model, chat_template=template, special_tokens=special)


def _refuse(of_blocks: Mapping[str, Any], path: Path) -> None:
    """Refuses options of block diffusion."""
    for name in of_blocks:
        raise ConvertError(f"--{name} is for models of block diffusion, but {path} holds another")


def _read_chat_template(folder: Path) -> str | None:
    """The template of a Hugging Face folder: a file of its own, or else that of tokenizer_config.json."""
    file, path = folder / CHAT_TEMPLATE, folder / "tokenizer_config.json"
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


def _finite(source: Any) -> Any:
    """A model, or a head, whose parameters refuse to be NaN or infinite when they are read."""
    leaves = {path: finite(path, leaf) for path, leaf in flatten_dict(source.params, sep="/").items()}
    changes: dict[str, Any] = {"params": unflatten_dict(leaves, sep="/")}
    if getattr(source, "head", None) is not None:
        changes["head"] = _finite(source.head)
    return dataclasses.replace(source, **changes)
