"""What drafts by masks gain on a model's own answers: tokens a call of every shape, from one set of
texts.

    python -m experiments.real.drafts MODEL ADAPTER test.jsonl --prompts 200 --out drafts.json

The model answers the prompts greedily, one by one. Then the masks after every place of an answer
draft what follows, each draft drawn with the one before it known, as `Drafted` does. From the number
of right drafts at each place follow the calls of each shape:

    comb of K    a call commits its right drafts and one token, and has fresh drafts at any place
    line of K    after a refusal the next call has no drafts, and commits one token

The prompt's call drafts too and counts. The masks of this line stand after the last draft; `Drafted`
puts them where the text most probably ends. `--check` decodes some of the prompts with decoders, sampled
ones too, and lists texts that are not one by one's. `--timed` times some shapes one row at a
time, in turns with one by one and prompt lookup, the prompt's call included.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jaxtyping import Array, Int

import paradec_jax as pd
from experiments.common.command import run as run_command
from experiments.common.record import write_record
from experiments.real.settings import HERE
from paradec_jax import decode
from paradec_jax.data.jsonl import read_examples
from paradec_jax.evaluate.cases import case_of
from paradec_jax.evaluate.intervals import bootstrap, ends, speedup
from paradec_jax.evaluate.timing import measure
from paradec_jax.families import choose
from paradec_jax.losses.drafts import at, mask_rows, text_rows
from paradec_jax.objectives.answers import answers, asked

SHAPES = (
    "autoregressive",
    "prompt_lookup",
    *(f"drafted --masks {masks}" for masks in (1, 2, 3)),
    *(f"drafted --masks {masks} --places 1" for masks in (2, 3)),
)
PLACES = 64  # of a text whose masks are computed in one call


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
      model: the model, as for `pd.load`.
      adapter: folder of `paradec train draft`.
      data: JSON lines with prompts.
      prompts: how many of them, drawn by the seed.
      new_tokens: tokens of an answer, at most.
      rows: prompts that are decoded together.
      check: prompts that decoders decode.
      decoders: these, as a command line names them.
      timed: prompts that are timed.
      passes: timings of each shape.
      shapes: decoders that are timed, as a command line names them; the first is the baseline.
      seed: seed of the choice of prompts.
      dtype: of parameters and computation.
      out: path of the JSON.
    """

    model: tyro.conf.Positional[str]
    adapter: tyro.conf.Positional[Path]
    data: tyro.conf.Positional[Path]
    prompts: int = 200
    new_tokens: int = 128
    rows: int = 16
    check: int = 8
    decoders: tuple[str, ...] = ("drafted", "drafted --places 1")
    timed: int = 0
    passes: int = 5
    shapes: tuple[str, ...] = SHAPES
    seed: int = 1
    dtype: str = "float32"
    out: Path = HERE / "results" / "smollm2-135m-drafts.json"


def right_drafts(
    network: Any,
    drafter: Any,
    new_tokens: int,
    params: Any,
    tokens: Int[Array, "B T"],
    prompts: Int[Array, "B"],
    lengths: Int[Array, "B"],
) -> Int[Array, "B S"]:
    """How many drafts after each place of the answers equal what follows there, up to the text's end;
    the first place is the prompt's last.
    """
    cache, _ = text_rows(network, params["network"], tokens)
    (batch, width), count = tokens.shape, drafter.count
    candidates = decode.Drafted().candidates

    def some(offsets: Int[Array, "P"]) -> Int[Array, "B P"]:
        anchors = jnp.minimum(prompts[:, None] - 1 + offsets, width - 1)
        places = anchors[..., None] + 1 + jnp.arange(count)
        seen = jnp.arange(width) <= anchors[..., None]
        hidden = mask_rows(drafter, params, cache, seen, places)
        ids = lax.top_k(network.logits(params["network"], hidden), candidates)[1]

        def draft(before: Array, j: Array) -> tuple[Array, Array]:
            informed = drafter.informed(params, hidden[:, :, j], before)
            best = jnp.argmax(drafter.scores(params, informed, ids[:, :, j]), axis=-1)
            token = jnp.take_along_axis(ids[:, :, j], best[..., None], axis=-1)[..., 0]
            return token, token

        known = at(tokens, jnp.minimum(places, width - 1))  # the tokens at a + 1 .. a + k
        _, drafts = lax.scan(draft, known[..., 0], jnp.arange(count))
        follows = at(tokens, jnp.minimum(places + 1, width - 1))
        right = (jnp.moveaxis(drafts, 0, -1) == follows) & (places + 1 < lengths[:, None, None])
        return jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=-1), axis=-1)

    size = -(-new_tokens // PLACES) * PLACES
    found = lax.map(some, jnp.arange(size).reshape(-1, PLACES))
    return jnp.moveaxis(found, 0, 1).reshape(batch, size)


def calls_of(
    right: np.ndarray, prompt: int, length: int, count: int, line: bool
) -> tuple[int, list[int]]:
    """Calls of a text whose first `prompt` tokens are given, and how many drafts each accepted."""
    # The prompt's call writes one token, and drafts.
    accepted, known, calls, drafted = list[int](), prompt + 1, 1, True
    while known < length:
        # Drafts of this call stand after the newest token, whose masks were after the one before it.
        m = min(int(right[known - 1 - prompt]), count) if drafted else 0
        accepted.append(m)
        drafted = not line or m == count or not drafted
        known, calls = known + m + 1, calls + 1
    return calls, accepted


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    model = pd.load(options.model, dtype=options.dtype, adapter=options.adapter)
    if model.drafter is None:
        raise ValueError(
            f"{options.adapter} is an adapter without masks: paradec train draft makes one"
        )
    count = model.drafter.config.count
    examples = read_examples(
        options.data, model, folder=Path(".cache/drafts"), length=10**6, prompts=True
    )
    _, prompts = asked(examples, model, options.seed, options.prompts, options.new_tokens, count)
    texts, calls = answers(prompts, model, decode.AutoRegressive(greedy=True), options.rows)
    networks = model.network, model.drafter.network
    program = jax.jit(functools.partial(right_drafts, *networks, options.new_tokens))
    params = {"network": model.prepared, "drafter": networks[1].prepare(model.drafter.params)}
    found = []
    for begin in range(0, len(texts), options.rows):
        some = range(begin, min(begin + options.rows, len(texts)))
        full = [[*prompts.tokens[i][: prompts.lengths[i]], *texts[i]] for i in some]
        tokens = np.zeros((options.rows, prompts.size), np.int32)
        begins, lengths = np.ones((2, options.rows), np.int32)
        for row, (i, ids) in enumerate(zip(some, full, strict=True)):
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
            begins[row] = prompts.lengths[i]
        right = np.asarray(program(params, tokens, begins, lengths))
        found += [
            (right[row], int(prompts.lengths[i]), len(full[row])) for row, i in enumerate(some)
        ]

    rows: dict[str, Any] = {}
    for line in (False, True):
        for masks in range(1, count + 1):
            each = [calls_of(*one, masks, line) for one in found]
            written = np.asarray([length - prompt for _, prompt, length in found])
            taken = np.asarray([one for one, _ in each])
            accepted = np.bincount(
                np.concatenate([np.asarray(a, int) for _, a in each]), minlength=masks + 1
            )
            name = f"{'line' if line else 'comb'} of {masks}"
            rows[name] = {
                "tokens a call": float(written.sum() / taken.sum()),
                "range": ends(bootstrap(written, taken)),
                "accepted": (accepted / accepted.sum()).round(3).tolist(),
                "positions": 2 * masks + 1 if line else (masks + 1) ** 2,
            }
            print(f"{name:10} {rows[name]}", flush=True)
    results: dict[str, Any] = {
        "answers": len(texts),
        "tokens": int(sum(map(len, texts))),
        "calls one by one": calls,
    }
    results |= {"rows": rows, "decoded": decoded(options, model, prompts, texts)}
    results["timed"] = timed(options, model, prompts)
    write_record(options.out, options, results, dtypes=(options.dtype,))


def decoded(options: Options, model: Any, prompts: Any, texts: list[list[int]]) -> dict[str, Any]:
    """Tokens a call of some decoders, and how many of their texts are those of the newest
    `autoregressive` before them, or else of greedy one by one.
    """
    few, rows = min(options.check, len(texts)), {}
    first = {name: getattr(prompts, name)[:few] for name in ("tokens", "lengths", "keys")}
    some, wanted = dataclasses.replace(prompts, **first), texts[:few]
    for name in options.decoders if few else ():
        setting = choose(model.family, name)
        wrote, calls = answers(some, model, setting.decoder, options.rows, setting.knobs)
        if name.startswith("autoregressive"):
            wanted = wrote
        other = [i for i in range(few) if wrote[i] != wanted[i]]
        rows[name] = {"tokens a call": sum(map(len, wrote)) / calls, "of": few, "other": other}
        print(f"decoded, {name}: {rows[name]}", flush=True)
    return rows


def timed(options: Options, model: Any, prompts: Any) -> dict[str, Any]:
    """Tokens a second of one row by shape, and times the first one with its range."""
    if not options.timed:
        return {}
    settings = [choose(model.family, shape) for shape in options.shapes]
    cases = [case_of(setting, model, prompts.size) for setting in settings]
    requests = [prompts.request([i]) for i in range(min(options.timed, len(prompts.lengths)))]
    speeds, rows = measure(cases, requests, passes=options.passes), {}
    base = speeds[0]
    texts = [decoded.completions() for decoded in base.decoded]
    for shape, speed in zip(options.shapes, speeds, strict=True):
        ratio, ends_of = speedup(speed.generated, speed.each, base.generated, base.each)
        calls = sum(int(np.asarray(decoded.network_calls)[0]) for decoded in speed.decoded)
        same = [d.completions() == text for d, text in zip(speed.decoded, texts, strict=True)]
        rows[shape] = {
            "tokens a second": sum(speed.generated)
            / float(np.median([sum(x) for x in speed.each])),
            "times": ratio,
            "range": ends(ends_of),
            "tokens a call": sum(speed.generated) / calls,
            "equal": sum(same),
            "of": len(same),
        }
        print(f"{shape}: {rows[shape]}", flush=True)
    return rows


if __name__ == "__main__":
    run_command(main)
