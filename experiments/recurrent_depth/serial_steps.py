"""Serial steps of decoding: how deep, how late, how many at once.

`python -m experiments.recurrent_depth.serial_steps`. One token after the other against the
wavefront at r recurrences a token (arXiv 2510.14961, appendix C), read off the decoders' own
counters. A serial step is one pass of the core. Nothing here depends on weights.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.common.record import write_record
from experiments.decoders.paced import paced_wavefront, same_token
from experiments.recurrent_depth.step_trace import schedule
from experiments.replicas import ReleasedWavefront
from paradec_jax import Static, make_request
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.families import init_params
from paradec_jax.models.recurrent_network import RecurrentDepthNetwork


@dataclasses.dataclass(frozen=True)
class Options:
    """What to count.

    Attributes:
      preset: a named shape, whose layers are counted.
      recurrence: r, recurrences of a token; its divisors are the inner recurrences r'.
      new_tokens: tokens to decode after the one that the prompt predicts.
      out: where the JSON goes.
    """

    preset: str = "tiny-recurrent"
    recurrence: int = 16
    new_tokens: int = 64
    out: Path = Path("experiments/recurrent_depth/results/serial_steps.json")

    def __post_init__(self) -> None:
        if self.preset not in RECURRENT_PRESETS:
            raise ValueError(
                f"preset must be one of {', '.join(RECURRENT_PRESETS)}, not {self.preset!r}"
            )
        for name in ("recurrence", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def cases(recurrence: int) -> list[tuple[str, int, Any, Any]]:
    """Name, inner recurrence, decoder and knobs; the released sampler gives a token (r div r' + 2)
    r' recurrences.
    """
    rows: list[tuple[str, int, Any, Any]] = [
        ("autoregressive", recurrence, Static(recurrence=recurrence, greedy=True), None)
    ]
    for inner in (i for i in range(1, recurrence + 1) if recurrence % i == 0):
        window = recurrence // inner + 3
        released = ReleasedWavefront(
            inner_recurrence=inner, window=window, recurrence=recurrence, rule="fixed", greedy=True
        )
        rows.append(
            ("wavefront", inner, *paced_wavefront(recurrence, inner, prefill_recurrence=recurrence))
        )
        rows.append(("released, fixed", inner, released, released.Knobs(noise=0.0, momentum=0.0)))
    return rows


def decoding(preset: str, recurrence: int, new_tokens: int) -> list[dict[str, Any]]:
    """One row a decoder. `first` and `all` are what has passed when the first token, and the last,
    is committed.

    Layers count prelude and coda of every network call besides the core; `core_positions` is the
    work, positions times passes of the core. What is decoded is a small network of random weights
    that predicts one token, so waves keep pace.
    """
    config = RECURRENT_PRESETS[preset]
    small = dataclasses.replace(
        RECURRENT_PRESETS["test-recurrent"], max_length=8 * (recurrence + new_tokens)
    )
    network = same_token(RecurrentDepthNetwork(small, recurrence=recurrence))
    params = init_params(small, jax.random.key(0))
    request = make_request(np.ones((1, 4), np.int32), max_new_tokens=new_tokens + 1)
    rows = []
    for name, inner, decoder, knobs in cases(recurrence):
        steps = schedule(decoder.bind(network, 5 + new_tokens), params, request, knobs)
        serial, first = np.cumsum(steps.recurrences), steps.until(1) - 1
        outside = config.prelude_layers + config.coda_layers
        layers = outside * np.cumsum(steps.calls) + config.core_layers * serial
        rows.append(
            {
                "decoder": name,
                "inner_recurrence": inner,
                "depth": sorted(set(steps.depths)),
                "serial_first": int(serial[first]),
                "serial_all": int(serial[-1]),
                "layers_first": int(layers[first]),
                "layers_all": int(layers[-1]),
                "in_flight_first_token": steps.positions[first],
                "in_flight": steps.positions,
                "core_positions": int(np.dot(steps.positions, steps.recurrences)),
            }
        )
    return rows


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table."""
    rows = decoding(options.preset, options.recurrence, options.new_tokens)
    for row in rows:
        print(
            f"{row['decoder']:15s}  inner r {row['inner_recurrence']:2d}  depth {row['depth']}  "
            f"first token after {row['serial_first']:2d} recurrences, {row['layers_first']:3d} layers, with "
            f"{row['in_flight_first_token']:2d} in flight  all after {row['serial_all']:4d}, {row['layers_all']:4d}  "
            f"work {row['core_positions']}"
        )
    write_record(options.out, options, {"rows": rows})


if __name__ == "__main__":
    tyro.cli(main)
