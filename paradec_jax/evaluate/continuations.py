"""Texts continued by any decoder, in batches of one shape, and cut where the text to be judged ends.

Every decoder's output is cut by one rule before it is judged: at its budget, after its first stop token, and
before the first stop string. Most decoders stop there by themselves; `ReleasedWavefront` goes on, as its authors
released it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from paradec_jax.config import TokenSpec
from paradec_jax.data.problems import encode_prompts
from paradec_jax.generate import generate, tokenizer_of
from paradec_jax.stop_strings import StopStrings, text_of
from paradec_jax.store import Model
from paradec_jax.tokenizer import Tokenizer

BUCKET = 32


class Continuation(NamedTuple):
    """What a decoder wrote after one prompt.

    Attributes:
      tokens: tokens up to the cut, a stop token and the tokens that complete a stop string included.
      text: without special tokens, cut before the first stop string.
      reason: "stop token", "stop string" or "budget".
    """

    tokens: list[int]
    text: str
    reason: str


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
) -> list[Continuation]:
    """Continues prompts, `rows` at a time.

    All batches have one shape, so there is one compiled program: prompts are padded to the longest of all, the
    last batch is filled up with its last prompt. A row does not depend on the others.

    Args:
      model: a model with a tokenizer.
      prompts: texts, at least one.
      decoder: unbound.
      knobs: its knobs; the defaults when None.
      max_new_tokens: tokens each row may get.
      stop: texts that end a row.
      seed: of all draws.
      rows: prompts of a batch.

    Raises:
      ValueError: what `generate` refuses.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, not {rows}")
    tokenizer, spec = tokenizer_of(model), model.token_spec
    read, lengths = encode_prompts(tokenizer, prompts, spec=spec, bucket=BUCKET)
    found: list[Continuation] = []
    for start in range(0, len(prompts), rows):
        batch = list(prompts[start : start + rows])
        out = generate(
            model,
            batch + batch[-1:] * (rows - len(batch)),
            decoder,
            knobs=knobs,
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop_strings=stop,
            bucket=read.shape[1],
        )
        for i in range(len(batch)):
            prompt = read[start + i, : lengths[start + i]].tolist()
            found.append(cut(tokenizer, spec, out.tokens[i], max_new_tokens, stop, prompt))
    return found


def cut(
    tokenizer: Tokenizer,
    spec: TokenSpec,
    ids: Sequence[int],
    budget: int,
    stop: Sequence[str],
    prompt: Sequence[int] = (),
) -> Continuation:
    """The continuation in generated ids: those up to the end of the text to be judged.

    Args:
      tokenizer, spec: the model's.
      ids: generated tokens, those that complete a stop string the last ones or there is none.
      budget: tokens at most.
      stop: texts before the first of which the text ends.
      prompt: ids that the generated ones follow.
    """
    ids = list(ids[:budget])
    ends = [i for i, token in enumerate(ids) if token in spec.stop]
    ids = ids[: ends[0] + 1] if ends else ids
    if found := StopStrings(tokenizer, spec, stop, 1, [prompt]).finish([ids]):
        return Continuation(ids, found[0][1], "stop string")
    return Continuation(ids, text_of(tokenizer, spec, ids, prompt), "stop token" if ends else "budget")
