"""Where the time of a step goes, by kind of operation: `python -m experiments.systems.step_profile`.

How operations are put to kinds, and what tracing costs, is told in `paradec_jax/report/kinds.py`.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from experiments.common.record import write_record
from experiments.systems.bench import LARGE, paced
from paradec_jax import facts, make_request
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.families import init_params
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.report import kinds
from paradec_jax.timing.bench import compile_once

SHAPES = {**RECURRENT_PRESETS, "large": LARGE}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to trace.

    Attributes:
      shape: a recurrent preset, or "large", the shape of `bench.py` whose weights fit into no cache.
      decoders: which of the decoders of `bench.py`.
      widths: W of the wave; static decoding does as many recurrences.
      inner_recurrence: r' of a wave's step.
      context, tokens: prompt tokens, and new ones.
      passes: traced runs.
      seed: of weights and prompts.
      out: where the JSON goes; a CSV of the same name lies beside it.
    """

    shape: str = "tiny-recurrent"
    decoders: tuple[Literal["static", "released", "clean"], ...] = ("static", "clean")
    widths: tuple[int, ...] = (1, 3, 8)
    inner_recurrence: int = 1
    context: int = 128
    tokens: int = 64
    passes: int = 5
    seed: int = 0
    out: Path = Path("experiments/systems/results/step_profile.json")

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, not {self.shape!r}")
        for name in ("inner_recurrence", "context", "passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.tokens < 2 or min(self.widths, default=0) < 1:
            raise ValueError("tokens must be at least 2, and there must be widths of at least 1")


def profile(network: Any, params: Any, name: str, width: int, options: Options) -> list[dict[str, Any]]:
    """One row a kind of operation of one decoder's step."""
    chosen = paced(name, width, options.inner_recurrence)
    if chosen is None:
        return []
    decoder, knobs = chosen
    prompt = np.random.default_rng(options.seed).integers(0, network.vocab_size, (1, options.context))
    request = make_request(prompt, max_new_tokens=options.tokens, seed=options.seed)
    bound = decoder.bind(network, options.context + options.tokens)
    programs = compile_once(bound, bound.prepare(params), request, knobs)
    return [{"decoder": name, "width": width} | row for row in kinds.profile(programs, options.passes)]


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Prints and writes the table."""
    config = SHAPES[options.shape]
    if options.context + options.tokens > config.max_length:
        raise ValueError(f"context and tokens are more than the {config.max_length} positions of the model")
    network, params = RecurrentDepthNetwork(config), init_params(config, jax.random.key(options.seed))
    rows = []
    for width in options.widths:
        for name in options.decoders:
            found = profile(network, params, name, width, options)
            rows += found
            for row in found:
                print(
                    f"{name:8s} W {width:2d}  {row['microseconds_per_step']:6.0f} us a step, traced "
                    f"{row['traced_microseconds_per_step']:6.0f}: {row['kind']:24s} {row['share']:4.0%} "
                    f"(as traced {row['traced_share']:4.0%}) in {row['operations_per_step']:4d} operations"
                )
    write_record(options.out, options, {"rows": rows}, dtypes=facts.dtypes(params), lines=rows)


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
