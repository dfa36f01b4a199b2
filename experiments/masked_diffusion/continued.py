"""Prompts continued: perplexity of the continuations, and how alike those of one prompt are.

    python -m experiments.masked_diffusion.continued --text FILE

For figures 4 and 19 of SDTT (Deschenaux and Gulcehre 2024, arXiv 2410.21035): prompts are the beginnings of pieces of
held-out text, each is continued several times by the teacher and by the student of every round. The judge reads the
prompt and scores what comes after it; self-BLEU compares the continuations of one prompt with each other (eq. 8).
The real continuations stand beside them.
"""

import dataclasses
import hashlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments.common.command import run as run_command
from experiments.common.plots import draw_panels
from experiments.common.record import rows_begun, write_record
from experiments.masked_diffusion.study import Options as Models
from experiments.masked_diffusion.study import masked, rounds_of
from paradec_jax import Model, facts, load, make_request, run, store
from paradec_jax.data.text import read_text, windows
from paradec_jax.decode.machine.request import keys_of
from paradec_jax.evaluate.intervals import bootstrap
from paradec_jax.evaluate.judge import check_judge
from paradec_jax.evaluate.likelihood import Row, token_log_likelihoods
from paradec_jax.evaluate.text_measures import has_sacrebleu, self_bleu
from paradec_jax.generate import tokenizer_of

PERPLEXITY = "perplexity of continuations"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to continue.

    Attributes:
      text: the file that the models were trained on, whose held-out part the prompts come from.
      teacher, students, judge, runs: models, as `study` takes them.
      steps: of the sampler.
      prompts: how many.
      prompt: tokens of each.
      copies: continuations of each.
      length: tokens of prompt and continuation; as long as the teacher when None.
      rows: texts drawn together.
      seed: of all draws.
      out: where the JSON goes.
      figure: where the picture goes.
    """

    text: Path
    teacher: str | None = None
    students: tuple[str, ...] = ()
    judge: str | None = None
    runs: Path = Path("runs")
    steps: tuple[int, ...] = (8, 16, 32, 64)
    prompts: int = 100
    prompt: int = 50
    copies: int = 5
    length: int | None = None
    rows: int = 50
    seed: int = 0
    out: Path = Path("experiments/masked_diffusion/results/continued.json")
    figure: Path = Path("experiments/masked_diffusion/figures/continued.png")

    def __post_init__(self) -> None:
        least = min(*self.steps, self.prompts, self.prompt, self.rows) if self.steps else 0
        if least < 1 or self.copies < 2:
            raise ValueError("steps, prompts, prompt and rows must be at least 1 and copies at least 2")

    @property
    def models(self) -> Models:
        """Where the models are."""
        return Models(
            study=(), **{name: getattr(self, name) for name in ("teacher", "students", "judge", "runs")}
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """Held-out text in pieces [N, L], of which the first `prompt` tokens are prompts, and who judges what follows."""

    ids: np.ndarray
    prompt: int
    judge: Model

    def nats(self, texts: np.ndarray) -> np.ndarray:
        """Mean loss of what follows the prompt in each text, [N]."""
        bos = self.judge.token_spec.bos
        begin = () if bos is None else (bos,)
        count = texts.shape[1] - self.prompt
        rows = [Row((*begin, *text), count) for text in texts.tolist()]
        found = token_log_likelihoods(self.judge.network, self.judge.params, rows, batch=32)
        return np.asarray([-np.mean(scores) for scores, _ in found])


def pieces_of(options: Options) -> Pieces:
    """Prompts and judge.

    Raises:
      ValueError: no room after the prompt, too little text, a judge that is none or that has another tokenizer.
    """
    model, judge = load(options.models.first), load(options.models.judging, dtype="float32")
    check_judge(judge, "sdtt")
    tokenizer = tokenizer_of(model)
    if not tokenizer.same_as(tokenizer_of(judge)):
        raise ValueError("the judge must have the tokenizer of the teacher, for it reads ids")
    length = model.network.max_length if options.length is None else options.length
    if not options.prompt < length:
        raise ValueError(f"a prompt of {options.prompt} tokens leaves no room in texts of {length}")
    held_out = np.concatenate(read_text(options.text, tokenizer)[0].held_out)
    if (held_out == model.token_spec.mask).any():
        raise ValueError(f"{options.text} holds characters that {options.models.first} does not know")
    return Pieces(windows(held_out, length, options.prompts), options.prompt, judge)


def continued(model: Model, pieces: Pieces, steps: int, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Each prompt with each of its continuations, [N copies, L], and the network calls of each."""
    length, setting = pieces.ids.shape[1], masked(steps)
    decoder = setting.decoder.bind(model.network, length, model.token_spec)
    params = decoder.prepare(model.params)
    prompts = np.repeat(pieces.ids[:, : options.prompt], options.copies, axis=0)
    texts, calls = [], []
    for start in range(0, len(prompts), options.rows):
        numbers = np.arange(start, start + options.rows, dtype=np.int32)
        some = prompts[np.minimum(numbers, len(prompts) - 1)]
        keys = keys_of(np.int64(options.seed), numbers)
        request = make_request(some, max_new_tokens=length - options.prompt, keys=keys)
        decoded = run(decoder, params, request, setting.knobs)
        texts.append(np.asarray(decoded.tokens))
        calls.append(np.asarray(decoded.network_calls))
    return np.concatenate(texts)[: len(prompts)], np.concatenate(calls)[: len(prompts)]


def measured(model: Model, pieces: Pieces, texts: np.ndarray, copies: int) -> dict[str, Any]:
    """Perplexity of continuations with its interval over prompts, and self-BLEU."""
    nats = pieces.nats(texts).reshape(-1, copies).mean(axis=1)
    low, high = bootstrap(nats)
    bleu = None
    if copies > 1 and has_sacrebleu():
        written = [
            tokenizer_of(model).decode_after(row[: pieces.prompt], row[pieces.prompt :], skip_special=True)
            for row in texts.tolist()
        ]
        bleu = self_bleu([written[i : i + copies] for i in range(0, len(written), copies)])
    ends = [math.exp(low), math.exp(high)] if math.isfinite(low) else [None, None]
    return {"perplexity": math.exp(nats.mean()), "interval": ends, "self_bleu": bleu}


def rows_of(options: Options, pieces: Pieces) -> list[dict[str, Any]]:
    """A row a model and number of steps, and one of the real continuations; what is written already is kept."""
    kept = kept_of(options)
    rows = rows_begun(options.out, kept) or []
    lines: list[tuple[str, str]] = [("teacher", options.models.first), *rounds_of(options.models)]
    for line, place in lines:
        sha256 = store.fingerprint(place)
        model = None
        for steps in options.steps:
            start = {"line": line, "steps": steps, "model_sha256": sha256}
            if any(row.items() >= start.items() for row in rows):
                continue
            model = load(place, dtype="float32") if model is None else model
            texts, calls = continued(model, pieces, steps, options)
            found = measured(model, pieces, texts, options.copies) | {"network_calls": float(calls.mean())}
            rows.append({**start, **found, "dtypes": facts.dtypes(model.params)})
            _write(options, kept, rows)
            print(told(rows[-1]), flush=True)
    if not any(row["steps"] is None for row in rows):
        real = measured(pieces.judge, pieces, pieces.ids, 1)
        rows.append({"line": "real text", "steps": None, "model_sha256": None, **real, "dtypes": []})
        _write(options, kept, rows)
        print(told(rows[-1]), flush=True)
    return rows


def kept_of(options: Options) -> dict[str, Any]:
    """What must be the same for two rows to stand in one file."""
    names = ("prompts", "prompt", "copies", "length", "seed")
    text, judge = hashlib.sha256(options.text.read_bytes()), store.fingerprint(options.models.judging)
    own = {name: getattr(options, name) for name in names}
    return own | {"text_sha256": text.hexdigest(), "judge_sha256": judge}


def told(row: dict[str, Any]) -> str:
    """A row as text."""
    steps = "" if row["steps"] is None else f"{row['steps']} steps"
    bleu = "" if row["self_bleu"] is None else f"  self-BLEU {row['self_bleu']:.2f}"
    return f"{row['line']:12s} {steps:10s} perplexity {row['perplexity']:.3f}{bleu}"


def _write(options: Options, kept: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    dtypes = [dtype for row in rows for dtype in row["dtypes"]]
    write_record(options.out, kept, {"rows": rows}, dtypes=dtypes)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Writes, prints and draws the table."""
    rows = rows_of(options, pieces_of(options))
    panels: dict[str, dict[str, list[tuple[float, float, Sequence[float]]]]] = {}
    for row in rows:
        if row["steps"] is None:
            continue
        at = row["perplexity"]
        ends = [at, at] if None in row["interval"] else row["interval"]
        panels.setdefault(PERPLEXITY, {}).setdefault(row["line"], []).append((row["steps"], at, ends))
        if row["self_bleu"] is not None:
            point = row["steps"], row["self_bleu"], [row["self_bleu"]] * 2
            panels.setdefault("self-BLEU of a prompt", {}).setdefault(row["line"], []).append(point)
    try:
        draw_panels(panels, options.figure, x="steps", logarithmic=(PERPLEXITY,))
    except ImportError:
        print("no picture: matplotlib is missing (pip install -e '.[eval]')", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
