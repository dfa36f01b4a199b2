"""What a wave can gain at most, by the shape of the network. `python -m experiments.recurrent_depth.shapes`.

Random weights, batch 1. A wave that commits one token a step costs a step a token; a sequential decoder costs
a step of r recurrences. So the ratio of the two times is what the wave gains where r recurrences are needed,
whatever the weights are, and no wave with a headway of one gains more.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import tyro

from experiments.common.record import write_record
from paradec_jax import Static, Wavefront, facts, make_request
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.families import EVERY_STEP, init_params
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.timing import Case, measure


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time.

    Attributes:
      shapes: width, feed-forward width and core layers of each network; one prelude and one coda layer.
      recurrences: of sequential decoding.
      waves: inner recurrence and width of each wave.
      context: prompt tokens.
      tokens: generated tokens.
      passes: timings of each.
      out: where the JSON goes.
    """

    shapes: tuple[tuple[int, int, int], ...] = (
        (128, 256, 2),
        (128, 256, 4),
        (192, 384, 4),
        (256, 512, 2),
        (256, 512, 3),
    )
    recurrences: tuple[int, ...] = (1, 2, 3, 4, 8, 16)
    waves: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 8))
    context: int = 100
    tokens: int = 100
    passes: int = 7
    out: Path = Path("experiments/recurrent_depth/results/shapes.json")


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes microseconds of a step."""
    size = options.context + options.tokens
    prompt = np.random.default_rng(0).integers(0, 300, (1, options.context))
    request = make_request(prompt, max_new_tokens=options.tokens, seed=0)
    rows, dtypes = [], set()
    for width, feed_forward, layers in options.shapes:
        config = dataclasses.replace(
            RECURRENT_PRESETS["tiny-recurrent"],
            width=width,
            heads=width // 32,
            feed_forward=feed_forward,
            core_layers=layers,
        )
        network = RecurrentDepthNetwork(config)
        params = network.prepare(init_params(config, jax.random.key(0)))
        cases = {
            f"r {r}": Case(Static(network, size, recurrence=r, greedy=True)) for r in options.recurrences
        }
        for inner, wave in options.waves:
            decoder = Wavefront(
                network, size, inner_recurrence=inner, window=wave, prefill_recurrence=2, greedy=True
            )
            knobs = Wavefront.Knobs(exit_threshold=EVERY_STEP, max_wavefront=wave)
            cases[f"wave {inner} x {wave}"] = Case(decoder, knobs)
        dtypes.update(facts.dtypes(params))
        speeds = measure(list(cases.values()), params, [request], passes=options.passes)
        times = {
            name: 1e6 * (speed.seconds - speed.init_seconds) / speed.calls
            for name, speed in zip(cases, speeds, strict=True)
        }
        row = {
            "width": width,
            "feed_forward": feed_forward,
            "core_layers": layers,
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
            "microseconds": times,
            "passes": {name: list(speed.passes) for name, speed in zip(cases, speeds, strict=True)},
        }
        rows.append(row)
        told = {name: value for name, value in row.items() if name != "passes"}
        print(json.dumps(told | {"microseconds": {name: round(t) for name, t in times.items()}}), flush=True)
    write_record(options.out, options, {"rows": rows}, dtypes=sorted(dtypes))


if __name__ == "__main__":
    tyro.cli(main)
