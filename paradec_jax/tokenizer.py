"""Text to token ids and back, with errors that say what is wrong and a decoder safe to stream from."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers


class Tokenizer:
    """A read-only face of a `tokenizers.Tokenizer`.

    No method adds a begin- or end-of-text token: those belong to the checkpoint's `TokenSpec`. Special tokens
    written literally in a text become their ids.
    """

    __slots__ = ("_backend",)

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Reads a tokenizer.json.

        Raises:
          FileNotFoundError: when there is no such file.
          ValueError: when the file is not a tokenizer.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}: expected a tokenizer.json file")
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer.json that can be read: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tokenizer.json that `from_file` reads."""
        Path(path).write_text(self._backend.to_str(pretty=True), encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included; ids are 0 to vocab_size - 1."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, faster than one by one."""
        return [row.ids for row in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text and the characters [start, end) that each stands for; no special tokens are added."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of token ids; ids beyond the vocabulary (rows that only pad an embedding) have no text.

        Bytes that form no character appear as U+FFFD.
        """
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def framing(self) -> list[int]:
        """Ids that the file's own rule would put around a text (no method here does): those of an empty one."""
        return self._backend.encode("", add_special_tokens=True).ids

    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal digits."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def same_as(self, other: "Tokenizer") -> bool:
        """Whether both give every text the same ids: whether they are the same file."""
        return self._backend.to_str() == other._backend.to_str()


class StreamDecoder:
    """Turns ids that arrive a few at a time into text that never has to be taken back.

    A token may end inside a character. `push` keeps such a tail until later ids complete it, so the pieces
    joined are what `decode` gives for all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown: list[int] = []  # ids of the last piece: some decoders treat a text's first token apart
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Takes ids in and returns the text that they complete, possibly empty."""
        self._held.extend(int(i) for i in ids)
        text = self._pending()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        """Returns what is still kept, broken characters as U+FFFD, and starts afresh."""
        text = self._pending()
        self._shown, self._held = [], []
        return text

    def _pending(self) -> str:
        shown = self._decode(self._shown)
        return self._decode(self._shown + self._held)[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)
