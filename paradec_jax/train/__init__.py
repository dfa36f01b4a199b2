"""Training: a state, a step, a loop with hooks. Knows only the signature of a loss."""

from paradec_jax.train.checkpoint import Checkpoint, NoneReadable, SaveFailed
from paradec_jax.train.hooks import Evaluate, Log, Preempt, Preempted, Profile
from paradec_jax.train.loop import Hook, NonFiniteLoss, fit
from paradec_jax.train.optimizers import adamw, muon, warmup_stable_decay
from paradec_jax.train.processes import PeerLost, initialize
from paradec_jax.train.step import (
    Rounds,
    TrainState,
    TrainStep,
    averaged,
    make_train_step,
    update_ema,
)
