"""Consistency distillation of recurrent-depth models, so that a wavefront's drafts are right
sooner.

A wave of headway H opens H positions a step, of which only the first has a predicted input token.
It can commit more than one token a step only if the model guesses well after tokens that are still
wrong, and that is what progressive consistency distillation teaches causal models. Here a drawn
number of recurrences stands for the pass over both copies of the blocks; everything else is
`consistency_loss`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from paradec_jax.config import TokenSpec
from paradec_jax.decode.machine.network import Forward
from paradec_jax.losses.consistency import ConsistencyRules, combined, consistency_loss
from paradec_jax.losses.recurrent import Draw, settle, unroll
from paradec_jax.objective import Metrics, Objective, Sums, drawn


@dataclasses.dataclass(frozen=True, eq=False)
class Unrolled:
    """A recurrent-depth network at r recurrences, a traced number, read as causal networks are.

    The key is that of the initial states: the copies of a token draw states of their own.
    """

    network: Any
    recurrence: Int[Array, ""]
    key: Array
    backprop_depth: int
    remat: bool = False

    def __getattr__(self, name: str) -> Any:
        """Everything else is the network's."""
        return getattr(self.network, name)

    def forward(
        self, params: Any, inputs: Array, positions: Int[Array, "B S"], *, mask: Array | None = None
    ) -> Forward:
        """Embeds, recurs r times from random states, and reads the states out."""
        network, shape = self.network, positions.shape
        view = network.view(positions, mask=mask)
        state = network.initial_state(jax.random.split(self.key, shape))
        e, window = network.embed(params, inputs, view, network.empty_window(*shape))
        state = unroll(
            network, params, state, e, view, self.recurrence, self.backprop_depth, self.remat
        )
        return network.readout(params, state, view, window)


def recurrent_consistency_loss(
    network: Any,
    draw: Draw,
    backprop_depth: int | None,
    spec: TokenSpec,
    rules: ConsistencyRules,
    *,
    filler_share: float = 0.0,
    remat: bool | None = None,
    chunk: int | None = None,
) -> Objective:
    """The progressive consistency loss at a random recurrence, both copies packed under one mask.

    Args:
      draw, backprop_depth, remat: as in `recurrent_loss`.
      filler_share: share of the noisy blocks whose wrong tokens give way to random ones, uniform
        over the vocabulary: what a wave fills its newest positions with, which iterates of a Jacobi
        trajectory never show.

    Returns:
      A loss over the batches of `consistency_loss` with the scalar `step`; `recurrence` is one
      metric more.
    """
    if not 0 <= filler_share <= 1:
        raise ValueError(f"filler_share must be in [0, 1], not {filler_share}")
    depth, remat = settle(network.config, backprop_depth, remat)

    def sums(params: Any, frozen: Any, batch: dict[str, Array], key: Array) -> Sums:
        of_recurrence, of_state, of_rows, of_tokens = jax.random.split(key, 4)
        recurrence = draw(of_recurrence, batch["step"])
        noisy, clean = batch["noisy"], batch["clean"]
        filled = jax.random.bernoulli(of_rows, filler_share, noisy.shape[:2])[..., None] & (
            noisy != clean
        )
        filler = jax.random.randint(of_tokens, noisy.shape, 0, network.vocab_size, noisy.dtype)
        batch = batch | {"noisy": jnp.where(filled, filler, noisy)}
        unrolled = Unrolled(network, recurrence, of_state, depth, remat)
        objective = consistency_loss(unrolled, spec, rules, chunk=chunk)
        return objective.sums(params, frozen, batch, key) | {"recurrence": drawn(recurrence)}

    def value(sums: Sums) -> tuple[Array, Metrics]:
        loss, metrics = combined(sums, rules)
        return loss, metrics | {"recurrence": sums["recurrence"].mean}

    return Objective(sums, value)
