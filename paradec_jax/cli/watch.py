"""A continuation while it is written: pictures on a terminal, plain text elsewhere."""

import contextlib
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from paradec_jax import store
from paradec_jax.decode import stream
from paradec_jax.generate import Generation, Prepared, StopStrings


def show(model: store.Model, prepared: Prepared, knobs: Any, prompt: str, delay: float) -> Generation:
    """Shows a row while it grows: pictures on a terminal, plain text as it is committed elsewhere."""
    console = Console(highlight=False)
    watch = prepared.watch
    if watch is None:
        watch = StopStrings(prepared.tokenizer, prepared.spec, (), 1)
    state = None
    shown = 0
    states = stream(prepared.decoder, model.params, prepared.request, knobs, interrupt=watch)
    live = (
        Live(console=console, auto_refresh=False, vertical_overflow="visible")
        if console.is_terminal
        else None
    )
    with live or contextlib.nullcontext():
        for state in states:
            done = bool(np.asarray(prepared.decoder.done(state))[0])
            text = watch.visible(0, done=done)
            if live is None:
                print(text[shown:], end="", flush=True)
                shown = len(text)
            else:
                moving = "" if done else _candidates(prepared, state)
                live.update(Text.assemble((prompt, "dim"), text, (moving, "cyan")), refresh=True)
                time.sleep(0 if done else delay)
        result = prepared.collect(prepared.decoder.finish(state))
        if live is not None:
            live.update(Text.assemble((prompt, "dim"), result.text[0]), refresh=True)
    if live is None:
        print(result.text[0][shown:])
    return result


def _candidates(prepared: Prepared, state: Any) -> str:
    """Text of the guesses behind the first row's committed tokens, or nothing for decoders without any."""
    progress = state.progress
    start, end = int(progress.prompt_lengths[0]), int(progress.length[0])
    if hasattr(state, "candidates"):  # of a wave
        guesses = np.asarray(state.candidates)[0, 1 : int(state.active[0])].tolist()
    elif hasattr(state, "horizon"):  # of a window
        guesses = np.asarray(state.draft)[0, : int(state.horizon[0]) - end].tolist()
    else:
        return ""
    committed = np.asarray(progress.tokens)[0, start:end].tolist()
    decode = prepared.tokenizer.decode
    return decode(committed + guesses, skip_special=True)[len(decode(committed, skip_special=True)) :]
