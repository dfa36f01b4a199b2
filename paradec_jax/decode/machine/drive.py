"""Four drivers of one step. They know nothing of families: the caller picks the loop.

| driver    | built on                          | gives                                                  |
|-----------|-----------------------------------|--------------------------------------------------------|
| `run`     | `lax.while_loop`                  | the result, as fast as it goes                         |
| `trace`   | `lax.scan`                        | the result and a record of every step                  |
| `rollout` | nested `lax.scan` with checkpoint | as `trace`, and reverse mode in bounded memory         |
| `stream`  | a Python loop over jitted steps   | states as they come                                    |

Parameters are raw or prepared (`decoder.prepare`, once, by the owner of the parameters); no driver
does. Where they or the request lie on a mesh, the state lies on it by rows (`placing`). On a mesh
of several processes every one of them calls the driver with the same request, its own copy or one
by rows; results come whole to each, states by rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paradec_jax.config import check_number
from paradec_jax.decode.machine.decoder import DecoderBase
from paradec_jax.decode.machine.placing import over_processes, placed
from paradec_jax.decode.machine.request import Request
from paradec_jax.decode.machine.rows import Decoded
from paradec_jax.sharding.mesh import mesh_of, on
from paradec_jax.sharding.processes import gathered, shared

Record = Callable[[Any, Any], Any]
UNBOUNDED = np.iinfo(np.int32).max
INFO: Record = lambda state, info: info  # noqa: E731  what the step says of itself, the record by default


def run(
    decoder: DecoderBase,
    params: Any,
    request: Request,
    knobs: Any = None,
    *,
    max_steps: int | None = None,
    every: int = 1,
) -> Decoded:
    """Decodes until every row has stopped (or `max_steps` steps are done), in one compiled loop.

    Args:
      decoder: a bound decoder.
      params: parameters of its network.
      request: prompts, budgets, keys.
      knobs: a `decoder.Knobs`; the defaults when None.
      max_steps: a bound on the number of steps.
      every: steps between two looks whether every row has stopped. The host of an accelerator waits
        for each look; up to `every - 1` steps at the end are idle, and no row counts them.

    Raises:
      ValueError: what `decoder.check` and `decoder.knobs` refuse, before anything is compiled, or
        an `every` that does not divide `max_steps`.
    """
    check_number("every", every)
    if (max_steps or 0) % every:
        raise ValueError(f"every must divide max_steps = {max_steps}, but it is {every}")
    bound = np.int32(UNBOUNDED if max_steps is None else max_steps)
    mesh, request, knobs = checked(decoder, params, request, knobs)
    with on(mesh):
        return gathered(compiled_run(decoder, params, request, knobs, bound, every=every))


def checked(
    decoder: DecoderBase, params: Any, request: Request, knobs: Any
) -> tuple[jax.sharding.Mesh | None, Request, Any]:
    """The mesh of a call, its request and its knobs as its program takes them; raises ValueError as
    `run` does.
    """
    decoder.check(gathered(request))
    knobs, mesh = decoder.knobs(knobs), mesh_of(params, request)
    return mesh, *over_processes(mesh, params, request, knobs)


@jax.jit(static_argnums=0, static_argnames="every")
def compiled_run(
    decoder: DecoderBase, params: Any, request: Request, knobs: Any, max_steps: Any, every: int = 1
) -> Decoded:
    """The program behind `run`, without its checks."""
    state = _begin(decoder, params, request, knobs)
    return decoder.finish(_while_running(decoder, params, state, knobs, max_steps, every=every)[0])


def _begin(decoder: DecoderBase, params: Any, request: Request, knobs: Any) -> Any:
    """The state after the prompt; on a mesh by rows, as the prompt was read."""
    batch = request.batch
    return placed(decoder.init(params, placed(request, batch), knobs), batch)


def _while_running(
    decoder: DecoderBase,
    params: Any,
    state: Any,
    knobs: Any,
    most: Any,
    info: Any = None,
    every: int = 1,
) -> tuple[Any, Any, Any]:
    """The state after at most `most` steps, how many there were, and the newest info where one is
    given to begin.

    Whether to go on is asked before each `every` steps.
    """

    def going(carry: tuple[Any, Any, Any]) -> Any:
        state, count, _ = carry
        return (count < most) & ~jnp.all(decoder.done(state))

    def step(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        state, count, info = carry
        state, new = decoder.step(params, state, knobs)
        return state, count + 1, None if info is None else new

    def steps(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        return lax.fori_loop(0, every, lambda _, carry: step(carry), carry)

    body = step if every == 1 else steps
    return lax.while_loop(going, body, (state, jnp.int32(0), info))


def _recorded(
    decoder: DecoderBase, params: Any, knobs: Any, record: Record, state: Any, _: None
) -> tuple[Any, Any]:
    """A step, and what is kept of it."""
    state, info = decoder.step(params, state, knobs)
    return state, record(state, info)


def trace(
    decoder: DecoderBase,
    params: Any,
    request: Request,
    knobs: Any = None,
    *,
    n: int,
    record: Record = INFO,
) -> tuple[Decoded, Any]:
    """Does exactly `n` steps and keeps `record(state, info)` of each, stacked on a leading axis of
    n.

    Rows that have stopped do not move, so `n` may exceed what they need. `record` is a static
    argument: pass one function object, not a new lambda each time.
    """
    mesh, request, knobs = checked(decoder, params, request, knobs)
    with on(mesh):
        decoded, records = compiled_trace(decoder, record, n, params, request, knobs)
        return gathered(decoded), records


@jax.jit(static_argnums=(0, 1, 2))
def compiled_trace(
    decoder: DecoderBase, record: Record, n: int, params: Any, request: Request, knobs: Any
) -> tuple[Decoded, Any]:
    """The program behind `trace`, without its checks."""
    step = functools.partial(_recorded, decoder, params, knobs, record)
    state, records = lax.scan(step, _begin(decoder, params, request, knobs), length=n)
    return decoder.finish(state), records


def rollout(
    decoder: DecoderBase,
    params: Any,
    request: Request,
    knobs: Any = None,
    *,
    n: int,
    segment: int | None = None,
    record: Record = INFO,
) -> tuple[Decoded, Any]:
    """As `trace`, differentiable in reverse mode with respect to params and knobs.

    Steps are grouped in segments whose inner states are computed again in the backward pass, so
    memory grows with `n / segment + segment` states, not with n. Inner loops run a fixed number of
    masked steps (`decoder.differentiable()`).

    Args:
      decoder, params, request, knobs, record: as for `trace`.
      n: number of steps.
      segment: steps of a segment, a divisor of n; by default the divisor nearest to sqrt(n).

    Raises:
      ValueError: a segment that does not divide n.
    """
    decoder.check(request)
    if segment is None:
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        segment = min(divisors, key=lambda d: abs(d - n**0.5))
    if segment < 1 or n % segment:
        raise ValueError(f"segment must divide n = {n}, but it is {segment}")
    decoder = decoder.differentiable()
    knobs = decoder.knobs(knobs)
    step = functools.partial(_recorded, decoder, params, knobs, record)

    @jax.checkpoint
    def of_segment(state: Any, _: None) -> tuple[Any, Any]:
        return lax.scan(step, state, length=segment)

    with on(mesh_of(params, request)):
        state = _begin(decoder, params, request, knobs)
        state, records = lax.scan(of_segment, state, length=n // segment)
        return decoder.finish(state), jax.tree.map(lambda x: x.reshape(n, *x.shape[2:]), records)


def stream(
    decoder: DecoderBase,
    params: Any,
    request: Request,
    knobs: Any = None,
    *,
    every: int = 1,
    interrupt: Callable[[Any], Any] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yields (state, info) after the prompt and then after each `every` steps, until every row has
    stopped.

    The info is that of the newest step, None before the first. The state that was yielded is
    donated to the next
    call: take what you need from it before you go on. `decoder.finish(state)` of the last one is
      the result.

    Args:
      decoder, params, request, knobs: as for `run`.
      every: steps of one call.
      interrupt: looks at each state on the host and returns rows [B] to stop, or None; over
        processes it sees all rows on each, and must answer the same.
    """
    mesh, request, knobs = checked(decoder, params, request, knobs)
    with on(mesh):
        state, info = start(decoder, params, request, knobs), None
    while True:
        whole = state
        if shared(state.rows.length):  # caches stay where they are
            whole = dataclasses.replace(state, rows=gathered(state.rows))
        rows = None if interrupt is None else interrupt(whole)
        if rows is not None and np.any(rows):
            with on(mesh):
                state = _interrupt(decoder, state, np.asarray(rows))
        yield state, info
        if np.all(np.asarray(gathered(decoder.done(state)))):
            return
        with on(mesh):
            state, info = advance_with_info(decoder, params, state, knobs, np.int32(every))


start = jax.jit(_begin, static_argnums=0)


@jax.jit(static_argnums=0, donate_argnums=1)
def _interrupt(decoder: DecoderBase, state: Any, rows: Any) -> Any:
    """The state after rows [B] have been stopped from outside."""
    return placed(decoder.interrupt(state, rows))


finish = jax.jit(DecoderBase.finish, static_argnums=0)  # the result so far, in one program


@jax.jit(static_argnums=0, donate_argnums=2)
def advance(
    decoder: DecoderBase, params: Any, state: Any, knobs: Any, count: Any
) -> tuple[Any, Any]:
    """The state after at most `count` steps, and how many there were."""
    state, did, _ = _while_running(decoder, params, state, knobs, count)
    return placed(state), did


@jax.jit(static_argnums=0, donate_argnums=2)
def advance_with_info(
    decoder: DecoderBase, params: Any, state: Any, knobs: Any, count: Any
) -> tuple[Any, Any]:
    """As `advance`, with the newest step's info in place of the number; zeros where no step was
    done.
    """
    shapes = jax.eval_shape(lambda state: decoder.step(params, state, knobs)[1], state)
    empty = jax.tree.map(jnp.zeros_like, shapes)
    state, _, info = _while_running(decoder, params, state, knobs, count, empty)
    return placed(state), info
