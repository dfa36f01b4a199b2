"""Training of a user's model on a user's file: one objective a file, by name."""

from typing import Any

from paradec_jax.objectives.blocks import Blocks
from paradec_jax.objectives.draft import Draft
from paradec_jax.objectives.head import Head
from paradec_jax.objectives.jacobi import Jacobi
from paradec_jax.objectives.masked import Masked
from paradec_jax.objectives.recurrent import Recurrent
from paradec_jax.objectives.sdtt import Sdtt
from paradec_jax.objectives.sft import Sft

OBJECTIVES: dict[str, Any] = {
    kind.__name__.lower(): kind
    for kind in (Sft, Jacobi, Draft, Recurrent, Blocks, Head, Masked, Sdtt)
}
