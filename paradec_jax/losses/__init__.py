"""Objectives, one a file: `(params, frozen, batch, key) -> (loss, metrics)`.

All of them take the same arguments:

- `network`, the network that is trained, and `spec`, its special tokens;
- `rules`, the choices, by default those of the paper or of its released code;
- `chunk`, the number of positions whose logits are made at a time, and again in the backward pass,
  so that logits [B, T, V] never lie in memory whole; all at once when None.

`frozen` is read and not trained. `batch` is a dictionary of arrays, which may bring recorded draws
(`recorded`). An argument out of range, or a token that the checkpoint lacks, is a ValueError when
the objective is made, a chunk below 1 when it is traced.
"""

from paradec_jax.losses.block_diffusion import BlockRules, block_diffusion_loss
from paradec_jax.losses.cllm import cllm_loss
from paradec_jax.losses.consistency import (
    CLEAN_CONTEXT,
    MULTIBLOCK,
    WINDOWED,
    ConsistencyRules,
    consistency_loss,
)
from paradec_jax.losses.drafts import DraftRules, draft_loss
from paradec_jax.losses.masked_diffusion import (
    BoundRules,
    ForcingRules,
    forcing_loss,
    masked_diffusion_loss,
)
from paradec_jax.losses.next_token import next_token_loss
from paradec_jax.losses.recurrent import exponential, poisson_lognormal, recurrent_loss
from paradec_jax.losses.residual import ResidualRules, residual_loss
from paradec_jax.losses.self_distillation import DistillationRules, self_distillation_loss
