"""One way to spoil what a command reads, and the changes that such ways are made of."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

SENTINEL = "code-has-run"  # a file that harmful code would make in the working folder
CONFIG, WEIGHTS, OWN = "config.json", "model.safetensors", "network.safetensors"
DEEP = "[" * 100_000
HUGE = (2**31, 10**30)
MOST = 301  # letters of a sentence, and the line break
Change = Callable[[Path], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to be wrong.

    Attributes:
      name: what is wrong.
      command: "import", "check" or "generate".
      base: the model that is copied and spoilt.
      change: spoils the copy.
      sure: whether the command must refuse it.
      source: the file in the copy that the command is told, the folder itself by default.
      prompt: what `generate` continues; "-" reads `stdin`.
      options: more words of the command.
    """

    name: str
    command: str
    base: str
    change: Change = lambda folder: None
    sure: bool = True
    source: str = ""
    prompt: str = "a b c"
    stdin: bytes = b""
    options: tuple[str, ...] = ()

    def words(self, folder: Path, target: Path, recording: Path) -> list[str]:
        """The command's words, the program not among them."""
        source = str(folder / self.source)
        if self.command == "import":
            return ["import", source, str(target), *self.options]
        if self.command == "check":
            is_recording = self.base == "recording"
            model = str(recording.parent.parent / "model") if is_recording else source
            return ["check", model, "--logits", source if is_recording else str(recording), *self.options]
        few = [] if {"--gaps", "--max-new-tokens"} & set(self.options) else ["--max-new-tokens", "4"]
        return ["generate", self.prompt, "--model", source, *few, *self.options]


def listed(folder: Path) -> list[str]:
    """Names of all files and folders in a folder, at any depth."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def fault(case: Case, code: object, told: str, before: list[str], after: list[str]) -> str | None:
    """What is wrong with how a command ended, or None.

    Args:
      case: what it was given.
      code: its exit code.
      told: what it wrote to standard error.
      before, after: what lay in its working folder.
    """
    if any(SENTINEL in name for name in after):
        return "code has run"
    if code == 0:
        return "accepted" if case.sure else None
    if code not in (1, 2):
        return f"exit code {code}: {told[-300:]}"
    if told.count("\n") != 1 or not told.endswith("\n"):
        return f"not one line: {told[:500]}"
    if len(told) > MOST:
        return f"{len(told)} letters: {told}"
    left = sorted(set(after) - set(before))
    return f"left behind: {', '.join(left[:3])}" if left else None


def fields_of(file: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the object in a JSON file."""

    def apply(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        change(values)
        (folder / file).write_text(json.dumps(values))

    return apply


def without(*files: str) -> Callable[[Change], Change]:
    """Changes that first remove these files, which would be read in the place of what is changed."""

    def wrap(change: Change) -> Change:
        def apply(folder: Path) -> None:
            for file in files:
                (folder / file).unlink()
            change(folder)

        return apply

    return wrap


def text_of(file: str, text: str | bytes) -> Change:
    """Puts another text in the place of a file."""
    content = text.encode() if isinstance(text, str) else text
    return lambda folder: _write(folder / file, content)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def bytes_of(file: str, change: Callable[[bytearray], Any]) -> Change:
    """Changes the bytes of a file."""

    def apply(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        change(content)
        (folder / file).write_bytes(content)

    return apply


def cut(file: str, share: float) -> Change:
    """Keeps a share of a file, less than the whole."""
    return bytes_of(file, lambda content: content.__delitem__(slice(int(len(content) * share), None)))


def flip(file: str, place: float, mask: int) -> Change:
    """Flips bits of the byte at that place between 0 and 1."""

    def change(content: bytearray) -> None:
        content[int(len(content) * place)] ^= mask

    return bytes_of(file, change)


def splice(file: str, start: float, length: int) -> Change:
    """Writes a piece of the file's middle over another place of it."""

    def change(content: bytearray) -> None:
        middle = len(content) // 2
        at = int((len(content) - length) * start)
        content[at : at + length] = content[middle : middle + length][::-1]

    return bytes_of(file, change)


def tensors_of(file: str, change: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    """Changes the tensors of a safetensors file."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return apply
