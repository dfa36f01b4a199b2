"""A checkpoint in memory: a Hugging Face folder, a GGUF file, or a checkpoint of Lightning."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from paradec_jax.disk.folders import CHAT_TEMPLATE
from paradec_jax.disk.tensors import finite
from paradec_jax.io import text_of
from paradec_jax.store.model import Model, sampling_of
from paradec_jax.text.template import check as check_template

from . import full, gguf, huginn, mdlm, qwen2, sdar
from . import weights as tensor_files
from .engine import ConvertError, Json, read_json
from .fields import check_plain, matches, present
from .words import WORDS, check_words, json_if_there, read_special, read_tokenizer

DEFAULT = "default"  # name of a chat template
BY_FAMILY: dict[str, ModuleType] = {
    module.FAMILY: module for module in (huginn, qwen2, sdar, full, mdlm)
}
BY_TYPE = {kind: module for module in BY_FAMILY.values() for kind in module.MODEL_TYPES}
BY_KIND: dict[str, ModuleType] = {module.KIND: module for module in (sdar, full)}
GGUF, LIGHTNING = ".gguf", ".ckpt"


@contextlib.contextmanager
def opened(
    path: Path,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    weights: str | None = None,
    of_masks: Json | None = None,
    *,
    allow_nonfinite: bool = False,
) -> Iterator[Model]:
    """The whole model with tokenizer and chat template, its parameters read when they are asked
    for.

    Args:
      path: folder with config.json and weights, or a file that ends in .gguf or .ckpt.
      dtype: type of the parameters; that of `engine.common_dtype` by default.
      tokenizer: a tokenizer.json in the place of the checkpoint's own.
      weights: of a .ckpt, "raw" (the default) or "ema".
      of_masks: of block diffusion and of full attention, what `sdar.read` and `full.read` take, and
        a `kind` of `BY_KIND`.
      allow_nonfinite: whether parameters may be NaN or infinite; a StoreError otherwise, when they
        are read.

    Raises:
      ConvertError: when the checkpoint is not that of one complete, supported model.
    """
    words = path / WORDS if tokenizer is None and (path / WORDS).exists() else tokenizer
    given = {name: value for name, value in (of_masks or {}).items() if value is not None}
    with _reading(path, dtype, tokenizer, weights, given) as model:
        if path.is_dir():
            special = read_special(path)
            model = dataclasses.replace(model, **_read_chat(path), special_tokens=special)
        if words is not None:
            known = read_tokenizer(words)
            check_words(path, words, known)
            model = dataclasses.replace(model, tokenizer=known)
        yield model if allow_nonfinite else all_finite(model)


@contextlib.contextmanager
def _reading(
    path: Path,
    dtype: str | None,
    tokenizer: Path | None,
    weights: str | None,
    given: dict[str, Any],
) -> Iterator[Model]:
    """What a converter reads."""
    module: ModuleType | None = None
    if path.is_dir():
        fields = mdlm.flat(read_json(path / "config.json"))
        check_plain(fields)
        module = _module_of(fields, given)
    takes = inspect.signature(module.read).parameters if module else {}
    for name in given.keys() - takes.keys():
        raise ConvertError(f"--{name} is for other models than that of {path}")
    if weights is not None and (module or path.suffix != LIGHTNING):
        raise ConvertError(f"--weights chooses those of a {LIGHTNING} file, but {path} is none")
    if module is not None:
        # The others' configs say what texts begin with.
        more = {"words": tokenizer} if "words" in takes else {}
        with tensor_files.opened(path, module.plain_name, module.PREFIX) as source:
            yield module.read(source, fields, dtype, **given, **more)
    elif path.suffix == LIGHTNING:
        with mdlm.read_checkpoint(path, weights or "raw", dtype) as model:
            yield model
    elif path.suffix == GGUF:
        yield gguf.read(path, dtype, tokenizer is None)
    else:
        raise ConvertError(
            f"{path} is neither a folder nor a file that ends in {GGUF} or {LIGHTNING}"
        )


def _module_of(fields: Json, given: dict[str, Any]) -> ModuleType:
    """The converter of a folder; takes `kind` out of what is given."""
    named = str(fields.get("model_type"))
    kind = given.pop("kind", fields.get(full.KIND_FIELD))
    if kind is not None:
        if kind not in BY_KIND or named not in BY_KIND[kind].RELEASES:
            types = {one: ", ".join(module.RELEASES) for one, module in BY_KIND.items()}
            raise ConvertError(
                f"kind {kind!r} is not one of model type {named!r}, by kind: {types}"
            )
        return BY_KIND[kind]
    if named not in BY_TYPE:
        raise ConvertError(f"model_type must be one of {', '.join(BY_TYPE)}, not {named!r}")
    if named.startswith("a2d") and not (given.get("block") or fields.get("block_size")):
        raise ConvertError(
            f"config.json of a {named} does not say how it was trained: name it with paradec import --kind "
            f"{full.KIND} (or {sdar.KIND}), or load(..., kind={full.KIND!r})"
        )
    return BY_TYPE[named]


def _read_chat(folder: Path) -> dict[str, Any]:
    """Template and sampling of a Hugging Face folder, as fields of a model.

    The template is that of a file of its own, or else of tokenizer_config.json.
    """
    file, path = folder / CHAT_TEMPLATE, folder / "generation_config.json"
    drawn = present(json_if_there(path))
    try:
        if not matches(drawn.get("do_sample", False), bool):
            raise ValueError(f"do_sample must be true or false, not {drawn['do_sample']!r}")
        sampling = sampling_of(drawn)
        path = folder / "tokenizer_config.json"
        given = json_if_there(path).get("chat_template")
        if file.exists():
            given = text_of(path := file)
        templates = named_templates(given)
        if len(templates) > 1 and DEFAULT not in templates:
            raise ValueError(
                f"it has no chat template called {DEFAULT}, only {', '.join(templates)}"
            )
        template = templates.get(DEFAULT, next(iter(templates.values()), None))
        if template is not None:
            check_template(template)
    except ValueError as error:
        raise ConvertError(f"{path}: {error}") from error
    return {"chat_template": template, "sampling": sampling}


def named_templates(value: Any) -> dict[str, str]:
    """The templates in the field `chat_template` of a tokenizer_config.json, by name.

    Args:
      value: one template, which is called "default"; a list of objects with `name` and `template`;
        or None.

    Raises:
      ValueError: anything else.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    templates: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise ValueError(
                    f"chat_template must be a text or a list of objects with name and template, "
                    f"not {value!r:.200}"
                )
    return templates


def all_finite(source: Any) -> Any:
    """A model, or a head, whose parameters refuse to be NaN or infinite when they are read."""
    leaves = {
        path: finite(path, leaf) for path, leaf in flatten_dict(source.params, sep="/").items()
    }
    changes: dict[str, Any] = {"params": unflatten_dict(leaves, sep="/")}
    if getattr(source, "head", None) is not None:
        changes["head"] = all_finite(source.head)
    return dataclasses.replace(source, **changes)
