"""Conversations: the text that a checkpoint's chat template makes of a list of messages, and whose
words are whose.

A template is a Jinja program that comes with the weights (`chat_template` in tokenizer_config.json,
or a file chat_template.jinja); `paradec_jax.text.template` runs it.
"""

import copy
import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from paradec_jax.text.template import MARKS, render
from paradec_jax.text.template import check as check

# Names of an assistant's thought.
THOUGHTS = {"reasoning": "reasoning_content", "reasoning_content": "reasoning"}
# stands for an assistant's words; its first character is in no text
ANSWER = "\ufdd2 Two and two are 4."
# A template that asks whether content is none, and one that writes a call's arguments as they are,
# as a text.
NONE = re.compile(r"(?i)\bcontent['\"\])]*\s*(is\s+(not\s+)?|[!=]=\s*)none")
TEXT = re.compile(
    r"(?s)(?!.*arguments['\"\])\s]*\|).*arguments['\"\])\s]*([+~]|-?\}\})"
    r"|(?>.*arguments)(?!['\"\]\s]*\[|.*(tojson|items))"
)


def special_tokens(model: Any) -> dict[str, str]:
    """Texts of a model's special tokens by their names in templates: those kept with it, then those
    of its ids.
    """
    spec, words = model.token_spec, model.tokenizer
    ids = {"bos": spec.bos, "eos": next(iter(spec.stop), None), "pad": spec.pad, "mask": spec.mask}
    texts = {name: words.token_text(i) for name, i in ids.items() if words and i is not None}
    return {f"{name}_token": text for name, text in texts.items() if text} | {
        **model.special_tokens
    }


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are neither null nor an empty list."""
    return {name: value for name, value in fields.items() if value not in (None, [])}


def object_of(talk: Any) -> dict[str, Any]:
    """A conversation as an object with "messages"; it may be a list of them."""
    return dict(talk) if isinstance(talk, Mapping) else {"messages": talk}


@functools.cache
def reads(template: str) -> set[str]:
    """Names and texts in quotes of a template's program. Raises ValueError as `check`."""
    tokens = check(template).environment.lex(template)
    return {text.strip("'\"") for _, kind, text in tokens if kind in ("name", "string")}


def joined(content: Any) -> str:
    """The text of a message's content, which may be a list of parts. Raises ValueError for a part
    that is none.
    """
    texts = []
    for part in content if isinstance(content, list) else ["" if content is None else content]:
        match part:
            case str(text) | {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError(f"content must be a text or a list of texts, not {part!r:.80}")
    return "".join(texts)


def prepared(template: str, talk: Any) -> dict[str, Any]:
    """What a template is given of a conversation, in the form that it reads; a warning names what
    it does not read.

    Fields that are null or an empty list are absent. Thoughts and arguments of calls get the name
    and the form of the template.

    Raises:
      ValueError: a message without content, content that is no text, or what must be JSON and is
        not.
    """
    given, names, done = present(object_of(talk)), reads(template), []
    messages = given.pop("messages", None)
    try:
        given |= given.pop("chat_template_kwargs", {})
        render("", messages, True, **given)  # refuses what are no messages, and their names
        if isinstance(tools := given.get("tools"), str):
            given["tools"] = json.loads(tools or "null") or None
        for message in messages:
            fields = copy.deepcopy(present(message))
            for name, other in THOUGHTS.items():
                if name in fields and other in names and not fields.get(other):
                    fields[other] = fields.pop(name)
            if not fields.keys() - {"role", "name", "weight", "train"}:
                raise ValueError("it has no content")
            content, calls = fields.get("content"), fields.get("tool_calls", ())
            none = content is None or (calls and content == "")
            fields["content"] = None if none and NONE.search(template) else joined(content)
            for call in calls:
                function = call.get("function", call)
                text = function.get("arguments") or "{}"
                if not isinstance(text, str):
                    text = json.dumps(text, ensure_ascii=False)
                function["arguments"] = text if TEXT.match(template) else json.loads(text)
            done.append(fields)
    except Exception as error:  # of any form that somebody else's data may have
        raise ValueError(f"message {len(done)} or tools: {error}") from error
    if unread := {*present(given)}.union(*done) - names - {"role", "content", "weight", "train"}:
        warnings.warn(f"the chat template does not read {', '.join(sorted(unread))}", stacklevel=2)
    return given | {"messages": done}


def conversation(
    model: Any, messages: Any, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """The text of a conversation by a model's own template, which knows the model's special tokens
    by name.

    Begin-of-text is in it only where the template writes it.

    Args:
      model: the model.
      messages: messages, or an object with "messages" and what else the template knows by name,
        such as "tools".
      add_generation_prompt: end with the start of the assistant's answer.
      **variables: what else the template knows by name.

    Raises:
      ValueError: a model without a template, and as `prepared` and `render`.
    """
    if model.chat_template is None:
        raise ValueError(
            "the model has no chat template: put a chat_template.jinja into its folder"
        )
    given = special_tokens(model) | prepared(model.chat_template, messages) | variables
    return render(model.chat_template, add_generation_prompt=add_generation_prompt, **given)


def as_prompts(
    model: Any, conversations: Sequence[Any], continue_last: bool = False
) -> tuple[list[str], Any]:
    """Texts that an assistant's answers follow, and the `TokenSpec` of such texts.

    A template alone says where begin-of-text stands, so `bos` is None. `stop` holds, beside the
    checkpoint's own stop tokens, what ends a turn (`turn_end`).

    Args:
      model: the model.
      conversations: conversations, each as `conversation` takes one.
      continue_last: whether the last message of each is an assistant's, whose words go on.

    Raises:
      ValueError: as `conversation`; another last message.
    """
    texts = []
    for i, talk in enumerate(conversations):
        text, talk = conversation(model, talk, not continue_last), object_of(talk)
        *asked, last = talk["messages"]
        if (last["role"] == "assistant") != continue_last or last.get("tool_calls"):
            raise ValueError(
                f"conversation {i} ends with the role {last['role']}: continue_last goes on with the words of an "
                "assistant that makes no calls, and without it those of others are answered"
            )
        if continue_last:
            begun = {**last, "content": joined(last.get("content")) + ANSWER}
            longer = conversation(model, {**talk, "messages": [*asked, begun]}, False)
            text = commonprefix([text, longer])  # noqa: RUF071  (where a template trims, without the last blanks)
            talk["messages"] = asked
        texts.append(text)
    stop = dict.fromkeys([*model.token_spec.stop, turn_end(model, talk)])
    stop.pop(None, None)
    return texts, dataclasses.replace(model.token_spec, bos=None, stop=tuple(stop))


def turn_end(model: Any, messages: Any) -> int | None:
    """Id of the first token of its own that a template writes after an assistant's words, or None.

    It need not be a stop token of the checkpoint: some name the end of a text alone, and not
    "<|im_end|>".
    """
    talk = object_of(messages)
    talk["messages"] = [*talk["messages"], {"role": "assistant", "content": ANSWER}]
    after = conversation(model, talk, False).partition(ANSWER)[2]
    return next(filter(model.tokenizer.stands_alone, model.tokenizer.encode(after)), None)


def answered(model: Any, talk: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The assistant's answers in a conversation that count, each after the text before it.

    Where the template has blocks `generation` these are the answers, unless some do not count.
    Elsewhere an answer is what a turn adds to the text that it is generated from.

    Raises:
      ValueError: as `conversation`; another weight; a template that neither marks them nor
        begins with the text of the messages before.
    """
    text, messages = conversation(model, talk, False), talk["messages"]
    turns, silent = [], False
    for i, message in enumerate(messages):
        answers = message["role"] == "assistant"
        given = [message.get("weight"), message.get("train")]
        if any(value not in (None, 0, answers) for value in given):
            raise ValueError(
                f'"weight" and "train" must be 0 or, of an assistant\'s message, 1, not {given}'
            )
        turns += [i] * (answers and 0 not in given)
        silent |= answers and 0 in given

    def write(most: int, *more: Any, prompt: Any = False, **marks: str) -> str:
        return conversation(model, {**talk, "messages": [*messages[:most], *more]}, prompt, **marks)

    if "endgeneration" in reads(model.chat_template) and not silent:
        parts = re.split(f"[{''.join(MARKS.values())}]", write(len(messages), **MARKS))
        if "".join(parts) != text:
            raise ValueError(
                "the chat template writes another text with its generation marks than without"
            )
        return [("".join(parts[:i]), parts[i]) for i in range(1, len(parts), 2)]
    pairs = []
    for i in turns:
        whole, other = write(i + 1), write(i, {"role": "assistant", "content": ANSWER})
        try:
            before = write(i, prompt=True)
        except ValueError:  # no messages, or too few for the template
            before = ""
        head = commonprefix([whole, other])  # noqa: RUF071  (at most up to the content)
        before = before or head
        answer = whole.removeprefix(before)
        # Before may open a thought, which the template leaves out of the history.
        if not whole.startswith(before):
            if not whole.startswith(write(i)):
                raise ValueError(
                    "the chat template has no {% generation %} marks, and its text of the messages before "
                    f"message {i} is no beginning of the text with it: which words are the assistant's is unknown"
                )
            answer, words = whole.removeprefix(head), joined(messages[i].get("content"))
            if not answer.startswith(words.strip()):
                # What differs begins with a whole tag: "<think>" and "</think>" share no "<".
                shared = re.sub(r"[<\[][^<>\[\]]*$", "", commonprefix([head, before]))  # noqa: RUF071
                opened = before.removeprefix(shared)
                words = words.removeprefix(opened).removeprefix(opened.strip())
                answer = words + write(i, {**messages[i], "content": ANSWER}).partition(ANSWER)[2]
        pairs.append((before, answer))
    return pairs
