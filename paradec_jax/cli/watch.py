"""A continuation while it is written: pictures on a terminal, plain text elsewhere."""

import contextlib
import itertools
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from paradec_jax.decode.canvas import Canvas
from paradec_jax.decode.machine import finish
from paradec_jax.generate import Generation, Task, tokenizer_of

HIDDEN = "_"  # in the place of a mask


def show(task: Task, knobs: Any, prompt: str, delay: float) -> Generation:
    """Shows a task's only row while it grows: pictures on a terminal, plain text as it is committed
    elsewhere.
    """
    console = Console(highlight=False)
    watch, decoder = task.watch(), task.decoder
    live = (
        Live(console=console, auto_refresh=False, vertical_overflow="visible")
        if console.is_terminal
        else None
    )
    state, shown = None, 0
    with live or contextlib.nullcontext():
        for state, _ in task.stream(watch, knobs):
            done = bool(np.asarray(decoder.done(state))[0])
            # Where the text is the whole canvas, nothing of it is sure to stay before the end.
            text = "" if task.whole else watch.visible(0, done=done)
            if live is None:
                print(text[shown:], end="", flush=True)
                shown = len(text)
            else:
                moving = "" if done and not task.whole else _moving(task, state, text)
                live.update(Text.assemble((prompt, "dim"), text, (moving, "cyan")), refresh=True)
                time.sleep(0 if done else delay)
        result = task.decode(finish(decoder, state), watch)
        if live is not None:
            live.update(Text.assemble((prompt, "dim"), result.text[0]), refresh=True)
    if live is None:
        print(result.text[0][shown:])
    return result


def _moving(task: Task, state: Any, shown: str) -> str:
    """Text of the first row after that shown, which may still change: with the guesses, or the rest
    of a canvas.
    """
    tokenizer, rows = tokenizer_of(task.model), state.rows
    if not isinstance(state, Canvas):
        guesses = np.asarray(task.decoder.drafts(state))[0]
        ids = rows.completions()[0] + guesses[guesses >= 0].tolist()
        return tokenizer.decode_after(task.prompts[0], ids, skip_special=True)[len(shown) :]
    ids, final = np.asarray(rows.tokens)[0], np.asarray(state.shown)[0]
    start = 0 if task.whole else int(rows.length[0])
    text = ""
    for known, group in itertools.groupby(
        range(start, int(rows.limit[0])), key=lambda p: bool(final[p])
    ):
        places = list(group)
        before = ids[: places[0]][final[: places[0]]].tolist()
        text += (
            tokenizer.decode_after(before, ids[places].tolist(), skip_special=True)
            if known
            else HIDDEN * len(places)
        )
    return text
