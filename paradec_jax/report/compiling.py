"""Seconds of compilation, with no cache of programs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from paradec_jax.config import TokenSpec
from paradec_jax.decode import make_request
from paradec_jax.decode.block.head import ZERO
from paradec_jax.families import FAMILIES, PRESETS, family_of, parameter_shapes
from paradec_jax.report.parts import Part, Result, Table, Task
from paradec_jax.report.sizes import with_dtype
from paradec_jax.report.timing import compile_once


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """No compiled program is read from a disk or written to it.

    JAX looks at the option once, at its first program; `reset_cache` has it look again.
    """
    before = getattr(jax.config, "jax_enable_compilation_cache", True)
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        reset_cache()


def programs(task: Task) -> list[tuple[str, str]]:
    """Presets and decoders: of each family all decoders at its smallest shape, then its baseline at the others."""
    pairs: list[tuple[str, str]] = []
    larger: list[tuple[str, str]] = []
    for family in FAMILIES.values():
        own = [name for name in task.sizes.presets if name in family.presets]
        pairs += [(name, decoder) for name in own[:1] for decoder in family.decoders]
        baseline = next(setting.name for setting in family.settings if setting.baseline)
        larger += [(name, baseline) for name in own[1:]]
    return pairs + larger


def seconds_of(preset: str, name: str, task: Task) -> float:
    """Seconds that trace and compile a decoder's two programs; of the weights there are only shapes.

    A decoder of masks gets the last token for one, and one that asks a residual head none: heads have no presets.
    """
    config = with_dtype(PRESETS[preset], task.sizes.dtype)
    family, sizes = family_of(config), task.sizes
    network, decoder = family.network(config), family.decoders[name]
    mask = TokenSpec(mask=config.vocab_size - 1, alignment="own")
    if heads := decoder.further_networks:
        decoder = dataclasses.replace(decoder, **dict.fromkeys(heads, ZERO))
    spec = None if network.visibility == "causal" else mask
    decoder = decoder.bind(network, sizes.context + sizes.tokens, spec)
    prompt = np.zeros((1, sizes.context), np.int32)
    request = make_request(prompt, max_new_tokens=sizes.tokens, seed=0)
    shapes = parameter_shapes(config)
    params = jax.eval_shape(decoder.prepare, {"network": shapes} if heads else shapes)
    return compile_once(decoder, params, request).compile_seconds


def measure(task: Task) -> Result:
    """One row a program."""
    rows: list[dict[str, Any]] = []
    with uncached():
        for (preset, name), own in task.each(programs(task)):
            what = f"compiling {name}"
            if own.has(0.0, what, preset):
                with own.survives(what, of=preset):
                    rows.append({"shape": preset, "decoder": name, "seconds": seconds_of(preset, name, own)})
    return {"dtype": task.sizes.dtype, "rows": rows}


def tables(result: Result) -> list[Table]:
    """One line a program."""
    rows = [[row["shape"], row["decoder"], f"{row['seconds']:.1f}"] for row in result["rows"]]
    return [
        Table(
            f"Seconds of compilation, {result['dtype']}, batch 1",
            ("shape", "decoder", "s"),
            rows,
            "Tracing and compiling what reads a prompt and what goes on after it, once, with no cache on disk.",
        )
    ]


COMPILING = Part("compile", "Compilation", 1.0, measure, tables)
