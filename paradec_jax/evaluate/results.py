"""Files of results: JSON lines, and tables as JSON with CSV beside them. Each file is written whole or not at all."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paradec_jax.io import atomic_write_text


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    """Writes a file of JSON lines, whole or not at all."""
    atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
