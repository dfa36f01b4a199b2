"""The released program of D2F (arXiv 2508.09192), whose rules are those of `MultiBlock`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from experiments.replicas.blocks import ended
from paradec_jax.decode import MultiBlock
from paradec_jax.decode.block.flight import FlightCanvas
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import is_stop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FilledCanvas(FlightCanvas):
    """A canvas whose rows end where no block that was begun has a mask left."""

    @property
    def unsealed(self) -> Bool[Array, "B S"]:
        """Positions that were revealed, however long ago."""
        return self.shown & ~self.given

    def seal(self, upto: Any = None) -> "FilledCanvas":
        """As of the base; a stop token ends a row once the blocks that were begun are complete."""
        stop = self.rows.stop
        rows = dataclasses.replace(self.rows, stop=jnp.full_like(stop, -1)).settle(self.shown)
        begun = jnp.arange(self.step.shape[1]) < self.count[:, None]
        left = jnp.any(self.slots(self.open) & begun[..., None], axis=(1, 2))
        stopped = jnp.any(is_stop(rows.tokens, stop) & self.unsealed, axis=1) & ~left
        rows = ended(dataclasses.replace(rows, stop=stop), stopped, jnp.zeros_like(left))
        return dataclasses.replace(self, rows=rows)


@dataclasses.dataclass(frozen=True)
class ReleasedForcing(MultiBlock):
    """`MultiBlock` as D2F's program runs it: a stop token keeps it from adding blocks, and those
    that were begun are completed, so that rows hold tokens after it.
    """

    def init(self, params: Any, request: Request, knobs: Any) -> FilledCanvas:
        """As of `MultiBlock`."""
        stop = request.stop
        request = dataclasses.replace(request, stop=jnp.full_like(stop, -1))
        state = super().init(params, request, knobs)
        rows = dataclasses.replace(state.rows, stop=stop)
        return FilledCanvas(**vars(state) | {"rows": rows})
