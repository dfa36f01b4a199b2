"""Models, and models on disk: `load`, `save`, what a model is made of, adapters."""

from paradec_jax.disk.folders import StoreError, digest_of
from paradec_jax.store.folder import (
    fingerprint,
    load,
    names_of,
    opened,
    save,
)
from paradec_jax.store.model import Model, ResidualHead
