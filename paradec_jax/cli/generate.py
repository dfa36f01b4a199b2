"""`paradec generate`: one decoder continues a text."""

import sys
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from paradec_jax import store
from paradec_jax.cli.watch import show
from paradec_jax.data.word_problems import PROMPT
from paradec_jax.evaluate.options import choose
from paradec_jax.families import RECURRENT_DEPTH, family_named
from paradec_jax.generate import Generation, generate, prepare

DEFAULT_MODEL = RECURRENT_DEPTH.bundled[0]
Flag = FlagCreatePairsOff[bool]


def generate_command(
    prompt: Positional[Annotated[str, arg(metavar="PROMPT")]],
    decoder: Literal[
        "autoregressive",
        "adaptive",
        "speculative",
        "wavefront",
        "jacobi",
        "multiblock",
        "prompt_lookup",
        "lookahead",
    ]
    | None = None,
    model: Annotated[str, arg(metavar="DIR|NAME")] = DEFAULT_MODEL,
    question: Flag = False,
    stream: Flag = False,
    max_new_tokens: int = 200,
    temperature: float = 0.0,
    top_p: float = 1.0,
    samples: int = 1,
    stop: UseAppendAction[tuple[str, ...]] = (),
    seed: int = 0,
    recurrence: int | None = None,
    inner_recurrence: int | None = None,
    window: int | None = None,
    headway: int | None = None,
    exit_threshold: float | None = None,
    block: int | None = None,
    blocks: int | None = None,
    running: bool | None = None,
    pool: int | None = None,
    candidates: int | None = None,
    spawn: float | None = None,
    acceptance: Literal["coupled", "rejection"] | None = None,
    delay: float = 0.02,
) -> int:
    """Continues a text.

    The prompt is used as it is. The bundled model has learned one form of text,
    "Question: ...", a line break, "Answer:", a line break; --question puts PROMPT into it.

    Args:
      prompt: the text, or - to read it from standard input.
      decoder: how to decode, by default as the last row of the family's table in `paradec compare`. Settings
        are those of the decoder's last row there, changed by the options below.
      model: a model folder, or the name of a bundled model.
      question: put the prompt into the form of the word problems.
      stream: show committed tokens as they come and, on a terminal and in another colour, the candidates that
        move in the wavefront.
      max_new_tokens: tokens at most.
      temperature: 0 takes the most probable token.
      top_p: probability mass kept when sampling.
      samples: continuations to draw.
      stop: text that ends the continuation; may be given several times.
      seed: of all draws.
      recurrence: recurrences a token (autoregressive, speculative) or at most (adaptive).
      inner_recurrence: recurrences of a step (wavefront).
      window: positions of the wave at most (wavefront).
      headway: positions that are appended to the wave a step (wavefront).
      exit_threshold: relative change of a state below which it has converged (wavefront, adaptive).
      block: tokens of a block (jacobi, multiblock).
      blocks: blocks in flight at most (multiblock).
      running: whether the window keeps its full width (jacobi).
      pool: earlier iterates that are searched for candidates (jacobi, multiblock).
      candidates: candidates verified in a call (jacobi, multiblock).
      spawn: agreement of the newest block that spawns the next one (multiblock).
      acceptance: rule for drafts when sampling; rejection needs --candidates 1 and no pool (jacobi, multiblock).
      delay: seconds between two pictures of --stream on a terminal.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    if question:
        prompt = PROMPT.format(question=prompt.strip())
    if stream and samples != 1:
        raise ValueError(f"--stream shows one continuation, but --samples is {samples}")
    loaded = store.load(model)
    options = {
        "recurrence": recurrence,
        "inner_recurrence": inner_recurrence,
        "window": window,
        "headway": headway,
        "exit_threshold": exit_threshold,
        "block": block,
        "blocks": blocks,
        "running": running,
        "pool": pool,
        "candidates": candidates,
        "spawn": spawn,
        "acceptance": acceptance,
        "temperature": temperature,
        "top_p": top_p,
    }
    chosen, knobs = _choose(loaded.family, decoder, {k: v for k, v in options.items() if v is not None})
    arguments: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "samples": samples,
        "stop_strings": stop,
    }
    if stream:
        result = show(loaded, prepare(loaded, [prompt], chosen, **arguments), knobs, prompt, delay)
    else:
        result = generate(loaded, [prompt], chosen, knobs=knobs, **arguments)
        for i, text in enumerate(result.text):
            if samples > 1:
                print(f"--- sample {i}", file=sys.stderr)
            print(text)
    _print_counts(result)
    return 0


def _choose(family: str, name: str | None, options: dict[str, Any]) -> tuple[Any, Any]:
    """The decoder of that name and its knobs: its last row of the family's table, changed by options.

    Raises:
      ValueError: a decoder of another family, or an option that this decoder does not have.
    """
    table = family_named(family).settings
    name = table[-1].name if name is None else name
    settings = [setting for setting in table if setting.name == name]
    if not settings:
        known = ", ".join(dict.fromkeys(setting.name for setting in table))
        raise ValueError(
            f"--decoder {name} does not suit a model of family {family}; it takes one of {known}"
        )
    return choose(name, settings[-1].decoder, settings[-1].knobs, options)


def _print_counts(result: Generation) -> None:
    tokens, calls = sum(len(row) for row in result.tokens), int(result.network_calls.sum())
    told = f"{tokens} tokens in {calls} network calls: {tokens / calls:.2f} tokens a call"
    for name, count in result.counts.items():
        if name not in ("network_calls", "positions"):
            told += f", {int(count.sum()) / tokens:.2f} {name.replace('_', ' ')} a token"
    print(told, file=sys.stderr)
