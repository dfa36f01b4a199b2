"""Where the time of a step goes, by kind of operation.

The loop after a prompt runs under XLA's profiler, and every operation of the compiled program that the trace has is
put to one kind by what it does: a product where it contains one, else a reduction, else a move of data, else
element-wise work. Tracing costs each operation alike, which makes many small ones look dear; so the difference
between the traced and the untraced time of a step is taken off in equal parts.
"""

import collections
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from paradec_jax.report.timing import Programs

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
                    stats = dict(event.stats)
                    if stats.get("hlo_module") != module:  # that of the prompt has the same names
                        continue
                    name = str(
                        stats.get("hlo_op", event.name)
                    )  # on an accelerator an event is named by its kernel
                    count[name] += 1
                    seconds[name] += 1e-9 * event.duration_ns
    return {name: (count[name], seconds[name]) for name in count}


def profile(programs: Programs, passes: int, untraced: float | None = None) -> list[dict[str, Any]]:
    """The kinds of a step's operations, the dearest first; nothing where the trace has none of them.

    Args:
      programs: a compiled decoder.
      passes: traced runs.
      untraced: seconds of a step; timed here when None.
    """
    timings = [programs.time() for _ in range(2 if untraced is not None else passes + 1)][1:]
    steps = passes * timings[0].steps
    if untraced is None:
        untraced = min(timing.loop - timing.idle for timing in timings) / timings[0].steps
    kinds = kinds_of(programs.go_on.as_text())
    operations: collections.Counter[str] = collections.Counter()
    seconds: dict[str, float] = collections.defaultdict(float)
    for event, (count, spent) in traced(programs, passes).items():
        # What runs less than once a step is no part of it.
        if event in kinds and count > steps // 2:
            operations[kinds[event]] += round(count / steps)
            seconds[kinds[event]] += spent / steps
    total = sum(seconds.values())
    overhead = max(0.0, total - untraced) / max(sum(operations.values()), 1)
    left = {kind: max(0.0, spent - overhead * operations[kind]) for kind, spent in seconds.items()}
    return [
        {
            "kind": kind,
            "share": spent / sum(left.values()),
            "traced_share": seconds[kind] / total,
            "operations_per_step": operations[kind],
            "traced_microseconds_per_step": 1e6 * total,
            "microseconds_per_step": 1e6 * untraced,
        }
        for kind, spent in sorted(left.items(), key=lambda item: -item[1])
        if sum(left.values())
    ]
