"""Four drivers of one step. They know nothing of families: the caller picks the loop.

| driver    | built on                          | gives                                                  |
|-----------|-----------------------------------|--------------------------------------------------------|
| `run`     | `lax.while_loop`                  | the result, as fast as it goes                         |
| `trace`   | `lax.scan`                        | the result and a record of every step                  |
| `rollout` | nested `lax.scan` with checkpoint | as `trace`, and reverse mode in bounded memory         |
| `stream`  | a Python loop over jitted steps   | states as they come                                    |
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paradec_jax.decode.protocol import Decoded, Request

Record = Callable[[Any], Any]


def check(decoder: Any, request: Request) -> None:
    """Refuses, before anything is compiled, a request that the decoder's buffers cannot hold.

    Raises:
      ValueError: an unbound decoder, a prompt longer than the buffer, or a buffer beyond the model's length.
    """
    name = type(decoder).__name__
    if decoder.network is None or decoder.size < 1:
        raise ValueError(f"{name} has no network or no size: call bind(network, size) first")
    if isinstance(request.lengths, jax.core.Tracer):
        return
    longest = int(np.max(np.asarray(request.lengths)))
    if request.tokens.shape[1] > decoder.size or longest >= decoder.size:
        raise ValueError(
            f"a prompt of {longest} tokens (padded to {request.tokens.shape[1]}) leaves no room in a buffer of "
            f"{decoder.size} positions: give {name} a greater size or shorten the prompt"
        )
    if decoder.size > decoder.network.max_length:
        raise ValueError(
            f"size {decoder.size} is more than the {decoder.network.max_length} positions the model was built for"
        )


def _knobs(decoder: Any, knobs: Any) -> Any:
    """The knobs as float32 and int32 arrays, so that Python numbers and arrays trace one program."""
    knobs = decoder.Knobs() if knobs is None else knobs
    if not isinstance(knobs, decoder.Knobs):
        wanted = f"{type(decoder).__name__}.Knobs ({decoder.Knobs.__name__})"
        raise ValueError(f"{type(decoder).__name__} takes knobs of type {wanted}, not {type(knobs).__name__}")
    knobs = knobs.checked()
    temperature = knobs.temperature
    if (
        getattr(decoder, "greedy", False)
        and not isinstance(temperature, jax.core.Tracer)
        and np.any(np.asarray(temperature) > 0)
    ):
        raise ValueError(f"{type(decoder).__name__} is greedy, so temperature must be 0, not {temperature}")

    def as_array(x: Any) -> Any:
        x = jnp.asarray(x)
        if x.dtype == jnp.bool_:
            return x
        return lax.convert_element_type(x, jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else _float(x))

    return jax.tree.map(as_array, knobs)


def _float(x: Any) -> Any:
    return x.dtype if x.dtype == jnp.float64 and not x.weak_type else jnp.float32


def run(
    decoder: Any, params: Any, request: Request, knobs: Any = None, *, max_steps: int | None = None
) -> Decoded:
    """Decodes until every row has stopped (or `max_steps` steps are done), in one compiled loop.

    Args:
      decoder: a bound decoder.
      params: parameters of its network.
      request: prompts, budgets, keys.
      knobs: a `decoder.Knobs`; the defaults when None.
      max_steps: a bound on the number of steps.
    """
    check(decoder, request)
    return _run(decoder, params, request, _knobs(decoder, knobs), _bound(max_steps))


def _bound(max_steps: int | None) -> np.int32:
    return np.int32(np.iinfo(np.int32).max if max_steps is None else max_steps)


@functools.partial(jax.jit, static_argnums=0)
def _run(decoder: Any, params: Any, request: Request, knobs: Any, max_steps: Any) -> Decoded:
    def going(carry: tuple[Any, Any]) -> Any:
        state, count = carry
        return (count < max_steps) & ~jnp.all(decoder.done(state))

    def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return decoder.step(params, carry[0], knobs), carry[1] + 1

    params = decoder.network.prepare(params)
    state, _ = lax.while_loop(going, body, (decoder.init(params, request, knobs), jnp.int32(0)))
    return decoder.finish(state)


def trace(
    decoder: Any,
    params: Any,
    request: Request,
    knobs: Any = None,
    *,
    n: int,
    record: Record = lambda state: state.progress.tokens,
) -> tuple[Decoded, Any]:
    """Does exactly `n` steps and keeps `record(state)` after each, stacked on a leading axis of n.

    Rows that have stopped do not move, so `n` may exceed what they need. `record` is a static argument: pass
    one function object, not a new lambda each time.
    """
    check(decoder, request)
    return _trace(decoder, record, n, params, request, _knobs(decoder, knobs))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _trace(
    decoder: Any, record: Record, n: int, params: Any, request: Request, knobs: Any
) -> tuple[Decoded, Any]:
    def body(state: Any, _: None) -> tuple[Any, Any]:
        state = decoder.step(params, state, knobs)
        return state, record(state)

    params = decoder.network.prepare(params)
    state, records = lax.scan(body, decoder.init(params, request, knobs), length=n)
    return decoder.finish(state), records


def rollout(
    decoder: Any,
    params: Any,
    request: Request,
    knobs: Any = None,
    *,
    n: int,
    segment: int | None = None,
    record: Record = lambda state: state.progress.tokens,
) -> tuple[Decoded, Any]:
    """As `trace`, differentiable in reverse mode with respect to params and knobs.

    Steps are grouped in segments whose inner states are computed again in the backward pass, so memory grows
    with `n / segment + segment` states, not with n. Inner loops run a fixed number of masked steps
    (`decoder.differentiable()`).

    Args:
      decoder, params, request, knobs, record: as for `trace`.
      n: number of steps.
      segment: steps of a segment, a divisor of n; by default the divisor nearest to sqrt(n).

    Raises:
      ValueError: a segment that does not divide n.
    """
    check(decoder, request)
    if segment is None:
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        segment = min(divisors, key=lambda d: abs(d - n**0.5))
    if segment < 1 or n % segment:
        raise ValueError(f"segment must divide n = {n}, but it is {segment}")
    decoder = decoder.differentiable()
    knobs = _knobs(decoder, knobs)
    params = decoder.network.prepare(params)

    def body(state: Any, _: None) -> tuple[Any, Any]:
        state = decoder.step(params, state, knobs)
        return state, record(state)

    @jax.checkpoint
    def of_segment(state: Any, _: None) -> tuple[Any, Any]:
        return lax.scan(body, state, length=segment)

    state, records = lax.scan(of_segment, decoder.init(params, request, knobs), length=n // segment)
    return decoder.finish(state), jax.tree.map(lambda x: x.reshape(n, *x.shape[2:]), records)


def stream(
    decoder: Any,
    params: Any,
    request: Request,
    knobs: Any = None,
    *,
    every: int = 1,
    max_steps: int | None = None,
    interrupt: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Yields the state after the prompt and then after each `every` steps, until every row has stopped.

    The state that was yielded is donated to the next call: take what you need from it before you go on.
    `decoder.finish(state)` of the last one is the result.

    Args:
      decoder, params, request, knobs: as for `run`.
      every: steps of one call.
      max_steps: a bound on the number of steps.
      interrupt: looks at each state on the host and returns rows [B] to stop, or None.
    """
    check(decoder, request)
    knobs = _knobs(decoder, knobs)
    state = _init(decoder, params, request, knobs)
    count = 0
    while True:
        if interrupt is not None and (rows := interrupt(state)) is not None and np.any(rows):
            state = decoder.interrupt(state, jnp.asarray(rows))
        yield state
        if bool(jnp.all(decoder.done(state))) or (max_steps is not None and count >= max_steps):
            return
        steps = every if max_steps is None else min(every, max_steps - count)
        state, _ = _steps(decoder, params, state, knobs, np.int32(steps))
        count += steps


_init = jax.jit(
    lambda decoder, params, request, knobs: decoder.init(params, request, knobs), static_argnums=0
)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _steps(decoder: Any, params: Any, state: Any, knobs: Any, count: Any) -> tuple[Any, Any]:
    """The state after at most `count` steps, and how many there were."""

    def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return decoder.step(params, carry[0], knobs), carry[1] + 1

    def going(carry: tuple[Any, Any]) -> Any:
        return (carry[1] < count) & ~jnp.all(decoder.done(carry[0]))

    params = decoder.network.prepare(params)
    return lax.while_loop(going, body, (state, jnp.int32(0)))
