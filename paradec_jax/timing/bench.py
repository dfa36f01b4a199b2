"""How close a decoder comes to the limits of its device: random weights, a fixed number of tokens.

Weights are random, so nothing here depends on a model's quality. Decoders whose steps depend on what the model
says (`Adaptive`, `Wavefront`) then show the cost of a step, not of a token; a paced wavefront commits one token a
step whatever the weights are, and shows both.

Reading the prompt and the loop after it are two programs, the ones of `stream` and `serve`, so that the cost of a
step is no small difference of two long timings. Each is compiled once, and what was compiled is what is timed.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from paradec_jax.decode import Decoded, Request, Wavefront, make_request
from paradec_jax.decode.machine import drive
from paradec_jax.decode.machine.rows import NETWORK_CALLS, POSITIONS

COPY_BYTES = 2**28
INSTANT = 1e-9  # seconds that a loop takes at least, however coarse the clock
_CPU_SIDE, _SIDE = 2048, 8192


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device was measured to do.

    Attributes:
      bytes_per_second: bytes read and written where 256 MiB are copied onto themselves.
      read_bytes_per_second: bytes read by products with a vector, one after another, of a matrix that is as large
        as the model: the rate at which a step over one position could stream its weights.
      reread_bytes_per_second: the same of a matrix as large as the part of the model that a recurrence reads again,
        which a smaller cache may hold.
      flops_per_second: of a square matrix product in the dtype of interest, sums in float32.
    """

    bytes_per_second: float
    read_bytes_per_second: float
    reread_bytes_per_second: float
    flops_per_second: float


def limits(dtype: str, weights: int = COPY_BYTES, core: int = 0, repeats: int = 7) -> Limits:
    """Measures the default device; each figure is the best of `repeats`.

    Args:
      dtype: of weights and activations.
      weights: bytes of the model, which decide out of which cache they are read.
      core: bytes that a recurrence reads again; 0 for none.
      repeats: timings of each figure.
    """
    read = read_rate(dtype, weights, repeats)
    return Limits(
        bytes_per_second=copy_rate(repeats),
        read_bytes_per_second=read,
        reread_bytes_per_second=read_rate(dtype, core, repeats) if core else read,
        flops_per_second=product_rate(dtype, repeats),
    )


def product_rate(dtype: str, repeats: int) -> float:
    """Operations a second of a square matrix product, sums in float32."""
    side = _CPU_SIDE if jax.default_backend() == "cpu" else _SIDE
    product = jax.jit(lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.float32))
    matrix = jnp.ones((side, side), dtype)
    return 2 * side**3 / _best(product, (matrix,) * 2, repeats)


def copy_rate(repeats: int) -> float:
    """Bytes a second that are read and written in place, so that no memory is asked for meanwhile."""
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    buffer = jax.block_until_ready(copy(jnp.zeros(COPY_BYTES // 4, jnp.float32)))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        buffer = jax.block_until_ready(copy(buffer))
        seconds.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / min(seconds)


def read_rate(dtype: str, weights: int, repeats: int) -> float:
    """Bytes a second of matrix-vector products, the better of the two orders.

    A CPU reads float32 whatever the dtype is: its products turn bfloat16 weights into float32, once, before a loop.
    """
    if jax.default_backend() == "cpu":
        weights, dtype = weights * 4 // jnp.dtype(dtype).itemsize, "float32"
    size = jnp.dtype(dtype).itemsize
    side = math.isqrt(max(weights, size) // size)
    times = max(8, -(-COPY_BYTES // (size * side**2)))  # so many that starting the program counts for nothing
    matrix, vector = jnp.full((side, side), 1 / side, dtype), jnp.ones(side, dtype)

    def stream(matrix: Array, vector: Array, contracted: int) -> Array:
        def once(_: Array, vector: Array) -> Array:
            found = jnp.tensordot(matrix, vector, (contracted, 0), preferred_element_type=jnp.float32)
            return (found + 1).astype(vector.dtype)  # depends on the last one, so none can be left out

        return jax.lax.fori_loop(0, times, once, vector)

    orders = (jax.jit(functools.partial(stream, contracted=axis)) for axis in (0, 1))
    seconds = min(_best(order, (matrix, vector), repeats) for order in orders)
    return times * size * side**2 / seconds


def limits_of(network: Any, params: Any) -> Limits:
    """The limits of the device for the weights of a network."""
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    core = _at(network, 2).work(1, 1, 0).bytes - _at(network, 1).work(1, 1, 0).bytes
    return limits(network.config.dtype, weights, core)


def read_seconds(network: Any, batch: int, positions: int, context: int, device: Limits) -> float:
    """Seconds that reading takes which a call must do; what recurrences read again is read at a rate of its own."""
    whole, once = (at.work(batch, positions, context).bytes for at in (network, _at(network, 1)))
    return once / device.read_bytes_per_second + (whole - once) / device.reread_bytes_per_second


def _best(function: Any, arguments: tuple[Any, ...], repeats: int) -> float:
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def bench(
    network: Any,
    params: Any,
    decoder: Any,
    knobs: Any = None,
    *,
    batch: int = 1,
    context: int = 64,
    tokens: int = 64,
    passes: int = 5,
    seed: int = 0,
    device: Limits | None = None,
) -> dict[str, Any]:
    """Decodes `tokens` tokens after random prompts of `context` tokens and returns one row of figures.

    Args:
      network: a network that can say what a call costs (`work`).
      params: its parameters, random ones as a rule.
      decoder: unbound.
      knobs: its knobs, or None for the defaults.
      batch: rows.
      context: prompt tokens of each row.
      tokens: tokens to generate in each row; the first comes with the prompt, where there is a cache.
      passes: timings, of which the median counts.
      seed: of the prompts.
      device: measured limits, where they are known already.

    Returns:
      Rates, seconds and microseconds of a step (prompt left out), bytes and floating-point operations that a
      step must move and do, their shares of what the device was measured to copy, to read and to multiply, the
      larger of the last two (`limit_fraction`), compile time and memory.

    Raises:
      ValueError: prompt and tokens together are longer than the model's length, fewer than two tokens, or no
        pass.
    """
    if tokens < 2 or passes < 1:
        raise ValueError(f"tokens must be at least 2 and passes at least 1, not {tokens} and {passes}")
    device = limits_of(network, params) if device is None else device
    vocab = network.vocab_size - (decoder.spec.mask is not None)  # whose last token the mask is
    prompts = np.random.default_rng(seed).integers(0, vocab, (batch, context))
    request = make_request(prompts, max_new_tokens=tokens, seed=seed)
    bound = decoder.bind(network, context + tokens)
    bound.check(request)
    programs = compile_once(bound, bound.prepare(params), request, knobs)
    programs.time()  # the first call of a program is slower than the others
    timings = [programs.time() for _ in range(passes)]
    size = {"parameters": sum(x.size for x in jax.tree.leaves(params))}
    return figures(network, bound, programs, timings, device) | size


def figures(
    network: Any, decoder: Any, programs: "Programs", timings: Sequence["Timing"], device: Limits
) -> dict[str, Any]:
    """The figures of `bench` but for the number of parameters, of a bound decoder that was timed."""
    request = programs.arguments[1]
    batch, context = request.batch, request.tokens.shape[1]
    tokens = decoder.size - context
    seconds = [t.prompt + t.loop for t in timings]
    decoded, steps = timings[-1].decoded, timings[-1].steps
    generated, calls = int(decoded.generated.sum()), int(decoded.network_calls.sum())
    idle = min(t.idle for t in timings)
    loop = statistics.median(max(t.loop - idle, INSTANT) for t in timings)
    a_step = loop / steps
    spent = timings[-1].counts
    width = -(-spent[POSITIONS] // spent[NETWORK_CALLS])
    # A canvas is read anew in every call, and its output matrix meets the positions that the call reveals.
    held, first = (context + tokens // 2, batch) if decoder.needs_cache else (0, 0)
    revealed = {} if decoder.needs_cache else {"logits": generated / steps / batch}
    depth = round(spent.get("recurrences", 0) / spent[NETWORK_CALLS])
    step = _at(network, depth).work(batch, width, held, **revealed)
    read = read_seconds(_at(network, depth), batch, width, held, device)
    flops = step.flops / a_step / device.flops_per_second
    return {
        "decoder": type(decoder).__name__,
        "batch": batch,
        "context": context,
        "tokens": generated,
        "dtype": network.config.dtype,
        "device": jax.devices()[0].device_kind,
        "seconds": statistics.median(seconds),
        "prompt_seconds": statistics.median(t.prompt for t in timings),
        "tokens_per_second": generated / statistics.median(seconds),
        "decode_tokens_per_second": (generated - first) / loop,
        "network_calls": calls,
        "network_calls_per_token": calls / generated,
        "microseconds_per_step": 1e6 * a_step,
        "step_bytes": step.bytes,
        "step_flops": step.flops,
        "bandwidth_fraction": step.bytes / a_step / device.bytes_per_second,
        "read_fraction": read / a_step,
        "flops_fraction": flops,
        "limit_fraction": max(read / a_step, flops),
        "device_bytes_per_second": device.bytes_per_second,
        "device_read_bytes_per_second": device.read_bytes_per_second,
        "device_reread_bytes_per_second": device.reread_bytes_per_second,
        "device_flops_per_second": device.flops_per_second,
        "compile_seconds": programs.compile_seconds,
        "peak_bytes": programs.peak_bytes,
        "spread": statistics.pstdev(seconds) / statistics.median(seconds),
    }


@dataclasses.dataclass(frozen=True)
class Timing:
    """One run.

    Attributes:
      prompt: seconds that read the prompts.
      loop: seconds of the call that does all steps after them.
      idle: seconds of the same call without a step: dispatch.
      steps: how many there were.
      counts: what the steps cost, summed over rows.
      decoded: what came out.
    """

    prompt: float
    loop: float
    idle: float
    steps: int
    counts: dict[str, int]
    decoded: Decoded


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The two compiled programs of a decoder and all that they take.

    Attributes:
      read: (params, request, knobs) -> state after the prompts.
      go_on: (params, state, knobs, most) -> state after at most so many steps, and their number; the state that
        it is given is gone afterwards.
      finish: state -> result.
      arguments: params, request, knobs.
      compile_seconds: of tracing and compiling both.
      peak_bytes: arguments, results and temporaries of the larger one, where the backend tells.
    """

    read: Any
    go_on: Any
    finish: Any
    arguments: tuple[Any, Any, Any]
    compile_seconds: float
    peak_bytes: int | None

    def time(self) -> Timing:
        """One run, with no bound on the number of steps."""
        params, request, knobs = self.arguments
        clock = [time.perf_counter()]
        state = jax.block_until_ready(self.read(params, request, knobs))
        clock.append(time.perf_counter())
        before = _totals(state)
        clock.append(time.perf_counter())
        state, _ = jax.block_until_ready(self.go_on(params, state, knobs, np.int32(0)))
        clock.append(time.perf_counter())
        state, steps = jax.block_until_ready(self.go_on(params, state, knobs, np.int32(drive.UNBOUNDED)))
        clock.append(time.perf_counter())
        prompt, _, idle, loop = np.diff(clock).tolist()
        counts = {name: total - before[name] for name, total in _totals(state).items()}
        return Timing(prompt, loop, idle, int(steps), counts, self.finish(state))


def compile_once(decoder: Any, params: Any, request: Request, knobs: Any = None) -> Programs:
    """Compiles what reads the prompts and what goes on after them, without running either.

    Args:
      decoder: a bound decoder.
      params: parameters of its network.
      request: of the shape to compile for.
      knobs: a `decoder.Knobs`; the defaults when None.
    """
    knobs = decoder.knobs(knobs)
    start = time.perf_counter()
    read = drive.start.lower(decoder, params, request, knobs)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), read.out_info)
    go_on = drive.advance.lower(decoder, params, state, knobs, np.int32(drive.UNBOUNDED))
    compiled = read.compile(), go_on.compile()
    seconds = time.perf_counter() - start
    peaks = [_peak(program.memory_analysis()) for program in compiled]
    peak = None if None in peaks else max(p for p in peaks if p is not None)
    return Programs(*compiled, decoder.finish, (params, request, knobs), seconds, peak)


def _peak(memory: Any) -> int | None:
    """Bytes of arguments, results and temporaries of a compiled program, where its backend tells."""
    if memory is None:
        return None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes  # donated buffers count once
    return int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)


def _totals(state: Any) -> dict[str, int]:
    """What the rows of a state have cost together."""
    return {name: int(np.asarray(count).sum()) for name, count in state.rows.counts.items()}


def _at(network: Any, recurrence: int) -> Any:
    """The network at a depth, where it has one."""
    return network.at(recurrence) if "recurrences" in network.counters else network


def paced_wavefront(recurrence: int, inner_recurrence: int) -> tuple[Wavefront, Any]:
    """A wave that gives each token `recurrence` recurrences or a little more and commits one token a step."""
    steps = -(-recurrence // inner_recurrence)
    wave = Wavefront(inner_recurrence=inner_recurrence, window=steps, paced=True, greedy=True)
    return wave, wave.Knobs(max_recurrence=recurrence)
