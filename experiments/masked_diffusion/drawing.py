"""Texts that a model draws from nothing, and a row of where they come from and what they cost.

Text i draws with `fold_in(key(seed), i)` whatever batch it is in.
"""

import statistics
from typing import Any

from paradec_jax import facts
from paradec_jax.decode.machine.rows import NETWORK_CALLS
from paradec_jax.evaluate.answers import answer, batches
from paradec_jax.evaluate.cases import Source, case_of, empty_prompts
from paradec_jax.evaluate.fields import Row, source_fields
from paradec_jax.evaluate.timing import compile_all

TEXT_ROWS = 64  # texts drawn and judged together
UNDRAWN = (
    *("family", "decoder", "settings", "steps", "temperature", "network_calls"),
    *("seconds_per_sample", "compile_seconds", "batch", "dtype", "device"),
)


def draw(
    source: Source, samples: int, length: int, *, rows: int = TEXT_ROWS, seed: int = 0
) -> tuple[list[list[int]], Row]:
    """Draws texts of `length` tokens from nothing, at most `rows` in a batch.

    Returns:
      The ids of each text, and a row of where they come from and what they cost: network calls of a
      text, and the median seconds of a batch over the texts in it.

    Raises:
      ValueError: what the decoder refuses, or a model that cannot start a text.
    """
    prompts = empty_prompts(source.model, samples, length, seed)
    case, batch = case_of(source.setting, source.model, prompts.size), batches(prompts, rows)[0]
    compile_seconds = compile_all([(case, prompts.request(batch))])[0]
    drawn = answer(case, prompts, rows)
    settings = source.setting.settings()
    return drawn.ids, source_fields(source, facts.device()) | {
        "length": length,
        "steps": settings.get("steps"),
        "temperature": settings["temperature"],
        "network_calls": float(drawn.counts[NETWORK_CALLS].mean()),
        "seconds_per_sample": statistics.median(drawn.seconds) / len(batch),
        "compile_seconds": compile_seconds,
        "batch": len(batch),
    }


def real_row(length: int) -> dict[str, Any]:
    """A row of real text, which no decoder drew: None for what it has none of."""
    return dict.fromkeys(UNDRAWN) | {"model": "real text", "label": "", "length": length}
