"""The loop of adaptive computation: recurrences until a criterion fires, each row by itself."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paradec_jax.decode.machine.knobs import check_range, knob
from paradec_jax.decode.machine.network import Forward, Prefix
from paradec_jax.decode.recurrent.criteria import CRITERIA, Criterion
from paradec_jax.decode.recurrent.latents import LatentKnobs
from paradec_jax.decode.rules.windows import last_of, where_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExitLoop:
    """Where the loop stands, and how it ended.

    Attributes:
      index: recurrences that the loop has done.
      states: s, [B, W, D]; those of a row stay once its criterion has fired.
      kv: keys and values of the window.
      active: rows whose criterion has not fired, [B].
      previous: what the criterion compares with at its next check.
      hidden: head input of the last position at the last check, zeros where no check has read it, [B, 1, D].
      checks: checks done by each row, [B].
      exit_values: what the criterion measured at each check, NaN where it was not asked, [B, steps].
    """

    index: Int[Array, ""]
    states: Float[Array, "B W D"]
    kv: Any
    active: Bool[Array, "B"]
    previous: Any
    hidden: Float[Array, "B 1 D"]
    checks: Int[Array, "B"]
    exit_values: Float[Array, "B steps"]


Recurrence = Callable[[Array, Any, Array, Array], tuple[Array, Any]]
Look = Callable[[Array, Any], tuple[Forward, Array]]


def exit_loop(
    recur_once: Recurrence,
    look: Look,
    criterion: Criterion,
    states: Float[Array, "B W D"],
    kv: Any,
    active: Bool[Array, "B"],
    *,
    valid: Bool[Array, "B W"],
    threshold: Any,
    due: Callable[[Int[Array, ""]], Any],
    steps: int,
    bounded: bool = False,
) -> ExitLoop:
    """Runs recurrences on each row until its criterion fires, `steps` of them at most.

    Args:
      recur_once: (states, kv, index, active) -> states, kv; one recurrence of the active rows.
      look: (states, kv) -> a call's result with the head input of the last real position alone, and its logits
        [B, V]; asked where the criterion looks at logits.
      criterion: measures what has changed since the last check, and fires.
      states, kv: what the first recurrence starts from.
      active: rows that take part.
      valid: positions of the window that are real.
      threshold: of the criterion.
      due: whether the criterion is asked after recurrence `index`, counted from 0.
      steps: recurrences at most.
      bounded: do all `steps`, masked, so that reverse mode can cross the loop.
    """
    reads = criterion.looks_at == "logits"

    def check(loop: ExitLoop) -> ExitLoop:
        """Active rows measure, remember, and leave where the criterion fires."""
        seen = loop.states
        if reads:
            out, seen = look(loop.states, loop.kv)
            hidden = where_rows(loop.active, out.hidden, loop.hidden)
            loop = dataclasses.replace(loop, hidden=hidden, kv=_with_coda(loop.active, out.kv, loop.kv))
        value, previous = criterion.measure(loop.previous, seen, valid)
        column = jnp.arange(steps) == loop.checks[:, None]
        return dataclasses.replace(
            loop,
            active=loop.active & ~criterion.fires(value, threshold),
            previous=where_rows(loop.active, previous, loop.previous),
            checks=loop.checks + loop.active,
            exit_values=jnp.where(column & loop.active[:, None], value[:, None], loop.exit_values),
        )

    def body(loop: ExitLoop) -> ExitLoop:
        states, kv = recur_once(loop.states, loop.kv, loop.index, loop.active)
        moved = dataclasses.replace(loop, index=loop.index + 1, states=states, kv=kv)
        return lax.cond(due(loop.index), check, lambda same: same, moved)

    start = _start(criterion, look, states, kv, active, steps)
    if bounded:
        return lax.scan(lambda loop, _: (body(loop), None), start, length=steps)[0]
    return lax.while_loop(lambda loop: (loop.index < steps) & jnp.any(loop.active), body, start)


def _start(
    criterion: Criterion, look: Look, states: Array, kv: Any, active: Bool[Array, "B"], steps: int
) -> ExitLoop:
    seen, batch = states, len(active)
    if criterion.looks_at == "logits":
        seen = jnp.zeros(jax.eval_shape(look, states, kv)[1].shape, jnp.float32)
    return ExitLoop(
        index=jnp.int32(0),
        states=states,
        kv=kv,
        active=active,
        previous=criterion.init(seen),
        hidden=jnp.zeros_like(states[:, :1]),
        checks=jnp.zeros(batch, jnp.int32),
        exit_values=jnp.full((batch, steps), jnp.nan, jnp.float32),
    )


def as_last_checked(loop: ExitLoop, out: Forward, rows: Bool[Array, "B"]) -> Forward:
    """`out`, but in these rows what their last check has read."""
    hidden = where_rows(rows, loop.hidden, out.hidden)
    return dataclasses.replace(out, hidden=hidden, kv=_with_coda(~rows, out.kv, loop.kv))


def _with_coda(rows: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """The window `old` with the coda's keys and values of `new` in these rows: all that a readout changes."""
    return dataclasses.replace(old, coda=where_rows(rows, new.coda, old.coda))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fed:
    """A window that is fed to the network.

    Attributes:
      tokens, positions: of the window, [B, W].
      widths: positions that are real, [B].
      visible: cache entries that it sees, [B]; None for a prompt.
    """

    tokens: Int[Array, "B W"]
    positions: Int[Array, "B W"]
    widths: Int[Array, "B"]
    visible: Int[Array, "B"] | None

    @property
    def at(self) -> Int[Array, "B"]:
        """The first position."""
        return self.positions[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptiveKnobs(LatentKnobs):
    """Sampling, and when to look and leave.

    Attributes:
      exit_threshold: the criterion's threshold; its own default when None.
      min_recurrence: recurrences before the first check.
      check_every: recurrences between checks.
    """

    exit_threshold: Float[Array, ""] | float | None = knob(
        None, unset=lambda decoder: CRITERIA[decoder.criterion].threshold
    )
    min_recurrence: Int[Array, ""] | int = 0
    check_every: Int[Array, ""] | int = 1

    def check(self) -> None:
        """Raises ValueError for values outside their range, unless they are traced."""
        check_range(self.min_recurrence, "min_recurrence", lambda x: x >= 0, "at least 0")
        check_range(self.check_every, "check_every", lambda x: x >= 1, "at least 1")
        super().check()


def recur_until_exit(
    network: Any,
    params: Any,
    cache: Any,
    fed: Fed,
    active: Bool[Array, "B"],
    criterion: Criterion,
    knobs: AdaptiveKnobs,
    *,
    steps: int,
    may_exit: bool = True,
    bounded: bool = False,
) -> tuple[ExitLoop, Forward]:
    """Prelude, exit loop and coda on a window that starts from the latents in the cache.

    Args:
      network, params: a recurrent network.
      cache: what the window sees, and its initial latents.
      fed: the window.
      active: rows that take part.
      criterion: when to leave.
      knobs: its threshold, the first check and those after it.
      steps: recurrences at most.
      may_exit: whether the criterion is asked at all.
      bounded: see `exit_loop`.

    Returns:
      The loop at its end, and what its states read out, the head input of the last real position alone.
    """
    view = network.view(fed.positions, Prefix(cache, fed.visible))
    e, kv = network.embed(params, fed.tokens, view, network.empty_window(*fed.tokens.shape))

    def recur_once(states: Array, kv: Any, index: Array, active: Array) -> tuple[Array, Any]:
        return network.iterate(params, states, e, view, kv, index, active)

    def look(states: Array, kv: Any) -> tuple[Forward, Array]:
        out = network.readout(params, states, view, kv)
        out = dataclasses.replace(out, hidden=last_of(out.hidden, fed.widths))
        return out, network.logits(params, out.hidden)[:, 0]

    def due(index: Array) -> Any:
        since = index - knobs.min_recurrence
        return may_exit & (since >= 0) & (since % knobs.check_every == 0)

    loop = exit_loop(
        recur_once,
        look,
        criterion,
        network.latents(cache, fed.positions),
        kv,
        active,
        valid=jnp.arange(fed.tokens.shape[1]) < fed.widths[:, None],
        threshold=criterion.threshold if knobs.exit_threshold is None else knobs.exit_threshold,
        due=due,
        steps=steps,
        bounded=bounded,
    )
    return loop, look(loop.states, loop.kv)[0]
