"""Where the time of a step goes, by kind of operation: `python -m experiments.systems.step_profile`.

The loop after a prompt is compiled once, run under XLA's profiler, and every operation of the compiled
program that the trace has is put to one kind by what it does: a product where it contains one, else a
reduction, else a move of data, else element-wise work. Tracing costs each operation alike, which makes many
small ones look dear; so the difference between the traced and the untraced time of a step is taken off in
equal parts.
"""

import collections
import dataclasses
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from experiments.systems.bench import LARGE, paced
from paradec_jax import make_request
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.evaluate.results import write_table
from paradec_jax.families import init_params
from paradec_jax.models import RecurrentDepthNetwork
from paradec_jax.timing.bench import Programs, compile_once

SHAPES = {**RECURRENT_PRESETS, "large": LARGE}
KINDS = {  # the first that matches an opcode of an operation names its kind
    "products": {"dot", "custom-call", "convolution"},
    "reductions": {"reduce", "reduce-window", "sort", "topk"},
    "caches and windows": {
        "scatter",
        "gather",
        "dynamic-update-slice",
        "dynamic-slice",
        "concatenate",
        "pad",
    },
}
REST = "element-wise and copies"
CONTAINERS = {"while", "conditional", "call"}  # their time is that of what they hold


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


def kinds_of(program: str) -> dict[str, str]:
    """The kind of each operation of a compiled program's text, by its name.

    What is inside a fusion belongs to the fusion.
    """
    line = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?[\])}] ([a-z][a-z0-9\-]*)\(")
    opcodes: dict[str, str] = {}
    members: dict[str, set[str]] = collections.defaultdict(set)
    called: dict[str, str] = {}
    computation = ""
    for text in program.splitlines():
        if head := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", text):
            computation = head[1]
        elif found := line.match(text):
            name, opcode = found.groups()
            opcodes[name] = opcode
            members[computation].add(opcode)
            if opcode == "fusion" and (inside := re.search(r"calls=%?([\w.\-]+)", text)):
                called[name] = inside[1]
    fused = set(called.values())
    assert fused <= set(members), "a fusion calls what the text does not have"
    return {
        name: _kind(members[called[name]] if name in called else {opcode})
        for name, opcode in opcodes.items()
        if opcode not in CONTAINERS
    }


def _kind(opcodes: set[str]) -> str:
    return next((kind for kind, wanted in KINDS.items() if wanted & opcodes), REST)


def traced(programs: Programs, passes: int) -> Mapping[str, tuple[int, float]]:
    """How often each operation of the loop's program ran, and its seconds, by name."""
    module = programs.go_on.as_text().split(",")[0].removeprefix("HloModule ")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(passes):
                programs.time()
        (file,) = Path(folder).rglob("*.xplane.pb")
        trace = jax.profiler.ProfileData.from_file(str(file))
        count: collections.Counter[str] = collections.Counter()
        seconds: dict[str, float] = collections.defaultdict(float)
        for plane in trace.planes:
            for events in plane.lines:
                for event in events.events:
                    if dict(event.stats).get("hlo_module") != module:  # that of the prompt has the same names
                        continue
                    count[event.name] += 1
                    seconds[event.name] += 1e-9 * event.duration_ns
    return {name: (count[name], seconds[name]) for name in count}


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
    timings = [programs.time() for _ in range(options.passes + 1)][1:]
    plain = min(timing.loop - timing.idle for timing in timings) / timings[0].steps
    steps = options.passes * timings[0].steps
    kinds = kinds_of(programs.go_on.as_text())
    operations: collections.Counter[str] = collections.Counter()
    seconds: dict[str, float] = collections.defaultdict(float)
    for event, (count, spent) in traced(programs, options.passes).items():
        # What runs less than once a step is no part of it.
        if event in kinds and count > steps // 2:
            operations[kinds[event]] += round(count / steps)
            seconds[kinds[event]] += spent / steps
    traced_total = sum(seconds.values())
    overhead = max(0.0, traced_total - plain) / sum(operations.values())
    left = {kind: max(0.0, spent - overhead * operations[kind]) for kind, spent in seconds.items()}
    return [
        {
            "decoder": name,
            "width": width,
            "kind": kind,
            "share": spent / sum(left.values()),
            "traced_share": seconds[kind] / traced_total,
            "operations_per_step": operations[kind],
            "traced_microseconds_per_step": 1e6 * traced_total,
            "microseconds_per_step": 1e6 * plain,
        }
        for kind, spent in sorted(left.items(), key=lambda item: -item[1])
    ]


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
    facts = {**dataclasses.asdict(options), "out": options.out.name}
    write_table(options.out, {"options": facts, "device": jax.devices()[0].device_kind, "rows": rows}, rows)


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
