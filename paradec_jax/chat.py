"""Conversations: the text that a checkpoint's chat template makes of a list of messages, and whose words are whose.

A template is a Jinja program that comes with the weights (`chat_template` in tokenizer_config.json, or a file
chat_template.jinja); `paradec_jax.template` runs it.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from paradec_jax.template import MARKS, Messages, render
from paradec_jax.template import check as check

DEFAULT = "default"
ANSWER = "Two and two are 4."  # stands for an assistant's words where only what follows them is read


def named_templates(value: Any) -> dict[str, str]:
    """The templates in the field `chat_template` of a tokenizer_config.json, by name.

    Args:
      value: one template, which is called "default"; a list of objects with `name` and `template`; or None.

    Raises:
      ValueError: anything else, or two templates of one name.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    templates: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        fields = entry if isinstance(entry, dict) else {}
        name, template = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise ValueError(
                f"chat_template must be a text or a list of objects with name and template, not {value!r:.200}"
            )
        if name in templates:
            raise ValueError(f"chat_template holds two templates of the name {name!r}")
        templates[name] = template
    return templates


def special_tokens(model: Any) -> dict[str, str]:
    """Texts of a model's special tokens by their names in templates: those kept with it, then those of its ids."""
    spec, words = model.token_spec, model.tokenizer
    ids = {"bos_token": spec.bos, "eos_token": next(iter(spec.stop), None), "pad_token": spec.pad}
    ids["mask_token"] = spec.mask
    known = {name: words.token_text(i) for name, i in ids.items() if words is not None and i is not None}
    return {name: text for name, text in known.items() if text is not None} | dict(model.special_tokens)


def conversation(model: Any, messages: Messages, add_generation_prompt: bool = True, **variables: Any) -> str:
    """The text of a conversation by a model's own template, which knows the model's special tokens by name.

    Begin-of-text is in it only where the template writes it.

    Raises:
      ValueError: a model without a template, and as `render`.
    """
    if model.chat_template is None:
        raise ValueError("the model has no chat template: put a chat_template.jinja into its folder")
    return render(model.chat_template, messages, add_generation_prompt, **special_tokens(model) | variables)


def as_prompts(model: Any, conversations: Sequence[Messages]) -> tuple[list[str], Any]:
    """Texts that an assistant's answers follow, and the `TokenSpec` of such texts.

    A template alone says where begin-of-text stands, so `bos` is None. `stop` holds, beside the checkpoint's own stop
    tokens, what ends a turn (`turn_end`).

    Raises:
      ValueError: as `conversation`.
    """
    texts = [conversation(model, messages) for messages in conversations]
    ends = [turn_end(model, messages) for messages in conversations]
    stop = dict.fromkeys([*model.token_spec.stop, *(end for end in ends if end is not None)])
    return texts, dataclasses.replace(model.token_spec, bos=None, stop=tuple(stop))


def turn_end(model: Any, messages: Messages) -> int | None:
    """Id of the first special token that a template writes after an assistant's words, or None.

    It need not be a stop token of the checkpoint: some name the end of a text alone, and not "<|im_end|>".
    """
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    answered = conversation(model, [*asked, {"role": "assistant", "content": ANSWER}], False)
    _, known, after = answered.rpartition(ANSWER)
    ids = model.tokenizer.encode(after) if known else []
    return next((token for token in ids if model.tokenizer.is_special(token)), None)


def has_marks(template: str) -> bool:
    """Whether a template marks an assistant's words by blocks `generation`."""
    return re.search(r"\{%[-+]?\s*generation\b", template) is not None


def answered(model: Any, messages: Messages) -> list[tuple[str, bool]]:
    """The text of a conversation up to its last answer, in pieces, each with whether it is an assistant's.

    Where the template has blocks `generation` these are the assistant's pieces. Elsewhere an answer is what a turn
    adds to the text of the messages before it, which must then be the beginning of the text with the turn.

    Raises:
      ValueError: as `conversation`; no assistant's words; a template that neither marks them nor keeps to prefixes.
    """
    text = conversation(model, messages, False)
    if has_marks(model.chat_template):
        begins, ends = MARKS.values()
        first, *rest = conversation(model, messages, False, **MARKS).split(begins)
        halves = [part.partition(ends) for part in rest]
        pieces = [(first, False), *((half, i == 0) for one in halves for i, half in enumerate(one[::2]))]
        if "".join(piece for piece, _ in pieces) != text:
            raise ValueError("the chat template writes another text with its generation marks than without")
    else:
        pieces, end = [], 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = conversation(model, messages[:i]) if i else ""
            after = conversation(model, messages[: i + 1], False)
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    "the chat template has no {% generation %} marks, and its text of the messages before "
                    f"message {i} is no beginning of the text with it: which words are the assistant's is unknown"
                )
            pieces += [(text[end : len(before)], False), (text[len(before) : len(after)], True)]
            end = len(after)
    while pieces and not pieces[-1][1]:
        pieces.pop()
    if not pieces:
        raise ValueError('"messages" has no turn of an assistant')
    return [piece for piece in pieces if piece[0]]
