"""HumanEval (Chen et al. 2021, arXiv 2107.03374): complete a function from its signature and docstring, zero-shot.

A completion ends before the next thing at the left margin (the paper's stop strings). It is right when prompt and
completion, then the item's tests, run to their end.
"""

import os

from paradec_jax.evaluate.benchmarks.items import Item, Source, check_shots, distinct, read_records
from paradec_jax.evaluate.execution import Sample

STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


def read(
    path: str | os.PathLike[str], *, shots: int = 0, examples: str | os.PathLike[str] | None = None
) -> Source:
    """Reads JSON lines, gzipped or not, with "task_id", "prompt", "entry_point" and "test".

    Raises:
      FileNotFoundError, ValueError: a file that cannot be read, or any examples.
    """
    check_shots(shots, 0, "humaneval")
    if examples is not None:
        raise ValueError("humaneval has no examples: leave the file of examples out")
    items = [
        Item(
            row.text("task_id"),
            row.text("prompt"),
            STOP,
            f"{row.text('test')}\ncheck({row.text('entry_point')})\n",
        )
        for row in read_records(path)
    ]
    return Source(distinct(items))


def program(item: Item, text: str) -> Sample:
    """What must run to its end for a completion to be right."""
    return Sample(item.prompt + text, item.reference)
