"""Recorded windows through the caches of the original recurrent-depth program: logits, latents,
contents.
"""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from marks import over
from recorded import jitted
from recorded_recurrent_depth import (
    RUNS,
    arrays,
    assert_close,
    forward_inputs,
    forward_of,
    names,
    network,
    params,
)

from paradec_jax.decode import Prefix

FED_TOGETHER = 4  # first tokens of the ragged runs


@jitted
def feed(net, params, cache, tokens, positions, at, state, steps):
    """A window through a cache, `steps` recurrences; the window is stored at once."""
    view, window = net.view(positions, Prefix(cache, at)), net.empty_window(*tokens.shape)
    e, window = net.embed(params, tokens, view, window)
    state, window = lax.fori_loop(
        0,
        steps,
        lambda i, carry: net.iterate(params, *carry[:1], e, view, carry[1], i),
        (state, window),
    )
    out = net.readout(params, state, view, window)
    return (
        net.logits(params, out.hidden),
        net.normalise(params, state),
        net.write(cache, out.kv, at),
    )


@cache
def feed_pieces(strategy: str, pieces: tuple[tuple[int, int], ...]):
    """Feeds pieces of (length, recurrences) one after the other; every window has the length of the
    longest.

    What a window holds beyond its piece is scratch, which the next piece overwrites.
    """
    want = arrays("cache")
    tokens, _ = forward_inputs("cache")
    batch, length = tokens.shape
    width = max(max(lengths) for lengths in plans())
    net = network(strategy, int(want["num_steps"]))
    cache = net.init_cache(jax.random.split(jax.random.key(0), batch), length + width)

    def padded(x, at):
        return jnp.pad(x, [(0, 0), (0, width)] + [(0, 0)] * (x.ndim - 2))[:, at : at + width]

    logits, latents, at = [], [], 0
    for piece, steps in pieces:
        start = jnp.full(batch, at, jnp.int32)
        window = (padded(tokens, at), start[:, None] + jnp.arange(width), start)
        state = padded(jnp.asarray(want["init_state"]), at)
        out, latent, cache = feed(net, params(), cache, *window, state, jnp.int32(steps))
        logits.append(out[:, :piece])
        latents.append(latent[:, :piece])
        at += piece
    return jnp.concatenate(logits, 1), jnp.concatenate(latents, 1), cache.kv


def plans() -> list[list[int]]:
    return [arrays("cache")[name].tolist() for name in names("cache", r"plan_\w+")] + [
        [FED_TOGETHER]
    ]


def by_plan(name: str):
    """Result of the pieces that the end of an array's name speaks of: `<strategy>_<plan>`."""
    strategy, plan = re.fullmatch(r"(?:[a-zA-Z]+_)*?(full|shared)_(\w+)", name).groups()
    want = arrays("cache")
    return feed_pieces(
        strategy, tuple((int(n), int(want["num_steps"])) for n in want[f"plan_{plan}"])
    )


def test_cache_logits_without_a_cache():
    if "cache" not in RUNS:
        pytest.skip("the manifest lists no run of this kind")
    r = int(arrays("cache")["num_steps"])
    assert_close(forward_of("cache", r)["logits"], arrays("cache")["logits_full"])


@over(names("cache", r"(logits|latent)_(full|shared)_\w+"))
def test_cache(name):
    logits, latents, _ = by_plan(name)
    assert_close(logits if name.startswith("logits") else latents, arrays("cache")[name])


@over(names("cache", r"shared_[KV]_slot_-?\d+"))
def test_cache_contents(name):
    keys_or_values, slot = re.fullmatch(r"shared_([KV])_slot_(-?\d+)", name).groups()
    cache = by_plan("shared_one_by_one")[2]
    # slot -1 is the first coda layer
    entries = [
        *cache.prelude,
        *cache.core,
        *reversed(cache.coda),
    ]
    want = arrays("cache")[name]
    entry = entries[int(slot)]
    stored = entry.v if keys_or_values == "V" else entry.k.swapaxes(-1, -2)
    assert_close(stored[:, :, : want.shape[2]], want)


@over(names("cache", r"cache_slots_\w+"))
def test_cache_slots(name):
    cache = by_plan(name)[2]
    core = sum(kv.k.shape[1] if kv.k.ndim == 5 else 1 for kv in cache.core)
    assert arrays("cache")[name].tolist() == [*range(-len(cache.coda), len(cache.prelude) + core)]


@over(names("cache", r"logits_ragged_\w+"))
def test_cache_with_ragged_depths(name):
    steps = arrays("cache")["ragged_steps"].tolist()
    pieces = ((FED_TOGETHER, steps[0]), *((1, n) for n in steps[FED_TOGETHER:]))
    logits, _, _ = feed_pieces(name.removeprefix("logits_ragged_"), pieces)
    assert_close(logits, arrays("cache")[name])
