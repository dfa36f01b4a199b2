"""`paradec generate DECODER PROMPT`: one decoder continues a text. Each has the options that are
its own.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, UseAppendAction, arg
from tyro.extras import SubcommandApp

from paradec_jax import store
from paradec_jax.cli.options import NAMES, options_of, summary
from paradec_jax.cli.output import check_place
from paradec_jax.cli.replay import write_replay
from paradec_jax.cli.watch import show
from paradec_jax.config import check_numbers
from paradec_jax.data.problems import PROMPT
from paradec_jax.decode import DecoderBase
from paradec_jax.decode.machine import Setting
from paradec_jax.families import FAMILIES, choose
from paradec_jax.generate import NEW_TOKENS, Generation, Task, answering, continuation_task
from paradec_jax.infill import infill_task
from paradec_jax.records import choices

DEFAULT = "default"  # the decoder where none is named
Flag = FlagCreatePairsOff[bool]


@choices
class Text:
    """What to continue, and how far.

    Without a prompt a decoder of canvases writes from nothing. With --gaps it fills the gaps of a
    text.

    The prompt is used as it is. The bundled models have learned one form of text, "Question: ...",
    a line break, "Answer:", a line break; --question puts PROMPT into it.

    With --chat the prompt is a message in the form of the model's chat template. Without a prompt
    --chat is a
    conversation: a line is read and answered, and then the next, until the input ends (Ctrl-D).

    Attributes:
      prompt: the text, or - to read it from standard input; none for a decoder that can start from
        nothing, or for a conversation.
      model: a model folder, the name of a bundled model, a Hugging Face folder, a .gguf file or
        org/name[@revision]; by default a bundled model that suits the decoder.
      adapter: folder of a LoRA adapter in PEFT's layout, for that model.
      question: put the prompt into the form of the word problems.
      chat: answer the prompt as a message, or hold a conversation where there is none.
      system: what the model is told before the first message of --chat.
      gaps: "[12]" in the prompt is a gap of 12 tokens, to be filled; nothing is added after the
        text.
      stream: show committed tokens as they come and, on a terminal and in another colour, the
        candidates that move in the window, or a canvas with a line in the place of each mask.
      max_new_tokens: tokens at most; 200 if left out.
      samples: continuations to draw.
      stop: text that ends the continuation; may be given several times.
      seed: of all draws.
      delay: seconds between two pictures of --stream on a terminal.
      html: file for a page that plays how the text is written, call by call.
      beside: second decoder of that page, with its options: "jacobi --block 8".
    """

    prompt: Positional[Annotated[str, arg(metavar="PROMPT")]] = ""
    model: Annotated[str | None, arg(metavar="SOURCE")] = None
    adapter: Annotated[str | None, arg(metavar="FOLDER")] = None
    question: Flag = False
    chat: Flag = False
    system: str | None = None
    gaps: Flag = False
    stream: Flag = False
    max_new_tokens: int | None = None
    samples: int = 1
    stop: UseAppendAction[tuple[str, ...]] = ()
    seed: int = 0
    delay: float = 0.02
    html: Annotated[str | None, arg(metavar="FILE")] = None
    beside: Annotated[str | None, arg(metavar="DECODER")] = None

    def check(self) -> None:
        """Refuses numbers out of range, and options that do not go together. Raises ValueError."""
        check_numbers(Text, vars(self), {"samples": (1, 2**16)})
        for option in ("stream", "html"):
            if getattr(self, option) and self.samples != 1:
                raise ValueError(
                    f"--{option} shows one continuation, but --samples is {self.samples}"
                )
        if (self.html and self.stream) or (self.beside and not self.html):
            raise ValueError("--html is no option beside --stream, and --beside needs --html")
        if self.html == "-":
            raise ValueError("--html names a file, and - is none")
        check_place("html", self.html)
        if self.chat and self.gaps:
            raise ValueError("--gaps fills a text, and --chat answers one: give one of them")
        if self.system is not None and not self.chat:
            raise ValueError("--system begins a conversation, so it needs --chat")
        if self.chat and not self.prompt and (self.html or self.samples != 1):
            raise ValueError(
                "a conversation goes on from one answer: it has no --html and one of --samples"
            )

    def framed(self, words: str) -> str:
        """Words in the form that the options ask for."""
        return PROMPT.format(question=words.strip()) if self.question else words


def with_gaps(text: str) -> list[str | int]:
    """The pieces of a text in which "[12]" is a gap of 12 tokens.

    Raises:
      ValueError: no gap.
    """
    words = re.split(r"\[(\d+)\]", text)
    if len(words) == 1:
        raise ValueError('--gaps needs a gap in the prompt, such as "[12]" for one of 12 tokens')
    return [int(word) if i % 2 else word for i, word in enumerate(words) if i % 2 or word]


def with_decoder(words: Sequence[str]) -> list[str]:
    """The words after `generate`, with the default where they name no decoder."""
    if not words or words[0] in ("-h", "--help") or words[0].replace("-", "_") in (DEFAULT, *NAMES):
        return list(words)
    return [DEFAULT, *words]


def generate_text(name: str | None, text: Text, options: dict[str, Any]) -> int:
    """Continues a text with the decoder of that name, or the one that the model names, or its
    family's plain one.
    """
    text.check()
    talk = text.chat and not text.prompt
    prompt = "" if talk else text.framed(sys.stdin.read() if text.prompt == "-" else text.prompt)
    model = store.load(_model_for(name) if text.model is None else text.model, adapter=text.adapter)
    settings = [choose(model.family, model.decoder if name is None else name, options)]
    settings += [choose(model.family, text.beside)] if text.beside else []
    if text.chat:
        settings = [answering(model, setting, options) for setting in settings]
    messages = [] if text.system is None else [{"role": "system", "content": text.system}]
    if talk:
        _converse(model, settings, messages, text)
    else:
        asked = [*messages, {"role": "user", "content": prompt}]
        _write(model, settings, asked if text.chat else prompt, text)
    return 0


def _converse(
    model: store.Model, settings: Sequence[Setting], messages: list[dict[str, str]], text: Text
) -> None:
    """Answers lines of standard input, each after all that was said before it."""
    mark = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(mark)
        except EOFError:  # Ctrl-D leaves the cursor after the mark
            print(end="\n" if mark else "")
            return
        if line.strip():
            messages = [*messages, {"role": "user", "content": text.framed(line)}]
            answer = _write(model, settings, messages, text).text[0]
            messages = [*messages, {"role": "assistant", "content": answer}]


def _write(model: store.Model, settings: Sequence[Setting], prompt: Any, text: Text) -> Generation:
    """Prints what follows a text or a list of messages, and what it cost."""
    tasks = [_task(model, setting.decoder, prompt, text) for setting in settings]
    if text.stream:
        result = show(
            tasks[0], settings[0].knobs, "" if text.gaps or text.chat else prompt, text.delay
        )
    else:
        plays = list(zip(settings, tasks, strict=True))
        result = write_replay(text.html, plays) if text.html else tasks[0].run(settings[0].knobs)
        for i, continuation in enumerate(result.text):
            if text.samples > 1:
                print(f"--- sample {i}", file=sys.stderr)
            print(continuation, flush=True)
    _print_counts(result)
    return result


def _task(model: store.Model, decoder: DecoderBase, prompt: Any, text: Text) -> Task:
    """A text to be continued, or its gaps to be filled, or messages to be answered."""
    options: dict[str, Any] = {
        "seed": text.seed,
        "samples": text.samples,
        "log_probs": bool(text.html),
    }
    if not text.gaps:
        budget = NEW_TOKENS if text.max_new_tokens is None else text.max_new_tokens
        return continuation_task(
            model, [prompt], decoder, max_new_tokens=budget, stop_strings=text.stop, **options
        )
    if text.stop or text.max_new_tokens is not None:
        raise ValueError(
            "--gaps says what is to be written, so --stop and --max-new-tokens must not be given"
        )
    return infill_task(model, with_gaps(prompt), decoder, **options)


def _model_for(name: str | None) -> str:
    """The last bundled model of the family whose models suit it most, or of the first that has it.

    Raises:
      ValueError: a decoder of families of which none is bundled.
    """
    families = [family for family in FAMILIES.values() if family.named(name) and family.bundled]
    if not families:
        raise ValueError(f"no bundled model suits {name}: name one with --model")
    return max(families, key=lambda family: [*family.decoders][-1] == name).bundled[-1]


def _print_counts(result: Generation) -> None:
    calls = int(result.network_calls.sum())
    tokens = int(np.round(result.tokens_per_call * result.network_calls).sum())
    line = f"{tokens} tokens in {calls} network calls: {tokens / calls:.2f} tokens a call"
    for name, count in result.counts.items():
        if name not in ("network_calls", "positions"):
            line += f", {int(count.sum()) / tokens:.2f} {name.replace('_', ' ')} a token"
    print(line, file=sys.stderr)


def _command(name: str | None) -> Callable[..., int]:
    """The function of one subcommand, whose annotations are its options."""

    def run(text: OmitArgPrefixes[Text], decoder: OmitArgPrefixes[options_of(name)]) -> int:
        return generate_text(name, text, decoder)

    return run


app = SubcommandApp()
app.__doc__ = (
    "Continues a text: DECODER PROMPT, or PROMPT alone for the decoder that suits the model."
)
app.command(
    name=DEFAULT, help="The decoder that the model names, or else the plain one of its family."
)(_command(None))
for _name in NAMES:
    app.command(name=_name, help=summary(_name))(_command(_name))
