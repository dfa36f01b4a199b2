"""Tokenizer files of a Hugging Face folder: special tokens by name, and what a text begins with.

Two files may put begin-of-text before a text: the post-processor of tokenizer.json, which
transformers obeys, and `add_bos_token` of tokenizer_config.json, which it obeys for some classes
and versions of tokenizers alone. So an import takes either's word, refuses a post-processor that
begins texts where `add_bos_token` is false, and an export writes both.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paradec_jax.store.model import Model
from paradec_jax.text.chat import special_tokens
from paradec_jax.text.tokenizer import Tokenizer

from .engine import ConvertError, read_json
from .fields import write_json

WORDS, CONFIG, MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MASKS = ("<|mask|>", "<|mdm_mask|>", "|<MASK>|")  # of releases whose files have no such field
SLOW = ("tokenizer.model", "vocab.json")  # other forms of a tokenizer
# Post-processors that add tokens.
FRAMING = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


def json_if_there(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file."""
    return read_json(path) if path.exists() else {}


def read_special(folder: Path) -> dict[str, str]:
    """Texts of a folder's special tokens by their names in chat templates, such as `bos_token`.

    Raises:
      ConvertError: a token that is no text, or of which two files have different ones.
    """
    texts: dict[str, str] = {}
    for file in (CONFIG, MAP):
        for name, value in json_if_there(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            known = name in NAMES or isinstance(text, str)  # others may be anything
            if value is None or not name.endswith("_token") or not known:
                continue
            if not isinstance(text, str):
                raise ConvertError(
                    f"{name} of {folder / file} must be a text or an object with content, not {value!r:.200}"
                )
            if texts.setdefault(name, text) != text:
                raise ConvertError(
                    f"{name} is {texts[name]!r} in {folder / CONFIG}, but {text!r} in {folder / file}"
                )
    return texts


def mask_of(folder: Path, words: Path | None = None) -> int | None:
    """The mask token by a folder's tokenizer: that of its field, or else the one of a usual text.

    Arguments as of `begin_of_text`.
    """
    path = folder / WORDS if words is None else words
    if not path.exists():
        return None
    known = read_tokenizer(path)
    texts = (read_special(folder).get("mask_token", ""), *MASKS)
    return next((token for token in map(known.id_of, texts) if token is not None), None)


def check_words(folder: Path, path: Path, words: Tokenizer) -> None:
    """Refuses a tokenizer of `path` that gives an id another text than tokenizer_config.json."""
    given = json_if_there(folder / CONFIG).get("added_tokens_decoder")
    for token, value in given.items() if isinstance(given, dict) else ():
        text = value.get("content") if isinstance(value, dict) else value
        stored = words.token_text(int(token)) if token.isdecimal() and len(token) < 10 else None
        if stored is not None and stored != text:
            raise ConvertError(
                f"token {token} is {text!r} in {folder / CONFIG} (added_tokens_decoder), but {stored!r} in {path}"
            )


def begin_of_text(folder: Path, named: Mapping[str, int], words: Path | None = None) -> int | None:
    """The token that the folder's texts begin with, or None.

    What a post-processor puts after a text is left out, since a prompt is continued.

    Args:
      folder: the folder.
      named: the token of config.json or generation_config.json by the file's name, or nothing;
        these name one even where no text begins with it.
      words: the tokenizer's file; the folder's own where it is None.

    Raises:
      ConvertError: files that contradict each other, naming both.
    """
    path = folder / WORDS if words is None else words
    slow = next((folder / name for name in SLOW if (folder / name).is_file()), None)
    if slow is not None and words is None and not path.is_file():
        raise ConvertError(
            f"{slow} is not read: save a {WORDS} beside it with transformers (`save_pretrained`), or name one with "
            "paradec import --tokenizer"
        )
    tokenizer = read_tokenizer(path) if path.exists() else None
    config = json_if_there(folder / CONFIG)
    adds, before = config.get("add_bos_token"), [] if tokenizer is None else tokenizer.framing()[0]
    if before and adds is not None and not adds:
        raise ConvertError(
            f"add_bos_token of {folder / CONFIG} is {adds!r}, but the post-processor of {path} begins every text "
            f"with {before}"
        )
    if len(before) > 1:
        raise ConvertError(
            f"the post-processor of {path} begins every text with {before}, not with one token"
        )
    if not adds and not before:
        return None
    by_file = dict.fromkeys([f"the post-processor of {path}"], *before) if before else {}
    text = read_special(folder).get("bos_token")
    if tokenizer is not None and text is not None:
        token = tokenizer.id_of(text)
        if token is None:
            raise ConvertError(
                f"bos_token of {folder / CONFIG} is {text!r}, which is no token of {path}"
            )
        by_file[f"bos_token {text!r} of {folder / CONFIG}"] = token
    by_file |= {f"bos_token_id of {folder / file}": token for file, token in named.items()}
    if not by_file:
        raise ConvertError(
            f"add_bos_token of {folder / CONFIG} is true, but no file names the token"
        )
    (where, bos), *others = by_file.items()
    for other, token in others:
        if token != bos:
            raise ConvertError(
                f"texts begin with token {bos} by {where}, but with {token} by {other}"
            )
    return bos


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file."""
    try:
        return Tokenizer.from_file(path)
    except ValueError as error:
        raise ConvertError(str(error)) from error


def write_words(folder: Path, model: Model) -> None:
    """Writes the tokenizer's files, with which transformers gives a text the ids that it has here.

    Raises:
      ConvertError: a begin-of-text token that the tokenizer does not have.
    """
    words, bos = model.tokenizer, model.token_spec.bos
    fields: dict[str, Any] = {
        "add_bos_token": bos is not None,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if words is not None:
        for name, text in special_tokens(model).items():
            token = words.id_of(text)
            if token is not None and words.is_special(token):
                fields[name] = text
        words.save(folder / WORDS)
        written = json.loads((folder / WORDS).read_text(encoding="utf-8"))
        if words.framing() != ([] if bos is None else [bos], []):
            written["post_processor"] = _beginning(written.get("post_processor"), words, bos)
            text = json.dumps(written, indent=2, ensure_ascii=False)
            (folder / WORDS).write_text(text, encoding="utf-8")
    write_json(folder / CONFIG, fields)


def _beginning(processor: Any, words: Tokenizer, bos: int | None) -> dict[str, Any] | None:
    """A post-processor that does what that one does, but adds `bos` before texts and nothing else."""
    steps = [processor] if processor else []
    if processor and processor["type"] == "Sequence":
        steps = processor["processors"]
    steps = [step for step in steps if step["type"] not in FRAMING]
    if bos is not None:
        text = words.token_text(bos)
        if text is None:
            raise ConvertError(f"the begin-of-text token {bos} is none of the tokenizer's")
        begin = {"SpecialToken": {"id": text, "type_id": 0}}
        parts = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
        special = {text: {"id": text, "ids": [bos], "tokens": [text]}}
        template = {"single": [begin, parts[0]], "pair": [begin, *parts], "special_tokens": special}
        steps = [*steps, {"type": "TemplateProcessing", **template}]
    if len(steps) < 2:
        return steps[0] if steps else None
    return {"type": "Sequence", "processors": steps}
