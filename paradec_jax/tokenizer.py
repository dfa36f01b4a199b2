"""Text to token ids and back, with errors that say what is wrong and a decoder safe to stream from."""

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import tokenizers

from paradec_jax import tokenizer_rules as rules
from paradec_jax.io import one_sentence, read_object

MOST_BYTES = 48 * 2**20  # of a tokenizer.json; the largest of releases have 35 MB
# Patterns that may take back what they matched again and again, until the engine gives up: repeated groups.
DOUBTFUL = re.compile(r"\)[*+{]")
PROBE = "".join(map(chr, range(0xD800))) + "\U0001f469\u200d\U0001f467"
FEW = 512  # ids that a probe decodes

Found = TypeVar("Found")


class Tokenizer:
    """A read-only face of a `tokenizers.Tokenizer`.

    No method adds a begin- or end-of-text token: those belong to the checkpoint's `TokenSpec`. Special tokens
    written literally in a text become their ids. Nothing is cut and nothing padded, whatever the file says.

    Methods raise ValueError where the file's own rules fail on a text.
    """

    __slots__ = ("_backend", "_doubtful", "_size")

    def __init__(self, backend: tokenizers.Tokenizer, *, doubtful: bool = False) -> None:
        self._backend = backend
        self._doubtful = doubtful  # whether its errors may come with reports of their own
        self._size: int | None = None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Reads a tokenizer.json; its rules for padding and truncation are switched off.

        Raises:
          FileNotFoundError: when there is no such file.
          ValueError: when the file is not a tokenizer, or its rules fail on a text that tries them.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}: expected a tokenizer.json file")
        try:
            fields = read_object(path, MOST_BYTES)
            rules.check(fields)
            with _one_report():
                backend = _asked(lambda: tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8-sig")))
                backend.no_padding()
                backend.no_truncation()
                doubtful = any(
                    kind == "Precompiled" or DOUBTFUL.search(rule) for kind, rule in rules.rules(fields)
                )
                found = cls(backend, doubtful=doubtful)
                found._probe()
        except (ValueError, RecursionError) as error:
            reason = str(error).replace(f"{path} ", "it ")
            raise ValueError(f"{path} is not a tokenizer.json that can be read: {reason}") from error
        return found

    def _probe(self) -> None:
        """Raises ValueError where Rust panics over a text; a letter that has no token is no such case."""
        text = PROBE if self._doubtful else PROBE[:FEW]
        for question in (
            lambda: self._backend.encode(text, add_special_tokens=True),
            lambda: self._backend.decode(list(range(min(self.vocab_size, FEW)))),
        ):
            try:
                _asked(question)
            except _Panic:
                raise
            except ValueError:
                continue

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tokenizer.json that `from_file` reads."""
        Path(path).write_text(self._backend.to_str(pretty=True), encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, special tokens included."""
        if self._size is None:
            self._size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        return self._size

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._ask(lambda: self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, faster than one by one."""
        rows = self._ask(lambda: self._backend.encode_batch_fast(list(texts), add_special_tokens=False))
        return [row.ids for row in rows]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text and the characters [start, end) that each stands for; no special tokens are added."""
        encoding = self._ask(lambda: self._backend.encode(text, add_special_tokens=False))
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of token ids; ids beyond the vocabulary (rows that only pad an embedding) have no text.

        Bytes that form no character appear as U+FFFD.
        """
        return self._ask(
            lambda: self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)
        )

    def framing(self) -> list[int]:
        """Ids that the file's own rule would put around a text (no method here does): those of an empty one."""
        return self._ask(lambda: self._backend.encode("", add_special_tokens=True).ids)

    def _ask(self, question: Callable[[], Found]) -> Found:
        """An answer of the backend. Raises ValueError where it has none."""
        with _one_report() if self._doubtful else contextlib.nullcontext():
            return _asked(question)

    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal digits."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def same_as(self, other: "Tokenizer") -> bool:
        """Whether both give every text the same ids: whether they are the same file."""
        return self._backend.to_str() == other._backend.to_str()


class _Panic(ValueError):
    """What Rust calls a panic: a fault of the library's own, mostly of numbers that it trusted."""


def _asked(question: Callable[[], Found]) -> Found:
    try:
        return question()
    except TypeError as error:
        raise ValueError(f"this is no text in Unicode ({one_sentence(error)})") from error
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the tokenizer fails: {one_sentence(error)}") from error
    except BaseException as error:
        if (
            type(error).__name__ != "PanicException"
        ):  # of Rust, which has no name to import and is no Exception
            raise
        raise _Panic(f"the tokenizer fails: {one_sentence(error)}") from None


_SILENCE = threading.Lock()


@contextlib.contextmanager
def _one_report() -> Iterator[None]:
    """A block in which Rust writes nothing to standard error: its panics come as exceptions besides."""
    with _SILENCE, open(os.devnull, "wb") as nowhere:
        try:
            kept = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        try:
            os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


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
