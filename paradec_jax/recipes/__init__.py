"""Training of a user's model on a user's file: one objective a file, by name."""

from typing import Any

from paradec_jax.recipes.sft import Sft

OBJECTIVES: dict[str, Any] = {"sft": Sft}
