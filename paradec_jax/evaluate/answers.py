"""Answers of decoders to prompts, decoded in batches, and what a judge makes of them.

Prompt i draws with `fold_in(key(seed), i)` whatever row, batch or call it is in.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from paradec_jax.evaluate.cases import Prompts
from paradec_jax.evaluate.judge import judge_answers
from paradec_jax.evaluate.timing import Advance, Case
from paradec_jax.records import record
from paradec_jax.store import Model
from paradec_jax.text.tokenizer import Tokenizer


@record
class Answers:
    """What a decoder wrote after N prompts.

    Attributes:
      ids: new tokens of each prompt.
      counts: what each prompt cost, by name, [N] each.
      seconds: of each batch.
      reading: what the call that read the prompt cost alone, as `counts`; empty for a network
        without recurrences.
      judged: what a judge makes of them (`judge_answers`), None without a judge.
    """

    ids: list[list[int]]
    counts: dict[str, np.ndarray]
    seconds: list[float]
    reading: dict[str, np.ndarray]
    judged: Float[np.ndarray, "N 2"] | None = None


def batches(prompts: Prompts, rows: int) -> list[np.ndarray]:
    """Numbers of the prompts of each batch: equally many, of similar length, the last one filled
    up.
    """
    order = np.argsort(prompts.lengths, kind="stable")
    count = -(-len(order) // rows)
    rows = -(-len(order) // count)
    return list(np.pad(order, (0, count * rows - len(order)), mode="edge").reshape(count, rows))


def answer(
    case: Case, prompts: Prompts, rows: int, advance: Advance = lambda units: None
) -> Answers:
    """Decodes every prompt, at most `rows` of them together, in batches of equal shape."""
    ids: list[list[int]] = [[]] * len(prompts.lengths)
    counts: dict[str, np.ndarray] = {}
    reading: dict[str, np.ndarray] = {}
    seconds = []
    for batch in batches(prompts, rows):
        request, start = prompts.request(batch), time.perf_counter()
        decoded = jax.block_until_ready(case.run(request))
        seconds.append(time.perf_counter() - start)
        for i, row in zip(batch, decoded.completions(), strict=True):
            ids[i] = row
        parts = [(counts, decoded)]
        if "recurrences" in decoded.counts:  # a prompt may be read at a depth of its own
            parts.append((reading, case.run(request, max_steps=0)))
        for kept, part in parts:
            for name, values in part.counts.items():
                kept.setdefault(name, np.zeros(len(ids), np.int64))[batch] = np.asarray(values)
        advance(1)
    return Answers(ids, counts, seconds, reading)


def judged(
    judge: Model,
    tokenizer: Tokenizer,
    prompts: Prompts,
    answers: Sequence[Answers],
    base: Answers,
) -> list[Answers]:
    """Answers with what a judge makes of them; no text is judged twice, and the baseline's figures
    stay.
    """
    before = [row[:n].tolist() for row, n in zip(prompts.tokens, prompts.lengths, strict=True)]
    scores: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
    if base.judged is not None:
        scores |= zip(enumerate(map(tuple, base.ids)), base.judged, strict=True)
    results = []
    for one in answers:
        texts = [*enumerate(map(tuple, one.ids))]
        new = [text for text in texts if text not in scores]
        asked, written = [before[i] for i, _ in new], [ids for _, ids in new]
        scores |= zip(new, judge_answers(judge, tokenizer, asked, written), strict=True)
        results.append(dataclasses.replace(one, judged=np.stack([scores[text] for text in texts])))
    return results
