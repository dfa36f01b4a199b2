"""What each kind of call of block diffusion costs, on random weights, beside the limits of its device.

::

    narrow         B positions                a step in an open block
    wide           2 B                        a store, and the next block's first step
    verifying K    K B                        K states of a block side by side
    riding K       (K + 1) B                  and the block after the last one
    head           B positions of the head    and the output matrix on them

A call is a forward pass after a context, the scores that its decoder needs, the most probable token of each, and the
keys and values of one block written to the cache. Rules, draws and bookkeeping are not in it.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from paradec_jax.decode.machine.network import Prefix
from paradec_jax.decode.rules.windows import write_after_read
from paradec_jax.nn import masks
from paradec_jax.timing.bench import INSTANT, Limits

LONG = 0.2  # seconds of a timed loop that are enough
FIRST = 4  # calls of the loop that foretells them
MOST = 1024  # calls of a loop


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of call.

    Attributes:
      name: in tables.
      count: candidates that it reads; 0 for a call of the head.
      follows: whether it reads the next block along with them.
    """

    name: str
    count: int = 1
    follows: bool = False

    def positions(self, block: int) -> int:
        """Positions that it computes for each row."""
        return block * (max(self.count, 1) + self.follows)


def kinds(candidates: Sequence[int]) -> list[Kind]:
    """All kinds, of verifying ones those of so many candidates."""
    found = [Kind("narrow"), Kind("wide", follows=True), Kind("head", 0)]
    for count in candidates:
        found += [Kind(f"verifying {count}", count), Kind(f"riding {count}", count, True)]
    return found


def network_calls(
    network: Any, kind: Kind, params: Any, buffers: tuple[Any, Any], at: Array, steps: Any
) -> tuple[Any, Any]:
    """`steps` calls of the network at one place; each reads what the one before it predicted.

    Args:
      network: that sees in blocks.
      kind: of the calls.
      params: the network's parameters.
      buffers: the cache, and tokens [B, W].
      at: position of the first block, [B].
      steps: how many calls.
    """
    block, count = network.block, kind.count
    own = at[:, None] + jnp.arange(block)
    positions = jnp.tile(own, (1, count))
    mask = masks.candidates(count, block) if count > 1 else None
    if kind.follows:
        positions = jnp.concatenate([positions, own + block], axis=1)
        if count > 1:
            mask = masks.carried(count, block, jnp.full_like(at, count - 1))
    scored = block if count == 1 else positions.shape[1]  # a store's own block needs no scores

    def step(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        cache, tokens = carry
        out = network.forward(params, tokens, positions, Prefix(cache, at), mask)
        found = jnp.argmax(network.logits(params, out.hidden[:, -scored:]), axis=-1).astype(jnp.int32)
        kv = out.kv if positions.shape[1] == block else network.pick(out.kv, jnp.zeros_like(at), block)
        cache = network.write(cache, kv, write_after_read(at, found))
        return cache, jnp.tile(found, (1, positions.shape[1] // scored))

    return lax.fori_loop(0, steps, step, buffers)


def head_calls(
    network: Any, head: Any, params: Any, buffers: tuple[Any, Any, Any], at: Array, steps: Any
) -> tuple[Any, Any, Any]:
    """`steps` calls of the head on one block, each after the one before it; `buffers` are cache, tokens, inputs."""
    positions = at[:, None] + jnp.arange(network.block)

    def step(_: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        cache, tokens, hidden = carry
        vectors = network.embedding(params["network"])[tokens]
        out = head.forward(params["head"], vectors, positions, Prefix(cache, at), hidden=hidden)
        hidden = (hidden + out.hidden).astype(hidden.dtype)
        found = jnp.argmax(network.logits(params["network"], hidden), axis=-1).astype(jnp.int32)
        return head.write(cache, out.kv, write_after_read(at, found)), found, hidden

    return lax.fori_loop(0, steps, step, buffers)


@dataclasses.dataclass(eq=False)
class Loop:
    """A compiled loop of calls, the buffers that it hands on, and how many calls it makes."""

    compiled: Callable[..., Any]
    params: Any
    buffers: Any
    at: Array
    steps: int = FIRST

    def __call__(self) -> float:
        """Seconds of a call, of one run of the loop."""
        start = time.perf_counter()
        self.buffers = jax.block_until_ready(
            self.compiled(self.params, self.buffers, self.at, np.int32(self.steps))
        )
        return max(time.perf_counter() - start, INSTANT) / self.steps


def loop_of(network: Any, head: Any, params: Mapping[str, Any], kind: Kind, batch: int, context: int) -> Loop:
    """The compiled loop of one kind, warmed up, as long as a timing needs.

    Args:
      network, head: both networks.
      params: prepared parameters of both, by "network" and "head".
      kind: of the calls.
      batch: rows.
      context: cached positions before the block, whole blocks.
    """
    of, width = (network, kind.positions(network.block)) if kind.count else (head, network.block)
    cache = of.init_cache(jax.random.split(jax.random.key(0), batch), context + 2 * network.block)
    tokens = np.random.default_rng(0).integers(0, network.vocab_size - 1, (batch, width)).astype(np.int32)
    buffers: tuple[Any, ...] = (cache, jnp.asarray(tokens))
    run: Callable[..., Any] = functools.partial(network_calls, network, kind)
    given: Any = params["network"]
    if not kind.count:
        shape = (batch, width, network.config.width)
        hidden = jax.random.normal(jax.random.key(1), shape, jnp.dtype(network.config.dtype))
        run, given, buffers = functools.partial(head_calls, network, head), dict(params), (*buffers, hidden)
    at = jnp.full(batch, context, jnp.int32)
    compiled = jax.jit(run, donate_argnums=1).lower(given, buffers, at, np.int32(1)).compile()
    loop = Loop(compiled, given, buffers, at)
    loop()
    loop.steps = min(max(math.ceil(LONG / loop()), FIRST), MOST)
    return loop


def cost_of(network: Any, head: Any, kind: Kind, batch: int, context: int) -> tuple[int, int]:
    """Bytes that a call must read and operations that it must do."""
    if kind.count:
        work = network.work(batch, kind.positions(network.block), context)
        return work.bytes, work.flops
    work, c = head.work(batch, network.block, context), network.config
    matrix = c.vocab_size * c.width
    size = jnp.dtype(c.param_dtype).itemsize
    return work.bytes + matrix * size, work.flops + 2 * matrix * batch * network.block


def block_calls(
    network: Any,
    head: Any,
    params: Mapping[str, Any],
    device: Limits,
    *,
    batch: int = 1,
    context: int = 64,
    candidates: Sequence[int] = (2, 3, 4),
    passes: int = 5,
) -> list[dict[str, Any]]:
    """Times every kind of call in turns, and says what is left of the device's limits.

    Args:
      network, head: the network and a residual head for it.
      params: prepared parameters of both, by "network" and "head".
      device: measured limits.
      batch: rows.
      context: cached positions before a call; rounded down to whole blocks.
      candidates: K of verifying calls.
      passes: timings of each kind, of which the median counts.

    Returns:
      A row a kind. Those of verifying calls say how many drafts of a call must be right on average, so that they and
      the head's calls take no longer than narrow calls do for as many steps (`break_even`).

    Raises:
      ValueError: no pass, or a context without room for two blocks after it.
    """
    context = context // network.block * network.block
    if passes < 1 or context + 2 * network.block > network.max_length:
        raise ValueError(
            f"need a pass and room for two blocks after the context, not {passes} and {context} of "
            f"{network.max_length} positions"
        )
    wanted = kinds(candidates)
    loops = [loop_of(network, head, params, kind, batch, context) for kind in wanted]
    seconds = [[loop() for loop in loops] for _ in range(passes)]
    medians = {
        kind.name: statistics.median(of) for kind, of in zip(wanted, zip(*seconds, strict=True), strict=True)
    }
    rows = []
    for i, kind in enumerate(wanted):
        moved, flops = cost_of(network, head, kind, batch, context)
        took = medians[kind.name]
        read, multiplied = moved / device.read_bytes_per_second, flops / device.flops_per_second
        spent = took + (kind.count - 1) * medians["head"]
        rows.append(
            {
                "call": kind.name,
                "batch": batch,
                "context": context,
                "block": network.block,
                "positions": kind.positions(network.block),
                "head_layers": head.config.layers,
                "dtype": network.config.dtype,
                "device": jax.devices()[0].device_kind,
                "microseconds": 1e6 * took,
                "each": [of[i] for of in seconds],
                "of_narrow": took / medians["narrow"],
                "call_bytes": moved,
                "call_flops": flops,
                "read_fraction": read / took,
                "flops_fraction": multiplied / took,
                "limit_fraction": max(read, multiplied) / took,
                "break_even": spent / medians["narrow"] - 1 if kind.count > 1 else None,
            }
        )
    return rows
