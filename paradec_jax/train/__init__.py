"""Training: a state, a step, a loop with hooks. Knows only the signature of a loss."""

from paradec_jax.train.checkpoint import Checkpoint as Checkpoint
from paradec_jax.train.checkpoint import NoneReadable as NoneReadable
from paradec_jax.train.checkpoint import SaveFailed as SaveFailed
from paradec_jax.train.hooks import Evaluate as Evaluate
from paradec_jax.train.hooks import Log as Log
from paradec_jax.train.hooks import Preempt as Preempt
from paradec_jax.train.hooks import Preempted as Preempted
from paradec_jax.train.hooks import Profile as Profile
from paradec_jax.train.loop import DataIterator as DataIterator
from paradec_jax.train.loop import Hook as Hook
from paradec_jax.train.loop import NonFiniteLoss as NonFiniteLoss
from paradec_jax.train.loop import fit as fit
from paradec_jax.train.optimizers import adamw as adamw
from paradec_jax.train.optimizers import muon as muon
from paradec_jax.train.optimizers import warmup_stable_decay as warmup_stable_decay
from paradec_jax.train.processes import PeerLost as PeerLost
from paradec_jax.train.processes import initialize as initialize
from paradec_jax.train.step import Loss as Loss
from paradec_jax.train.step import Rounds as Rounds
from paradec_jax.train.step import TrainState as TrainState
from paradec_jax.train.step import TrainStep as TrainStep
from paradec_jax.train.step import make_train_step as make_train_step
from paradec_jax.train.step import update_ema as update_ema
