"""One line of JSON lines: a text, a prompt with its answer, or a conversation, under the names that
public data has.

::

    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}
    {"prompt": "...", "response": "..."}    or "answer", or "completion"; a prompt may be a list of messages
    {"text": "..."}

Messages may have "tools", "documents" and "chat_template_kwargs" beside them, which reach the chat
template.
"""

from collections.abc import Mapping
from typing import Any

ANSWERS = ("response", "answer", "completion")
ROLES = {  # by the names that "from" has
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}
VARIABLES = ("tools", "documents", "chat_template_kwargs")


def line_of(record: Mapping[str, Any]) -> tuple[str, Any, Any, list[str]]:
    """The content of a line: messages where there are some, whatever else it has. A field that is
    null is absent.

    Returns:
      (kind, content, answer, passed): "messages", "prompt" or "text"; a text, or of messages an
      object with them and with what else their template is given; the text that follows a prompt,
      or None; names of the fields that are passed over.

    Raises:
      ValueError: another line, with the fields that it has and those that are allowed.
    """
    fields = {name: value for name, value in record.items() if value is not None}
    kinds = [name for name in ("messages", "conversations", "prompt", "text") if name in fields]
    if len(kinds) != 1 and kinds[:1] not in (["messages"], ["conversations"]):
        raise ValueError(
            'one of "messages", "conversations", "prompt" and "text" is needed, and this line has '
            f"{' and '.join(kinds or fields) or 'none'}"
        )
    kind = kinds[0]
    content = fields.pop(kind)
    reply = next(
        (fields.pop(name) for name in ANSWERS if name in fields and kind == "prompt"), None
    )
    if kind in ("prompt", "text") and {type(content), type(reply or "")} == {str}:
        return kind, content, reply, sorted(fields.keys() - {"steps"})
    try:
        given = {"train": False} if reply else {}  # the words of a prompt
        turns = [{**turn, **given} for turn in content]
        answer = {"role": "assistant", "content": reply}
        turns += [answer] if isinstance(reply, str) else map(dict, reply or ())
    except (TypeError, ValueError):
        raise ValueError(
            f'{kind} must be a list of objects with "role" and "content", or a string, as its answer, '
            f"not {content!r:.40} and {reply!r:.40}"
        ) from None
    for turn in turns:
        # or else it has no role, which the template's messages need
        if turn.get("from") in [*ROLES]:
            turn |= {"role": ROLES[turn.pop("from")], "content": turn.pop("value", None)}
    more = {name: fields.pop(name) for name in VARIABLES if name in fields}
    return "messages", {"messages": turns} | more, None, [*fields]
