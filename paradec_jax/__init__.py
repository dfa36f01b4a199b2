"""Language models that decode many tokens per network call.

::

    import paradec_jax as pd

    model = pd.load("tiny-recurrent-distilled")
    out = pd.generate(model, ["Question: ..."], pd.Wavefront(inner_recurrence=4), max_new_tokens=200, seed=0)
    print(out.text[0], out.network_calls[0], out.tokens_per_call[0])
"""

from paradec_jax import decode
from paradec_jax.config import TokenSpec
from paradec_jax.decode import *  # noqa: F403  (whose names are listed there)
from paradec_jax.families import PRESETS
from paradec_jax.generate import Generation, generate
from paradec_jax.infill import infill
from paradec_jax.sharding.layout import layout, shardings
from paradec_jax.sharding.mesh import make_mesh, row_shardings
from paradec_jax.store import Model, StoreError, load, save
from paradec_jax.text.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Generation",
    "Model",
    "StoreError",
    "TokenSpec",
    "Tokenizer",
    "generate",
    "infill",
    "layout",
    "load",
    "make_mesh",
    "row_shardings",
    "save",
    "shardings",
]
__all__ += decode.__all__
