"""Tasks as files of JSON lines, which `paradec_jax.data.problems` reads."""

import json
import os
from collections.abc import Iterable

from paradec_jax.data.problems import Problem


def write_problems(path: str | os.PathLike[str], problems: Iterable[Problem]) -> None:
    """Writes problems as JSON lines."""
    with open(path, "w", encoding="utf-8") as file:
        for item in problems:
            line = {"prompt": item.prompt, "answer": item.solution, "steps": item.steps}
            line = {name: value for name, value in line.items() if value is not None}
            file.write(json.dumps(line) + "\n")
