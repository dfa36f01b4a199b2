"""One first answer in a fresh process, by parts; `first_answer` runs this file in the folder of a checkout.

Nothing but the standard library is imported before the clock is asked.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


class Parts:
    """Seconds by part; what JAX says of tracing, lowering and compiling is not counted where it happens inside."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("python", "imports", "load", *EVENTS.values()), 0.0)
        self.programs = self.cached = 0

    def happened(self, event: str, **_: Any) -> None:
        """What a listener of `jax.monitoring` is told of what takes no time."""
        self.cached += event == "/jax/compilation_cache/cache_hits"

    def told(self, event: str, seconds: float, **_: Any) -> None:
        """What a listener of `jax.monitoring` is told."""
        if event in EVENTS:
            self.seconds[EVENTS[event]] += seconds
            self.programs += EVENTS[event] == "compile"

    def told_by_jax(self) -> float:
        """Seconds of all events so far."""
        return sum(self.seconds[part] for part in EVENTS.values())

    def loading(self, load: Any) -> Any:
        """The function that loads models, timed."""

        def timed(*args: Any, **options: Any) -> Any:
            start, events = time.monotonic(), self.told_by_jax()
            model = load(*args, **options)
            self.seconds["load"] += time.monotonic() - start - (self.told_by_jax() - events)
            return model

        return timed


def answer(way: str, words: list[str], parts: Parts) -> None:
    """The command with its words, or the same by the library: decoder, prompt, model and budget."""
    package: Any = importlib.import_module("paradec_jax")
    store: Any = importlib.import_module("paradec_jax.store")
    if way == "command":
        store.load = parts.loading(store.load)
        if code := importlib.import_module("paradec_jax.cli").main(words):
            raise SystemExit(code)
        return
    decoder, prompt, model, budget = words
    loaded = parts.loading(package.load)(model)
    # The last row of the family's table, as the command takes it.
    settings = importlib.import_module("paradec_jax.families").FAMILIES[loaded.family].settings
    row = [setting for setting in settings if setting.name == decoder][-1]
    chosen = importlib.import_module("dataclasses").replace(row.decoder, greedy=True)
    out = package.generate(loaded, [prompt], chosen, knobs=row.knobs, max_new_tokens=int(budget))
    print(out.text[0])


def main(started: float, way: str, out: str, words: list[str]) -> None:
    """Writes {"seconds": by part, "programs": compiled or found in the cache, "cached": of these, the found ones}."""
    parts = Parts()
    begun = time.monotonic()
    parts.seconds["python"] = begun - started
    sys.path.insert(0, os.getcwd())
    package = importlib.import_module("paradec_jax" if way == "library" else "paradec_jax.cli")
    parts.seconds["imports"] = time.monotonic() - begun
    if Path.cwd().resolve() not in Path(str(package.__file__)).resolve().parents:
        raise SystemExit(f"{package.__file__} was imported, which is not of {Path.cwd()}")
    monitoring = importlib.import_module("jax").monitoring
    monitoring.register_event_duration_secs_listener(parts.told)
    monitoring.register_event_listener(parts.happened)
    answer(way, words, parts)
    Path(out).write_text(
        json.dumps({"seconds": parts.seconds, "programs": parts.programs, "cached": parts.cached})
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
