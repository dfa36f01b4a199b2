"""What a network call costs over several positions, with random weights."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from experiments.systems.machine import Clock, Timing, compiled, in_turns
from paradec_jax.config import ModelConfig
from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.rules.windows import write_after_read
from paradec_jax.families import network_of, parameter_shapes

CONTEXT = 256  # cached positions before a call
RECURRENCE = 4  # of a call of a recurrent model
SEED = 1
LONG = 0.2  # seconds that a timed loop should take
shapes_of = functools.lru_cache(parameter_shapes)  # tracing a whole network takes seconds
_PROGRAMS: dict[Any, Any] = {}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(shape: tuple[int, ...], dtype: Any, seed: Array) -> Array:
    """Numbers between -0.02 and 0.02 by a cheap hash: a large model is filled in seconds."""
    bits = (lax.iota(jnp.uint32, math.prod(shape)) + seed) * jnp.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    return ((bits >> 16).astype(jnp.float32) / 2**16 - 0.5).reshape(shape).astype(dtype) * 0.04


def random_params(config: ModelConfig) -> Any:
    """Raw random parameters."""
    leaves, treedef = jax.tree.flatten(shapes_of(config))
    drawn = [
        _random(leaf.shape, leaf.dtype, jnp.uint32(97 * i + 1)) for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, drawn)


def network_at(config: ModelConfig) -> Any:
    """The network; a recurrent one at the depth that is timed."""
    network = network_of(config)
    return network.at(RECURRENCE) if "recurrences" in network.counters else network


def run_calls(network: Any, params: Any, cache: Any, tokens: Array, at: Array, steps: Any) -> Any:
    """`steps` calls at one place: forward pass, most probable tokens, keys and values written to
    the cache.

    Each call reads the tokens that the one before it predicted. A network that sees its whole
    canvas has no cache.
    """
    positions = at[:, None] + jnp.arange(tokens.shape[1])

    def step(_: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        cache, tokens = carry
        prefix = None if cache is None else Prefix(cache, at)
        out = network.forward(params, tokens, positions, prefix)
        new = network.most_probable(params, out.hidden)
        if cache is not None:
            cache = network.write(cache, out.kv, write_after_read(at, new))
        return cache, new

    return lax.fori_loop(0, steps, step, (cache, tokens))


@dataclasses.dataclass(eq=False)
class CallLoop:
    """A compiled loop of calls, the buffers that it hands on, and how many calls it makes."""

    program: Any
    params: Any
    buffers: Any
    at: Array
    steps: int = 1

    def __call__(self) -> Any:
        """Runs the loop."""
        self.buffers = self.program(self.params, *self.buffers, self.at, np.int32(self.steps))
        return self.buffers


def call_loop(
    config: ModelConfig, params: Any, positions: int, context: int, batch: int = 1
) -> CallLoop:
    """The loop of calls over so many positions; its program is compiled once in a process."""
    network = network_at(config)
    context = 0 if network.visibility == "full" else context
    draw = np.random.default_rng(SEED).integers(0, config.vocab_size - 1, (batch, positions))
    keys, cache = jax.random.split(jax.random.key(SEED), batch), None
    if network.visibility != "full":
        cache = network.init_cache(keys, context + positions)
    buffers, at = (cache, jnp.asarray(draw, jnp.int32)), jnp.full(batch, context, jnp.int32)
    key = (config, positions, context, batch)
    if key not in _PROGRAMS:
        loop = jax.jit(functools.partial(run_calls, network), donate_argnums=(1, 2))
        _PROGRAMS[key] = loop.lower(params, *buffers, at, np.int32(1)).compile()
    return CallLoop(_PROGRAMS[key], params, buffers, at)


def settle_steps(loops: Mapping[Any, CallLoop]) -> None:
    """Warms loops up, and gives each so many calls that a timing takes long enough."""
    for _ in range(2):
        for name, timing in in_turns(loops, Clock(), 1).items():
            loops[name].steps = min(max(math.ceil(LONG / timing.seconds), 1), 512)


def call_loops(
    config: ModelConfig,
    positions: Sequence[int],
    context: int = CONTEXT,
    batch: int = 1,
    clock: Clock | None = None,
) -> tuple[dict[str, CallLoop], dict[str, str]]:
    """Loops of calls over several numbers of positions with random weights, warmed up.

    A network without a cache has no context. Returns loops by the number of positions, and the
    reasons for those that are missing because the clock ran out.
    """
    params = network_of(config).prepare(random_params(config))
    jobs = {
        str(n): functools.partial(call_loop, config, params, n, context, batch) for n in positions
    }
    loops, left = compiled(jobs, clock or Clock())
    settle_steps(loops)
    return loops, left


def call_cost(
    config: ModelConfig,
    positions: Sequence[int],
    context: int = CONTEXT,
    clock: Clock | None = None,
) -> tuple[dict[int, Timing], dict[str, str]]:
    """Seconds of a network call over several numbers of positions, timed in turns at batch 1 with
    random weights, and what is missing as of `call_loops`.
    """
    loops, left = call_loops(config, positions, context, clock=clock)
    timings = in_turns(loops, clock or Clock())
    return {int(name): timing.each(loops[name].steps) for name, timing in timings.items()}, left
