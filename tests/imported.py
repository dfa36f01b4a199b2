"""Models of other programs' folders, in memory."""

import contextlib
import dataclasses

import jax

from paradec_jax.store import Model


def in_memory(reading: contextlib.AbstractContextManager[Model]) -> Model:
    """The model that a converter reads, its parameters as NumPy arrays; without a head."""
    with reading as model:
        return dataclasses.replace(
            model, params=jax.tree.map(lambda leaf: leaf[...], model.params), head=None
        )
