"""How close a decoder comes to the limits of its device: random weights, a fixed number of tokens.

Weights are random, so nothing here depends on a model's quality. Decoders whose steps depend on what the model
says (`Adaptive`, `Wavefront`) then show the cost of a step, not of a token; `OfficialWavefront` under its rule
"fixed" commits one token a step whatever the weights are, and shows both.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paradec_jax.decode import AutoRegressive, OfficialWavefront, drive, make_request
from paradec_jax.evaluate.throughput import Subject, measure

COPY_BYTES = 2**28
_CPU_SIDE, _SIDE = 2048, 8192


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device was measured to do.

    Attributes:
      bytes_per_second: bytes read and written by a copy of 256 MiB.
      flops_per_second: of a square matrix product in the dtype of interest, sums in float32.
    """

    bytes_per_second: float
    flops_per_second: float


def limits(dtype: str, repeats: int = 7) -> Limits:
    """Measures the default device; each figure is the best of `repeats`."""
    side = _CPU_SIDE if jax.default_backend() == "cpu" else _SIDE
    copy = jax.jit(lambda x: x + 1)
    product = jax.jit(lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.float32))
    buffer = jnp.zeros(COPY_BYTES // 4, jnp.float32)
    matrix = jnp.ones((side, side), dtype)
    return Limits(
        2 * COPY_BYTES / _best(copy, (buffer,), repeats), 2 * side**3 / _best(product, (matrix,) * 2, repeats)
    )


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
    """Decodes `tokens` tokens behind random prompts of `context` tokens and returns one row of figures.

    Args:
      network: a network that can say what a call costs (`work`).
      params: its parameters, random ones as a rule.
      decoder: unbound.
      knobs: its knobs, or None for the defaults.
      batch: rows.
      context: prompt tokens of each row.
      tokens: tokens to generate in each row.
      passes: timings, of which the median counts.
      seed: of the prompts.
      device: measured limits, where they are known already.

    Returns:
      Rates, seconds and microseconds of a step (prompt left out), bytes and floating-point operations that a
      step must move and do, their shares of the device's limits, compile time and memory.

    Raises:
      ValueError: prompt and tokens together are longer than the model's length.
    """
    config = network.config
    device = limits(config.dtype) if device is None else device
    prompts = np.random.default_rng(seed).integers(0, network.vocab_size, (batch, context))
    request = make_request(prompts, max_new_tokens=tokens, seed=seed)
    bound = decoder.bind(network, context + tokens)
    drive.check(bound, request)
    speed = measure([Subject(bound, knobs)], params, [request], passes=passes)[0]
    memory = (
        drive._run.lower(bound, params, request, drive._knobs(bound, knobs), drive._bound(None))
        .compile()
        .memory_analysis()
    )
    step = network.work(batch, _positions(bound), context + tokens // 2, _recurrences(bound))
    seconds = speed.seconds_per_call
    return {
        "decoder": type(decoder).__name__,
        "batch": batch,
        "context": context,
        "tokens": speed.tokens,
        "dtype": config.dtype,
        "device": jax.devices()[0].device_kind,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "seconds": speed.seconds,
        "prompt_seconds": speed.init_seconds,
        "tokens_per_second": speed.tokens_per_second,
        "decode_tokens_per_second": speed.decode_tokens_per_second,
        "network_calls": speed.network_calls,
        "network_calls_per_token": speed.network_calls / speed.tokens,
        "microseconds_per_step": 1e6 * seconds,
        "step_bytes": step.bytes,
        "step_flops": step.flops,
        "bandwidth_fraction": step.bytes / seconds / device.bytes_per_second,
        "flops_fraction": step.flops / seconds / device.flops_per_second,
        "device_bytes_per_second": device.bytes_per_second,
        "device_flops_per_second": device.flops_per_second,
        "compile_seconds": speed.compile_seconds,
        "peak_bytes": _peak(memory),
        "spread": statistics.pstdev(speed.passes) / speed.seconds,
    }


def _peak(memory: Any) -> int | None:
    """Bytes of arguments, results and temporaries of a compiled program, where its backend tells."""
    if memory is None:
        return None
    return int(memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes)


def _positions(decoder: Any) -> int:
    """Positions that a step computes."""
    return getattr(decoder, "width", 1)


def _recurrences(decoder: Any) -> int:
    inner = getattr(decoder, "inner_recurrence", None)
    if inner is not None:
        return inner
    return decoder.network.recurrence if decoder.recurrence is None else decoder.recurrence


def fixed_wavefront(recurrence: int, inner_recurrence: int) -> OfficialWavefront:
    """A wave that gives each token `recurrence` recurrences or a little more and commits one token a step."""
    return OfficialWavefront(
        recurrence=recurrence,
        inner_recurrence=inner_recurrence,
        width=recurrence // inner_recurrence + 3,
        rule="fixed",
        greedy=True,
    )


def static(recurrence: int) -> AutoRegressive:
    """Static decoding as the other side of a comparison."""
    return AutoRegressive(recurrence=recurrence, greedy=True)
