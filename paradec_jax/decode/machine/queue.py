"""A queue of prompts through a fixed number of rows (continuous batching): a row that has stopped
takes the next.

The drivers of `drive` end with the slowest row of a batch; here the others go on with new work.
Rows do not know of each other, so every prompt gets what it gets alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from paradec_jax.config import check_number
from paradec_jax.decode.machine import drive
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.placing import over_processes, placed
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import NETWORK_CALLS, Decoded
from paradec_jax.sharding.mesh import on
from paradec_jax.sharding.processes import gathered, shared


class QueueResult(NamedTuple):
    """What `serve` returns.

    Attributes:
      decoded: one row a prompt, in the order of the request.
      steps: steps of the decoder, over all rows at once.
      occupancy: share of rows that were running, over all steps.
    """

    decoded: Decoded
    steps: int
    occupancy: float


def serve(
    decoder: DecoderBase,
    params: Any,
    request: Request,
    knobs: Any = None,
    *,
    rows: int = 8,
    every: int = 16,
) -> QueueResult:
    """Decodes all prompts of a request, `rows` at a time, and refills rows that have stopped.

    Every `every` steps the host looks which rows have stopped: fewer looks cost idle rows, more
    cost time. Prompts are read in groups of 1, 2, 4 .. rows, each group size one compiled program.

    Args:
      decoder: a bound decoder.
      params: parameters of its network.
      request: all prompts, N rows, at least one.
      knobs: a `decoder.Knobs` of scalars; the defaults when None.
      rows: rows of the running batch.
      every: steps between two looks.

    Raises:
      ValueError: a number below 1, or what `run` refuses.
    """
    check_number("rows", rows)
    check_number("every", every)
    mesh, request, knobs = drive.checked(decoder, params, request, knobs)
    take = jax.jit(Request.take) if shared(request.tokens) else Request.take
    request = gathered(request)

    def start(which: Any) -> Any:
        """The state after these prompts, by their numbers."""
        some, _ = over_processes(mesh, params, take(request, which), None)
        return drive.start(decoder, params, some, knobs)

    rows = min(rows, request.batch)
    with on(mesh):
        axes = _batch_axes(decoder, params, request, knobs)
        owners = np.arange(rows)  # the prompt in each row
        waiting = list(range(rows, request.batch))
        results: dict[int, Decoded] = {}
        state, steps, busy = start(np.arange(rows)), 0, 0
        while len(results) < request.batch:
            before = np.asarray(gathered(state.rows.counts[NETWORK_CALLS]))
            state, did = drive.advance(decoder, params, state, knobs, np.int32(every))
            steps += int(did)
            done, owned = np.asarray(gathered(decoder.done(state))), owners >= 0
            # A row was running in all of these steps unless it stopped, which its count of calls
            # tells.
            calls = np.asarray(gathered(state.rows.counts[NETWORK_CALLS])) - before
            share = np.where(done, calls / max(calls[owned].max(initial=0), 1), 1.0)
            busy += round(float((share * owned).sum()) * int(did))
            ended = np.flatnonzero(done & owned)
            if not len(ended):
                continue
            finished = jax.tree.map(np.asarray, gathered(drive.finish(decoder, state)))
            for row in ended:
                results[int(owners[row])] = jax.tree.map(lambda x, row=row: x[row], finished)
            # The next prompts take the rows that have ended; a row for which none is left stays as
            # it is.
            fresh, waiting = waiting[: len(ended)], waiting[len(ended) :]
            owners[ended] = -1
            owners[ended[: len(fresh)]] = fresh
            if fresh:
                # They are read in one call of a power-of-two batch: the last one fills it up,
                # written to the same row again.
                more = 2 ** (len(fresh) - 1).bit_length() - len(fresh)
                places = np.pad(ended[: len(fresh)], (0, more), mode="edge").astype(np.int32)
                state = _place(axes, state, start(np.pad(fresh, (0, more), mode="edge")), places)
        ordered = [results[i] for i in range(request.batch)]
        decoded = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *ordered)
        return QueueResult(decoded, steps, busy / max(steps * rows, 1))


@jax.jit(static_argnums=0, donate_argnums=1)
def _place(axes: tuple[int, ...], state: Any, new: Any, places: Int[Array, " K"]) -> Any:
    leaves, tree = jax.tree.flatten(state)
    leaves = [
        old if axis < 0 else old.at[(slice(None),) * axis + (places,)].set(value)
        for axis, old, value in zip(axes, leaves, jax.tree.leaves(new), strict=True)
    ]
    return placed(jax.tree.unflatten(tree, leaves))


def _batch_axes(decoder: DecoderBase, params: Any, request: Request, knobs: Any) -> tuple[int, ...]:
    """For each leaf of a decoder's state, the axis of rows, which grows where there is one row
    more; -1 for none.
    """

    def shapes(batch: int) -> list[tuple[int, ...]]:
        some = request.take(np.zeros(batch, np.int32))
        # traced once, unlike `decoder.init`
        state = drive.start.eval_shape(decoder, params, some, knobs)
        return [leaf.shape for leaf in jax.tree.leaves(state)]

    pairs = zip(shapes(1), shapes(2), strict=True)
    return tuple(
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), -1)
        for pair in pairs
    )
