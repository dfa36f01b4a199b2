"""Greedy answers of a model to the prompts of its data, and how many tokens a network call gives."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from paradec_jax.config import TokenSpec
from paradec_jax.data.jsonl import Examples
from paradec_jax.data.trajectories import Generation, Trajectories, append, claim
from paradec_jax.decode.machine import Setting, keys_of, seed_words
from paradec_jax.evaluate.cases import Prompts, case_of
from paradec_jax.evaluate.timing import Case, planned_bytes
from paradec_jax.generate import BUCKET
from paradec_jax.io import atomic_write_text, hold
from paradec_jax.objectives.folder import by_first, say
from paradec_jax.objectives.job import Job, Stopped
from paradec_jax.sharding.processes import gathered, shared
from paradec_jax.store import Model
from paradec_jax.text.chat import as_prompts
from paradec_jax.train.identity import checksums

MEASURED = 64  # held-out prompts that are decoded
ROWS = 32  # of them that are decoded together
MOST = 256  # tokens of a held-out answer


def asked(
    examples: Examples, model: Model, seed: int, most: int | None, new_tokens: int, block: int
) -> tuple[Any, Prompts]:
    """Numbers and prompts of examples in random order: of equal prompts one, and only where an
    answer has room.

    Raises:
      ValueError: there is none.
    """
    spec, positions = ending(model), model.network.max_length
    room = positions - new_tokens
    most_ids = room - block - 8  # what is rounded up
    first = {examples.prompt(i).tobytes(): i for i in reversed(range(len(examples)))}
    fit = [i for i in sorted(first.values()) if 1 < len(examples.prompt(i)) <= most_ids]
    if not fit:
        raise ValueError(
            "no line of the data, or of the held-out one, has a prompt of at least 2 tokens that "
            f"leaves room for {new_tokens} new ones in the {positions} positions of the model"
        )
    ids = np.random.default_rng(seed % 2**64).permutation(fit)[:most].astype(np.int32)
    rows = [examples.prompt(i) for i in ids]
    lengths = np.asarray([len(row) for row in rows], np.int32)
    width = min(-(-lengths.max() // BUCKET) * BUCKET, room)
    tokens = np.stack(
        [np.pad(row, (0, width - len(row)), constant_values=spec.pad) for row in rows]
    )
    return ids, Prompts(tokens, lengths, keys_of(seed_words(seed), ids), new_tokens, spec.stop)


def ending(model: Model) -> TokenSpec:
    """The model's special tokens; what ends a turn of its chat template ends an answer too."""
    spec = model.token_spec
    if model.chat_template is None:
        return spec
    _, ends = as_prompts(model, [[{"role": "user", "content": "?"}]])
    return dataclasses.replace(spec, stop=ends.stop)


def batches(
    what: str, case: Case, prompts: Prompts, numbers: np.ndarray, rows: int
) -> Iterator[tuple[np.ndarray, Any]]:
    """Numbers of prompts that are decoded together, and their request, which is filled up to so
    many rows.

    Fewer go together where the device has less memory than XLA plans. Lines say what it takes, and
    at most every 30 seconds how far it is.
    """
    stats, fit, due = jax.local_devices()[0].memory_stats(), rows, 0.0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    have = stats["bytes_limit"] if stats else memory
    while (
        need := planned_bytes(case, prompts.request(np.resize(numbers, fit)))
    ) > have and fit > 1:
        fit //= 2
    line = f"{what}: {fit} rows together, of {rows} asked, take {need / 1e9:.2g} of {have / 1e9:.2g} GB at most"
    for done in range(0, len(numbers), fit):
        if time.monotonic() >= due:
            due = time.monotonic() + 30
            say(f"{line}, {done} of {len(numbers)} prompts are done")
        batch = numbers[done : done + fit]
        yield batch, prompts.request(np.resize(batch, fit))


def collected(
    job: Job,
    model: Model,
    objective: Any,
    items: Callable[..., list[Generation]],
    *,
    part: str,
    setting: Setting,
    block: int,
    seed: int,
    window: int,
) -> Trajectories:
    """The answers of a model to prompts of the data, before one learns from them; a collection that
    was stopped goes on with the prompts that it lacks.

    Args:
      job: the run.
      model: the model.
      objective: what has the options `problems` and `new_tokens`, as for `asked`, and `rows`,
        prompts that are decoded together.
      items: what is decoded, a request and ids of its rows -> generations.
      part: folder of the trajectories, and of a file that says that all are there.
      setting: decoder and knobs.
      block: tokens of a block of the trajectories.
      seed, window: as for `asked`.

    Raises:
      Stopped: the time of the call is over before all are there.
    """
    place, model = job.folder / part, here(model)
    done, folder = place / "collected", place / "trajectories"

    @hold(place)
    def work() -> None:
        if done.exists():  # nothing is added to what a training may have begun with
            return
        new_tokens = objective.new_tokens
        settings = {
            "examples": job.examples.digest,
            "new_tokens": new_tokens,
            "seed": seed,
            "model": sum(checksums(model.params)),
        }
        claim(folder, block, settings)
        ids, prompts = asked(job.examples, model, seed, objective.problems, new_tokens, window)
        case = case_of(setting, model, prompts.size)
        left = np.flatnonzero(~np.isin(ids, [*Trajectories(folder).decoded]))
        for batch, request in batches(part, case, prompts, left, objective.rows):
            if time.monotonic() > job.until:
                say("the minutes are over before all answers are there: the same command goes on")
                return
            of = ids[np.resize(batch, request.batch)].tolist()
            append(folder, items(case, request, of)[: len(batch)])
        atomic_write_text(done, "")

    by_first(part, work)
    if not done.exists():
        raise Stopped(0)
    return Trajectories(folder)


def answers(
    prompts: Prompts, model: Model, decoder: Any, rows: int, knobs: Any = None
) -> tuple[list[list[int]], int]:
    """Answers to all prompts, so many decoded together, and the network calls that they took."""
    case, texts, calls = case_of(Setting("", decoder, knobs), model, prompts.size), [], 0
    what, numbers = f"held out, {type(decoder).__name__}", np.arange(len(prompts.lengths))
    for batch, request in batches(what, case, prompts, numbers, rows):
        decoded = case.run(request)
        texts += decoded.completions()[: len(batch)]
        calls += int(np.asarray(decoded.network_calls)[: len(batch)].sum())
    return texts, calls


def speed(job: Job, model: Model, decoder: Any, slow: Any, window: int) -> dict[str, float]:
    """Tokens a call of a decoder on held-out prompts, and the share of answers equal to those of a
    slow one.

    `window` is that of the decoder. Nothing where held-out lines have no prompts, or no room for
    their answers.
    """
    held_out, start, model = job.measured, model is job.model, here(model)
    new_tokens = min(
        max(len(held_out[i][0]) - len(held_out.prompt(i)) for i in range(len(held_out))), MOST
    )
    try:
        _, prompts = asked(held_out, model, job.run.seed, MEASURED, new_tokens, window)
    except ValueError as error:
        if start:
            say(f"tokens a call are not measured: {error}")
        return {}
    fast, (wanted, _) = (answers(prompts, model, one, ROWS) for one in (decoder, slow))
    return gain(*fast, wanted)


def gain(
    texts: list[list[int]], calls: int, wanted: list[list[int]], name: str = ""
) -> dict[str, float]:
    """Tokens a call of answers, and the share of them that are as wanted, under keys that end in
    `name`.
    """
    equal = np.mean([one == other for one, other in zip(texts, wanted, strict=True)])
    return {
        f"tokens a call{name}": sum(map(len, texts)) / calls,
        f"equal to one by one{name}": float(equal),
    }


def here(model: Any) -> Any:
    """The model or head, of several processes whole on one device of this one, for what each
    computes alone.
    """
    whole = jax.tree.map(
        lambda x: x.addressable_data(0) if shared(x) else x, gathered(dict(model.params))
    )
    return dataclasses.replace(model, params=whole)
