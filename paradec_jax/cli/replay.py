"""`paradec generate --html FILE`: a page that plays how one decoder writes a text, or two side by
side.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.cli.output import PLACE, TEMPLATE
from paradec_jax.decode import DecoderBase
from paradec_jax.decode.canvas import Canvas
from paradec_jax.decode.machine import NETWORK_CALLS, Setting, finish
from paradec_jax.evaluate.timing import Case, measure
from paradec_jax.generate import Generation, Task, tokenizer_of
from paradec_jax.io import atomic_write_text, text_of
from paradec_jax.text.tokenizer import BROKEN, Tokenizer

PASSES = 3  # timings of each decoder


def write_replay(path: str, plays: Sequence[tuple[Setting, Task]]) -> Generation:
    """Writes the page of decoders whose tasks have one model, prompt and row; returns what the
    first one wrote.
    """
    runs, generations = zip(*(_recorded(setting, task) for setting, task in plays), strict=True)
    _put_seconds(runs, plays)
    task = plays[0][1]
    tokenizer, prompt = tokenizer_of(task.model), task.prompts[0]
    # some tokenizers strip the blank of what begins a text
    before = prompt or tokenizer.encode("a")
    shown: set[int] = set()
    for part in (*runs, *(frame for run in runs for frame in run["frames"])):
        shown.update(*(part.get(name, ()) for name in ("tokens", "guesses", "choices")))
    trace = {
        "prompt": tokenizer.decode(prompt, skip_special=True),
        "time": f"median of {PASSES}, {task.model.config.dtype}, {jax.devices()[0].device_kind}",
        "pieces": {token: piece_of(tokenizer, before, token) for token in sorted(shown - {-1})},
        "runs": runs,
    }
    # so that no text ends its script
    text = json.dumps(trace, allow_nan=False).replace("<", "\\u003c")
    atomic_write_text(path, text_of(TEMPLATE).replace(PLACE, text, 1))
    return generations[0]


def piece_of(tokenizer: Tokenizer, before: Sequence[int], token: int) -> str:
    """Text of a token inside a text; as the vocabulary writes it where it alone has none, such as a
    lone byte.
    """
    text = tokenizer.decode_after(before, [token])
    return text if text and BROKEN not in text else tokenizer.token_text(token) or f"<{token}>"


def _recorded(setting: Setting, task: Task) -> tuple[dict[str, Any], Generation]:
    """What a decoder does, a frame for each state from that after the prompt on, and what it
    writes.

    `born` is the frame from which a position's token stays, -1 for none.
    """
    watch, frames, final = task.watch(), [], []
    for state, info in task.stream(watch, setting.knobs):
        seen = jax.device_get(_seen(task.decoder, state))
        final.append(seen.pop("final"))
        seen["guesses"] = np.trim_zeros(seen["guesses"] + 1, "b") - 1
        frame = {name: value.tolist() for name, value in seen.items()}
        frames.append(frame | _marks(info, frame["length"]))
    rows, given = state.rows, np.arange(len(final[0])) < int(state.rows.prompt_lengths[0])
    given |= False if rows.fixed is None else np.asarray(rows.fixed)[0]
    start = 0 if task.whole else int(rows.prompt_lengths[0])
    end = min(max(frame["length"] + len(frame["guesses"]) for frame in frames), int(rows.limit[0]))
    stays = np.stack(final)[:, start:end]
    run = {
        "name": setting.name,
        "label": setting.label(),
        "start": start,
        "tokens": np.asarray(rows.tokens)[0, start:end].tolist(),
        "log_probs": _numbers(np.asarray(rows.log_probs)[0, start:end]),
        "born": np.where(stays.any(axis=0), stays.argmax(axis=0), -1).tolist(),
        "given": given[start:end].tolist(),
        "frames": frames,
    }
    return run, task.decode(finish(task.decoder, state), watch)


@jax.jit(static_argnums=0)
def _seen(decoder: DecoderBase, state: Any) -> dict[str, Any]:
    """What a frame shows of the first row, and which positions stay as they are, [S]."""
    rows = state.rows
    final = jnp.arange(rows.tokens.shape[1]) < rows.length[:, None]
    final |= state.shown if isinstance(state, Canvas) else False
    counts = {"calls": rows.counts[NETWORK_CALLS], "length": rows.length}
    return jax.tree.map(
        lambda leaf: leaf[0], counts | {"guesses": decoder.drafts(state), "final": final}
    )


def _marks(info: Any, length: int) -> dict[str, Any]:
    """What an info says: numbers of the row; from position `at` on, choices and confidences, or a
    wave's changes.
    """
    if not dataclasses.is_dataclass(info):
        return {}
    leaves = {
        name: np.asarray(leaf)[0]
        for name, leaf in vars(info).items()
        if isinstance(leaf, jax.Array)
    }
    marks: dict[str, Any] = {
        "note": {
            name: leaf.item() for name, leaf in leaves.items() if not leaf.ndim and name != "at"
        }
    }
    if "scores" in leaves:
        newest = {
            name: leaf.reshape(-1, leaf.shape[-1])[-1] for name, leaf in leaves.items() if leaf.ndim
        }
        marks |= {"at": leaves["at"].item(), "confidence": _numbers(newest["scores"])}
        if "tokens" in newest:
            marks["choices"] = newest["tokens"].tolist()
    if "distance" in leaves:
        marks |= {
            "at": length - leaves["committed"].item() - 1,
            "change": _numbers(leaves["distance"]),
        }
    return marks


def _numbers(values: Any) -> list[float | None]:
    """Numbers for JSON, None where one is not finite."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


def _put_seconds(runs: Sequence[dict[str, Any]], plays: Sequence[tuple[Setting, Task]]) -> None:
    """Says of each frame how many seconds `run` takes to it: calls after the prompt's take equally
    long.
    """
    plain = functools.partial(dataclasses.replace, log_probs=False)
    cases = [Case(plain(task.decoder), task.params, setting.knobs) for setting, task in plays]
    request = min((task.request for _, task in plays), key=lambda request: request.tokens.shape[1])
    for run, speed in zip(runs, measure(cases, [request], passes=PASSES), strict=True):
        first = run["frames"][0]["calls"]
        calls = int(speed.decoded[0].network_calls[0]) - first
        each = max(speed.seconds - speed.init_seconds, 0.0) / max(calls, 1)
        for frame in run["frames"]:
            frame["seconds"] = round(speed.init_seconds + each * (frame["calls"] - first), 6)
