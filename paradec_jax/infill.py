"""Texts with gaps, filled."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from paradec_jax.config import TokenSpec
from paradec_jax.decode import Masked, make_request, run
from paradec_jax.generate import (
    Generation,
    Prompted,
    check_positive,
    equipped,
    network_for,
    on_mesh,
    parameters_for,
    row_keys,
    tokenizer_of,
)
from paradec_jax.store import Model
from paradec_jax.tokenizer import Tokenizer

AFTER_GAP = "\n"  # stands for the unknown text of a gap
MOST_GAP = 2**20  # tokens; each is an entry of a list before the model's own limit is looked at


def infill(
    model: Model,
    pieces: Sequence[str | int] | Sequence[Sequence[str | int]],
    decoder: Any = None,
    *,
    knobs: Any = None,
    seed: int = 0,
    samples: int = 1,
    log_probs: bool = False,
    bucket: int = 32,
    network: Any = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Generation:
    """Fills the gaps of texts.

    ::

        infill(model, ["To be, ", 12, " question."])      a gap of 12 tokens

    Stop tokens end nothing here: what comes after a gap was given.

    Args:
      model: a model with a tokenizer.
      pieces: texts and numbers of tokens to be filled in between, before or after them; or a list of such lists.
      decoder: any decoder that fills holes; `Masked()` when None.
      knobs, seed, samples, log_probs, network, mesh: as of `generate`.
      bucket: the canvas is rounded up to a multiple of it; what is too much is invisible.

    Raises:
      ValueError: no gap, a gap below 1, a text too long for the model, no tokenizer, or a decoder that appends.
    """
    prepared = prepare_infill(
        model,
        pieces,
        Masked() if decoder is None else decoder,
        seed=seed,
        samples=samples,
        log_probs=log_probs,
        bucket=bucket,
        network=network,
    )
    params = prepared.decoder.prepare(on_mesh(parameters_for(model, prepared.decoder), mesh))
    return prepared.collect(run(prepared.decoder, params, prepared.request, knobs))


def prepare_infill(
    model: Model,
    pieces: Sequence[str | int] | Sequence[Sequence[str | int]],
    decoder: Any,
    *,
    seed: int = 0,
    samples: int = 1,
    log_probs: bool = False,
    bucket: int = 32,
    network: Any = None,
) -> Prompted:
    """Encodes texts with gaps and binds the decoder; arguments and errors are those of `infill`."""
    tokenizer, spec = tokenizer_of(model), model.token_spec
    check_positive(samples=samples, bucket=bucket)
    one = not pieces or isinstance(pieces[0], str | int)
    rows = [_with_gaps(tokenizer, spec, row) for row in ([pieces] if one else pieces)]
    network, decoder = network_for(model, decoder, network), equipped(model, decoder)
    longest = max(len(row) for row in rows)
    if not decoder.windowed and longest > network.max_length:
        told = f"text and gaps have {longest} tokens"
        raise ValueError(f"{told}, more than the {network.max_length} positions the model was built for")
    keys = row_keys(rows, seed, samples)
    rows = [row for row in rows for _ in range(samples)]
    request = make_request(
        [[max(token, 0) for token in row] for row in rows],
        given=[[token >= 0 for token in row] for row in rows],
        max_new_tokens=0,
        keys=keys,
    )
    size = -(-longest // bucket) * bucket
    decoder = decoder.bind(network, size if decoder.windowed else min(size, network.max_length), spec)
    if log_probs:
        decoder = dataclasses.replace(decoder, log_probs=True)
    return Prompted(decoder, request, None, tokenizer, spec, [()] * len(rows), samples, whole=True)


def _with_gaps(tokenizer: Tokenizer, spec: TokenSpec, pieces: Any) -> list[int]:
    """Ids of texts, and -1 for each token of a gap, after the model's begin-of-text token."""
    ids: list[int] = []
    for whole, group in itertools.groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if whole:  # texts beside each other are one text, and what follows a gap begins none
            ids += tokenizer.encode_after(AFTER_GAP if ids else "", "".join(group))
            continue
        for gap in group:
            if gap < 1:
                raise ValueError(f"a gap must be of at least 1 token, not {gap}")
            if gap > MOST_GAP:
                raise ValueError(f"a gap must be of at most {MOST_GAP} tokens, not {gap}")
            ids += [-1] * gap
    if -1 not in ids:
        raise ValueError("the text has no gap: put a number of tokens between its pieces")
    return tokenizer.begun(ids, spec.bos)
