"""Files that appear whole or not at all."""

import os
import uuid
from pathlib import Path


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes UTF-8 text to a file beside `path`, which then takes its place; its folder must exist.

    Whoever reads `path` meanwhile, or after a kill, finds the old file or the new one. On an error the old one stays
    and nothing is left beside it.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
