"""The tables of decoders that the laws are tested on.

`ROWS` holds every decoder that `paradec_jax.decode` offers, on a stub network whose answers are known: every law that
can be stated without knowing the decoder runs over all its rows. `REAL` and `CAUSAL` hold some of them for small
models of random weights.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from plain_baselines import Count, lookahead_count, prompt_lookup_count
from plain_jacobi import jacobi_count
from plain_recurrent import (
    latent_count,
    second_check_count,
    speculative_count,
    static_count,
    wavefront_count,
)

from paradec_jax import decode
from paradec_jax.testing import StubCausal, StubNetwork, tiny_causal, tiny_network

SIZE, BUDGET = 20, 9
STEPS = 16  # more than any row of the table needs for BUDGET tokens


@dataclasses.dataclass(frozen=True)
class Row:
    """A decoder of the table.

    Attributes:
      kind, options: the decoder's class and static fields.
      knobs: knobs that differ from the defaults.
      stub: fields of the stub network.
      net: the stub network's class.
      recurrence: recurrences each position does at its end (the most that matter), for the expected tokens.
      faithful: repeats a release that cuts no commit at a budget or a stop token, so those laws leave it out.
      count: (stub, prompt length, new tokens) -> network calls, positions, recurrences; None without a formula.
    """

    kind: type
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    stub: dict[str, Any] = dataclasses.field(default_factory=dict)
    net: type = StubNetwork
    recurrence: int | None = 4
    faithful: bool = False
    count: Callable[[Any, int, int], Count] | None = None

    def network(self, **changes: Any) -> Any:
        return self.net(**{**self.stub, **changes})

    def decoder(self, network: Any = None, size: int = SIZE, **options: Any) -> Any:
        network = self.network() if network is None else network
        return self.kind(network, size, **{**self.options, **options})

    def values(self, **changes: Any) -> Any:
        return self.kind.Knobs(**{**self.knobs, **changes})


def causal_row(kind: type, count: Callable[..., Count], stub: dict[str, Any], **options: Any) -> Row:
    """A row on the causal stub; the options tell the calls as well."""
    options = {**options, "log_probs": True}
    return Row(kind, options, stub=stub, net=StubCausal, count=functools.partial(count, options))


def jacobi_row(kind: type, *, spawn: float | None = None, **options: Any) -> Row:
    """A row of a Jacobi decoder on the causal stub; the knob tells the calls as well."""
    knobs = {} if spawn is None else {"spawn": spawn}
    row = causal_row(kind, jacobi_count, REPEATING, **options)
    count = functools.partial(jacobi_count, {**options, **knobs})
    return dataclasses.replace(row, knobs=knobs, count=count)


REPEATING = {"weights": (0, 0, 1, 0), "slope": 0, "constant": 0}  # the text has period 3
MIXED = {"needed": (3, 1, 2, 4, 1)}
ROWS = {
    "autoregressive": Row(decode.AutoRegressive, {"log_probs": True}, stub=MIXED, count=static_count),
    "autoregressive-hasty": Row(
        decode.AutoRegressive,
        {"recurrence": 2},
        stub={**MIXED, "recurrence": 2},
        recurrence=2,
        count=static_count,
    ),
    "autoregressive-continuous": Row(
        decode.AutoRegressive, {"continuous": True}, stub=MIXED, count=static_count
    ),
    "adaptive-latent": Row(decode.Adaptive, stub={**MIXED, "recurrence": 5}, count=latent_count),
    "adaptive-entropy": Row(
        decode.Adaptive, {"criterion": "entropy-diff"}, stub=MIXED, recurrence=2, count=second_check_count
    ),
    "adaptive-argmax": Row(
        decode.Adaptive,
        {"criterion": "argmax-stability", "log_probs": True},
        {"exit_threshold": 2.0},
        stub={**MIXED, "errs": False},
    ),
    "speculative": Row(
        decode.SelfSpeculative,
        {"draft_recurrence": 2, "lookahead": 3, "log_probs": True},
        stub=MIXED,
        count=functools.partial(speculative_count, 2, 3),
    ),
    "speculative-one": Row(
        decode.SelfSpeculative,
        {"draft_recurrence": 1, "lookahead": 1},
        stub=MIXED,
        count=functools.partial(speculative_count, 1, 1),
    ),
    "wavefront": Row(
        decode.Wavefront,
        {"width": 4, "inner_recurrence": 2, "log_probs": True},
        count=functools.partial(wavefront_count, 2),
    ),
    "wavefront-buckets": Row(
        decode.Wavefront,
        {"width": 6, "inner_recurrence": 2, "buckets": (1, 3)},
        count=functools.partial(wavefront_count, 2),
    ),
    "wavefront-bursts": Row(  # positions behind a slow one settle while they wait, and are committed together
        decode.Wavefront, {"width": 6, "inner_recurrence": 2}, stub={"needed": (5, 1, 1, 1), "errs": False}
    ),
    "wavefront-headway": Row(
        decode.Wavefront,
        {"width": 5, "inner_recurrence": 2, "headway": 2, "noise_mixer": "sqrt"},
        {"max_recurrence": 8, "noise": 0.1},
        recurrence=None,
    ),
    "wavefront-restart": Row(
        decode.Wavefront,
        {"width": 5, "inner_recurrence": 2, "headway": 3, "carry": False},
        stub={"needed": (2, 1)},
        recurrence=None,
    ),
    "wavefront-straight-through": Row(
        decode.SoftWavefront,
        {"width": 4, "inner_recurrence": 2, "log_probs": True},
        count=functools.partial(wavefront_count, 2),
    ),
    "official": Row(
        decode.OfficialWavefront,
        {"width": 5, "inner_recurrence": 2, "recurrence": 4},
        {"noise": 0.0},
        faithful=True,
    ),
    "official-fixed": Row(
        decode.OfficialWavefront,
        {"width": 10, "inner_recurrence": 2, "recurrence": 4, "headway": 2, "rule": "fixed"},
        recurrence=None,
        faithful=True,
    ),
    "prompt-lookup": causal_row(decode.PromptLookup, prompt_lookup_count, REPEATING, max_ngram=2, num_pred=3),
    "lookahead": causal_row(
        decode.Lookahead, lookahead_count, REPEATING, level=4, window=3, guesses=2, pool_from_prompt=True
    ),
    "jacobi": jacobi_row(decode.Jacobi, block=4),
    "jacobi-rows": jacobi_row(decode.Jacobi, block=4, rows=3),
    "jacobi-running-pool": jacobi_row(decode.Jacobi, block=5, running=True, pool=2),
    "jacobi-rejection": jacobi_row(decode.Jacobi, block=4, running=True, acceptance="rejection"),
    "multiblock": jacobi_row(decode.MultiBlock, block=3, blocks=2, pool=1, spawn=0.5),
    "multiblock-rows": jacobi_row(decode.MultiBlock, block=2, blocks=3, rows=2, spawn=0.0),
}
# Slow: another row of the same decoder takes the same way through its code.
VARIANTS = (
    "autoregressive-hasty",
    "adaptive-argmax",
    "speculative-one",
    "wavefront-bursts",
    "wavefront-restart",
    "official-fixed",
    "jacobi",
    "jacobi-rows",
    "jacobi-rejection",
    "jacobi-running-pool",
    "multiblock-rows",
)


def over(rows: dict[str, Any]) -> Any:
    """A test of each of these rows."""
    names = [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in rows]
    return pytest.mark.parametrize("name", names)


EVERY = over(ROWS)
CUT = over({name: row for name, row in ROWS.items() if not row.faithful})
COUNTED = over({name: row for name, row in ROWS.items() if row.count})


# On small models of random weights

WIDE = {"width": 4, "inner_recurrence": 2, "headway": 2, "noise_mixer": "sqrt"}
REAL = {
    "autoregressive": (decode.AutoRegressive, "shared", {"continuous": True}, {}),
    "adaptive": (decode.Adaptive, "latest", {"criterion": "kl"}, {"exit_threshold": 0.02}),
    "speculative": (decode.SelfSpeculative, "full", {"draft_recurrence": 2, "lookahead": 3}, {}),
    "wavefront": (decode.Wavefront, "shared", WIDE, {"noise": 0.2, "max_recurrence": 6}),
}
CAUSAL = {
    "prompt-lookup": (decode.PromptLookup, {"max_ngram": 2, "num_pred": 3}),
    "lookahead": (
        decode.Lookahead,
        {"level": 4, "window": 4, "guesses": 3, "pool_from_prompt": True},
    ),
    "jacobi": (decode.Jacobi, {"block": 4, "running": True, "rows": 2}),
    "multiblock": (decode.MultiBlock, {"block": 3, "blocks": 2, "pool": 2}),
}


def tiny(kind: type, cache: str, **options: Any) -> Any:
    """A decoder of the small recurrent model."""
    return kind(tiny_network(cache), SIZE, **options)


def causal(kind: type, size: int = SIZE, **options: Any) -> Any:
    """A decoder of the small causal model."""
    return kind(tiny_causal(), size, log_probs=True, **options)
