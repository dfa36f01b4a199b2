"""A causal model as the start of one that fills masks: its shape, and a token for the mask."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from paradec_jax.objectives.folder import say
from paradec_jax.objectives.job import Job
from paradec_jax.store import Model
from paradec_jax.text.chat import conversation


def filling(job: Job, shape: Any, mask: str | None, alignment: str | None, **changes: Any) -> Model:
    """The model of a run with the parameters that it has, as one that fills masks.

    Args:
      job: the run.
      shape: class of the new config.
      mask: mask of a causal model, see `unused`.
      alignment: which token a position predicts; as before when None.
      **changes: fields of the new config.

    Raises:
      ValueError: sliding windows, or no token for the mask.
    """
    model, name = job.model, job.run.model
    config: Any = model.config
    if config.windows:
        raise ValueError(f"{name} has sliding windows, which no model that fills masks has")
    # What both shapes have, but for the lengths of blocks.
    both = {field.name for field in dataclasses.fields(shape)} & {*vars(config)}
    config = shape(**{name: getattr(config, name) for name in both - {"block", "blocks"}} | changes)
    spec = model.token_spec
    hides = unused(job, mask) if model.family == "causal" else spec.mask
    spec = dataclasses.replace(spec, mask=hides, alignment=alignment or spec.alignment)
    return dataclasses.replace(model, config=config, token_spec=spec, head=None)


def unused(job: Job, mask: str | None) -> int:
    """Id of the mask: the token given, or its id, else a row of the embedding or a special token
    that nothing uses.

    Raises:
      ValueError: there is none.
    """
    spec, words, size = job.model.token_spec, job.model.tokenizer, job.model.config.vocab_size
    assert words is not None  # which has read the data
    used = {spec.bos, spec.pad, *spec.stop, *np.unique(job.examples.ids).tolist()}
    if job.model.chat_template:
        used.update(words.encode(job.model.chat_template))
        asked = {"role": "user", "content": "?"}
        for role in ("system", "assistant", "tool"):
            with contextlib.suppress(ValueError):  # of a role that the template refuses
                talk = conversation(job.model, [asked, {**asked, "role": role}])
                used.update(words.encode(talk))
    special = filter(words.is_special, reversed(range(words.vocab_size)))
    candidates: Iterable[int] = itertools.chain(range(words.vocab_size, size), special)
    if mask is not None:
        given = int(mask) if mask.isdecimal() else words.id_of(mask)
        candidates = [] if given is None or given >= size else [given]
    found = next((token for token in candidates if token not in used), None)
    if found is None:
        raise ValueError(
            f"mask must be a token that neither {job.run.model} nor its chat template nor the data use, "
            f"not {mask}"
        )
    return found


def say_mask(model: Model) -> None:
    """Says which token the mask is."""
    words, mask = model.tokenizer, model.token_spec.mask
    assert words is not None and mask is not None
    say(f"the mask is token {mask} ({words.token_text(mask) or 'which has no text'})")
