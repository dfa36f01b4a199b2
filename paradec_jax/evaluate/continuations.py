"""Texts continued by any decoder, in batches of one shape, and cut where the text to be judged ends.

Every decoder's output is cut by one rule before it is judged: at its budget, after its first stop token, and
before the first stop string. Most decoders stop there by themselves; `ReleasedWavefront` goes on, as its authors
released it.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from paradec_jax.config import TokenSpec
from paradec_jax.data.batches import encode_prompts
from paradec_jax.generate import generate, tokenizer_of
from paradec_jax.stop_strings import StopStrings, text_of
from paradec_jax.store import Model
from paradec_jax.tokenizer import Tokenizer

BUCKET = 32


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What a decoder wrote after one prompt.

    Attributes:
      text: without special tokens, cut before the first stop string.
      tokens: tokens up to the cut, a stop token and the tokens that complete a stop string included.
      reason: "stop token", "stop string" or "budget".
      prompt_tokens: tokens read, begin-of-text included.
      network_calls: calls of the network for this row until it stopped, the prompt's included.
      recurrences: recurrences, one after the other; calls where the network has none.
      seconds: wall time of the row's batch over the prompts in it, compilation included.
    """

    text: str
    tokens: tuple[int, ...]
    reason: str
    prompt_tokens: int
    network_calls: int
    recurrences: int
    seconds: float


def prompt_lengths(model: Model, prompts: Sequence[str]) -> list[int]:
    """Tokens of each prompt, begin-of-text included. Raises ValueError without a tokenizer or a prompt."""
    tokenizer = tokenizer_of(model)
    return encode_prompts(tokenizer, prompts, spec=model.token_spec, bucket=1)[1].tolist()


def continuations(
    model: Model,
    prompts: Sequence[str],
    decoder: Any,
    knobs: Any = None,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    seed: int = 0,
    rows: int = 8,
    width: int | None = None,
) -> Iterator[list[Continuation]]:
    """Continues prompts, `rows` at a time in their order, and yields each batch as it is done.

    All batches have one shape, so there is one compiled program: prompts are padded to the longest of all, the
    last batch is filled up with its last prompt. A row does not depend on the others.

    Args:
      model: a model with a tokenizer.
      prompts: texts.
      decoder: unbound.
      knobs: its knobs; the defaults when None.
      max_new_tokens: tokens each row may get.
      stop: texts that end a row.
      seed: of all draws.
      rows: prompts of a batch.
      width: tokens of the longest prompt, where these are some of a larger number; of these when None.

    Raises:
      ValueError: what `generate` refuses.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, not {rows}")
    if not prompts:
        return
    tokenizer, spec = tokenizer_of(model), model.token_spec
    read, lengths = encode_prompts(tokenizer, prompts, spec=spec, bucket=1)
    bucket = -(-max(width or 1, *lengths.tolist()) // BUCKET) * BUCKET
    for start in range(0, len(prompts), rows):
        batch = list(prompts[start : start + rows])
        began = time.perf_counter()
        # every=1: a row's network calls end with the step that completes its stop string.
        out = generate(
            model,
            batch + batch[-1:] * (rows - len(batch)),
            decoder,
            knobs=knobs,
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop_strings=stop,
            bucket=bucket,
            every=1,
        )
        seconds = (time.perf_counter() - began) / len(batch)
        found = []
        for i in range(len(batch)):
            prompt = read[start + i, : lengths[start + i]].tolist()
            tokens, text, reason = cut(tokenizer, spec, out.tokens[i], max_new_tokens, stop, prompt)
            calls = out.network_calls
            counts = int(calls[i]), int(out.counts.get("recurrences", calls)[i])
            found.append(Continuation(text, tuple(tokens), reason, len(prompt), *counts, seconds))
        yield found


def cut(
    tokenizer: Tokenizer,
    spec: TokenSpec,
    ids: Sequence[int],
    budget: int,
    stop: Sequence[str],
    prompt: Sequence[int] = (),
) -> tuple[Sequence[int], str, str]:
    """Tokens up to the end of the text to be judged, that text, and why it ends there.

    Args:
      tokenizer, spec: the model's.
      ids: generated tokens, those that complete a stop string the last ones or there is none.
      budget: tokens at most.
      stop: texts before the first of which the text ends.
      prompt: ids that the generated ones follow.
    """
    ids = ids[:budget]
    ends = [i for i, token in enumerate(ids) if token in spec.stop]
    ids = ids[: ends[0] + 1] if ends else ids
    if found := StopStrings(tokenizer, spec, stop, 1, [prompt]).finish([ids]):
        return ids, found[0][1], "stop string"
    return ids, text_of(tokenizer, spec, ids, prompt), "stop token" if ends else "budget"
