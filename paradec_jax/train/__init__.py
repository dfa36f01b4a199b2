"""Training: state, step, optimizers, checkpoints, loop. Knows only the signature of a loss."""

from paradec_jax.train.checkpoint import Checkpoints
from paradec_jax.train.loop import DataIterator, NonFiniteLoss, fit
from paradec_jax.train.optimizers import adamw, decay_mask, muon, warmup_stable_decay
from paradec_jax.train.rounds import Rounds
from paradec_jax.train.state import TrainState, update_ema
from paradec_jax.train.step import Loss, Metrics, make_train_step

__all__ = [
    "Checkpoints",
    "DataIterator",
    "Loss",
    "Metrics",
    "NonFiniteLoss",
    "Rounds",
    "TrainState",
    "adamw",
    "decay_mask",
    "fit",
    "make_train_step",
    "muon",
    "update_ema",
    "warmup_stable_decay",
]
