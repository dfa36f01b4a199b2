"""A continuation while it is written: pictures on a terminal, plain text elsewhere."""

import contextlib
import itertools
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from paradec_jax import store
from paradec_jax.decode import stream
from paradec_jax.decode.machine.drive import finish
from paradec_jax.decode.masked.canvas import Canvas
from paradec_jax.generate import Generation, Prompted, parameters_for
from paradec_jax.stop_strings import StopStrings


def show(model: store.Model, prepared: Prompted, knobs: Any, prompt: str, delay: float) -> Generation:
    """Shows a row while it grows: pictures on a terminal, plain text as it is committed elsewhere."""
    console = Console(highlight=False)
    watch = prepared.watch
    if watch is None:
        watch = StopStrings(prepared.tokenizer, prepared.spec, (), 1, prepared.prompts)
    state = None
    shown = 0
    decoder = prepared.decoder
    params = decoder.prepare(parameters_for(model, decoder))
    states = stream(decoder, params, prepared.request, knobs, interrupt=watch)
    live = (
        Live(console=console, auto_refresh=False, vertical_overflow="visible")
        if console.is_terminal
        else None
    )
    with live or contextlib.nullcontext():
        for state, _ in states:
            done = bool(np.asarray(decoder.done(state))[0])
            text = watch.visible(0, done=done)
            if live is None:
                if not prepared.whole:
                    print(text[shown:], end="", flush=True)
                    shown = len(text)
            else:
                if prepared.whole:
                    text = ""
                moving = "" if done and not prepared.whole else _moving(prepared, state, text)
                live.update(Text.assemble((prompt, "dim"), text, (moving, "cyan")), refresh=True)
                time.sleep(0 if done else delay)
        result = prepared.collect(finish(decoder, state))
        if live is not None:
            live.update(Text.assemble((prompt, "dim"), result.text[0]), refresh=True)
    if live is None:
        print(result.text[0][shown:])
    return result


HIDDEN = "_"  # in the place of a mask


def _moving(prepared: Prompted, state: Any, shown: str) -> str:
    """Text of the first row after that shown, which may still change: with the guesses, or the rest of a canvas."""
    if isinstance(state, Canvas):
        return _canvas(prepared, state)
    return _drafts(prepared, state, shown)


def _canvas(prepared: Prompted, state: Canvas) -> str:
    """The canvas after the first row's committed tokens, or all of it where that is the result: masks as lines."""
    rows = state.rows
    ids, final = np.asarray(rows.tokens)[0], np.asarray(state.final)[0]
    start = 0 if prepared.whole else int(rows.length[0])
    told = ""
    for known, group in itertools.groupby(range(start, int(rows.limit[0])), key=lambda p: bool(final[p])):
        places = list(group)
        before = ids[: places[0]][final[: places[0]]].tolist()
        told += (
            prepared.tokenizer.decode_after(before, ids[places].tolist(), skip_special=True)
            if known
            else HIDDEN * len(places)
        )
    return told


def _drafts(prepared: Prompted, state: Any, shown: str) -> str:
    """Text of the first row's committed tokens and guesses after what is shown of it."""
    committed = state.rows.completions()[0]
    guesses = np.asarray(prepared.decoder.drafts(state))[0]
    ids = committed + guesses[guesses >= 0].tolist()
    return prepared.tokenizer.decode_after(prepared.prompts[0], ids, skip_special=True)[len(shown) :]
