"""Training of a user's model on a user's file: one objective a file, by name."""

from typing import Any

from paradec_jax.recipes.blocks import Blocks
from paradec_jax.recipes.head import Head
from paradec_jax.recipes.jacobi import Jacobi
from paradec_jax.recipes.masked import Masked
from paradec_jax.recipes.recurrent import Recurrent
from paradec_jax.recipes.sdtt import Sdtt
from paradec_jax.recipes.sft import Sft

KINDS = (Sft, Jacobi, Recurrent, Blocks, Head, Masked, Sdtt)
OBJECTIVES: dict[str, Any] = {kind.__name__.lower(): kind for kind in KINDS}
