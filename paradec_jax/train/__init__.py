"""Training: state, step, optimizers, checkpoints, loop. Knows only the signature of a loss."""

from paradec_jax.train.agree import PeerLost
from paradec_jax.train.checkpoint import Checkpoints, NoneReadable, SaveFailed
from paradec_jax.train.holder import FolderHeld
from paradec_jax.train.iterator import DataIterator
from paradec_jax.train.launch import initialize
from paradec_jax.train.loop import fit
from paradec_jax.train.optimizers import adamw, decay_mask, muon, warmup_stable_decay
from paradec_jax.train.preempt import Preempted
from paradec_jax.train.rounds import Rounds
from paradec_jax.train.state import TrainState, update_ema
from paradec_jax.train.step import Loss, Metrics, make_train_step
from paradec_jax.train.window import NonFiniteLoss
from paradec_jax.train.writers import Writer

__all__ = [
    "Checkpoints",
    "DataIterator",
    "FolderHeld",
    "Loss",
    "Metrics",
    "NonFiniteLoss",
    "NoneReadable",
    "PeerLost",
    "Preempted",
    "Rounds",
    "SaveFailed",
    "TrainState",
    "Writer",
    "adamw",
    "decay_mask",
    "fit",
    "initialize",
    "make_train_step",
    "muon",
    "update_ema",
    "warmup_stable_decay",
]
