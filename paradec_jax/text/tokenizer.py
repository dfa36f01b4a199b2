"""Text to token ids and back, with errors that say what is wrong and a decoder safe to stream from."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import tokenizers

from paradec_jax.io import AnyPath, one_sentence, text_of

FEW = 512  # ids among which `framing` looks for a text
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes that form no character decode to
# Tokens that byte fallback joins: one wrong byte spoils its neighbours.
ONE_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Texts that another one is put after to be split as it is inside a text: with one of them it does
# not melt.
OPENINGS = ("\n", "a", ".")

Found = TypeVar("Found")


class Tokenizer:
    """A read-only face of a `tokenizers.Tokenizer`.

    No method adds a begin- or end-of-text token: those belong to the checkpoint's `TokenSpec`.
    Special tokens written literally in a text become their ids. Nothing is cut and nothing padded,
    whatever the file says.

    Methods raise ValueError where the file's own rules fail on a text.

    Args:
      backend: the library's tokenizer.
      name: name of its file in error messages.

    Attributes:
      rows: ids that a text may use, all where it is None; the embedding has no rows for those
        beyond.
    """

    def __init__(self, backend: tokenizers.Tokenizer, name: str = "the tokenizer") -> None:
        self._backend = backend
        self._name = name
        self.rows: int | None = None

    @classmethod
    def from_file(cls, path: AnyPath) -> "Tokenizer":
        """Reads a tokenizer.json; its rules for padding and truncation are switched off.

        Raises:
          FileNotFoundError: when there is no such file.
          ValueError: when the library cannot read the file.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"no tokenizer at {path}: expected a tokenizer.json file")
        backend = _asked(
            lambda: tokenizers.Tokenizer.from_str(text_of(path)),
            f"{path} is not a tokenizer.json that can be read",
        )
        backend.no_padding()
        backend.no_truncation()
        return cls(backend, str(path))

    def save(self, path: AnyPath) -> None:
        """Writes the tokenizer.json that `from_file` reads."""
        Path(path).write_text(self._backend.to_str(pretty=True), encoding="utf-8")

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id, special tokens included."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._encoding(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, faster than one by one."""
        rows = self._ask(
            lambda: self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        )
        return [self._checked(row).ids for row in rows]

    def encode_with_offsets(
        self, text: str, before: str = ""
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text, as of `encode_after`, and the characters [start, end) of it that each
        stands for.
        """
        for start in (before, *OPENINGS, ""):
            alone, both = self.encode(start), self._encoding(start + text)
            if both.ids[: len(alone)] == alone:
                break
        shift, offsets = len(start), both.offsets[len(alone) :]
        places = [(max(low - shift, 0), max(high - shift, 0)) for low, high in offsets]
        return both.ids[len(alone) :], places

    def _encoding(self, text: str) -> tokenizers.Encoding:
        return self._checked(
            self._ask(lambda: self._backend.encode(text, add_special_tokens=False))
        )

    def _checked(self, encoding: tokenizers.Encoding) -> tokenizers.Encoding:
        """An encoding whose ids all have rows in the model. Raises ValueError for others."""
        last = max(encoding.ids, default=0)
        if self.rows is not None and last >= self.rows:
            raise ValueError(
                f"a text holds {self.token_text(last)!r}, a token for which the model has no row"
            )
        return encoding

    def encode_after(self, before: str, text: str) -> list[int]:
        """Token ids of a text that follows another one, whose ids stay those that it has alone.

        Some tokenizers put a blank before a text; there is none before what follows. An empty
        `before` makes the text a beginning.
        """
        return self.encode_with_offsets(text, before)[0]

    def begun(self, ids: Sequence[int], bos: int | None) -> list[int]:
        """Ids of a text after one begin-of-text token, None for none: a text may have brought it,
        written out.
        """
        brought = [*ids[:1]] == [bos] and self.is_special(ids[0])
        return [*ids] if brought or bos is None else [bos, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of token ids; ids beyond the vocabulary (rows that only pad an embedding) have no
        text.

        Bytes that form no character appear as U+FFFD.
        """
        return self._ask(
            lambda: self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)
        )

    def decode_after(
        self, before: Sequence[int], ids: Sequence[int], *, skip_special: bool = False
    ) -> str:
        """Text that ids add to the text of those before them.

        The texts of both joined are the text of all ids. Where `before` ends inside a character
        that the ids complete, that character belongs to them.
        """
        before = [int(i) for i in before]
        before = before[self._last_whole(before, skip_special) :]
        former = self.decode(before, skip_special=skip_special)
        return _added(former, self.decode([*before, *ids], skip_special=skip_special))

    def _last_whole(self, ids: Sequence[int], skip_special: bool) -> int:
        """Place of the last id before which nothing has to be known to decode what follows it; 0
        for none.
        """
        for place in range(len(ids) - 1, 0, -1):
            text = self.decode(ids[place : place + 1], skip_special=skip_special)
            if text and BROKEN not in text and not self._is_byte(ids[place]):
                return place
        return 0

    def _is_byte(self, token: int) -> bool:
        return ONE_BYTE.fullmatch(self.token_text(token) or "") is not None

    def is_special(self, token: int) -> bool:
        """Whether a token is left out of a text that is decoded without special tokens."""
        return bool(self.decode([token])) and not self.decode([token], skip_special=True)

    def stands_alone(self, token: int) -> bool:
        """Whether a token was added to the vocabulary whole, as special ones are, and is no blank."""
        added = self._ask(self._backend.get_added_tokens_decoder).get(token)
        return bool(added and added.content.strip())

    def token_text(self, token: int) -> str | None:
        """A token as the vocabulary writes it, or None for an id beyond the vocabulary."""
        return self._ask(lambda: self._backend.id_to_token(token))

    def id_of(self, token: str) -> int | None:
        """Id of a token as the vocabulary writes it, or None where it has none of that text."""
        return self._ask(lambda: self._backend.token_to_id(token))

    def framing(self) -> tuple[list[int], list[int]]:
        """Ids that the file's own rule would put before and after a text; no method here does."""
        few = range(min(self.vocab_size, FEW))
        texts = (self.decode([token], skip_special=True) for token in few)
        text = next(filter(self.encode, texts), "")
        framed = self._ask(lambda: self._backend.encode(text, add_special_tokens=True))
        inside = [i for i, special in enumerate(framed.special_tokens_mask) if not special]
        if not inside:
            return framed.ids, []
        return framed.ids[: inside[0]], framed.ids[inside[-1] + 1 :]

    def _ask(self, question: Callable[[], Found]) -> Found:
        """An answer of the backend. Raises ValueError where it has none."""
        return _asked(question, f"{self._name} fails")

    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal digits."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def same_as(self, other: "Tokenizer") -> bool:
        """Whether both give every text the same ids: whether they are the same file."""
        return self.digest() == other.digest()


def _asked(question: Callable[[], Found], failure: str) -> Found:
    """An answer of the library, the only way to it: whatever it raises is one sentence that begins
    with `failure`.
    """
    try:
        return question()
    except BaseException as error:
        # The library raises nothing narrower, and a panic of Rust is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = one_sentence(error)
        if isinstance(error, TypeError):
            reason = f"this is no text in Unicode ({reason})"
        raise ValueError(f"{failure}: {reason}") from error


def _added(before: str, text: str) -> str:
    """What a text has after another one, of which broken characters at the end may have become
    whole.
    """
    start = len(before.rstrip(BROKEN))
    while start < len(before) and text[start : start + 1] == BROKEN:
        start += 1
    return text[start:]


class GrowingText:
    """Text of ids that arrive one at a time, of which a part never has to be taken back.

    A token may end inside a character, and a byte that a tokenizer falls back to may be spoilt by
    the next one. Such a tail belongs to `whole` alone until later ids settle it.

    Args:
      tokenizer: the tokenizer.
      skip_special: whether special tokens have no text.
      before: ids of the text that this one follows, which is not part of it: both texts are those
        of `Tokenizer.decode_after`.

    Attributes:
      text: what no later id changes.
      whole: that and what may still change: the text of all ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = False, before: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decode = functools.partial(tokenizer.decode, skip_special=skip_special)
        self._ids = [*map(int, before)]
        self.text = self.whole = ""
        self._settle()

    def push(self, token: int) -> None:
        """Takes an id in."""
        self._ids.append(token)
        text = self._decode(self._ids)
        self.whole = self.text + _added(self._shown, text)
        if not text.endswith(BROKEN) and not self._ends_in_bytes():
            self.text = self.whole
            self._settle()

    def _settle(self) -> None:
        """Counts all ids as shown, and forgets those that nothing later depends on."""
        self._ids = self._ids[self._tokenizer._last_whole(self._ids, self._skip_special) :]
        self._shown = self._decode(self._ids)

    def _ends_in_bytes(self) -> bool:
        """Whether the last id that has a text is one byte."""
        for token in reversed(self._ids):
            if self._tokenizer._is_byte(token):
                return True
            if self._decode([token]):
                return False
        return False
