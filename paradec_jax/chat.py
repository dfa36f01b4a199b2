"""Conversations: the text that a checkpoint's chat template makes of a list of messages, and whose words are whose.

A template is a Jinja program that comes with the weights (`chat_template` in tokenizer_config.json, or a file
chat_template.jinja); `paradec_jax.template` runs it.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from os.path import commonprefix as common_prefix
from typing import Any

import jinja2

from paradec_jax.template import MARKS, render
from paradec_jax.template import check as check

DEFAULT = "default"
THOUGHT = ("reasoning_content", "reasoning")
THOUGHTS = (THOUGHT, THOUGHT[::-1])  # a name of the field with an assistant's thought, and the other
ANSWER = "Two and two are 4."  # stands for an assistant's words where only what follows them is read
# A template that asks whether content is none, and one that writes a call's arguments as they are, as a text.
NONE = re.compile(r"content['\"\])]* is (not )?none")
TEXT = re.compile(r"(?s)(?!.*arguments['\"\])\s]*\|).*arguments['\"\])\s]*([+~]|-?\}\})")


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
    known = {name: words and i is not None and words.token_text(i) for name, i in ids.items()}
    return {name: text for name, text in known.items() if text} | dict(model.special_tokens)


def split(talk: Any) -> tuple[Any, dict[str, Any]]:
    """Messages of a conversation, which is a list or an object that has them, and what else the template is given."""
    given = dict(talk) if isinstance(talk, Mapping) else {"messages": talk}
    return given.pop("messages", None), {name: value for name, value in given.items() if value is not None}


@functools.lru_cache(maxsize=16)
def reads(template: str) -> frozenset[str]:
    """Names and texts in quotes of a template's program. Raises ValueError for no Jinja."""
    tokens = check(template) and jinja2.Environment().lex(template)
    return frozenset(text.strip("'\"") for _, kind, text in tokens if kind in ("name", "string"))


def joined(content: Any) -> str:
    """The text of a message's content, which may be a list of parts. Raises ValueError for a part that is none."""
    if isinstance(content, str | None):
        return content or ""
    for part in content if isinstance(content, list) else [content]:
        text = isinstance(part, Mapping) and part.get("type") == "text" and part.get("text")
        if not isinstance(text, str):
            raise ValueError(f"content must be a text or a list of texts, not {part!r:.80}")
    return "".join(part["text"] for part in content)


def prepared(template: str, talk: Any) -> tuple[Any, dict[str, Any], set[str]]:
    """Messages in the form that a template reads, what else it is given, and names of what it does not read.

    Fields that are null are absent. Thoughts and arguments of calls get the name and the form of the template.

    Raises:
      ValueError: a message without content, content that is no text, or what must be JSON and is not.
    """
    (messages, variables), known, done = split(talk), reads(template), []
    names = {one: other for one, other in THOUGHTS if one not in known and other in known}
    if not isinstance(messages, list | tuple) or not all(isinstance(of, Mapping) for of in messages):
        return messages, variables, set()  # which `render` refuses
    try:
        variables |= variables.pop("chat_template_kwargs", {})
        if isinstance(variables.get("tools"), str):
            variables["tools"] = json.loads(variables["tools"])
        for message in messages:
            given = {names.get(name, name): value for name, value in message.items() if value is not None}
            if len(given) < 2:
                raise ValueError("it has no content")
            fields, none = copy.deepcopy(given), "content" not in given and NONE.search(template)
            fields["content"] = None if none else joined(given.get("content"))
            for call in fields.get("tool_calls", ()):
                function = call.get("function", call)
                arguments = function.get("arguments", {})
                if isinstance(arguments, str) and not TEXT.match(template):
                    function["arguments"] = json.loads(arguments or "{}")
                elif not isinstance(arguments, str) and TEXT.match(template):
                    function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            done.append(fields)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"message {len(done)}, its tool_calls, or tools: {error}") from error
    return done, variables, {*variables}.union(*done) - known - {"role", "content", "weight", "train"}


def conversation(model: Any, talk: Any, add_generation_prompt: bool = True, **variables: Any) -> str:
    """The text of a conversation by a model's own template, which knows the model's special tokens by name.

    Begin-of-text is in it only where the template writes it.

    Args:
      model: the model.
      talk: messages, or an object with "messages" and what else the template knows by name, such as "tools".
      add_generation_prompt: end with the start of the assistant's answer.
      **variables: what else the template knows by name.

    Raises:
      ValueError: a model without a template, and as `prepared` and `render`.
    """
    if model.chat_template is None:
        raise ValueError("the model has no chat template: put a chat_template.jinja into its folder")
    messages, given, _ = prepared(model.chat_template, talk)
    given = special_tokens(model) | given | variables
    if given.keys() & {"messages", "template", "add_generation_prompt"}:
        raise ValueError('no "template" and no "add_generation_prompt" may stand beside "messages"')
    return render(model.chat_template, messages, add_generation_prompt, **given)


def as_prompts(model: Any, talks: Sequence[Any], continue_last: bool = False) -> tuple[list[str], Any]:
    """Texts that an assistant's answers follow, and the `TokenSpec` of such texts.

    A template alone says where begin-of-text stands, so `bos` is None. `stop` holds, beside the checkpoint's own stop
    tokens, what ends a turn (`turn_end`).

    Args:
      model: the model.
      talks: conversations.
      continue_last: whether the last message of each is an assistant's, whose words go on.

    Raises:
      ValueError: as `conversation`; another last message.
    """
    texts, stop, unread = [], [*model.token_spec.stop], set()
    for i, talk in enumerate(talks):
        text, ((*asked, last), variables) = conversation(model, talk), split(talk)
        if (last["role"] == "assistant") != continue_last:
            raise ValueError(
                f"conversation {i} ends with a message of the role {last['role']}: continue_last goes on with "
                "the assistant's, and without it another's is answered"
            )
        if continue_last:
            asked += [{**last, "content": f"{joined(last.get('content'))}{ANSWER} "}]
            text, _, after = conversation(model, variables | {"messages": asked}, False).rpartition(ANSWER)
            text = text if after[:1] == " " else text.rstrip()  # as a template does that trims
        texts.append(text)
        stop.append(turn_end(model, talk))
        unread |= prepared(model.chat_template, talk)[2]
    if unread:
        warnings.warn(f"the chat template does not read {', '.join(sorted(unread))}", stacklevel=2)
    stop = [token for token in dict.fromkeys(stop) if token is not None]
    return texts, dataclasses.replace(model.token_spec, bos=None, stop=tuple(stop))


def turn_end(model: Any, talk: Any) -> int | None:
    """Id of the first token of its own that a template writes after an assistant's words, or None.

    It need not be a stop token of the checkpoint: some name the end of a text alone, and not "<|im_end|>".
    """
    messages, variables = split(talk)
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    answer = {"role": "assistant", "content": ANSWER}
    answered = conversation(model, variables | {"messages": [*asked, answer]}, False)
    _, known, after = answered.rpartition(ANSWER)
    ids = model.tokenizer.encode(after) if known else []
    return next((token for token in ids if model.tokenizer.stands_alone(token)), None)


def has_marks(template: str) -> bool:
    """Whether a template marks an assistant's words by blocks `generation`."""
    return re.search(r"\{%[-+]?\s*generation\b", template) is not None


def trained(message: Mapping[str, Any]) -> bool:
    """Whether a message's words count: an assistant's, but for "weight" 0 and "train" false.

    Raises:
      ValueError: other values, or another's message that is to count.
    """
    answers, given = message["role"] == "assistant", [message.get("weight"), message.get("train")]
    if any(value not in (None, 0, answers) for value in given):
        raise ValueError(
            f'"weight" and "train" of a message must be 0 or, of an assistant\'s, 1, not {given}'
        )
    return answers and 0 not in given


def answered(model: Any, talk: Any) -> list[list[tuple[str, bool]]]:
    """The assistant's answers in a conversation that count: of each the text before it, False, it and True.

    Where the template has blocks `generation` these are the answers. Elsewhere an answer is what a turn adds to the
    text that it is generated from.

    Raises:
      ValueError: as `conversation` and `trained`; no answer that counts; a template that neither marks them nor
        begins with the text of the messages before.
    """
    text, (messages, variables), rows = conversation(model, talk, False), split(talk), []

    def write(messages: Any, prompt: bool = False, **marks: str) -> str:
        return conversation(model, variables | {"messages": messages}, prompt, **marks)

    answers = [i for i, message in enumerate(messages) if trained(message)]
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if has_marks(model.chat_template) and answers == said:
        parts = re.split(f"[{''.join(MARKS.values())}]", write(messages, **MARKS))
        if "".join(parts) != text:
            raise ValueError("the chat template writes another text with its generation marks than without")
        rows, answers = [[("".join(parts[:j]), False), (parts[j], True)] for j in range(1, len(parts), 2)], []
    for i in answers:
        whole, before = write(messages[: i + 1]), None
        with contextlib.suppress(ValueError):  # no messages, or too few for the template
            before = write(messages[:i], True)
        if before is None or not whole.startswith(before):
            others = ({"role": "assistant", "content": words} for words in (ANSWER, ANSWER[::-1]))
            shown = [write([*messages[:i], other]) for other in others]
            start = common_prefix([whole, *shown])  # up to the content
            before = start if before is None else before
        answer = whole.removeprefix(before)
        if not whole.startswith(before):  # it opens a thought, which the template leaves out of the history
            if not whole.startswith(write(messages[:i])):
                raise ValueError(
                    "the chat template has no {% generation %} marks, and its text of the messages before "
                    f"message {i} is no beginning of the text with it: which words are the assistant's is unknown"
                )
            opened = before[len(common_prefix([before, start])) :]
            answer, words = whole[len(before) - len(opened) :], joined(messages[i].get("content"))
            if words.strip() not in answer:
                answer = words.removeprefix(opened).removeprefix(opened.strip())
                answer += shown[0].rpartition(ANSWER)[2]
        rows.append([(before, False), (answer, True)])
    if not rows:
        raise ValueError('"messages" has no turn of an assistant that counts')
    return rows
