"""Chat templates: the text that a checkpoint makes of a list of messages, in a sandbox.

A template is a Jinja program that comes with the weights (`chat_template` in tokenizer_config.json, or a file
chat_template.jinja). It is somebody else's code: it runs without access to attributes that begin with an underscore
and cannot change the objects handed to it.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEFAULT = "default"
ANSWER = "Two and two are 4."  # stands for an assistant's words where only what follows them is read
# Names by which a block `generation` knows what to write before and after it, and what that is: no characters.
MARKS = {"generation_begins": "\ufdd0", "generation_ends": "\ufdd1"}
Messages = Sequence[Mapping[str, Any]]


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


def render(
    template: str,
    messages: Messages,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text of a conversation, special tokens written literally.

    Templates find what those written for Hugging Face's `apply_chat_template` expect: blocks without the line break
    after them, `break` and `continue`, the block `generation`, the filter `tojson` (which keeps letters beyond
    ASCII), `raise_exception(message)` and `strftime_now(format)`. A variable that is not given is empty.

    Args:
      template: the Jinja text.
      messages: objects with a `role` and mostly `content`, oldest first.
      add_generation_prompt: end with the start of the assistant's answer.
      **variables: what else the template knows by name, such as `tools`, `documents`, `bos_token` and `eos_token`.

    Raises:
      ValueError: messages of another form, a template that is no Jinja, that refuses these messages, that asks for
        what the sandbox forbids, or that fails.
    """
    if not isinstance(template, str):
        raise ValueError(f"template must be a text, not {template!r:.200}")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of at least one message, not {messages!r:.200}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} must be an object with a role, not {message!r:.200}")
    given = {"tools": None, "documents": None} | variables
    compiled = check(template)
    try:
        return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
    except _Refusal as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    except jinja2.exceptions.SecurityError as error:
        raise ValueError(f"the chat template asks for what its sandbox forbids: {error}") from error
    except Exception as error:  # a program of somebody else's may raise anything
        raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from error


class _Refusal(jinja2.TemplateError):
    """A template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an assistant's words; the text is that of the block.

    Where the variables named by `MARKS` are given, they stand before and after it.
    """

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes inside the block, between its marks."""
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in MARKS)
        return [first, *inside, last]


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,  # the optimizer computes constants, such as 9**9**9, while it compiles
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
    }
    environment.globals.update(functions)
    return environment


@functools.lru_cache(maxsize=16)
def check(template: str) -> jinja2.Template:
    """A template, compiled and not run. Raises ValueError for no Jinja, or filters that are not known."""
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no Jinja: {error.message} (line {error.lineno})") from error
    except (RecursionError, SyntaxError, MemoryError, OverflowError) as error:  # of Python's own compiler
        raise ValueError(f"the chat template cannot be compiled ({type(error).__name__})") from error


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes of HTML that Jinja's own filter makes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
