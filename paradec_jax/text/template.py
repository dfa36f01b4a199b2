"""A chat template as a program: somebody else's Jinja, compiled and run in a sandbox.

It runs without access to attributes that begin with an underscore and cannot change the objects
handed to it. The language does not bound time and memory. So on POSIX systems a template runs in a
process of its own: this file, as a program whose time and memory the system bounds.
"""

import datetime
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Names by which a block `generation` knows what to write before and after it, and what that is: no
# characters.
MARKS = {"generation_begins": "\ufdd0", "generation_ends": "\ufdd1"}
Messages = Sequence[Mapping[str, Any]]
SECONDS, MEMORY = 1.5, 10**9  # processor time of one text, bytes of the process that makes it
LONGEST, MOST = 100_000, 10**7  # characters of a template, and of a text
TOO_MUCH = "takes too much time or memory"


def render(
    template: str,
    messages: Messages,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text of a conversation, special tokens written literally.

    Templates find what those written for Hugging Face's `apply_chat_template` expect: blocks
    without the line break after them, `break` and `continue`, the block `generation`, the filter
    `tojson` (which keeps letters beyond ASCII), `raise_exception(message)` and
    `strftime_now(format)`. A variable that is not given is empty.

    Args:
      template: the Jinja text.
      messages: objects with a `role` and mostly `content`, oldest first.
      add_generation_prompt: end with the start of the assistant's answer.
      **variables: what else the template knows by name, such as `tools`, `documents`, `bos_token`
        and `eos_token`.

    Raises:
      ValueError: messages of another form, a template that is no Jinja, that refuses these
        messages, that asks for what the sandbox forbids, or that fails.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of at least one message, not {messages!r:.200}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} must be an object with a role, not {message!r:.200}")
    given = {"tools": None, "documents": None, **variables, "messages": messages}
    given["add_generation_prompt"] = add_generation_prompt
    check(template)
    try:
        question = json.dumps([template, given]) if os.name == "posix" else ""
    except TypeError:  # objects of the caller's own, which no other process has
        question = ""
    text, error = json.loads(_ask(question)) if question else _answer(template, given)
    if error:
        raise ValueError(f"the chat template {error}")
    return text


_lock = threading.Lock()
_programs: dict[int, Any] = {}  # that answer, by the process that began them


def _ask(question: str) -> str:
    """The answer to a line of JSON, by a process that begins with the first one, and anew after one
    that ended it.
    """
    with _lock:
        # In a session of its own, so that Ctrl-C on a terminal is the caller's alone.
        program: Any = _programs.pop(os.getpid(), None) or subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        print(question, file=program.stdin, flush=True)
        answer = program.stdout.readline()
        if answer:
            _programs[os.getpid()] = program
        else:
            program.communicate()
    return answer or json.dumps(["", TOO_MUCH])


def _serve() -> None:
    """Answers the lines of standard input, with less time and memory than this process could have."""
    import resource  # POSIX only

    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (min(MEMORY, most % 2**63), most))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose end ends the process
        print(json.dumps([part[:MOST] for part in _answer(*json.loads(line))]), flush=True)


def _answer(template: str, given: Mapping[str, Any]) -> tuple[str, str]:
    """A text, or what there is to say of a template that makes none."""
    try:
        text = check(template).render(given)
    except _Refusal as error:
        return "", f"refuses these messages: {error}"
    except jinja2.exceptions.SecurityError as error:
        return "", f"asks for what its sandbox forbids: {error}"
    except MemoryError:
        return "", TOO_MUCH
    except Exception as error:  # a program of somebody else's may raise anything
        return "", f"fails: {type(error).__name__}: {error}"
    if len(text) > MOST:
        return "", f"makes a text of more than {MOST:,} characters"
    return text, ""


class _Refusal(jinja2.TemplateError):
    """A template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an assistant's words; the text is that of
    the block.

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
        # Or else those that are written are computed there.
        finalize=jinja2.pass_context(lambda _, value: value),
    )
    # Without the escapes of HTML that Jinja's own filter makes.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


@functools.lru_cache(maxsize=16)
def check(template: str) -> jinja2.Template:
    """A template, compiled and not run. Raises ValueError for no Jinja, or filters that are not
    known.
    """
    if len(template) > LONGEST:
        raise ValueError(
            f"the chat template must have at most {LONGEST:,} characters, not {len(template):,}"
        )
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is no Jinja: {error.message} (line {error.lineno})"
        ) from error
    # Of the compilers.
    except (RecursionError, SyntaxError, MemoryError, ArithmeticError, ValueError) as error:
        raise ValueError(
            f"the chat template cannot be compiled ({type(error).__name__})"
        ) from error


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


if __name__ == "__main__":
    _serve()
