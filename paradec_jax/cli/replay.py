"""`paradec generate --html FILE`: a page that plays how one decoder writes a text, or two side by side."""

import dataclasses
import functools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from paradec_jax.cli.options import NAMES, options_of
from paradec_jax.decode.machine.drive import finish
from paradec_jax.decode.machine.rows import NETWORK_CALLS
from paradec_jax.decode.masked.canvas import Canvas
from paradec_jax.disk.folders import ASSETS
from paradec_jax.evaluate.setting import Setting
from paradec_jax.generate import Generation, Task, tokenizer_of
from paradec_jax.timing import Case, measure
from paradec_jax.tokenizer import BROKEN, Tokenizer

TEMPLATE, PLACE = ASSETS / "replay.html", "{}<!--trace-->"  # what the trace is written over
PASSES = 3  # timings of each decoder
DIGITS = 4


def second_decoder(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a decoder that is written as on the command line, "jacobi --block 8".

    Raises:
      ValueError: a text that begins with no decoder's name.
    """
    name, *words = shlex.split(text) or [""]
    name = name.replace("-", "_")
    if name not in NAMES:
        raise ValueError(f"--beside must begin with one of {', '.join(NAMES)}, not {name!r}")
    return name, tyro.cli(options_of(name), args=words, prog=f"--beside {name}")


def write_replay(path: str, plays: Sequence[tuple[Setting, Task]]) -> Generation:
    """Writes the page of one decoder or two, whose tasks have one model and one row, and the same prompt.

    Returns:
      What the first decoder wrote.
    """
    runs, generations = zip(*(_recorded(setting, task) for setting, task in plays), strict=True)
    _put_seconds(runs, plays)
    task = plays[0][1]
    tokenizer, prompt = tokenizer_of(task.model), task.prompts[0]
    before = prompt or tokenizer.encode("a")  # some tokenizers strip the blank of what begins a text
    shown = {token for run in runs for token in run["tokens"]}
    shown |= {token for run in runs for frame in run["frames"] for token in frame["guesses"] if token >= 0}
    trace = {
        "prompt": tokenizer.decode(prompt, skip_special=True),
        "dtype": task.model.config.dtype,
        "device": jax.devices()[0].device_kind,
        "passes": PASSES,
        "pieces": {token: piece_of(tokenizer, before, token) for token in sorted(shown)},
        "runs": runs,
    }
    # Nothing in a text can end the script element that holds it.
    text = json.dumps(trace, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    Path(path).write_text(TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text, 1), encoding="utf-8")
    return generations[0]


def piece_of(tokenizer: Tokenizer, before: Sequence[int], token: int) -> str:
    """Text of a token inside a text; as the vocabulary writes it where it alone has none, such as a lone byte."""
    text = tokenizer.decode_after(before, [token])
    return text if text and BROKEN not in text else tokenizer.token_text(token) or f"<{token}>"


def _recorded(setting: Setting, task: Task) -> tuple[dict[str, Any], Generation]:
    """What a decoder does, state by state from that after the prompt, and what it writes.

    Of a run: `start`, the first position that is shown; `tokens` and `log_probs` from there on; `born`, the frame
    after which each stays, -1 for never; `given`, whether it was the caller's.
    Of a frame: `calls`; `length`, committed tokens; `guesses` for the positions after them, -1 for none; `scores`,
    what the rule looked at, from position `at` on; `note`, the info's numbers of the row.
    """
    watch, frames, final = task.watch(), [], []
    for state, info in task.stream(watch, setting.knobs):
        seen = jax.device_get(_seen(task.decoder, state))
        calls, length = int(seen["calls"]), int(seen["length"])
        guesses = np.trim_zeros(seen["guesses"] + 1, "b") - 1
        frames.append({"calls": calls, "length": length, "guesses": guesses.tolist(), **_told(info, length)})
        final.append(seen["final"])
    rows, end = state.rows, max(frame["length"] + len(frame["guesses"]) for frame in frames)
    given = np.arange(len(final[0])) < int(rows.prompt_lengths[0])
    given |= False if rows.fixed is None else np.asarray(rows.fixed)[0]
    start = 0 if task.whole else int(rows.prompt_lengths[0])
    stays = np.stack(final)[:, start:end]
    log_probs = np.asarray(rows.log_probs)[0, start:end]
    run = {
        "name": setting.name,
        "label": setting.label(),
        "canvas": isinstance(state, Canvas),
        "start": start,
        "tokens": np.asarray(rows.tokens)[0, start:end].tolist(),
        "log_probs": _numbers(log_probs),
        "born": np.where(stays.any(axis=0), stays.argmax(axis=0), -1).tolist(),
        "given": given[start:end].tolist(),
        "frames": frames,
    }
    return run, task.decode(finish(task.decoder, state), watch)


@functools.partial(jax.jit, static_argnums=0)
def _seen(decoder: Any, state: Any) -> dict[str, Any]:
    """What a frame shows of the first row, and which positions stay as they are, [S]."""
    rows = state.rows
    final = state.final if isinstance(state, Canvas) else jax.numpy.zeros_like(rows.tokens, bool)
    committed = jax.numpy.arange(rows.tokens.shape[1]) < rows.length[:, None]
    seen = {"calls": rows.counts[NETWORK_CALLS], "length": rows.length, "guesses": decoder.drafts(state)}
    return jax.tree.map(lambda leaf: leaf[0], seen | {"final": final | committed})


def _told(info: Any, length: int) -> dict[str, Any]:
    """What an info says: numbers of the row; confidences of a canvas, or how far the latents of a wave moved."""
    if not dataclasses.is_dataclass(info):
        return {}
    leaves = {name: np.asarray(leaf)[0] for name, leaf in vars(info).items() if isinstance(leaf, jax.Array)}
    told: dict[str, Any] = {"note": {name: leaf.item() for name, leaf in leaves.items() if not leaf.ndim}}
    if "scores" in leaves:  # of the newest round, where a head makes several
        width = leaves["where"].shape[-1]
        told |= {"at": leaves["at"].item(), "confidence": _numbers(leaves["scores"].reshape(-1, width)[-1])}
    if "distance" in leaves:
        told |= {"at": length - leaves["committed"].item() - 1, "change": _numbers(leaves["distance"])}
    return told


def _numbers(values: Any) -> list[float | None]:
    """Numbers for JSON, None where one is not finite."""
    return [round(float(value), DIGITS) if np.isfinite(value) else None for value in values]


def _put_seconds(runs: Sequence[dict[str, Any]], plays: Sequence[tuple[Setting, Task]]) -> None:
    """Says of each frame how many seconds `run` takes to it: calls after the prompt's take equally long."""
    cases = [
        Case(dataclasses.replace(task.decoder, log_probs=False), task.params, setting.knobs)
        for setting, task in plays
    ]
    request = min((task.request for _, task in plays), key=lambda request: request.tokens.shape[1])
    for run, speed in zip(runs, measure(cases, [request], passes=PASSES), strict=True):
        first = run["frames"][0]["calls"]
        more = int(speed.decoded[0].network_calls[0]) - first
        each = max(speed.seconds - speed.init_seconds, 0.0) / max(more, 1)
        for frame in run["frames"]:
            frame["seconds"] = round(speed.init_seconds + each * (frame["calls"] - first), 6)
