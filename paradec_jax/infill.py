"""Texts with gaps, filled."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from paradec_jax.config import TokenSpec, check_number
from paradec_jax.decode import DecoderBase, make_request
from paradec_jax.families import choose
from paradec_jax.generate import (
    BUCKET,
    Generation,
    Task,
    bind,
    parameters,
    row_keys,
    tokenizer_of,
)
from paradec_jax.store import Model
from paradec_jax.text.tokenizer import Tokenizer

AFTER_GAP = "\n"  # stands for the unknown text of a gap
Pieces = Sequence[str | int] | Sequence[Sequence[str | int]]
MOST_GAP = 2**20  # tokens; each is an entry of a list before the model's own limit is looked at


def infill(
    model: Model,
    pieces: Pieces,
    decoder: DecoderBase | None = None,
    *,
    knobs: Any = None,
    seed: int = 0,
    samples: int = 1,
    log_probs: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Generation:
    """Fills the gaps of texts.

    ::

        infill(model, ["To be, ", 12, " question."])      a gap of 12 tokens

    Stop tokens end nothing here: what comes after a gap was given.

    Args:
      model: a model with a tokenizer.
      pieces: texts and numbers of tokens to be filled in between, before or after them; or a list
        of such lists.
      decoder: any decoder that fills holes; that of the model or of its family when None.
      knobs, seed, samples, log_probs, mesh: see `generate`.

    Raises:
      ValueError: no gap, a gap below 1, a text too long for the model, no tokenizer, or a decoder
        that appends.
    """
    decoder = decoder or choose(model.family, model.decoder).decoder
    task = infill_task(
        model, pieces, decoder, seed=seed, samples=samples, log_probs=log_probs, mesh=mesh
    )
    return task.run(knobs)


def infill_task(
    model: Model,
    pieces: Pieces,
    decoder: DecoderBase,
    *,
    seed: int = 0,
    samples: int = 1,
    log_probs: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Task:
    """Encodes texts with gaps and binds the decoder; arguments and errors are those of `infill`."""
    tokenizer, spec = tokenizer_of(model), model.token_spec
    check_number("samples", samples)
    one = not pieces or isinstance(pieces[0], str | int)
    rows = [_with_gaps(tokenizer, spec, row) for row in ([pieces] if one else pieces)]
    longest = max(len(row) for row in rows)
    # A canvas of a multiple of the bucket shares its program; positions beyond a row are invisible
    # to it.
    size, what = -(-longest // BUCKET) * BUCKET, f"text and gaps have {longest} tokens"
    decoder = bind(model, decoder, size, longest, what, log_probs=log_probs)
    keys = row_keys(rows, seed, samples)
    rows = [row for row in rows for _ in range(samples)]
    request = make_request(
        [[max(token, 0) for token in row] for row in rows],
        given=[[token >= 0 for token in row] for row in rows],
        max_new_tokens=0,
        keys=keys,
    )
    return Task(
        model, decoder, parameters(model, decoder, mesh), request, [()] * len(rows), whole=True
    )


def _with_gaps(tokenizer: Tokenizer, spec: TokenSpec, pieces: Any) -> list[int]:
    """Ids of texts, and -1 for each token of a gap, after the model's begin-of-text token."""
    ids: list[int] = []
    for is_text, group in itertools.groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if is_text:  # texts beside each other are one text, and what follows a gap begins none
            ids += tokenizer.encode_after(AFTER_GAP if ids else "", "".join(group))
            continue
        for gap in group:
            check_number("gap", gap, 1, MOST_GAP)
            ids += [-1] * gap
    if -1 not in ids:
        raise ValueError("the text has no gap: put a number of tokens between its pieces")
    return tokenizer.begun(ids, spec.bos)
